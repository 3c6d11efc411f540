from __future__ import annotations

from dataclasses import replace

import pytest
from ladder_cases import SETTINGS, measurement

from lightning_zeroladder.ladder import MIN_STEPS, Measurement, enough
from lightning_zeroladder.ladder.stopping import FEW_STEPS

# 20 steps around 1 s: median 1, median absolute deviation 0.1, so the standard error is 1.2533 * 0.14826 / sqrt(20),
# or 4.2 % of the step.
NOISY = [0.9, 1.1] * 10
STEADY = [0.999, 1.001] * 10  # standard error 0.042 %


@pytest.mark.parametrize(("count", "expected"), [(MIN_STEPS - 1, False), (MIN_STEPS, True)])
def test_needs_ten_steps(count: int, expected: bool) -> None:
    assert enough([1.0] * count, 1000.0, None, SETTINGS) is expected


def test_steady_trial_is_enough_by_itself() -> None:
    assert enough(STEADY, 1000.0, None, SETTINGS)


def test_noisy_trial_is_not_enough_by_itself() -> None:
    assert not enough(NOISY, 1000.0, None, SETTINGS)


def test_exhaustive_runs_every_step() -> None:
    assert not enough(STEADY, 1000.0, measurement(9.0), replace(SETTINGS, exhaustive=True))


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        (measurement(0.5, spread=0.005), True),  # 2000 tokens/s against 1000 +- 125
        (measurement(2.0, spread=0.02), True),  # 500 against 1000 +- 125
        (measurement(0.9, spread=0.009), False),  # 1111 lies within
        (measurement(1.1, spread=0.011), False),
    ],
)
def test_stops_once_separated_from_the_best(best: Measurement, expected: bool) -> None:
    assert enough(NOISY, 1000.0, best, SETTINGS) is expected


def test_the_gap_must_exceed_the_tie() -> None:
    # 1000 +- 125 against 833 +- 1: a gap of 41, or 4.9 % of the best.
    best = measurement(1.2, spread=0.004)
    assert enough(NOISY, 1000.0, best, replace(SETTINGS, tie=0.04))
    assert not enough(NOISY, 1000.0, best, replace(SETTINGS, tie=0.06))


def test_equal_steps_do_not_hide_the_others() -> None:
    # The robust spread is 0, the standard deviation is not.
    assert not enough([1.0] * 11 + [1.5] * 9, 1000.0, None, SETTINGS)


def test_best_without_spread_is_taken_as_noisy_as_this_trial() -> None:
    # 1200 against 1000 +- 125 would be separated if the best were exact; at +- 150 it is not.
    assert not enough(NOISY, 1000.0, measurement(1 / 1.2), SETTINGS)
    assert enough(NOISY, 1000.0, measurement(1 / 1.2, spread=1e-6), SETTINGS)


def test_steps_without_duration_say_nothing() -> None:
    assert not enough([0.0] * 20, 1000.0, None, SETTINGS)


@pytest.mark.parametrize(
    ("seconds", "count", "expected"),
    [(1.5, FEW_STEPS, True), (1.5, FEW_STEPS - 1, False), (1.08, FEW_STEPS, False), (1.08, MIN_STEPS, True)],
)
def test_a_few_steps_tell_a_rung_that_is_far_behind(seconds: float, count: int, expected: bool) -> None:
    steps = [seconds + 0.002 * (-1) ** index for index in range(count)]
    assert enough(steps, 1000.0, measurement(1.0, spread=0.002), SETTINGS) is expected
