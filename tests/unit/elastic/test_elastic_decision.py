from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zeroladder.costmodel.memory import ModelCount
from lightning_zeroladder.elastic.decision import DecisionKey, OnResize, Resized, project, stand
from lightning_zeroladder.ladder import decide
from lightning_zeroladder.ladder.types import (
    Failure,
    FailureKind,
    LadderSettings,
    Measurement,
    Rung,
    Skip,
    SkipKind,
    Statistic,
    StepBreakdown,
    TrialResult,
)

GIB = 2**30
COUNT = ModelCount(trainable=GIB, frozen=0)
KEY = DecisionKey("abc", 4, 1, "H100", 8, 1, "bf16-mixed", "AdamW", "def", (("torch", "2.13.0"),))
SETTINGS = LadderSettings(memory_limit_bytes=40 * GIB)


def measured(peak_gib: float, communication_s: float, *, optimizer_s: float = 0.1) -> Measurement:
    part = StepBreakdown(0.0, 0.3, 0.6, communication_s, optimizer_s)
    step_s = 0.9 + communication_s + optimizer_s
    return Measurement(Statistic(step_s, 0.001, 50), part, 1000.0, "tokens", int(peak_gib * GIB), None, 5)


def trial(stage: int, *args: float, **options: float) -> TrialResult:
    return TrialResult(Rung(stage), measurement=measured(*args, **options))


def resized(before: tuple[int, int], after: tuple[int, int]) -> Resized:
    return Resized(before, after, COUNT, weight_bytes=2, optimizer_bytes=12)


def judge(trials, before, after, setting=OnResize.AUTO, settings=SETTINGS, **changes):
    decision = decide(trials, settings)
    now = replace(KEY, world_size=after[0], accumulate=after[1], **changes)
    key = replace(KEY, world_size=before[0], accumulate=before[1])
    return stand(setting, key, now, decision, resized(before, after), settings)


TRIALS = (trial(0, 30, 0.05), trial(1, 24, 0.3), trial(2, 22, 0.4), trial(3, 20, 0.6))


def test_same_key_needs_no_trials():
    found = judge(TRIALS, (4, 1), (4, 1))
    assert found.keep
    assert found.reason == "Nothing has changed that the decision for stage 0 rests on."


def test_other_ranks_where_it_still_fits_and_wins():
    found = judge(TRIALS, (4, 1), (2, 2))
    assert found.keep
    assert "From 4 to 2 ranks, stage 0 still fits" in found.reason


def test_other_ranks_where_it_does_not_fit():
    """Stage 3 on 4 ranks holds a quarter of 16 bytes per parameter: 4 GiB. On one rank it is 16."""
    tight = replace(SETTINGS, stages=(2, 3), memory_limit_bytes=30 * GIB)
    found = judge((trial(2, 25, 0.3), trial(3, 22, 0.05)), (4, 1), (1, 4), settings=tight)
    assert not found.keep
    assert "stage 3 would need 34.0 GiB of 27.0 GiB" in found.reason


def test_too_near_to_tell():
    near = replace(SETTINGS, memory_limit_bytes=34 * GIB)
    found = judge(TRIALS[:1], (4, 1), (2, 2), settings=near)
    assert not found.keep
    assert "too near to tell" in found.reason
    assert found.stages == (0,)


def test_another_stage_should_win_now():
    """Stage 2 sends in every micro-batch: with eight times the accumulation it loses to stage 1."""
    trials = (trial(1, 24, 0.30), trial(2, 22, 0.10))
    found = judge(trials, (8, 1), (1, 8), settings=replace(SETTINGS, stages=(1, 2), memory_limit_bytes=80 * GIB))
    assert found.keep  # one rank sends nothing: stage 2 is as fast
    found = judge(trials, (8, 1), (2, 8), settings=replace(SETTINGS, stages=(1, 2), memory_limit_bytes=80 * GIB))
    assert not found.keep
    assert "stage 1 should be" in found.reason
    assert found.stages[0] == 1


@pytest.mark.parametrize(
    "lacked",
    [
        TrialResult(Rung(1), failure=Failure(FailureKind.OUT_OF_MEMORY, "forward", 1, "out of memory")),
        TrialResult(Rung(1), skip=Skip(SkipKind.CANNOT_FIT, needed_bytes=50 * GIB)),
    ],
)
def test_a_stage_that_had_no_room_may_have_some_now(lacked):
    settings = replace(SETTINGS, stages=(1, 3))
    found = judge((lacked, trial(3, 20, 0.6)), (2, 2), (8, 1), settings=settings)
    assert not found.keep
    assert found.reason == "From 2 to 8 ranks, stage 1 may fit now, which did not before."
    assert found.stages == (3, 1)
    fewer = judge((lacked, trial(3, 20, 0.6)), (8, 1), (4, 2), settings=settings)
    assert fewer.keep


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 2}, "the number of nodes"),
        ({"device": "A100"}, "the device"),
        ({"model": "x"}, "the model's shapes"),
        ({"precision": "32-true"}, "the precision"),
        ({"versions": ()}, "the versions of the libraries"),
    ],
)
def test_what_measurements_cannot_be_carried_over(changes, words):
    found = judge(TRIALS, (4, 1), (4, 1), **changes)
    assert not found.keep
    assert words in found.reason
    assert found.stages == SETTINGS.stages


def test_the_users_word():
    assert judge(TRIALS, (4, 1), (8, 1), OnResize.KEEP, nodes=2).keep
    assert not judge(TRIALS, (4, 1), (4, 1), OnResize.WALK).keep


def test_a_stage_that_may_not_be_tried_any_more():
    decision = decide(TRIALS, SETTINGS)
    narrow = replace(SETTINGS, stages=(2, 3))
    found = stand(OnResize.AUTO, KEY, replace(KEY, world_size=2), decision, resized((4, 1), (2, 1)), narrow)
    assert not found.keep
    assert "stage 0 is not among the stages" in found.reason


@given(
    stage=st.integers(0, 3),
    ranks=st.integers(1, 64),
    k=st.integers(1, 16),
    now=st.integers(1, 64),
    k_now=st.integers(1, 16),
)
def test_projections(stage, ranks, k, now, k_now):
    here = measured(60, 0.2)
    same = project(Rung(stage), here, resized((ranks, k), (ranks, k)))
    assert (same.peak_bytes, same.step_s) == (here.peak_bytes, pytest.approx(here.step_s.median))
    there = project(Rung(stage), here, resized((ranks, k), (now, k_now)))
    assert there.step_s > 0
    assert there.throughput == pytest.approx(here.units_per_step * k_now / k / there.step_s)
    if now > ranks:
        assert there.peak_bytes <= here.peak_bytes
        assert (there.peak_bytes == here.peak_bytes) == (stage == 0)


def test_differences_are_named():
    assert KEY.differences(replace(KEY, world_size=2, accumulate=2)) == ("world_size", "accumulate")
    assert KEY.differences(KEY) == ()
