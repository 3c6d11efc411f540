"""When a trial has seen enough steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

from lightning_zeroladder.ladder.statistics import summarize
from lightning_zeroladder.ladder.types import LadderSettings, Measurement, Statistic

__all__ = ["MIN_STEPS", "enough"]

MIN_STEPS = 10  # counted steps below which the spread itself is too uncertain to stop on
SIGMAS = 3.0


def enough(step_s: Sequence[float], units_per_step: float, best: Measurement | None, settings: LadderSettings) -> bool:
    """Whether more steps cannot change the decision.

    True when the throughput is known to half of ``settings.tie``, or when its interval (3 standard errors either way)
    lies further than ``settings.tie`` from that of ``best``, be it above or below.

    Args:
        step_s: Seconds of each optimizer step counted so far, warm-up excluded.
        units_per_step: Tokens (or samples) that one rank processes per optimizer step.
        best: The fastest rung that fits so far, if there is one.
        settings: ``tie`` and ``exhaustive`` count here.
    """
    if settings.exhaustive or len(step_s) < MIN_STEPS:
        return False
    error = _relative_error(step_s)
    if error <= settings.tie / 2.0:
        return True
    if best is None:
        return False
    rate = units_per_step / summarize(step_s).median
    # A best without spread hides its noise (equal or too few samples): assume that it is as noisy as this trial.
    best_error = best.relative_error if best.step_s.spread > 0 else error
    reach = SIGMAS * (rate * error + best.throughput * best_error)
    return abs(rate - best.throughput) - reach > settings.tie * best.throughput


def _relative_error(step_s: Sequence[float]) -> float:
    """Relative standard error of the median step time.

    When more than half of the steps took equally long the robust spread is 0 whatever the others did: the ordinary
    standard deviation, which sees them, takes its place.
    """
    statistic = summarize(step_s)
    if statistic.spread == 0:
        statistic = Statistic(statistic.median, stdev(step_s), statistic.count)
    return statistic.standard_error / statistic.median if statistic.median > 0 else math.inf
