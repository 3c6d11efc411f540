"""Peak memory of this process: allocated and reserved on CUDA, resident on the host."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

__all__ = ["PeakMemory", "default_memory_limit", "read_peak", "reset_peak", "resident_bytes", "trim_host_memory"]

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK_RESIDENT = "5"


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peak since the last reset.

    Attributes:
        peak_bytes: Allocated on CUDA, resident on CPU.
        reserved_bytes: Reserved by the allocator on CUDA, None on CPU.
    """

    peak_bytes: int
    reserved_bytes: int | None


def resident_bytes() -> int:
    """Return the resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def trim_host_memory() -> None:
    """Return freed host memory to the operating system where glibc keeps it: what is resident is then in use."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # not glibc: nothing to trim


def reset_peak(device: torch.device) -> None:
    """Start a new peak. On Linux the kernel's own mark is reset; elsewhere the process's peak stays what it was."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR_REFS.exists() and os.access(_CLEAR_REFS, os.W_OK):
        trim_host_memory()
        _CLEAR_REFS.write_text(_RESET_PEAK_RESIDENT)


def read_peak(device: torch.device) -> PeakMemory:
    """Return the peak since `reset_peak`."""
    if device.type == "cuda":
        return PeakMemory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    return PeakMemory(_peak_resident_bytes(), None)


def _peak_resident_bytes() -> int:
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resident_bytes()


def default_memory_limit(device: torch.device, local_ranks: int) -> int:
    """Return the memory one rank may use: the device's on CUDA, its share of the host's available memory on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().available) // max(1, local_ranks)
