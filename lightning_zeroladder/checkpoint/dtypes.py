"""Names of element types, as torch pickles them, with their sizes. Kept apart so that reading needs no torch."""

from __future__ import annotations

__all__ = ["ITEMSIZE", "STORAGE_OF", "dtype_of_storage"]

_STORAGES: dict[str, tuple[str, int]] = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
}

ITEMSIZE: dict[str, int] = dict(_STORAGES.values())
"""Bytes per element by dtype name."""

STORAGE_OF: dict[str, str] = {dtype: storage for storage, (dtype, _) in _STORAGES.items()}
"""Name of torch's storage class by dtype name."""


def dtype_of_storage(name: str) -> str | None:
    """Return the dtype held by one of torch's storage classes, or None if it is not a plain one."""
    known = _STORAGES.get(name)
    return known[0] if known else None
