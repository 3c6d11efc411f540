"""GPUs by name: memory, peak rate, and what a collective inside a node gets.

Rates are the makers' dense bf16 figures (fp16 where there is no bf16). Bandwidths are what nccl-tests report as bus
bandwidth of an all-reduce over eight of them, rounded; on cards without NVLink, over PCIe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["ACHIEVED", "GPUS", "Gpu", "gpu_named", "is_gpu"]

ACHIEVED = 0.4
"""Share of the peak rate that a training step gets from large matrix products, where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    Attributes:
        memory_bytes: Device memory.
        peak_flops: Dense 16-bit FLOP/s.
        inside_bytes_per_s: Bandwidth that a rank gets in a collective inside a node.
    """

    memory_bytes: int
    peak_flops: float
    inside_bytes_per_s: float


GPUS: dict[str, Gpu] = {
    "v100": Gpu(32 * 10**9, 125e12, 120e9),
    "a10g": Gpu(24 * 10**9, 70e12, 12e9),
    "l4": Gpu(24 * 10**9, 121e12, 12e9),
    "l40s": Gpu(48 * 10**9, 362e12, 20e9),
    "rtx4090": Gpu(24 * 10**9, 165e12, 12e9),
    "a100-40gb": Gpu(40 * 10**9, 312e12, 230e9),
    "a100": Gpu(80 * 10**9, 312e12, 230e9),
    "h100": Gpu(80 * 10**9, 989e12, 360e9),
    "h200": Gpu(141 * 10**9, 989e12, 360e9),
    "b200": Gpu(180 * 10**9, 2250e12, 700e9),
}
"""What `plan` knows by name."""


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its name, in any case.

    Raises:
        ValueError: If it is not known; the message lists those that are.
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise ValueError(f"gpu={name!r} is not known; known are {', '.join(GPUS)}. Or give --hbm and --flops.")
    return found


def is_gpu(name: str, device: str) -> bool:
    """Whether a device's own name, such as ``NVIDIA H100 80GB HBM3``, is that of a GPU in `GPUS`, of any memory."""
    letters, digits, rest = re.findall(r"^([a-z]+)(\d+)([a-z]*)", name.lower())[0]
    return re.search(rf"(?<![a-z0-9]){letters} ?{digits}{rest}(?![a-z0-9])", device.lower()) is not None
