"""The sampler that Lightning injects, able to begin in the middle of an epoch that other ranks have begun."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DistributedSampler
from typing_extensions import override

__all__ = ["InjectedRank", "ResumableSampler", "share"]


class InjectedRank(int):
    """A rank that tells a sampler which Lightning has made from one of the user's own."""


def share(order: Sequence[int], seen: int, ranks: int, rank: int, *, drop_last: bool) -> list[int]:
    """Return a rank's part of what is left of an epoch.

    Ranks take turns, as `torch.utils.data.DistributedSampler` has them do. So the n-th batches of all ranks together
    are the next samples of the order, whatever the number of ranks: a run that goes on with others takes its optimizer
    steps on the same samples.

    Args:
        order: Every sample of the epoch.
        seen: How many of them were seen, from the beginning.
        ranks: Ranks that share the rest.
        rank: One of them.
        drop_last: Leave the last ones out where they cannot be shared evenly, instead of repeating the first ones.
    """
    left = len(order) - seen
    each = left // ranks if drop_last else math.ceil(left / ranks)
    rest = list(order[seen : seen + each * ranks])
    while order and len(rest) < each * ranks:
        rest += order[: each * ranks - len(rest)]
    return rest[rank::ranks]


class ResumableSampler(DistributedSampler[Any]):
    """Yields what a sampler yields, in the one epoch that was begun before only what is left of it.

    Its length is that of a whole epoch: that is what Lightning counts epochs and schedules by.

    Args:
        base: The sampler that Lightning has injected, over a dataset or the user's own sampler.
    """

    def __init__(self, base: DistributedSampler[Any]) -> None:
        super().__init__(
            base.dataset, base.num_replicas, base.rank, base.shuffle, seed=base.seed, drop_last=base.drop_last
        )
        self.base = base
        self.begun_epoch = 0
        self.begun_seed = base.seed
        self.seen = 0

    def begin(self, epoch: int, seen: int, seed: int | None = None) -> bool:
        """Take an epoch up where it was left.

        Args:
            epoch: The epoch.
            seen: Samples of it that were seen, over all ranks.
            seed: What it was shuffled by, where that is not this run's seed.

        Returns:
            Whether an iterator made before is of no use any more.
        """
        seen = min(seen, self.whole)
        begun = (epoch, seen, self.base.seed if seed is None else seed)
        same = (self.begun_epoch, self.seen, self.begun_seed) == begun and self.epoch == epoch
        self.begun_epoch, self.seen, self.begun_seed = begun
        self.set_epoch(epoch)
        return not same

    @property
    def whole(self) -> int:
        """Samples of an epoch."""
        return len(self.base.dataset)  # type: ignore[arg-type]

    @property
    def seed_of_epoch(self) -> int:
        """What the present epoch is shuffled by."""
        return self.begun_seed if self.epoch == self.begun_epoch else self.base.seed

    def order(self) -> list[int]:
        """Return every sample of the present epoch, in its order."""
        alone = copy.copy(self.base)
        alone.num_replicas, alone.rank = 1, 0
        alone.num_samples = alone.total_size = self.whole
        alone.seed = self.seed_of_epoch
        alone.set_epoch(self.epoch)
        return list(alone)

    @override
    def __iter__(self) -> Iterator[Any]:
        seen = self.seen if self.epoch == self.begun_epoch else 0
        yield from share(self.order(), seen, self.num_replicas, self.rank, drop_last=self.drop_last)
        if self.epoch == self.begun_epoch:
            self.seen = 0  # a loader that is cycled beside a longer one gets all of it in its next round
