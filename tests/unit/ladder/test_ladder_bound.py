from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ladder_cases import SETTINGS, failed, ladders, ran

from lightning_zeroladder.ladder import FailureKind, TrialResult, best_case_step_s, cannot_win

STAGE_0 = ran(0, 1.0, forward_s=0.2, backward_s=0.4, communication_s=0.2, optimizer_s=0.2)
STAGE_1 = ran(1, 0.9, forward_s=0.2, backward_s=0.4, communication_s=0.2, optimizer_s=0.1)


def test_optimizer_step_shards_above_stage_0() -> None:
    assert best_case_step_s(2, [STAGE_0], world_size=4) == pytest.approx(0.65)  # 0.2 + 0.4 + 0.2 / 4
    assert best_case_step_s(0, [STAGE_0], world_size=4) == pytest.approx(0.8)
    assert best_case_step_s(2, [STAGE_1], world_size=4) == pytest.approx(0.7)  # sharded already


def test_smallest_bound_counts() -> None:
    assert best_case_step_s(2, [STAGE_0, STAGE_1], world_size=1) == pytest.approx(0.7)


def test_nothing_measured_bounds_nothing() -> None:
    oom = failed(0, FailureKind.OUT_OF_MEMORY, "forward", 1, "")
    assert best_case_step_s(1, [oom], world_size=2) == 0.0
    assert cannot_win(1, [oom], SETTINGS, 2) is None


def test_gain_over_the_best() -> None:
    assert cannot_win(2, [STAGE_0], SETTINGS, 4) is None  # 1.0 / 0.65: may win
    compute_bound = ran(0, 1.0, forward_s=0.3, backward_s=0.697, optimizer_s=0.002)
    assert cannot_win(1, [compute_bound], SETTINGS, 2) == pytest.approx(1 / 0.998 - 1)


def test_nothing_fits_so_any_stage_may_win() -> None:
    assert cannot_win(1, [ran(0, 1.0, forward_s=1.0, peak_gib=79)], SETTINGS, 2) is None


def test_world_size() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        best_case_step_s(1, [], 0)


@given(ladders, st.integers(0, 3), st.integers(1, 64))
def test_bound_never_exceeds_what_was_measured(trials: list[TrialResult], stage: int, world_size: int) -> None:
    bound = best_case_step_s(stage, trials, world_size)
    for trial in trials:
        if trial.measurement:
            part = trial.measurement.breakdown
            assert bound <= part.forward_s + part.backward_s + part.optimizer_s
