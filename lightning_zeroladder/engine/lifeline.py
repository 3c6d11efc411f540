"""A line between the ranks beside the training process groups.

On it a rank that fails tells the others at once, also those that are blocked in a collective; they are freed, all meet,
make new process groups and go on. Everything here goes through a TCP store of our own: the training groups are lost
when a rank leaves them.
"""

from __future__ import annotations

import ctypes
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lightning_zeroladder.engine.sockets import GROUP_SOCKETS, abort_nccl

__all__ = ["Lifeline", "Note", "OtherRankFailed", "RanksLost"]

_CLOSED = "closed"
_FOREVER = timedelta(days=30)
_STORE_TIMEOUT = timedelta(seconds=30)
_TICK_S = 0.005

_SETTLE_S = 0.25
"""How long the others get to reach a place where a cut does no harm; a rank that is blocked elsewhere is cut then."""

_CATCH_UP_S = 2.0
"""How long they get to complete a step that the failed rank has completed."""

_SILENT_S = 10.0
"""A process that shows no sign of life for this long is gone."""

_CUT_S = 10.0

_INTERRUPT_S = 5.0
"""A main thread that has not left this long after the cut is not in a collective: it is interrupted."""

_HUNG_S = 60.0
"""How long to wait for a rank that hangs to leave; one that does not is given up."""


class OtherRankFailed(RuntimeError):
    """A rank has failed, and this one is called away from what it does."""


