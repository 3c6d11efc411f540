"""What an untried stage could reach at best, from what other stages measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_zeroladder.ladder.fitting import fastest_fitting
from lightning_zeroladder.ladder.types import LadderSettings, TrialResult

__all__ = ["best_case_step_s", "cannot_win"]


def best_case_step_s(stage: int, measured: Sequence[TrialResult], world_size: int) -> float:
    """Lower bound in seconds of the optimizer-step time of an untried stage.

    Every stage computes the same forward and backward. Communication and waiting for data are taken as fully hidden,
    and the optimizer step as perfectly sharded where the measured stage did not shard it (stage 0) and the untried
    stage does (stage 1 and up). The smallest such time over all measured trials is the bound.

    Args:
        stage: The untried stage.
        measured: Trials; those without a measurement are passed over.
        world_size: Data-parallel ranks N.

    Returns:
        Seconds; 0 when nothing was measured, since nothing is known then.

    Raises:
        ValueError: If ``world_size`` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: must be at least 1, pass the number of data-parallel ranks.")
    bounds = []
    for trial in measured:
        if trial.measurement is not None:
            part = trial.measurement.breakdown
            shards = world_size if trial.rung.stage == 0 and stage >= 1 else 1
            bounds.append(part.forward_s + part.backward_s + part.optimizer_s / shards)
    return min(bounds, default=0.0)


def cannot_win(stage: int, measured: Sequence[TrialResult], settings: LadderSettings, world_size: int) -> float | None:
    """The best-case gain of an untried stage over the fastest rung that fits, if it is not worth a higher stage.

    Returns:
        The relative gain in throughput, such as 0.004 or -0.02, when it is at most ``settings.tie``; None when the
        stage may win or nothing fits yet.
    """
    best = fastest_fitting(measured, settings)
    if best is None:
        return None
    bound_s = best_case_step_s(stage, measured, world_size)
    gain = best.measurement.step_s.median / bound_s - 1.0 if bound_s > 0 else math.inf
    return gain if gain <= settings.tie else None
