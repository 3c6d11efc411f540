"""What a run has beyond the plain ZeRO stages, read off its model, optimizer, config and machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zeroladder.costmodel import ModelCount
from lightning_zeroladder.engine.ops import nvme_problem
from lightning_zeroladder.ladder import Beyond, Buckets, HostShare, JobSize, Option

__all__ = ["Facts", "job_size", "largest_parameter", "what_is_beyond"]

_GPU_ONLY = ("FusedAdam", "FusedLamb", "FusedLion")
"""DeepSpeed's optimizers whose kernels run on the GPU."""

_FP32_BYTES = 4
_LOW_PRECISION_BYTES = 2
_STEP_BYTES = 8
"""fp32 weights and gradients that stages 1 to 3 keep beside the optimizer's state, bytes per trained element."""

_PADDING = 1.1
"""What alignment and fragments add at most to the memory that leaves the device with the state."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run before its first engine.

    Attributes:
        count: Parameters.
        largest: Elements of the largest parameter.
        world_size: Data-parallel ranks.
        nodes: Machines.
        low_precision: Whether weights are trained in bf16 or fp16, with an fp32 copy.
        moment_bytes: Bytes of optimizer state per trained element, without the fp32 copy.
        zero_config: ``zero_optimization`` of the run.
        device: Device of a rank.
        accumulate: Micro-batches per optimizer step.
    """

    count: ModelCount
    largest: int
    world_size: int
    nodes: int
    low_precision: bool
    moment_bytes: int
    zero_config: Mapping[str, Any]
    device: torch.device
    accumulate: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight and of a gradient."""
        return _LOW_PRECISION_BYTES if self.low_precision else _FP32_BYTES


def largest_parameter(module: Module) -> int:
    """Elements of the largest parameter, whole also where stage 3 has divided it."""
    return max((int(getattr(param, "ds_numel", param.numel())) for param in module.parameters()), default=0)


def what_is_beyond(
    facts: Facts,
    optimizer: Optimizer | None,
    *,
    no_checkpointing: str | None,
    nvme_path: str | Path | None,
    allow_quantized: bool,
) -> Beyond:
    """Find out what the ladder may try beyond the plain stages.

    Args:
        facts: The run.
        optimizer: Its torch optimizer; None where the DeepSpeed config defines it.
        no_checkpointing: Why activations cannot be recomputed; None if they can.
        nvme_path: Folder for state on NVMe, if one was given.
        allow_quantized: Whether communication may round.
    """
    unavailable: dict[Option, str] = {}
    if no_checkpointing is not None:
        unavailable[Option.CHECKPOINTING] = no_checkpointing
    if (why := _steps_on_gpu_only(optimizer, facts.device)) is not None:
        unavailable |= dict.fromkeys((Option.OPTIMIZER_ON_HOST, Option.PARAMETERS_ON_HOST, Option.NVME), why)
    elif nvme_path is not None and (why := nvme_problem()) is not None:
        unavailable[Option.NVME] = why
    if allow_quantized:
        unavailable |= dict.fromkeys((Option.QUANTIZED_WEIGHTS, Option.QUANTIZED_GRADIENTS), _no_rounding(facts.device))
    offloaded = any(_is_offloaded(facts.zero_config, name) for name in ("offload_optimizer", "offload_param"))
    return Beyond(
        buckets=_buckets(facts),
        optimizer_on_host={} if offloaded else {stage: _optimizer_share(facts, stage) for stage in (1, 2, 3)},
        parameters_on_host=None if offloaded else _parameter_share(facts),
        nvme=nvme_path is not None,
        nodes=facts.nodes,
        ranks_per_node=facts.world_size // facts.nodes,
        allow_quantized=allow_quantized,
        unavailable=unavailable,
    )


def job_size(facts: Facts) -> JobSize:
    """The sizes from which the ladder says what would close a gap."""
    optimizer_bytes = facts.moment_bytes + (_FP32_BYTES if facts.low_precision else 0)
    return JobSize(facts.count, facts.world_size, facts.weight_bytes, optimizer_bytes, facts.accumulate)


def _is_offloaded(zero_config: Mapping[str, Any], name: str) -> bool:
    device: str = (zero_config.get(name) or {}).get("device", "none")
    return device != "none"


def _no_rounding(device: torch.device) -> str:
    if device.type != "cuda":
        return "rounding needs DeepSpeed's CUDA kernels"
    return (
        "its losses have to be compared with exact ones first, which is not done yet; the DeepSpeed config can set it"
    )


def _steps_on_gpu_only(optimizer: Optimizer | None, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    advice = "return torch.optim.AdamW from configure_optimizers to have it stepped on the host"
    if optimizer is None:
        return f"the optimizer of the DeepSpeed config steps on the GPU; {advice}"
    if type(optimizer).__name__ in _GPU_ONLY:
        return f"{type(optimizer).__name__} steps on the GPU only; {advice}"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return f"{type(optimizer).__name__}(capturable=True) steps on the GPU only; leave capturable out"
    return None


def _buckets(facts: Facts) -> Buckets:
    zero = facts.zero_config
    return Buckets(
        reduce=_size(zero, "reduce_bucket_size", 500_000_000),
        allgather=_size(zero, "allgather_bucket_size", 500_000_000),
        prefetch=_size(zero, "stage3_prefetch_bucket_size", 50_000_000),
        live=_size(zero, "stage3_max_live_parameters", 1_000_000_000),
        trainable=facts.count.trainable,
        parameters=facts.count.trainable + facts.count.frozen,
        element_bytes=facts.weight_bytes,
        overlap=bool(zero.get("overlap_comm")),
        allocated_whole=facts.device.type == "cuda",
    )


def _size(zero_config: Mapping[str, Any], name: str, default: int) -> int:
    value = zero_config.get(name, default)
    return default if isinstance(value, str) else int(value)  # "auto" is DeepSpeed's default


def _optimizer_share(facts: Facts, stage: int) -> HostShare:
    """Gradients go to the host with the optimizer's state as they are reduced, so they count as freed, not as kept."""
    count, ranks, weight = facts.count, facts.world_size, facts.weight_bytes
    kept = (count.trainable + count.frozen) * weight // (ranks if stage == 3 else 1)
    state = count.trainable * (facts.moment_bytes + _STEP_BYTES) // ranks
    gradients = count.trainable * weight // (ranks if stage >= 2 else 1)
    return HostShare(kept, int(_PADDING * (state + gradients)))


def _parameter_share(facts: Facts) -> HostShare:
    weights = (facts.count.trainable + facts.count.frozen) * facts.weight_bytes // facts.world_size
    without = _optimizer_share(facts, 3)
    return HostShare(facts.largest * facts.weight_bytes, without.freed_bytes + int(_PADDING * weights))
