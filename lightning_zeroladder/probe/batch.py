"""How much work a batch is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["samples_in", "units_in"]

_TOKEN_KEYS = ("input_ids", "tokens", "inputs")


def _tensors(batch: Any) -> Iterable[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for key in _TOKEN_KEYS:
            if isinstance(batch.get(key), Tensor):
                yield batch[key]
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)


def _holds_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype not in (torch.bool, torch.uint8)


def samples_in(batch: Any) -> int | None:
    """Return the length of the first dimension of the first tensor in a batch, None if it has no tensor."""
    return next((len(tensor) for tensor in _tensors(batch) if tensor.dim() > 0), None)


def units_in(batch: Any) -> tuple[int, str]:
    """Return how many tokens a batch holds, or samples where it holds none.

    Tokens are the elements of a two-dimensional integer tensor (batch, sequence): the entry named ``input_ids``,
    ``tokens`` or ``inputs`` of a mapping, or else the first tensor of the batch.

    Args:
        batch: Whatever the dataloader yields.

    Returns:
        The count and ``tokens`` or ``samples``.
    """
    first = next(iter(_tensors(batch)), None)
    if first is not None and _holds_tokens(first):
        return first.numel(), "tokens"
    return samples_in(batch) or 1, "samples"
