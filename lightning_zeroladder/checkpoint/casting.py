"""Change the element type of raw bytes, rounding to nearest even as torch does, without torch."""

from __future__ import annotations

from typing import Any

from lightning_zeroladder.checkpoint.dtypes import ITEMSIZE

__all__ = ["FLOATS", "cast"]

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Element types that `cast` knows."""


def cast(data: bytes | memoryview, source: str, target: str) -> bytes | memoryview:
    """Return the elements in ``data`` as another floating-point type.

    Args:
        data: Little-endian elements.
        source: Their type, one of `FLOATS`.
        target: The type wanted, one of `FLOATS`.

    Raises:
        ValueError: For a type that is not known.
    """
    if source == target:
        return data
    import numpy as np  # late: most checkpoints are copied as they are, and importing it takes a third of the start

    for dtype in (source, target):
        if dtype not in FLOATS:
            raise ValueError(f"cannot convert {source} to {target}: only {', '.join(FLOATS)} are converted")
    values = _from_bfloat16(data) if source == "bfloat16" else np.frombuffer(data, dtype=np.dtype(source))
    with np.errstate(over="ignore", invalid="ignore"):
        if ITEMSIZE[target] == 2:
            values = values.astype(np.float32)  # as torch does, so float64 is rounded twice
        result = _to_bfloat16(values) if target == "bfloat16" else values.astype(np.dtype(target))
    return result.view(np.uint8).reshape(-1).data


def _from_bfloat16(data: bytes | memoryview) -> Any:
    import numpy as np

    return (np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: Any) -> Any:
    import numpy as np

    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
