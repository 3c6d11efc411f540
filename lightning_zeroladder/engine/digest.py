"""A checksum of training state that does not depend on how the state is divided among ranks."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["checksum"]

_CHUNK_ELEMENTS = 1 << 17
"""Small enough for the integer temporaries to stay in cache."""

_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd 64-bit constants (those of splitmix64, as signed numbers)."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mix_chunk(bits: Tensor, positions: Tensor) -> Tensor:
    mixed = positions.mul_(_MIX[0]).add_(bits)
    mixed.bitwise_xor_(mixed >> 30).mul_(_MIX[1])
    mixed.bitwise_xor_(mixed >> 27).mul_(_MIX[2])
    return mixed.bitwise_xor_(mixed >> 31).sum()


def checksum(values: Tensor, start: int) -> Tensor:
    """Return the checksum of a piece of a flattened tensor.

    Every element is mixed with its position in the whole tensor and the results are added modulo 2**64, so the
    checksums of the pieces of a tensor add up to the checksum of the whole, however it is cut.

    Args:
        values: One-dimensional piece of any dtype; compared by its bits (0.0 and -0.0 differ).
        start: Position of the first element within the whole flattened tensor, in elements.

    Returns:
        A zero-dimensional int64 tensor on the device of ``values``.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    bits = values.detach().contiguous().view(_BITS[values.element_size()])
    for offset in range(0, bits.numel(), _CHUNK_ELEMENTS):
        chunk = bits[offset : offset + _CHUNK_ELEMENTS]
        first = start + offset
        positions = torch.arange(first + 1, first + 1 + chunk.numel(), dtype=torch.int64, device=values.device)
        total += _mix_chunk(chunk, positions)
    return total
