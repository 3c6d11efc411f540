"""Take things a few at a time, so that what is whole at any moment stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["batched_by_size"]

T = TypeVar("T")


def batched_by_size(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group items in their order so that the sizes in a group add up to at most ``limit``.

    Args:
        items: Anything.
        size_of: Size of one item, in the unit of ``limit``.
        limit: Largest total; an item that is larger by itself gets a group of its own.
    """
    batch: list[T] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if batch and filled + size > limit:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += size
    if batch:
        yield batch
