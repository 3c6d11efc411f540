"""Where in its epoch a run is, in samples over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Position", "batches_left", "position_of"]


@dataclass(frozen=True, slots=True)
class Position:
    """A point in an epoch at which no gradients are waiting.

    Attributes:
        epoch: Its number, from 0.
        finished: Whether all its batches are done; the others then say nothing.
        batches: Lightning's count of its batches that are done.
        samples: Of each dataloader, the samples that all ranks together have seen.
        units: Of each dataloader, the samples of a batch over all ranks; 0 if it does not tell.
        starts: Of each dataloader, the samples at which the iterator in use had begun.
        seeds: Of each dataloader, what its order was shuffled by; 0 if nothing of ours tells.
        lengths: Of each dataloader, the samples of an epoch; 0 likewise.
        undone: Batches after this point that were seen when it was saved, whose gradients were not in yet; the run
            sees them again. Those of an earlier epoch are lost.
        world_size: Ranks.
    """

    epoch: int
    finished: bool
    batches: int
    samples: tuple[int, ...]
    units: tuple[int, ...]
    starts: tuple[int, ...]
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]
    undone: int
    world_size: int

    @property
    def inside(self) -> bool:
        """Whether there is something to skip and something left."""
        return not self.finished and self.batches > 0

    def entries(self) -> dict[str, Any]:
        """Return it as plain numbers and lists."""
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in self.__slots__
        }


def position_of(entries: Mapping[str, Any]) -> Position:
    """Return the position that `Position.entries` told.

    Raises:
        KeyError: If something is missing.
    """
    values: dict[str, Any] = {name: entries[name] for name in Position.__slots__}
    for name in ("samples", "units", "starts", "seeds", "lengths"):
        values[name] = tuple(values[name])
    return Position(**values)


def batches_left(left: int, ranks: int, micro_batch: int, *, drop_samples: bool, drop_last: bool) -> int:
    """Return how many batches each rank still gets.

    Args:
        left: Samples that nobody has seen.
        ranks: Ranks that share them.
        micro_batch: Samples per batch and rank.
        drop_samples: Leave samples out that cannot be shared evenly, instead of repeating some.
        drop_last: Leave an incomplete last batch out.
    """
    each = left // ranks if drop_samples else math.ceil(left / ranks)
    return each // micro_batch if drop_last else math.ceil(each / micro_batch)
