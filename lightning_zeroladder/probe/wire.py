"""Count what goes over the wire: elements sent per rank, by collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["WireCounter"]

_TWICE = frozenset({"all_reduce", "all_reduce_coalesced"})
_FEW_ELEMENTS = 64
"""Calls on fewer elements are not counted as traffic: norms, flags of an overflow."""


class WireCounter:
    """Counts collectives as a ring would send them.

    An all-reduce sends 2 (N - 1) / N of its tensor per rank; a reduce-scatter, an all-gather, a broadcast and, averaged
    over ranks, a reduce send (N - 1) / N of the whole tensor.

    Args:
        world_size: Ranks N.

    Attributes:
        elements: Elements sent per rank so far, by collective.
        nbytes: The same in bytes.
        calls: Calls so far, by collective.
    """

    def __init__(self, world_size: int) -> None:
        self._share = (world_size - 1) / world_size
        self.elements: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def note(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a call."""
        tensors = max(map(_tensors, (*args, *kwargs.values())), key=_numel, default=[])
        whole = _numel(tensors)
        if whole < _FEW_ELEMENTS:
            return
        self.calls[name] += 1
        sent = round(whole * self._share * (2 if name in _TWICE else 1))
        self.elements[name] += sent
        self.nbytes[name] += sent * tensors[0].element_size()

    @property
    def sent(self) -> int:
        """Elements sent per rank in all."""
        return sum(self.elements.values())

    def clear(self) -> None:
        """Begin anew."""
        self.elements.clear()
        self.nbytes.clear()
        self.calls.clear()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def _numel(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
