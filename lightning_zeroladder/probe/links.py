"""Measure the links between ranks: collectives by size, checked and timed, and what they cost a matrix product.

Like nccl-tests: the size of a collective is that of the whole tensor, a time is that of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zeroladder.costmodel.links import Links, Machine, Overlap, Sample, Where
from lightning_zeroladder.costmodel.traffic import Collective
from lightning_zeroladder.ladder.statistics import summarize

__all__ = ["PRECISIONS", "Effort", "default_effort", "measure_links", "quick_links"]

PRECISIONS: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Types that can travel."""

_MIB = 2**20
_FEWEST_CALLS = 3
_PERIOD = 3
"""Elements are 0, 1, 2, 0, ... shifted by the rank: sums over up to 128 ranks are exact in bf16 too."""

_EXACT_RANKS = 128
_ROUNDING = 2.0**-6
"""Relative error allowed to a bf16 sum over more ranks than that."""

_SHARE_PER_SIZE = 0.1
"""Share of a curve's time that the calls of one size may take."""

_OVERLAP_S = 0.2
"""Longest all-reduce to put beside a matrix product."""

_OVERLAP_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        smallest_bytes: First size.
        largest_bytes: Last size, unless the time is over before.
        growth: Each size is so many times the one before.
        seconds: For everything together, about. A size that would not be done in time is left out, but each
            collective is timed at two sizes at least.
        most_calls: Timed calls of a size.
        overlap: Whether to measure a matrix product beside an all-reduce as well.
    """

    smallest_bytes: int = 1024
    largest_bytes: int = 2**30
    growth: int = 4
    seconds: float = 60.0
    most_calls: int = 50
    overlap: bool = True

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: With what was given and what is allowed.
        """
        if not 0 < self.smallest_bytes < self.largest_bytes:
            raise ValueError(
                f"smallest_bytes={self.smallest_bytes}, largest_bytes={self.largest_bytes}: the first must be above 0 "
                "and below the second."
            )
        if self.growth < 2 or self.most_calls < _FEWEST_CALLS or self.seconds <= 0:
            raise ValueError(
                f"growth={self.growth} must be at least 2, most_calls={self.most_calls} at least {_FEWEST_CALLS}, "
                f"seconds={self.seconds:g} above 0."
            )

    def sizes(self) -> list[int]:
        """Sizes in bytes, ascending; the largest is among them."""
        found = []
        size = self.smallest_bytes
        while size < self.largest_bytes:
            found.append(size)
            size *= self.growth
        return [*found, self.largest_bytes]


def default_effort(device: torch.device) -> Effort:
    """Return what `zeroladder bench` does: 1 KiB to 1 GiB on GPUs, to 64 MiB on CPU, within a minute."""
    return Effort() if device.type == "cuda" else Effort(largest_bytes=64 * _MIB)


def quick_links(device: torch.device, *, per_node: int, precision: str, seconds: float = 1.5) -> Links:
    """Measure in a second or two what a prediction needs: a small and a large call of each collective, and overlap.

    A collective over the default process group; every rank gets the same result.

    Args:
        device: Of this rank's tensors.
        per_node: Ranks on each node; ranks are numbered node by node.
        precision: Type that travels, one of `PRECISIONS`.
        seconds: About how long it takes. On links so slow that two calls take longer, it takes longer.

    Raises:
        ValueError: As `measure_links`.
    """
    largest = 32 * _MIB if device.type == "cuda" else 4 * _MIB
    effort = Effort(smallest_bytes=4096, largest_bytes=largest, growth=32, seconds=seconds, most_calls=8)
    return measure_links(device, per_node=per_node, precision=precision, effort=effort)


def measure_links(
    device: torch.device,
    *,
    per_node: int,
    precision: str,
    effort: Effort,
    on_sample: Callable[[Sample], None] | None = None,
) -> Links:
    """Time every collective over the ranks of the default process group. A collective itself.

    Where there are several nodes, once over the ranks of each node (all nodes at a time, as in training) and once over
    all ranks. Every rank gets the same result.

    Args:
        device: Of this rank's tensors.
        per_node: Ranks on each node; ranks are numbered node by node.
        precision: Type that travels, one of `PRECISIONS`.
        effort: How much.
        on_sample: Called on every rank with each sample as it is done.

    Raises:
        ValueError: If there is one rank only, the ranks are not a multiple of ``per_node``, or the type is unknown.
    """
    world = dist.get_world_size()
    if world < 2:
        raise ValueError("there is one rank only: links are between ranks, start two or more.")
    if per_node < 1 or world % per_node:
        raise ValueError(f"{world} ranks are not a multiple of per_node={per_node}: every node needs equally many.")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is not known; known are {', '.join(PRECISIONS)}.")
    dtype = PRECISIONS[precision]
    samples: list[Sample] = []
    overlaps: list[Overlap] = []
    wheres = _wheres(world, per_node)
    curve_s = effort.seconds / (len(wheres) * len(Collective) + effort.overlap)
    with torch.inference_mode():
        for where in wheres:
            with _ranks(where, world, per_node) as ranks:
                for collective in Collective:
                    _curve(_Bench(collective, where, ranks, device, dtype), effort, curve_s, samples, on_sample)
                if effort.overlap:
                    overlaps.append(_overlap(where, ranks, device, dtype, samples, curve_s / len(wheres)))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    machine = Machine(
        name, str(dist.get_backend()), world // per_node, per_node, precision, str(torch.__version__).partition("+")[0]
    )
    return Links(machine, tuple(samples), tuple(overlaps))


