"""Combine what the ranks measured: the slowest time, the largest memory, the mean of the parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["across_ranks"]


class _AcrossRanks(Metric):
    """A vector reduced element by element over ranks."""

    value: Tensor
    full_state_update = False

    def __init__(self, numel: int, reduction: Literal["max", "mean"]) -> None:
        super().__init__()
        self.add_state("value", torch.zeros(numel, dtype=torch.float64), dist_reduce_fx=reduction)

    def update(self, values: Tensor) -> None:
        self.value = values

    def compute(self) -> Tensor:
        return self.value


def across_ranks(values: Sequence[float], reduction: Literal["max", "mean"], device: torch.device) -> list[float]:
    """Reduce a list of numbers over all ranks; every rank gets the same list. A collective.

    Args:
        values: Numbers of this rank, equally many on every rank.
        reduction: ``max`` or ``mean``, element by element.
        device: Where the process group communicates.
    """
    metric = _AcrossRanks(len(values), reduction).to(device)
    metric.update(torch.tensor(values, dtype=torch.float64, device=device))
    return [float(value) for value in metric.compute().reshape(-1)]
