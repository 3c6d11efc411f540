"""A run that is resumed on another number of ranks in the middle of an epoch goes on meaning the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from elastic_cases import JOBS, MICRO
from harness import outcome, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TOLERANCE = 1e-6
"""Losses are below 5: a few fp32 roundings, from gradients added in another order and over other ranks."""

RANKS = (4, 2, 3, 4)
STOPS = (2, 4, 5)
STAGES = (2, 1, 3, 0)
EXACT = ("shuffled", "workers", "ordered", "number", "two loaders")

Legs = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def legs(tmp_path_factory: pytest.TempPathFactory) -> Legs:
    folder = tmp_path_factory.mktemp("elastic")
    results = []
    for number, ranks in enumerate(RANKS):
        payload = {
            "folder": str(folder / "shared"),
            "leg": number,
            "stops": STOPS,
            "stages": STAGES,
            "jobs": list(JOBS),
        }
        place = folder / f"leg{number}"
        results.append(run_ranks("elastic_cases:run", payload, ranks=ranks, timeout_s=140, tmp_path=place))
    return results


def micro_batches(legs: Legs, job: str, epoch: int) -> list[dict[str, Any]]:
    """Every micro-batch of every rank of the interrupted run."""
    return [entry for leg in legs for facts in outcome(leg, job) for entry in facts["seen"] if entry["epoch"] == epoch]


def uninterrupted(legs: Legs, job: str, epoch: int) -> list[dict[str, Any]]:
    return [entry for facts in outcome(legs[0], f"{job}-whole") for entry in facts["seen"] if entry["epoch"] == epoch]


def numbers(entries: list[dict[str, Any]], key: str = "numbers") -> Counter[int]:
    return Counter(number for entry in entries for number in entry[key])


def losses(entries: list[dict[str, Any]]) -> dict[int, float]:
    return {n: loss for entry in entries for n, loss in zip(entry["numbers"], entry["losses"], strict=True)}


def steps(entries: list[dict[str, Any]]) -> dict[int, Counter[int]]:
    """The samples of each optimizer step."""
    found: dict[int, Counter[int]] = {}
    for entry in entries:
        found.setdefault(entry["step"], Counter()).update(entry["numbers"])
    return found


def told(legs: Legs, job: str, leg: int) -> str:
    return "\n".join(outcome(legs[leg], job)[0]["said"])


@pytest.mark.parametrize("job", EXACT)
@pytest.mark.parametrize("epoch", [0, 1])
def test_each_optimizer_step_is_that_of_the_uninterrupted_run(legs: Legs, job: str, epoch: int) -> None:
    """Cases C24 and C26: 4, 2, 3 and 4 ranks at stages 2, 1, 3 and 0, with the same 24 samples in each step."""
    ours, theirs = micro_batches(legs, job, epoch), uninterrupted(legs, job, epoch)
    assert numbers(ours) == Counter(range(JOBS[job].count))
    assert steps(ours) == steps(theirs)
    assert {sum(step.values()) for step in steps(ours).values()} == {24}
    ours_by_number, theirs_by_number = losses(ours), losses(theirs)
    assert max(abs(ours_by_number[n] - theirs_by_number[n]) for n in theirs_by_number) <= TOLERANCE
    assert numbers(ours, "second") == numbers(theirs, "second")  # of a loader that is cycled beside the other


@pytest.mark.parametrize("job", EXACT)
def test_counts_and_schedule_go_on(legs: Legs, job: str) -> None:
    learning_rates: dict[int, set[float]] = {}
    for leg, accumulate in zip(legs, (3, 6, 4, 3), strict=True):
        for facts in outcome(leg, job):
            assert facts["accumulate"] == [accumulate, accumulate]
            assert facts["global_step"] == facts["engine_steps"]
            for entry in facts["seen"]:
                learning_rates.setdefault(entry["step"], set()).add(entry["lr"])
    whole = outcome(legs[0], f"{job}-whole")[0]
    assert outcome(legs[-1], job)[0]["global_step"] == whole["global_step"] == 12
    assert learning_rates == {entry["step"]: {entry["lr"]} for entry in whole["seen"]}


def test_new_accumulation_is_said(legs: Legs) -> None:
    assert "accumulate_grad_batches=6 instead of 3 makes optimizer steps of 24 samples on 2 ranks" in told(
        legs, "shuffled", 1
    )
    assert "going on in epoch 0 after 48 of 144 samples" in told(legs, "shuffled", 1)
    assert told(legs, "shuffled", 0) == ""


@pytest.mark.parametrize(("job", "dropped"), [("uneven", 0), ("drop-last", 7)])
def test_nothing_is_left_out_where_the_ranks_do_not_divide_the_epoch(legs: Legs, job: str, dropped: int) -> None:
    """131 samples and 8, 4 and 6 at once: only what padding repeats is seen twice, only the tail is left out."""
    seen = numbers(micro_batches(legs, job, 0))
    assert len(seen) >= 131 - dropped
    assert sum(seen.values()) - len(seen) < RANKS[-1]
    second = numbers(micro_batches(legs, job, 1))  # a whole epoch again
    assert second == numbers(uninterrupted(legs, job, 1))


def test_nearest_global_batch_is_said_with_the_rule(legs: Legs) -> None:
    said = told(legs, "uneven", 2)
    assert "optimizer steps have 6 samples instead of 8 (3 ranks take 6 samples at once)" in said
    assert "by 0.75 for SGD, by 0.866 for Adam" in said
    assert outcome(legs[3], "uneven")[0]["accumulate"] == [1, 1]  # 8 again: the target is kept, not the nearest of it
    assert "8 samples instead of 6" in told(legs, "uneven", 3)


def test_limits_and_validation_fall_on_the_same_samples(legs: Legs) -> None:
    """15 batches of 8 samples, a validation after 6: of 4 samples these are 30 and 12, of 6 samples 20 and 8."""
    assert [outcome(leg, "limited")[0]["batches"] for leg in legs] == [15, 30, 20, 15]
    assert numbers(micro_batches(legs, "limited", 0)) == numbers(uninterrupted(legs, "limited", 0))
    assert numbers(micro_batches(legs, "limited", 1)) == numbers(uninterrupted(legs, "limited", 1))
    first = outcome(legs[1], "limited")[0]["seen"][0]["batch"]
    [[epoch, batches]] = outcome(legs[1], "limited")[0]["validations"]
    assert (epoch, (first + batches) * MICRO * RANKS[1]) == (0, 12 * MICRO * RANKS[0])
    assert outcome(legs[3], "limited")[0]["validations"] == [[1, 6], [1, 12]]
    assert outcome(legs[3], "limited")[0]["seen"][0]["batch"] == 0
    assert "limit_train_batches=30 instead of 15" in told(legs, "limited", 1)


def test_share_of_an_epoch_and_estimated_stepping_batches(legs: Legs) -> None:
    """Half of 144 samples is 72, so 3 steps of 24; the estimate is asked for before the checkpoint is loaded."""
    assert outcome(legs[3], "part")[0]["stepping"] == outcome(legs[0], "part-whole")[0]["stepping"] == 6
    for epoch in (0, 1):
        assert numbers(micro_batches(legs, "part", epoch)) == numbers(uninterrupted(legs, "part", epoch))
    assert outcome(legs[3], "part")[0]["global_step"] == 6


def test_scale(legs: Legs) -> None:
    assert [outcome(leg, "scale")[0]["accumulate"][0] for leg in legs] == [3, 3, 3, 3]
    assert "optimizer steps have 12 samples instead of 24 (accumulate_grad_batches=3)" in told(legs, "scale", 1)
    assert set(numbers(micro_batches(legs, "scale", 0))) == set(range(144))


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("own batch sampler", "your own OwnBatches, which is left alone"),
        ("own sampler", "your own DistributedSampler, which is left alone"),
        ("stateful", "CountingLoader keeps its own position, saved on 4 ranks"),
    ],
)
def test_what_is_left_alone_is_said(legs: Legs, job: str, says: str) -> None:
    assert says in told(legs, job, 1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("same")
    payload = {"folder": str(folder / "cases")}
    return run_ranks("elastic_cases:same", payload, ranks=2, timeout_s=280, tmp_path=folder)


def gap(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """The largest difference of a loss, of the same samples in the same order."""
    assert [entry["numbers"] for entry in ours] == [entry["numbers"] for entry in theirs]
    pairs = zip(ours, theirs, strict=True)
    return max(abs(a - b) for one, two in pairs for a, b in zip(one["losses"], two["losses"], strict=True))


def test_micro_batches_of_an_open_window_are_seen_again(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "window"):
        assert len(data["first"]["seen"]) == 7
        assert gap(data["second"]["seen"], data["whole"]["seen"][6:]) <= TOLERANCE
    said = " ".join(outcome(results, "window")[0]["second"]["said"])
    assert "after 24 of 144 samples, 1 batches before the checkpoint once more" in said


@pytest.mark.parametrize("case", ["end-validation", "end-epoch", "end-step"])
def test_after_the_end_of_an_epoch_comes_a_whole_one(results: list[dict[str, Any]], case: str) -> None:
    for data in outcome(results, case):
        assert gap(data["first"]["seen"] + data["second"]["seen"], data["whole"]["seen"]) <= TOLERANCE
        assert data["second"]["validations"] == [[1, 36]]


def test_second_epoch_with_workers_has_its_own_order(results: list[dict[str, Any]]) -> None:
    """Workers fetch before Lightning has said which epoch it is."""
    for data in outcome(results, "second-epoch"):
        assert len(data["first"]["seen"]) == 42
        assert gap(data["second"]["seen"], data["whole"]["seen"][42:]) <= TOLERANCE


def test_checkpoint_of_others(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "old"):
        assert gap(data["second"]["seen"], data["whole"]["seen"][6:]) <= TOLERANCE


def test_another_seed_does_not_change_the_order_of_an_epoch(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "other-seed"):
        assert gap(data["second"]["seen"], data["whole"]["seen"][6:]) <= TOLERANCE


def test_other_data_are_said(results: list[dict[str, Any]]) -> None:
    said = " ".join(outcome(results, "other-seed")[0]["more"]["said"])
    assert "the training data have 150 samples, 144 when the checkpoint was saved in the middle of epoch 0" in said


def test_loaders_with_a_state_of_their_own(results: list[dict[str, Any]]) -> None:
    for rank, data in enumerate(outcome(results, "own-state")):
        assert gap(data["first"]["seen"] + data["second"]["seen"], data["whole"]["seen"]) <= TOLERANCE
        assert {number // 1000 for entry in data["second"]["seen"] for number in entry["numbers"]} == {rank}


def test_accumulation_that_the_user_changes_is_followed(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "by-hand"):
        assert data["second"]["accumulate"] == [2, 2]
        assert data["after"] == 2
    [line] = [line for line in outcome(results, "by-hand")[0]["second"]["said"] if "optimizer steps have" in line]
    assert "8 samples instead of 4 (accumulate_grad_batches=2)" in line


def test_trainer_gets_its_settings_back(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "twice"):
        assert data["first"]["accumulate"] == [3, 3]
        assert data["given"][0] == 2
        assert data["second"] == 3
