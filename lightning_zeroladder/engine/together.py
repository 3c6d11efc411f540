"""Do something on every rank that may fail on some: all go on, or all raise the same error and none waits."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["gather_objects", "together"]

T = TypeVar("T")


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(action: Callable[[], T]) -> T:
    """Run an action on every rank. A collective, also where the action fails.

    Returns:
        This rank's result.

    Raises:
        Exception: If it failed anywhere: on each rank the error of the first rank that failed, of the same class, with
            the rank and host in the message where that is another one.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:
        failure = error
    told = None if failure is None else (_sendable(type(failure)), str(failure), socket.gethostname())
    failed = [(rank, *entry) for rank, entry in enumerate(gather_objects(told)) if entry is not None]
    if failed:
        rank, kind, message, host = failed[0]
        if failure is not None and str(failure) == message:
            raise failure
        others = sorted({entry[0] for entry in failed})
        note = f"{message} (on rank {rank}, host {host}; ranks that failed: {', '.join(map(str, others))})"
        raise _same_kind(kind, note) from failure
    return result  # type: ignore[no-any-return]


def _sendable(kind: type[Exception]) -> type[Exception]:
    """Return a class that the other ranks know: one that a function has made for itself cannot be sent."""
    try:
        pickle.dumps(kind)
    except Exception:
        return RuntimeError
    return kind


def _same_kind(kind: type[Exception], message: str) -> Exception:
    try:
        return kind(message)
    except TypeError:  # some exceptions take more than a message
        return RuntimeError(f"{kind.__name__}: {message}")
