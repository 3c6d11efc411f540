"""Which sockets of this process belong to process groups, and how to end a collective that waits on one of them.

A rank that is blocked in a gloo collective is freed when its connections close, and by nothing else: gloo's own abort
and shut-down leave it waiting (seen in torch 2.13). One that makes a group waits on the group's store for the others'
addresses: it is freed when its connection to that closes. NCCL has an abort of its own.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

__all__ = ["GROUP_SOCKETS", "GroupSockets", "abort_nccl"]

_FDS = "/proc/self/fd"


def _open_sockets() -> dict[int, str]:
    """Return the kernel's name of each socket of this process by file descriptor."""
    found: dict[int, str] = {}
    with suppress(FileNotFoundError):
        for entry in os.listdir(_FDS):
            with suppress(OSError):
                name = os.readlink(f"{_FDS}/{entry}")
                if name.startswith("socket:"):
                    found[int(entry)] = name
    return found


class GroupSockets:
    """The sockets that appeared while process groups were made.

    Attributes:
        store: What the groups were made over, where this process serves it: they need it for as long as they live.
    """

    def __init__(self) -> None:
        self.store: object = None
        self._noted: dict[int, str] = {}
        self._before: dict[int, str] | None = None
        self._lock = threading.Lock()  # one thread makes groups while another cuts

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Take the sockets that appear inside for those of process groups."""
        with self._lock:
            self._before = before = _open_sockets()
        try:
            yield
        finally:
            with self._lock:
                self._before = None
                self._noted.update(_appeared(before, _open_sockets()))

    def __bool__(self) -> bool:
        """Whether any are known."""
        return bool(self._noted)

    def cut(self, spared_ports: Collection[int]) -> int:
        """End what this side reads from the connections, and forget them. Returns how many.

        Whoever waits on one sees it end, closes it, and with that the other side's ends too. Sockets that listen are
        left alone: gloo aborts the process when one of those fails.

        Args:
            spared_ports: Connections that came in at these ports are left alone: other ranks talk to a store there.
        """
        done = 0
        with self._lock:
            current = _open_sockets()
            noted, self._noted = self._noted, {}
            if self._before is not None:  # another thread is making a group, and may wait in it for a rank that left
                noted.update(_appeared(self._before, current))
        for fd, name in noted.items():
            if current.get(fd) == name:  # the number may have been given to another socket since
                done += _shut_down(fd, spared_ports)
        return done


def _appeared(before: dict[int, str], now: dict[int, str]) -> dict[int, str]:
    return {fd: name for fd, name in now.items() if before.get(fd) != name}


def _shut_down(fd: int, spared_ports: Collection[int]) -> bool:
    try:
        connection = socket.socket(fileno=os.dup(fd))
    except OSError:
        return False
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        connection.getpeername()  # fails where there is none
        if connection.getsockname()[1] in spared_ports:
            return False
        # For reading only. What gloo cannot write any more it keeps in a queue, and whoever waits for such a send is
        # not woken when the connection closes (seen in torch 2.13): the end of what can be read has to come first.
        connection.shutdown(socket.SHUT_RD)
        return True
    except OSError:  # it listens, or is closed already
        return False
    finally:
        connection.close()


def abort_nccl() -> None:
    """Abort what runs on NCCL groups, from any thread."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend()):
        from torch.distributed.distributed_c10d import _abort_process_group

        _abort_process_group()


GROUP_SOCKETS = GroupSockets()
"""Those of this process: groups, like file descriptors, outlive the Trainer that made them."""