class RanksLost(RuntimeError):
    """Some ranks do not answer any more: their processes ended."""


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank says before it leaves.

    Attributes:
        rank: The rank that failed first.
        host: Its host.
        kind: ``out of memory``, ``error`` or ``hang``.
        phase: What it was doing, in words.
        error: Class of the exception.
        message: Its text.
        traceback: Where it came from, formatted.
        steps: Optimizer steps that the rank had completed.
        fatal: Whether the run ends.
    """

    rank: int
    host: str
    kind: str
    phase: str
    error: str
    message: str
    traceback: str
    steps: int
    fatal: bool = False

    @property
    def words(self) -> str:
        """The exception as one reads it."""
        return f"{self.error}: {self.message}"


class Lifeline:
    """One rank's end of the line.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        address: Host of rank 0, as the other ranks reach it.
        port: Port of its store; 0 on rank 0, which picks one.
        spared_ports: Ports at which this process may serve a store: what comes in there is never cut.
    """

    def __init__(self, rank: int, world_size: int, address: str, port: int, spared_ports: set[int]) -> None:
        self.rank, self.world_size = rank, world_size
        self.generation = 0
        self.steps = 0
        self.stall_s: float | None = None
        self._address = address
        self._store = TCPStore(address, port, None, rank == 0, _STORE_TIMEOUT, wait_for_workers=False)
        self._watching_store = TCPStore(address, self._store.port, None, False, _STORE_TIMEOUT)
        self._spared_ports = {*spared_ports, self._store.port}
        self._depth = 0
        self._away = False
        self._main = threading.get_ident()
        self._beat_s = time.monotonic()
        self._note: Note | None = None
        self._cut = threading.Event()
        self._closed = False
        self._regrouping = threading.Lock()
        self._thread: threading.Thread | None = None
        self._watch()

    @classmethod
    def open(cls, address: str, spared_ports: set[int]) -> Lifeline:
        """Join all ranks of the default process group. A collective of that group.

        Args:
            address: Host of rank 0, as the other ranks reach it.
            spared_ports: Ports at which this process may serve a store: what comes in there is never cut.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        line = cls(rank, world_size, address, 0, spared_ports) if rank == 0 else None
        port: list[Any] = [line.port if line is not None else None]
        dist.broadcast_object_list(port, src=0)
        return line or cls(rank, world_size, address, int(port[0]), spared_ports)

    @property
    def port(self) -> int:
        """Port of the store."""
        return int(self._store.port)

    @property
    def store(self) -> Store:
        """The store, for what else needs one beside the groups."""
        return self._store

    # While training ---------------------------------------------------------------------------------------------

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Mark where this rank may be called away: what happens inside can be done again.

        Raises:
            OtherRankFailed: At the start, if some rank has failed.
        """
        self._depth += 1
        self._beat_s = time.monotonic()
        try:
            if self._note is not None:
                raise OtherRankFailed(self._note.words)
            yield
        finally:
            self._depth -= 1

    @property
    def inside(self) -> bool:
        """Whether the main thread is in a guarded place."""
        return self._depth > 0

    def beat(self) -> None:
        """Say that a micro-batch is done."""
        self._beat_s = time.monotonic()

    @property
    def note(self) -> Note | None:
        """What the rank that failed first said; None while all is well."""
        return self._note

    def fail(self, note: Note) -> Note:
        """Tell all ranks that this one has failed.

        Returns:
            What the first rank that failed said.

        Raises:
            RanksLost: If rank 0, which holds the store, is gone.
        """
        self._away = True
        with self._talking():
            said = self._store.compare_set(self._key("failed"), "", json.dumps(asdict(note)))
        return _read_note(said)

    def meet(self, name: str, patience_s: float) -> list[int]:
        """Wait for all ranks to come to the same place, while all is well.

        Args:
            name: The place; another one each time.
            patience_s: How long to wait.

        Returns:
            The ranks that have not come by then.
        """
        self._put(name, {})
        keys = [self._key(f"{name}/{rank}") for rank in range(self.world_size)]
        deadline_s = time.monotonic() + patience_s
        with self._talking():
            while not self._store.check(keys):
                if time.monotonic() > deadline_s:
                    return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                time.sleep(_TICK_S)
        return []

    # Meeting again ----------------------------------------------------------------------------------------------

    def wait_for_cut(self) -> None:
        """Wait until no collective of this rank can be under way any more."""
        self._away = True
        self._cut.wait(_CUT_S)

    def leave(self, status: dict[str, Any], patience_s: float = math.inf) -> list[dict[str, Any]]:
        """Wait until every rank has left what it was doing.

        Args:
            status: What the others need to know about this one; anything that JSON can carry.
            patience_s: How long to wait for those that are alive.

        Returns:
            The status of each rank, in order.

        Raises:
            RanksLost: If a rank shows no sign of life.
        """
        self._put("left", status)
        hung = self._note is not None and self._note.kind == "hang"
        return [json.loads(value) for value in self._all("left", min(patience_s, _HUNG_S if hung else math.inf))]

    def regroup(self, close: Callable[[], None], make: Callable[[Store], None]) -> None:
        """Make new process groups in place of those that were cut. All ranks call it.

        Args:
            close: Forgets the old groups.
            make: Makes the new ones over the store that it is given.
        """
        close()
        self._put("closed", {})
        self._all("closed")
        with self._regrouping:
            self.generation += 1
        with GROUP_SOCKETS.noting():
            # Through a connection of their own, which is cut with them.
            store = TCPStore(self._address, self.port, None, False, _STORE_TIMEOUT)
            make(PrefixStore(f"groups/{self.generation}", store))
        GROUP_SOCKETS.store = self._store
        self._note, self._away = None, False
        self._watch()

    def close(self, *, together: bool) -> None:
        """Let go of the line.

        Args:
            together: All ranks call this; without it only this one leaves.
        """
        self._closed = True
        if not together:
            return
        with suppress(RanksLost):
            self._put("done", {})
            self._all("done")
            with self._talking():
                self._store.compare_set(self._key("failed"), "", _CLOSED)
        if self._thread is not None:
            self._thread.join(2.0)

    # The thread that listens ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._cut = threading.Event()
        self._thread = threading.Thread(
            target=self._listen, args=(self.generation,), name="zeroladder-lifeline", daemon=True
        )
        self._thread.start()

    def _listen(self, generation: int) -> None:
        note = self._wait_for_note(generation)
        if note is None:
            return
        self._note = note
        ended = threading.Event()
        threading.Thread(target=self._show_life, args=(generation, ended), daemon=True).start()
        try:
            self._settle(generation, note)
            GROUP_SOCKETS.cut(self._spared_ports)
            abort_nccl()
        finally:
            self._cut.set()
            self._call_away(generation)
            ended.set()

    def _call_away(self, generation: int) -> None:
        """See to it that the main thread leaves: one that is not in a collective is interrupted where it is."""
        interrupt_s = time.monotonic() + _INTERRUPT_S
        while self.generation == generation and not self._closed:
            with self._regrouping:
                if self.generation == generation and not self._away:
                    GROUP_SOCKETS.cut(self._spared_ports)  # of groups that were being made at the first cut
            if not self._away and self._depth and time.monotonic() > interrupt_s:
                raised = ctypes.py_object(OtherRankFailed)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main), raised)
                interrupt_s = math.inf
            time.sleep(0.05)

    def _wait_for_note(self, generation: int) -> Note | None:
        key = self._key("failed", generation)
        with suppress(Exception):  # rank 0 is gone, and with it the store
            self._watching_store.wait([key], _FOREVER)
            said = self._watching_store.get(key)
            return None if said == _CLOSED.encode() or self._closed else _read_note(said)
        return None

    def watch_for_hangs(self, stall_s: float | None) -> None:
        """Give a trial up in which no rank completes a micro-batch for some time, each of them inside one.

        Args:
            stall_s: The time in seconds; None to stop watching. Setting it again changes it.
        """
        starts = self.stall_s is None and stall_s is not None
        self.stall_s = stall_s
        if starts:
            threading.Thread(target=self._look_for_hangs, name="zeroladder-hangs", daemon=True).start()

    def _look_for_hangs(self) -> None:
        with suppress(Exception):
            store = TCPStore(self._address, self.port, None, False, _STORE_TIMEOUT)
            while (stall_s := self.stall_s) is not None and not self._closed:
                time.sleep(min(1.0, stall_s / 4))
                if self._depth and not self._away and time.monotonic() - self._beat_s > stall_s:
                    self._report_stall(store, stall_s)

    def _report_stall(self, store: TCPStore, stall_s: float) -> None:
        """Say that this rank stands still; the word goes out when all do."""
        mine = f"stalled/{self.steps}"
        store.set(self._key(f"{mine}/{self.rank}"), "1")
        if store.check([self._key(f"{mine}/{rank}") for rank in range(self.world_size)]):
            message = f"no rank completed a micro-batch for {stall_s:.0f} s"
            host = socket.gethostname()
            note = Note(self.rank, host, "hang", "forward or backward", "Hang", message, "", self.steps)
            store.compare_set(self._key("failed"), "", json.dumps(asdict(note)))

    def _settle(self, generation: int, note: Note) -> None:
        """Wait for all ranks to be in a guarded place and as far as the one that failed, for a moment.

        A rank that is still busy with the end of a step that the failed rank has completed would lose that step.
        """
        begun_s = time.monotonic()
        while not self._away:
            waited_s = time.monotonic() - begun_s
            behind = self.steps < note.steps
            if waited_s > (_CATCH_UP_S if behind else _SETTLE_S) or (self._depth and not behind):
                break
            time.sleep(_TICK_S)
        with suppress(Exception):
            store = self._watching_store
            store.set(self._key(f"ready/{self.rank}", generation), "1")
            keys = [self._key(f"ready/{rank}", generation) for rank in range(self.world_size)]
            while time.monotonic() - begun_s < _CATCH_UP_S and not store.check(keys):
                time.sleep(_TICK_S)

    def _show_life(self, generation: int, ended: threading.Event) -> None:
        """Count on the store for as long as the process lives."""
        with suppress(Exception):
            store = TCPStore(self._address, self.port, None, False, _STORE_TIMEOUT)
            while not ended.is_set():
                store.add(self._key(f"alive/{self.rank}", generation), 1)
                ended.wait(0.5)

    # Talking to the store ---------------------------------------------------------------------------------------

    def _key(self, name: str, generation: int | None = None) -> str:
        return f"{self.generation if generation is None else generation}/{name}"

    def _put(self, name: str, value: Any) -> None:
        with self._talking():
            self._store.set(self._key(f"{name}/{self.rank}"), json.dumps(value))

    def _all(self, name: str, patience_s: float = math.inf) -> list[bytes]:
        """Return what every rank has put under a name, waiting for it as long as all of them are alive."""
        deadline_s = time.monotonic() + patience_s
        keys = [self._key(f"{name}/{rank}") for rank in range(self.world_size)]
        counts: dict[int, int] = {}
        seen_s = dict.fromkeys(range(self.world_size), time.monotonic())
        while True:
            with self._talking():
                if self._store.check(keys):
                    return [self._store.get(key) for key in keys]
                # Its own wait would write a warning for every time-out.
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                for rank in missing:
                    count = self._store.add(self._key(f"alive/{rank}"), 0)
                    if counts.get(rank) != count:
                        counts[rank], seen_s[rank] = count, time.monotonic()
            time.sleep(_TICK_S)
            now_s = time.monotonic()
            silent = missing if now_s > deadline_s else [rank for rank in missing if now_s - seen_s[rank] > _SILENT_S]
            if silent:
                raise RanksLost(_lost_words(silent))

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except dist.DistStoreError:
            raise
        except (dist.DistNetworkError, dist.DistError, RuntimeError) as error:
            if isinstance(error, RanksLost):
                raise
            raise RanksLost(_lost_words([0])) from error


def _read_note(said: bytes) -> Note:
    return Note(**json.loads(said))


def _lost_words(ranks: list[int]) -> str:
    which = f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} do"
    return (
        f"zero_auto: {which} not answer any more: the process ended, was killed (the system's out-of-memory killer, "
        "preemption), or its host is cut off. The run cannot go on without it. Look at that rank's output and at "
        "dmesg on its host; start the job again with the same run_dir and ckpt_path to go on from the last checkpoint."
    )
