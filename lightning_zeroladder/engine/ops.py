"""Which of DeepSpeed's compiled operators this machine can have."""

from __future__ import annotations

__all__ = ["nvme_problem"]


def nvme_problem() -> str | None:
    """Return why state cannot be kept on NVMe here, as a phrase; None if DeepSpeed's operator for it can be built."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if AsyncIOBuilder().is_compatible(verbose=False):
        return None
    return "DeepSpeed's async_io operator cannot be built here, it needs a C++ compiler and libaio (Debian: libaio-dev)"
