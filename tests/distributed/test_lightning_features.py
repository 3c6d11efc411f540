"""What Lightning offers works while the stage changes, and gives the numbers that a fixed stage gives."""

from __future__ import annotations

from typing import Any

import pytest
from harness import outcome, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

TOLERANCE = 1e-6
"""Stages add gradients in another order: a few fp32 roundings of losses of about 1."""

WEIGHT_TOLERANCE = 2e-5
"""Adam turns a rounding of a gradient near zero into a share of lr = 1e-3."""

STEPS_PER_RUNG = 5


class Launches:
    """Starts each group of cases once, when the first of them is asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._done: dict[str, list[dict[str, Any]] | str] = {}

    def __call__(self, group: str, case: str) -> list[Any]:
        if group not in self._done:
            folder = self._factory.mktemp(group)
            payload = {"group": group, "folder": str(folder / "cases")}
            self._done[group] = f"the launch of the {group} cases failed in an earlier test"
            self._done[group] = run_ranks(
                "feature_cases:run", payload, ranks=1 if group == "single" else 2, timeout_s=300, tmp_path=folder
            )
        results = self._done[group]
        if isinstance(results, str):
            pytest.fail(results, pytrace=False)
        return outcome(results, case)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory)


def close(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> None:
    """Compare nested lists of numbers."""
    if isinstance(ours, (int, float)):
        assert ours == pytest.approx(theirs, abs=tolerance, rel=0)
        return
    assert len(ours) == len(theirs)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(a, (int, float)):
            assert abs(a - b) <= tolerance, f"at {index}: {a} and {b}"
        else:
            close(a, b, tolerance)


def assert_moved(walk: dict[str, Any], accumulate: int = 1, reached: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """At least two changes of stage, each after a whole number of optimizer steps and none elsewhere."""
    assert len(walk["moves"]) >= 2
    assert [walk["moves"][0][0], *(move[1] for move in walk["moves"])][: len(reached)] == list(reached)
    changes = [
        [before, after, index / accumulate]
        for index, (before, after) in enumerate(zip(walk["stages"], walk["stages"][1:], strict=False), start=1)
        if before != after
    ]
    assert changes == [move for move in walk["moves"] if move[0] != move[1]]


def assert_like_fixed(data: dict[str, Any], accumulate: int = 1, reached: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    assert_moved(data["walk"], accumulate, reached)
    for fixed in data["fixed"]:
        assert fixed["moves"] == []
        assert fixed["global_step"] == data["walk"]["global_step"]
        assert len(fixed["losses"]) > 0
        close(data["walk"]["losses"], fixed["losses"])
        assert data["walk"]["lrs"] == fixed["lrs"]
    assert data["weight_gaps"]
    assert max(data["weight_gaps"]) <= WEIGHT_TOLERANCE


# Accumulation, clipping, schedulers --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["accumulation", "accumulation_across_epochs"])
def test_moves_happen_on_boundaries_only(launch: Launches, case: str) -> None:
    for data in launch("training", case):
        assert_like_fixed(data, accumulate=3)
        assert [move[2] for move in data["walk"]["moves"]][:3] == [5, 10, 15]
        assert all(isinstance(move[2], int) for move in data["walk"]["moves"])
        # Lightning counts windows per epoch, DeepSpeed over the run: each epoch of ten leaves one micro-batch over.
        assert len(data["walk"]["losses"]) == (72 if case == "accumulation" else 79)


def test_clipping_by_norm(launch: Launches) -> None:
    for data in launch("training", "clip_by_norm"):
        assert_like_fixed(data)
        late = zip(data["walk"]["losses"][5:], data["unclipped"][5:], strict=True)
        assert max(abs(a - b) for a, b in late) > 1e-4  # the clipping did something


def test_scheduler_per_step(launch: Launches) -> None:
    for data in launch("training", "step_lr_per_step"):
        assert_like_fixed(data, accumulate=2)
        steps = len(data["walk"]["lrs"]) // 2
        assert [lrs[0] for lrs in data["walk"]["lrs"][::2]] == pytest.approx(
            [1e-3 * 0.7 ** (step // 3) for step in range(steps)], rel=1e-12
        )


def test_scheduler_per_epoch(launch: Launches) -> None:
    for data in launch("training", "step_lr_per_epoch"):
        assert_like_fixed(data)
        assert [lrs[0] for lrs in data["walk"]["lrs"]] == pytest.approx(
            [1e-3 * 0.7 ** (step // 7) for step in range(24)], rel=1e-12
        )


def test_reduce_lr_on_plateau(launch: Launches) -> None:
    for data in launch("training", "reduce_lr_on_plateau"):
        assert_like_fixed(data)
        # The first epoch sets the best value, no later one beats it by 10, so the rate halves after each.
        assert [lrs[0] for lrs in data["walk"]["lrs"]] == [1e-3] * 12 + [5e-4] * 6 + [2.5e-4] * 6


# Validation, callbacks, logging --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "accumulate", "checks"), [("validation_in_mid_fit", 1, 8), ("validation_while_accumulating", 2, 9)]
)
def test_validation_in_mid_fit(launch: Launches, case: str, accumulate: int, checks: int) -> None:
    for data in launch("training", case):
        assert_like_fixed(data, accumulate)
        assert len(data["walk"]["val_losses"]) == 3 * checks
        close(data["walk"]["val_losses"], data["fixed"][0]["val_losses"])


def test_model_checkpoint(launch: Launches) -> None:
    for data in launch("training", "model_checkpoint"):
        assert_like_fixed(data)
        ours, theirs = data["walk"], data["fixed"][0]
        close(ours["val_losses"], theirs["val_losses"])
        assert sorted(ours["kept"]) == sorted(theirs["kept"]) == ours["files"] == theirs["files"]
        assert len(ours["kept"]) == 2
        close([ours["kept"][name] for name in ours["files"]], [theirs["kept"][name] for name in ours["files"]])
        assert ours["has_model"]


def test_early_stopping(launch: Launches) -> None:
    for data in launch("training", "early_stopping"):
        assert_like_fixed(data)
        assert data["walk"]["global_step"] == 16  # the first check sets the best, three more do not beat it by 100


def test_log_with_sync_dist(launch: Launches) -> None:
    by_rank = launch("training", "log_sync_dist")
    mean = [(a + b) / 2 for a, b in zip(*(data["walk"]["losses"] for data in by_rank), strict=True)]
    for data in by_rank:
        assert_like_fixed(data)
        assert by_rank[0]["walk"]["losses"] != by_rank[1]["walk"]["losses"]
        close(data["walk"]["logged"], mean)
        close(data["walk"]["logged"], data["fixed"][0]["logged"])
        close(data["walk"]["final_epoch"], sum(mean[-8:]) / 8)


def test_torchmetrics_in_the_module(launch: Launches) -> None:
    by_rank = launch("training", "torchmetrics_in_module")
    losses = [data["walk"]["losses"] for data in by_rank]
    epochs = [sum(sum(rank[start : start + 8]) for rank in losses) / 16 for start in (0, 8, 16)]
    for data in by_rank:
        assert_like_fixed(data)
        close(data["walk"]["mse"], epochs)
        close(data["walk"]["logged"], epochs[-1])
        close(data["walk"]["mse"], data["fixed"][0]["mse"])


# Models --------------------------------------------------------------------------------------------------------------


def test_configure_model(launch: Launches) -> None:
    for data in launch("training", "configure_model"):
        assert_like_fixed(data)
        assert data["walk"]["born_sharded"] is False


def test_configure_model_sharded_at_birth(launch: Launches) -> None:
    for data in launch("training", "configure_model_sharded_at_birth"):
        assert data["fixed"][0]["born_sharded"] is True
        assert data["walk"]["born_sharded"] is False
        assert_like_fixed(data)


def test_parameter_groups(launch: Launches) -> None:
    for data in launch("training", "parameter_groups"):
        assert_like_fixed(data)
        assert data["walk"]["lrs"][0] == [3e-3, 1e-3, 5e-4]
        assert data["walk"]["lrs"][-1] == pytest.approx([lr * 0.8**5 for lr in (3e-3, 1e-3, 5e-4)], rel=1e-12)


@pytest.mark.parametrize("case", ["frozen_parameters", "frozen_parameters_in_optimizer"])
def test_frozen_parameters(launch: Launches, case: str) -> None:
    for data in launch("training", case):
        assert_like_fixed(data)
        assert data["walk"]["unchanged"]
        assert data["walk"]["still_frozen"]


def test_tied_weights(launch: Launches) -> None:
    for data in launch("training", "tied_weights"):
        assert_like_fixed(data)
        assert data["walk"]["tied"]


def test_batch_norm_buffers(launch: Launches) -> None:
    for data in launch("training", "batch_norm_buffers"):
        assert_like_fixed(data)
        assert data["walk"]["batches"] == 24
        assert data["walk"]["buffer_dtype"] == "torch.float32"
        for fixed in data["fixed"]:
            assert fixed["batches"] == 24
            close(data["walk"]["mean"], fixed["mean"])


def test_parameter_without_gradient(launch: Launches) -> None:
    for data in launch("training", "parameter_without_gradient"):
        assert_like_fixed(data)


def test_manual_optimization_keeps_both_backward_calls(launch: Launches) -> None:
    for data in launch("training", "manual_optimization"):
        assert_like_fixed(data)
        close(data["walk"]["losses"], data["once"])


def test_bf16_true(launch: Launches) -> None:
    for data in launch("training", "precision_bf16-true"):
        assert_moved(data["walk"])
        assert data["walk"]["dtype"] == "torch.bfloat16"
        fixed = [run["losses"] for run in data["fixed"]]

        def apart(ours: list[float], theirs: list[float]) -> float:
            return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))

        among = max(apart(a, b) for a in fixed for b in fixed)
        assert min(apart(data["walk"]["losses"], losses) for losses in fixed) <= max(among, TOLERANCE)


# Data ----------------------------------------------------------------------------------------------------------------


def test_iterable_dataset_without_length(launch: Launches) -> None:
    for data in launch("training", "iterable_dataset"):
        assert_like_fixed(data)
        assert data["walk"]["micro_batch"] == 3


@pytest.mark.parametrize("case", ["custom_batch_sampler", "batch_sampler_without_size", "lightnings_own_sampler"])
def test_samplers(launch: Launches, case: str) -> None:
    for data in launch("training", case):
        assert_like_fixed(data)


# Around a fit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "steps"), [("run_shorter_than_ladder", 13), ("run_ends_after_one_counted_step", 12)])
def test_run_shorter_than_the_ladder(launch: Launches, case: str, steps: int) -> None:
    by_rank = launch("lifecycle", case)
    for data in by_rank:
        assert_like_fixed(data, reached=(0, 1, 2))
        assert data["walk"]["global_step"] == steps
    report = by_rank[0]["report"]
    assert report["complete"] is False
    stages = {result["trial"]["rung"]["stage"] for result in report["decision"]["results"]}
    assert stages == {0, 1, 2, 3}


def test_run_shorter_than_the_first_trial(launch: Launches) -> None:
    by_rank = launch("lifecycle", "run_shorter_than_first_trial")
    for data in by_rank:
        assert data["walk"]["moves"] == []
        close(data["walk"]["losses"], data["fixed"][0]["losses"])
        assert data["walk"]["global_step"] == 3
    assert by_rank[0]["report"]["complete"] is False


@pytest.mark.parametrize("case", ["two_fits_of_two_models", "two_fits_of_one_model"])
def test_two_fits_on_one_trainer(launch: Launches, case: str) -> None:
    for data in launch("lifecycle", case):
        assert [[move[1] for move in moves][:3] for moves in data["moves"]] == [[1, 2, 3], [1, 2, 3]]
        assert len(data["losses"][-1]) == (24 if case == "two_fits_of_two_models" else 48)
        close(data["losses"], data["fixed_losses"])
        assert max(data["weight_gaps"]) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("case", ["evaluation_without_fit", "evaluation_without_fit_sharded"])
def test_evaluation_without_fit(launch: Launches, case: str) -> None:
    by_rank = launch("lifecycle", case)
    mean = sum(sum(data["losses"]) for data in by_rank) / sum(len(data["losses"]) for data in by_rank)
    for data in by_rank:
        close(data["predicted"], data["expected"])
        close(data["validated"], mean)
        close(data["tested"], mean)


def test_evaluation_after_fit(launch: Launches) -> None:
    for data in launch("lifecycle", "evaluation_after_fit"):
        fixed = data["(1,)"]
        assert_moved(data["(0, 1, 2, 3)"])
        for stages in ("(0, 1, 2, 3)", "(3,)", "(0, 3)"):
            close(data[stages]["validated"], fixed["validated"])
            close(data[stages]["tested"], fixed["tested"])
            close(data[stages]["predicted"], fixed["predicted"], 1e-5)  # of outputs up to 3, from weights 2e-5 apart


def test_fit_after_evaluation(launch: Launches) -> None:
    for data in launch("lifecycle", "fit_after_evaluation"):
        walk, fixed = data["(0, 1, 2, 3)"], data["(3,)"]
        assert_moved(walk)
        close(walk["validated"], fixed["validated"])
        close(walk["losses"], fixed["losses"])


def test_save_checkpoint_after_fit(launch: Launches) -> None:
    for data in launch("lifecycle", "save_checkpoint_after_fit"):
        assert_moved(data["(0, 1, 2, 3)"])
        for saved in data.values():
            assert saved["of"] == 8
            assert saved["gap"] == 0.0


# Failing rungs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "stage", "step", "phase", "accumulate"),
    [
        ("forward_k1", 2, 3, "forward", 1),
        ("forward_k2_first_of_window", 2, 3, "forward", 2),
        ("forward_k2_second_of_window", 2, 3, "forward", 2),
        ("forward_k2_second_of_window_stage0", 0, 2, "forward", 2),
        ("forward_k2_second_of_window_stage1", 1, 1, "forward", 2),
        ("forward_k2_stage3", 3, 2, "forward", 2),
        ("forward_first_step", 1, 1, "forward", 1),
        ("backward_k1", 2, 3, "backward", 1),
        ("backward_k1_stage0", 0, 2, "backward", 1),
        ("backward_k2", 1, 2, "backward", 2),
        ("backward_k2_stage3", 3, 2, "backward", 2),
        ("optimizer_first_step", 2, 1, "optimizer step", 1),
    ],
)
def test_out_of_memory_ends_the_rung_and_no_batch_is_lost(
    launch: Launches, case: str, stage: int, step: int, phase: str, accumulate: int
) -> None:
    left = [other for other in (0, 1, 2, 3) if other != stage]
    by_rank = launch("lifecycle", f"out_of_memory_{case}")
    # A rank can be called away by the other one before it fails itself.
    assert max(len(data["walk"]["raised"]) for data in by_rank) == 1
    for rank, data in enumerate(by_rank):
        walk = data["walk"]
        close(walk["by_batch"], data["without"]["losses"])
        assert walk["global_step"] == data["without"]["global_step"] == 24
        assert max(data["weight_gaps"]) <= WEIGHT_TOLERANCE
        assert walk["commit"] in left
        tried = list(dict.fromkeys(walk["stages"]))
        assert [other for other in tried if other != stage] == left
        if rank == 0:
            assert [(one["kind"], one["phase"], one["step"]) for one in data["failures"]] == [
                ("out of memory", phase, step)
            ]


# One process ---------------------------------------------------------------------------------------------------------


def test_single_device_commits_at_once(launch: Launches) -> None:
    (data,) = launch("single", "single_device")
    assert data["walk"]["moves"] == []
    assert set(data["walk"]["stages"]) == {0}
    assert data["walk"]["losses"] == data["fixed"][0]["losses"]
    assert data["weight_gaps"] == [0.0]
    assert data["report"]["complete"] is True
