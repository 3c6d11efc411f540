"""A robust summary of noisy samples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_zeroladder.ladder.types import Statistic

__all__ = ["summarize"]

MAD_TO_SIGMA = 1.4826  # makes the median absolute deviation of normal noise its standard deviation


def summarize(samples: Sequence[float]) -> Statistic:
    """Median, robust spread and count of ``samples``; one slow step in ten moves neither.

    Args:
        samples: At least one sample, any unit.

    Returns:
        The statistic in the samples' unit. The spread is 0 when more than half of the samples are equal.

    Raises:
        ValueError: If there is no sample.
    """
    if not samples:
        raise ValueError("No samples given, at least one is needed: count a step before summarizing.")
    center = median(samples)
    deviation = median(abs(sample - center) for sample in samples)
    return Statistic(median=center, spread=MAD_TO_SIGMA * deviation, count=len(samples))