def _wheres(world: int, per_node: int) -> tuple[Where, ...]:
    if world == per_node:
        return (Where.INSIDE,)
    return (Where.INSIDE, Where.ACROSS) if per_node > 1 else (Where.ACROSS,)


@dataclass(frozen=True, slots=True)
class _Ranks:
    """A process group with this rank's place in it."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    first: int


@contextmanager
def _ranks(where: Where, world: int, per_node: int) -> Iterator[_Ranks]:
    """Give the group of this rank on these links; a group made for it is taken down again."""
    rank = dist.get_rank()
    if where is Where.ACROSS or world == per_node:
        yield _Ranks(None, world, rank, 0)
        return
    mine, _ = dist.new_subgroups(per_node)  # type: ignore[no-untyped-call]
    try:
        yield _Ranks(mine, per_node, rank % per_node, rank - rank % per_node)
    finally:
        dist.destroy_process_group(mine)


class _Bench:
    """One collective on one group.

    Args:
        collective: Operation.
        where: Which links.
        ranks: Who takes part.
        device: Of the tensors.
        dtype: Of the elements.
    """

    def __init__(
        self, collective: Collective, where: Where, ranks: _Ranks, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.collective, self.where, self.ranks = collective, where, ranks
        self.device, self._dtype = device, dtype
        self._whole = self._part = torch.empty(0)
        self._turn = 0

    def prepare(self, nbytes: int) -> int:
        """Make tensors of about this size, a multiple of the ranks; returns the bytes that it became."""
        share = -(-nbytes // (self._dtype.itemsize * self.ranks.size))
        self._whole = torch.zeros(share * self.ranks.size, dtype=self._dtype, device=self.device)
        self._part = torch.zeros(share, dtype=self._dtype, device=self.device)
        return self._whole.numel() * self._dtype.itemsize

    def release(self) -> None:
        """Let the tensors go."""
        self._whole = self._part = torch.empty(0)

    def call(self) -> None:
        """Run it once. The root of a reduce changes from call to call, as owners do."""
        group = self.ranks.group
        match self.collective:
            case Collective.ALL_REDUCE:
                dist.all_reduce(self._whole, group=group)
            case Collective.ALL_GATHER:
                dist.all_gather_into_tensor(self._whole, self._part, group=group)
            case Collective.REDUCE_SCATTER:
                dist.reduce_scatter_tensor(self._part, self._whole, group=group)
            case Collective.REDUCE:
                dist.reduce(self._whole, self.ranks.first + self._turn % self.ranks.size, group=group)
                self._turn += 1

    def check(self) -> bool:
        """Run it on known numbers and compare; leaves zeros behind."""
        ranks, share = self.ranks, self._part.numel()
        root = self._turn % ranks.size
        self._whole.copy_(self._pattern(ranks.rank, 0, self._whole.numel()))
        self._part.copy_(self._pattern(ranks.rank, 0, share))
        self.call()
        match self.collective:
            case Collective.ALL_GATHER:
                parts = self._whole.view(ranks.size, share)
                right = all(self._equal(parts[rank], self._pattern(rank, 0, share)) for rank in range(ranks.size))
            case Collective.REDUCE_SCATTER:
                right = self._equal(self._part, self._total(ranks.rank * share, share))
            case Collective.REDUCE if ranks.rank != root:
                right = True
            case _:
                right = self._equal(self._whole, self._total(0, self._whole.numel()))
        self._whole.zero_()
        self._part.zero_()
        return right

    def _pattern(self, rank: int, start: int, numel: int) -> Tensor:
        return self._repeated([(place + rank) % _PERIOD for place in range(_PERIOD)], start, numel)

    def _total(self, start: int, numel: int) -> Tensor:
        sums = [sum((place + rank) % _PERIOD for rank in range(self.ranks.size)) for place in range(_PERIOD)]
        return self._repeated(sums, start, numel)

    def _repeated(self, values: list[int], start: int, numel: int) -> Tensor:
        shifted = [values[(start + place) % _PERIOD] for place in range(_PERIOD)]
        return torch.tensor(shifted, dtype=self._dtype, device=self.device).repeat(-(-numel // _PERIOD))[:numel]

    def _equal(self, found: Tensor, expected: Tensor) -> bool:
        if self._dtype is torch.float32 or self.ranks.size <= _EXACT_RANKS:
            return torch.equal(found, expected)
        return torch.allclose(found.float(), expected.float(), rtol=_ROUNDING, atol=0)


def _curve(
    bench: _Bench,
    effort: Effort,
    seconds: float,
    samples: list[Sample],
    on_sample: Callable[[Sample], None] | None,
) -> None:
    """Time ascending sizes until the last, or until the next would not be done in time."""
    left_s, last_s, sizes = seconds, 0.0, effort.sizes()
    for place, nbytes in enumerate(sizes):
        growth = nbytes / sizes[place - 1] if place else 1.0
        if place >= 2 and growth * last_s * (2 + _FEWEST_CALLS) > left_s:
            break
        started_s = time.perf_counter()
        size = bench.prepare(nbytes)
        right = bench.check()
        once_s = _slowest(_times(bench.call, 1, bench.device), bench.device)[0]
        calls = min(effort.most_calls, max(_FEWEST_CALLS, int(_SHARE_PER_SIZE * seconds / once_s)))
        slowest_s = _slowest(_times(bench.call, calls, bench.device), bench.device)
        found = summarize(slowest_s)
        # What every rank decides by has to be the same on every rank.
        wrong, spent_s = _slowest([0.0 if right else 1.0, time.perf_counter() - started_s], bench.device)
        sample = Sample(
            bench.collective, bench.where, bench.ranks.size, size, found.median, found.spread, calls, wrong == 0.0
        )
        samples.append(sample)
        if on_sample is not None:
            on_sample(sample)
        last_s, left_s = found.median, left_s - spent_s
    bench.release()


def _times(call: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    """Seconds of each of several calls in a row on this rank."""
    if device.type != "cuda":
        stamps = [time.perf_counter()]
        for _ in range(calls):
            call()
            stamps.append(time.perf_counter())
        return [end - start for start, end in pairwise(stamps)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def _slowest(values: list[float], device: torch.device) -> list[float]:
    """Return each value's largest over all ranks. A collective over the default group."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def _overlap(
    where: Where,
    ranks: _Ranks,
    device: torch.device,
    dtype: torch.dtype,
    samples: list[Sample],
    seconds: float,
) -> Overlap:
    """Run matrix products for as long as an all-reduce takes, alone and beside it."""
    timed = [s for s in samples if s.collective is Collective.ALL_REDUCE and s.where is where]
    most_s = min(_OVERLAP_S, seconds / (3 * _OVERLAP_REPEATS))
    chosen = max((s for s in timed if s.median_s <= most_s), key=lambda s: s.nbytes, default=timed[0])
    bench = _Bench(Collective.ALL_REDUCE, where, ranks, device, dtype)
    size = bench.prepare(chosen.nbytes)
    whole = bench._whole
    width = 4096 if device.type == "cuda" else 256
    left = torch.ones(width, width, dtype=dtype if device.type == "cuda" else torch.float32, device=device)
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, left, out=out)

    multiply()
    once_s = _median_slowest(_times(multiply, 5, device), device)
    products = max(1, round(chosen.median_s / once_s))

    def multiply_all() -> None:
        for _ in range(products):
            multiply()

    product_s = _median_slowest(_times(multiply_all, _OVERLAP_REPEATS, device), device)
    collective_s = _median_slowest(_times(bench.call, _OVERLAP_REPEATS, device), device)
    during, both = [], []
    for _ in range(_OVERLAP_REPEATS):
        dist.barrier(group=ranks.group)
        product, total = _beside(lambda: dist.all_reduce(whole, group=ranks.group, async_op=True), multiply_all, device)
        during.append(product)
        both.append(total)
    return Overlap(where, size, collective_s, product_s, _median_slowest(during, device), _median_slowest(both, device))


def _beside(
    start: Callable[[], dist.Work | None], compute: Callable[[], None], device: torch.device
) -> tuple[float, float]:
    """Start a collective, compute, wait; returns the seconds of the computation and of all."""
    if device.type != "cuda":
        stamps = [time.perf_counter()]
        work = start()
        compute()
        stamps.append(time.perf_counter())
        if work is not None:
            work.wait()
        return stamps[1] - stamps[0], time.perf_counter() - stamps[0]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
    events[0].record()
    work = start()
    compute()
    events[1].record()
    if work is not None:
        work.wait()
    events[2].record()
    torch.cuda.synchronize(device)
    return events[0].elapsed_time(events[1]) / 1e3, events[0].elapsed_time(events[2]) / 1e3


def _median_slowest(values: list[float], device: torch.device) -> float:
    return summarize(_slowest(values, device)).median
