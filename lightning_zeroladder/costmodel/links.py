"""What the links between ranks were measured to do, and how long a collective of any size takes on them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_zeroladder.costmodel.traffic import Collective

__all__ = ["Links", "Machine", "Overlap", "Sample", "Where", "ring_bytes"]


class Where(StrEnum):
    """Which links a group of ranks uses."""

    INSIDE = "inside a node"
    ACROSS = "across nodes"


def ring_bytes(collective: Collective, nbytes: float, ranks: int) -> float:
    """Bytes that one rank sends over a ring for a collective on a whole tensor of ``nbytes``.

    2 (N - 1) / N of it for an all-reduce, (N - 1) / N for the others; a reduce averaged over owners, as in
    `costmodel.traffic`.
    """
    once = nbytes * (ranks - 1) / ranks
    return 2 * once if collective is Collective.ALL_REDUCE else once


@dataclass(frozen=True, slots=True)
class Sample:
    """A collective of one size, timed.

    Attributes:
        collective: Operation.
        where: Which links.
        ranks: Ranks N of the group.
        nbytes: Bytes of the whole tensor: what all ranks hold together before a gather or after a scatter.
        median_s: Median over calls of the slowest rank's seconds.
        spread_s: Robust standard deviation of the same.
        calls: Calls timed.
        correct: Whether the result was what it has to be, on every rank.
    """

    collective: Collective
    where: Where
    ranks: int
    nbytes: int
    median_s: float
    spread_s: float
    calls: int
    correct: bool

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends over a ring."""
        return ring_bytes(self.collective, self.nbytes, self.ranks)

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Size over time."""
        return self.nbytes / self.median_s

    @property
    def bus_bytes_per_s(self) -> float:
        """Algorithm bandwidth times nccl-tests' factor: what a link carries, whatever the operation and N."""
        if self.collective is Collective.REDUCE:
            return self.algorithm_bytes_per_s
        return self.sent_bytes / self.median_s


@dataclass(frozen=True, slots=True)
class Overlap:
    """A matrix product beside an all-reduce.

    Attributes:
        where: Which links.
        nbytes: Bytes of the all-reduce.
        collective_s: The all-reduce alone.
        product_s: The products alone.
        product_during_s: The same products while the all-reduce runs.
        both_s: From the start of both until both are done.
    """

    where: Where
    nbytes: int
    collective_s: float
    product_s: float
    product_during_s: float
    both_s: float

    @property
    def slow_down(self) -> float:
        """By what share the products take longer while the all-reduce runs; 0 if not at all."""
        return max(0.0, self.product_during_s / self.product_s - 1)

    @property
    def hidden(self) -> float:
        """Share of the shorter of the two that the other hid: 1 if both took as long as the longer alone."""
        shorter = min(self.collective_s, self.product_s)
        return min(1.0, max(0.0, (self.collective_s + self.product_s - self.both_s) / shorter))


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the links were measured.

    Attributes:
        device: Name of the GPU, or ``cpu``.
        backend: Of torch.distributed, such as ``nccl``.
        nodes: Machines.
        per_node: Ranks on each.
        precision: Type of the elements that travelled, ``bf16`` or ``fp32``.
        torch: Version of torch.
    """

    device: str
    backend: str
    nodes: int
    per_node: int
    precision: str
    torch: str


@dataclass(frozen=True, slots=True)
class Links:
    """What was measured.

    Attributes:
        machine: Where.
        samples: Collectives, by size.
        overlaps: One for each kind of link, if it was measured.
    """

    machine: Machine
    samples: tuple[Sample, ...]
    overlaps: tuple[Overlap, ...] = ()

    def of(self, collective: Collective, where: Where) -> tuple[Sample, ...]:
        """Samples of one operation on one kind of link, the smallest first."""
        found = [sample for sample in self.samples if sample.collective is collective and sample.where is where]
        return tuple(sorted(found, key=lambda sample: sample.nbytes))

    def has(self, where: Where) -> bool:
        """Whether these links were measured."""
        return any(sample.where is where for sample in self.samples)

    def wrong(self) -> tuple[Sample, ...]:
        """Samples whose result was not what it has to be."""
        return tuple(sample for sample in self.samples if not sample.correct)

    def seconds(self, collective: Collective, where: Where, nbytes: float, *, ranks: int) -> float:
        """Predict a call: between two measured sizes on the straight line, beyond the largest at its bandwidth.

        For another number of ranks than was measured, what counts is how many bytes a rank sends over a ring.

        Args:
            collective: Operation.
            where: Which links.
            nbytes: Bytes of the whole tensor.
            ranks: Ranks N that take part.

        Raises:
            ValueError: If it was not measured on these links.
        """
        samples = self.of(collective, where)
        if not samples:
            raise ValueError(
                f"{collective} {where} was not measured ({self._measured()}): run zeroladder bench there, or give the "
                "bandwidth as a number."
            )
        sent = ring_bytes(collective, nbytes, ranks)
        return _between([(sample.sent_bytes, sample.median_s) for sample in samples], sent)

    def bytes_per_s(self, collective: Collective, where: Where) -> float:
        """Bandwidth that one rank gets in the largest call that was measured: ring bytes over time.

        Raises:
            ValueError: If it was not measured on these links.
        """
        samples = self.of(collective, where)
        if not samples:
            raise ValueError(f"{collective} {where} was not measured ({self._measured()}).")
        return samples[-1].sent_bytes / samples[-1].median_s

    def latency_s(self, collective: Collective, where: Where) -> float:
        """Seconds of the smallest call that was measured.

        Raises:
            ValueError: If it was not measured on these links.
        """
        samples = self.of(collective, where)
        if not samples:
            raise ValueError(f"{collective} {where} was not measured ({self._measured()}).")
        return samples[0].median_s

    def _measured(self) -> str:
        kinds = dict.fromkeys(f"{sample.collective} {sample.where}" for sample in self.samples)
        return f"measured were: {', '.join(kinds)}" if kinds else "nothing was measured"


def _between(points: Sequence[tuple[float, float]], sent: float) -> float:
    """Interpolate seconds over bytes sent; below the smallest nothing gets quicker, above the largest it goes on."""
    place = bisect_left([x for x, _ in points], sent)
    if place == 0:
        return points[0][1]
    left = points[place - 1]
    if place == len(points):
        return left[1] * sent / left[0]
    right = points[place]
    return left[1] + (right[1] - left[1]) * (sent - left[0]) / (right[0] - left[0])
