"""What a stage certainly needs, and where that leaves a model room to be created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_zeroladder.costmodel import ModelCount, state_bytes

__all__ = ["certain_floors", "only_stage_3_holds"]

_FP32_BYTES = 4
_LOW_PRECISION_BYTES = 2
_ADAM_BYTES = 8
"""State per parameter assumed while the optimizer is not known yet."""


def certain_floors(
    stages: Sequence[int],
    count: ModelCount,
    *,
    world_size: int,
    low_precision: bool,
    moment_bytes: int,
    zero_config: Mapping[str, Any],
) -> dict[int, int]:
    """Return a lower bound of the bytes per rank that each stage needs.

    Args:
        stages: ZeRO stages.
        count: The model's parameters.
        world_size: Data-parallel ranks.
        low_precision: Whether weights are trained in bf16 or fp16, with an fp32 copy.
        moment_bytes: Bytes of optimizer state per parameter, without the fp32 copy.
        zero_config: ``zero_optimization`` of the run. With an offload in it nothing is certain to be on the device.

    Returns:
        Bytes by stage; empty if nothing is certain.
    """
    if zero_config.get("offload_optimizer") or zero_config.get("offload_param"):
        return {}
    weight_bytes = _LOW_PRECISION_BYTES if low_precision else _FP32_BYTES
    optimizer_bytes = moment_bytes + (_FP32_BYTES if low_precision else 0)
    return {
        stage: state_bytes(
            stage, count, world_size=world_size, weight_bytes=weight_bytes, optimizer_bytes=optimizer_bytes
        )
        for stage in stages
    }


def only_stage_3_holds(
    stages: Sequence[int],
    count: ModelCount,
    *,
    world_size: int,
    low_precision: bool,
    zero_config: Mapping[str, Any],
    memory_limit_bytes: int,
) -> bool:
    """Whether a model trained with Adam fits at no stage but 3, so that it has to be created in shards."""
    floors = certain_floors(
        stages,
        count,
        world_size=world_size,
        low_precision=low_precision,
        moment_bytes=_ADAM_BYTES,
        zero_config=zero_config,
    )
    lower = [floor for stage, floor in floors.items() if stage != 3]
    return 3 in floors and bool(lower) and all(floor > memory_limit_bytes for floor in lower)
