"""Memory that a ZeRO stage certainly needs.

The formulas are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020), section 5, with frozen parameters added: they have weights, but neither gradients nor optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelCount", "state_bytes"]


@dataclass(frozen=True, slots=True)
class ModelCount:
    """Parameter elements of the whole model.

    Attributes:
        trainable: Elements with a gradient.
        frozen: Elements without.
    """

    trainable: int
    frozen: int


def state_bytes(stage: int, count: ModelCount, *, world_size: int, weight_bytes: int, optimizer_bytes: int) -> int:
    """Lower bound of model state in bytes per rank: weights, gradients and optimizer state, sharded perfectly.

    Activations, buckets, padding, parameters kept whole and fragmentation come on top.

    Args:
        stage: ZeRO stage, 0 to 3.
        count: Parameter elements.
        world_size: Data-parallel ranks N.
        weight_bytes: Bytes of one weight, and of one gradient, as trained (2 for bf16).
        optimizer_bytes: Bytes of optimizer state per trainable element (12 for an fp32 master copy and Adam moments).

    Raises:
        ValueError: If the stage is unknown or a number is out of range.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}: must be one of 0, 1, 2, 3.")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: must be at least 1, pass the number of data-parallel ranks.")
    weights = (count.trainable + count.frozen) * weight_bytes
    gradients = count.trainable * weight_bytes
    optimizer = count.trainable * optimizer_bytes
    return (
        weights // (world_size if stage >= 3 else 1)
        + gradients // (world_size if stage >= 2 else 1)
        + optimizer // (world_size if stage >= 1 else 1)
    )
