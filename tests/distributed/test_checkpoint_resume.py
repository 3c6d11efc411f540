"""Checkpoints as users of a Trainer meet them: fit, validate, test and predict with ckpt_path."""

from __future__ import annotations

from typing import Any

import pytest
from harness import outcome, run_ranks
from resume_cases import STEPS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(500)]

TOLERANCE = 1e-6
"""Losses are below 4: a few fp32 roundings, from gradients added in another order."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("resume")
    payload = {"folder": str(folder / "cases")}
    return run_ranks("resume_cases:run", payload, ranks=2, timeout_s=460, tmp_path=folder)


def apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("case", "source", "stage"),
    [
        ("fit-0-3", 0, 3),
        ("fit-3-2", 3, 2),
        ("fit-1-0", 1, 0),
        ("fit-2-1", 2, 1),
        ("fit-last", 2, 3),
        ("fit-universal", 3, 1),
    ],
)
def test_fit_goes_on_at_another_stage(results: list[dict[str, Any]], case: str, source: int, stage: int) -> None:
    for data in outcome(results, case):
        assert len(data["parts"]) == 2 * STEPS
        assert apart(data["parts"], data["whole"]) <= TOLERANCE
        assert data["lrs"][0] == data["lrs"][1]  # the scheduler goes on
        assert data["stages"] == [[source], [stage]]
        assert data["found"] == [["a", "b"], [0, 1, 2]]
        assert data["tally"] == 2 * STEPS
        assert data["counter"] == 41
        assert data["global_step"] == 2 * STEPS
        assert data["buffers"] == [2 * STEPS, 2 * STEPS]
        if None not in data["frozen"]:
            assert data["frozen"][0] == data["frozen"][1]


def test_universal_copy_lies_beside_the_native_files(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "fit-universal"):
        assert {"checkpoint", "checkpoint_universal", "latest", "latest_universal"} <= set(data["inside"])
    for data in outcome(results, "fit-last"):
        assert "checkpoint_universal" not in data["inside"]


def test_slurm_requeue_path(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "slurm"):
        assert data == {"names": ["hpc_ckpt_1.ckpt"], "losses": STEPS, "global_step": 2 * STEPS}


@pytest.mark.parametrize("case", ["evaluate-3-3", "evaluate-3-1", "evaluate-0-3"])
def test_validate_test_and_predict(results: list[dict[str, Any]], case: str) -> None:
    """Case C7: from a stage 3 checkpoint this was an AttributeError."""
    for data in outcome(results, case):
        assert data["validate-differs"] == data["test-differs"] == []
        assert data["validate"] == pytest.approx(data["expected"], abs=TOLERANCE)
        assert data["test"] == data["validate"]
        assert data["apart"] <= TOLERANCE


def test_best_and_last(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "best"):
        assert data["value"] == pytest.approx(data["score"], abs=TOLERANCE)
        assert data["same"] == pytest.approx(data["score"], abs=TOLERANCE)
        assert len(data["names"]) == 3  # the two best and the last; none half written, none left over
        assert "last.ckpt" in data["names"]


@pytest.mark.parametrize("case", ["stock-0-1", "stock-1-3", "stock-2-0", "stock-3-2"])
def test_checkpoint_of_lightnings_own_strategy(results: list[dict[str, Any]], case: str) -> None:
    for data in outcome(results, case):
        assert apart(data["second"], data["whole"][STEPS:]) <= TOLERANCE
        assert apart(data["third"], data["whole"][STEPS:]) <= TOLERANCE  # case C2: converted
        assert data["global_step"] == 2 * STEPS
        assert 0 < data["validated"] < 5


@pytest.mark.parametrize("case", ["plain-1", "plain-3"])
def test_checkpoint_of_a_plain_deepspeed_loop(results: list[dict[str, Any]], case: str) -> None:
    for data in outcome(results, case):
        assert data["global_step"] == 2 * STEPS
        assert apart(data["losses"], data["expected"]) <= TOLERANCE


def test_own_classes_are_refused_by_name_and_opened_when_trusted(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "own-classes"):
        assert data["message"].startswith("UntrustedCheckpoint: ")
        assert "resume_cases.OwnClass" in data["message"]
        assert "trusted_checkpoints=True" in data["message"]
        assert data["value"] == 7
        assert data["global_step"] == STEPS + 1


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("flipped", "are not those that were written"),
        ("cut off", "has a manifest|cut off, damaged"),
        ("missing", "missing"),
        ("left over", "beyond the 2 ranks that saved it"),
        ("no checkpoint", "does not exist"),
        ("other model", "belongs to a model of other sizes"),
    ],
)
def test_damage_is_said_on_every_rank_and_changes_nothing(results: list[dict[str, Any]], how: str, says: str) -> None:
    by_rank = outcome(results, f"damaged-{how}")
    for data in by_rank:
        assert data["message"] is not None
        assert any(part in data["message"] for part in says.split("|")), data["message"]
        assert data["losses"] == []
        assert data["untouched"]
        if how in ("flipped", "cut off", "missing"):
            assert data["names"][1] in data["message"] or data["names"][0] in data["message"]


def test_frozen_weights_that_were_not_saved(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "without-frozen"):
        assert "it has no 'fixed'" in data["refused"]
        assert data["kept"]
        assert data["losses"] == STEPS


@pytest.mark.parametrize("stage", [0, 2])
def test_strict_loading_can_be_given_up(results: list[dict[str, Any]], stage: int) -> None:
    for data in outcome(results, f"lenient-{stage}"):
        assert data == {"differs": [], "grown": [0.5] * 7, "losses": 1}


def test_remote_folders_are_refused_before_training(results: list[dict[str, Any]]) -> None:
    """Case C9."""
    for data in outcome(results, "remote"):
        assert data["save"].startswith("MisconfigurationException: ModelCheckpoint would save to memory://bucket/run")
        assert "s3://bucket/run/last.ckpt is a remote path" in data["load"]


def test_a_ladder_walks_again_from_a_checkpoint_of_a_walk(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "walk"):
        assert apart(data["parts"], data["whole"]) <= TOLERANCE
        assert set(data["stages"][0]) == {0, 1, 2}
        assert data["stages"][1][0] == 0


def test_manifest(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "manifest"):
        assert (data["kind"], data["stage"], data["world_size"], data["accumulate"]) == ("native", 3, 2, 2)
        assert data["micro_batch"] == 4
        assert data["global_steps"] == STEPS
        assert data["global_samples"] == STEPS * 2 * 2 * 4
        assert data["parameters"]["net.0.weight"] == {"shape": [31, 24], "dtype": "float32"}
        assert "fixed" in data["parameters"]
        assert data["groups"][0][:2] == ["net.0.weight", "net.0.bias"]
        assert data["optimizer"] == "AdamW"
        assert {file["name"] for file in data["files"]} >= {
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        }
        assert all(file["checksum"].startswith("zip-crc32:") for file in data["files"] if file["name"].endswith(".pt"))
