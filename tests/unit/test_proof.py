"""How a round trip is laid out, and what its numbers mean."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zeroladder.proof.job import Job, Outcome, Role
from lightning_zeroladder.proof.plan import BadJob, Layout, Plan, Request, make_plan
from lightning_zeroladder.proof.verdict import (
    differing_state,
    judge,
    largest_difference,
    step_losses,
    tolerance_for,
)


def plan(accumulate: int = 1, *, devices: int = 2, to_devices: int | None = None, steps: int = 50) -> Plan:
    return make_plan(Request(devices, to_devices, 2, 3, steps), accumulate)


@given(devices=st.integers(1, 12), accumulate=st.integers(1, 12), steps=st.integers(13, 60), pick=st.integers(0, 10**6))
def test_both_layouts_take_the_same_micro_batches_in_each_step(
    devices: int, accumulate: int, steps: int, pick: int
) -> None:
    total = devices * accumulate
    divisors = [count for count in range(1, total + 1) if total % count == 0]
    to_devices = divisors[pick % len(divisors)]
    try:
        made = plan(accumulate, devices=devices, to_devices=to_devices, steps=steps)
    except BadJob:
        assert total // to_devices >= steps  # a checkpoint in the middle could not be counted on from
        return
    for layout in (made.before, made.after):
        for step in (0, made.saved_after, steps - 1):
            taken = sorted(
                layout.micro_batch(rank, step * layout.accumulate + index)
                for rank in range(layout.devices)
                for index in range(layout.accumulate)
            )
            assert taken == list(range(step * total, (step + 1) * total))
    assert 1 <= made.saved_after < steps
    # Lightning counts on from the batches of the checkpoint: a window has to begin there.
    assert made.saved_after * accumulate % made.after.accumulate == 0


@pytest.mark.parametrize(
    ("accumulate", "devices", "expected"), [(1, 2, 1), (1, 4, 2), (3, 2, 1), (1, 1, 1), (2, 3, 2), (1, 7, 1)]
)
def test_fewer_devices_are_chosen(accumulate: int, devices: int, expected: int) -> None:
    assert plan(accumulate, devices=devices).after.devices == expected


def test_the_checkpoint_is_saved_where_windows_of_both_begin() -> None:
    assert plan(1, steps=50).saved_after == 24
    assert plan(1, to_devices=2, steps=50).saved_after == 25
    assert plan(2, to_devices=4, steps=50).saved_after == 25
    assert plan(2, devices=3, to_devices=2, steps=4).saved_after == 3


@pytest.mark.parametrize(
    ("request_", "accumulate", "says"),
    [
        (Request(2, 3, 2, 3, 50), 1, "to_devices=3: .* 2 micro-batches .* Choose one of 1, 2,"),
        (Request(4, 3, 2, 3, 50), 2, "Choose one of 1, 2, 4, 8,"),
        (Request(2, None, 2, 3, 2), 1, "steps=2: .* multiples of 2 steps: at least 3 steps"),
        (Request(2, 0, 2, 3, 2), 1, "to_devices=0: must be at least 1"),
        (Request(2, 1, -1, 3, 2), 1, "stage=-1: ZeRO has the stages"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(request_: Request, accumulate: int, says: str) -> None:
    with pytest.raises(BadJob, match=says):
        make_plan(request_, accumulate)


def test_a_job_and_its_outcome_come_back_from_their_files(tmp_path: pytest.TempPathFactory) -> None:
    job = Job(Role.RESUMED, ("a.yaml",), ("--x=1",), str(tmp_path), Request(2, None, 2, 3, 9), plan(3, steps=9), 4)
    assert Job.read(job.write()) == job
    assert (job.devices, job.first_step(job.plan or plan())) == (1, 4)
    outcome = Outcome(plan(3), {0: 0.5, 7: math.inf}, {"a/fp32": -(2**63)}, "32-true", 4, "ddp")
    outcome.write(job.outcome(0))
    assert Outcome.read(job.outcome(0)) == outcome


def test_step_losses_are_means_over_all_ranks() -> None:
    made = Plan(Layout(2, 2, 1), Layout(1, 3, 2), steps=3, saved_after=1)
    first, second = Outcome(made, {0: 9.0, 2: 1.0, 4: 3.0}), Outcome(made, {1: 9.0, 3: 2.0, 5: 4.0})
    assert step_losses([first, second], made) == (1.5, 3.5)
    with pytest.raises(ValueError, match="ended after step 2 of 3"):
        step_losses([first, Outcome(made, {3: 2.0})], made)


def test_differences_are_relative_to_the_largest_loss() -> None:
    assert largest_difference([4.0, 1.0], [4.0, 0.5]) == 0.125
    assert largest_difference([0.0], [0.0]) == 0.0
    assert largest_difference([math.nan], [1.0]) == math.inf
    assert largest_difference([-1.0, -2.0], [-1.0, -4.0]) == 0.5


def test_state_that_is_missing_differs() -> None:
    assert differing_state({"a": 1, "b": 2}, {"a": 1, "c": 2}) == ("b", "c")
    assert differing_state({"a": 1}, {"a": 1}) == ()


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("32-true", 1e-5), ("64-true", 1e-5), ("bf16-mixed", 2e-2), ("bf16-true", 2e-2), ("16-mixed", 2e-2)],
)
def test_tolerance_follows_the_precision(precision: str, expected: float) -> None:
    assert tolerance_for(precision)[0] == expected


@pytest.mark.parametrize(
    ("numbers", "passed", "says"),
    [
        ({"difference": 9e-6}, True, "go on as in the uninterrupted run"),
        ({"difference": 0.0, "state_differs": ["a", "b", "c", "d"]}, False, "4 of 9 tensors .* a, b, c and 1 more"),
        ({"difference": math.inf, "finite": False}, False, "not all numbers"),
        ({"difference": 0.1}, None, "differ"),
        ({"difference": 0.1, "repeat": 0.04}, True, "already differ by 4.0e-02, .* no more than 3 times"),
        ({"difference": 0.1, "repeat": 0.03}, False, "already differ by 3.0e-02, but after the resume .* 1.0e-01"),
        ({"difference": 0.1, "repeat": 0.0}, None, "differ"),
        ({"difference": 0.1, "repeat": 0.0, "control": 0.1}, False, "its checkpoints do not hold"),
        ({"difference": 0.1, "repeat": 0.0, "control": 1e-7}, False, "on another number of devices or at another"),
        ({"difference": math.inf, "repeat": 0.0, "control": 1e-7}, False, "SyncBatchNorm"),
    ],
)
def test_the_verdict(numbers: dict[str, object], passed: bool | None, says: str) -> None:
    findings = {"tolerance": 1e-5, "state_differs": [], "state_tensors": 9, "finite": True, **numbers}
    found, reason = judge(**findings)  # type: ignore[arg-type]
    assert found is passed
    assert re.search(says, reason), reason
