"""When a trial has seen enough steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

from lightning_zeroladder.ladder.statistics import summarize
from lightning_zeroladder.ladder.types import LadderSettings, Measurement, Statistic

__all__ = ["FEW_STEPS", "MIN_STEPS", "enough"]

MIN_STEPS = 10  # counted steps below which the spread itself is too uncertain to stop on
FEW_STEPS = 5  # enough to tell a rung that is far from the best
FAR = 0.10  # by how much, relative, the intervals have to be apart then: five steps may hide most of the noise
SIGMAS = 3.0


def enough(step_s: Sequence[float], units_per_step: float, best: Measurement | None, settings: LadderSettings) -> bool:
    """Whether more steps cannot change the decision.

    True when the throughput is known to half of ``settings.tie``, or when its interval (3 standard errors either way)
    lies further than ``settings.tie`` from that of ``best``, be it above or below. Before ``MIN_STEPS`` it has to lie
    10 % away.

    Args:
        step_s: Seconds of each optimizer step counted so far, warm-up excluded.
        units_per_step: Tokens (or samples) that one rank processes per optimizer step.
        best: The fastest rung that fits so far, if there is one.
        settings: ``tie`` and ``exhaustive`` count here.
    """
    if settings.exhaustive or len(step_s) < FEW_STEPS:
        return False
    few = len(step_s) < MIN_STEPS
    error = _relative_error(step_s)
    if error <= settings.tie / 2.0 and not few:
        return True
    if best is None:
        return False
    rate = units_per_step / summarize(step_s).median
    # A best without spread hides its noise (equal or too few samples): assume that it is as noisy as this trial.
    best_error = best.relative_error if best.step_s.spread > 0 else error
    reach = SIGMAS * (rate * error + best.throughput * best_error)
    apart = max(FAR, settings.tie) if few else settings.tie
    return abs(rate - best.throughput) - reach > apart * best.throughput


def _relative_error(step_s: Sequence[float]) -> float:
    """Relative standard error of the median step time.

    When more than half of the steps took equally long the robust spread is 0 whatever the others did: the ordinary
    standard deviation, which sees them, takes its place.
    """
    statistic = summarize(step_s)
    if statistic.spread == 0:
        statistic = Statistic(statistic.median, stdev(step_s), statistic.count)
    return statistic.standard_error / statistic.median if statistic.median > 0 else math.inf
