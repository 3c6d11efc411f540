"""Finds out, before anything is trained, whether all ranks answer each other; if not, which ones do not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

__all__ = ["RanksSilent", "run_preflight"]

_LOOK_S = 0.05
_AFTERWARDS_S = 2.0
"""How long a rank whose collectives failed waits for the others to say how theirs went."""


class RanksSilent(RuntimeError):
    """Ranks did not answer.

    Attributes:
        ranks: Those that did not, ascending; empty when all answered but their collectives failed on every rank.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def run_preflight(store: Store, *, rank: int, world_size: int, backend: str, timeout_s: float) -> float:
    """Make the default group over all ranks and run an all-reduce and an all-gather of a few bytes in it.

    Call it on every rank, before a default group exists; the group is gone again when it returns. The ranks meet in
    the store first, because a backend that waits for a missing rank does not say which one.

    Args:
        store: Reaches all ranks; used under names of its own.
        rank: This one.
        world_size: All of them.
        backend: "gloo", or "nccl" with this rank's device already set.
        timeout_s: For the meeting, and again for the collectives.

    Returns:
        Seconds that the group and its collectives took on this rank.

    Raises:
        RanksSilent: Ranks did not come, or came and did not finish the collectives.
    """
    store = PrefixStore("zeroladder/preflight", store)
    silent = _missing(store, "here", rank, world_size, timeout_s)
    if silent:
        raise RanksSilent(
            f"{_named(silent)} of {world_size} did not answer within {timeout_s:g} s. Check that the processes were "
            "started and still run, that all have the same WORLD_SIZE and a RANK of their own, and that their hosts "
            "reach MASTER_ADDR:MASTER_PORT (firewall, name resolution).",
            silent,
        )
    started_s = time.perf_counter()
    try:
        _collectives(PrefixStore("group", store), rank, world_size, backend, timeout_s)
    except RuntimeError as error:
        silent = _waited_for(store, "done", world_size, _AFTERWARDS_S)
        raise RanksSilent(
            f"All {world_size} ranks started, but a small {backend} collective failed on rank {rank}; "
            f"not finished on {_named(silent)}. Check that the hosts reach each other on all ports and that "
            f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME names the interface between them. "
            f"The backend said: {error}",
            silent,
        ) from error
    taken_s = time.perf_counter() - started_s
    # Whoever holds the store must not leave while others still ask it.
    _missing(store, "done", rank, world_size, timeout_s)
    return taken_s


def _collectives(store: Store, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        mine = torch.tensor([rank], device=device)
        total, all_ranks = mine.clone(), [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_reduce(total)
        dist.all_gather(all_ranks, mine)
        got = [int(one) for one in all_ranks]
        if int(total) != world_size * (world_size - 1) // 2 or got != list(range(world_size)):
            raise RuntimeError(f"wrong numbers came back: sum {int(total)}, ranks {got}")
    finally:
        dist.destroy_process_group()


def _missing(store: Store, word: str, rank: int, world_size: int, timeout_s: float) -> list[int]:
    store.set(f"{word}/{rank}", "1")
    return _waited_for(store, word, world_size, timeout_s)


def _waited_for(store: Store, word: str, world_size: int, timeout_s: float) -> list[int]:
    """Return the ranks that have not said the word when the time is over, none as soon as all have."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        silent = [one for one in range(world_size) if not store.check([f"{word}/{one}"])]
        if not silent or time.monotonic() > deadline_s:
            return silent
        time.sleep(_LOOK_S)


def _named(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
