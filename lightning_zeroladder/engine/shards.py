"""Where a live DeepSpeed engine keeps the fp32 weights and optimizer state of each parameter.

Read off deepspeed 0.19: each kind of optimizer wrapper lays its state out in its own way, and this file is the one
place that knows them. Everything else sees a list of `Shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

__all__ = ["Shard", "UnsupportedEngine", "is_replicated", "live_shards", "local_weights", "write_weights"]


class UnsupportedEngine(RuntimeError):
    """The engine's optimizer wrapper is of a kind whose layout is not known."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one parameter's optimizer state that this rank holds.

    Attributes:
        name: Name of the parameter in the module.
        numel: Elements of the whole parameter.
        start: First element held, within the flattened parameter.
        master: The fp32 weights held, one-dimensional and a view: writing it writes the engine. May be empty.
        owner: The tensor that the inner torch optimizer steps; its key in ``optimizer.state``.
        offset: Position of ``master`` within the flattened ``owner``.
    """

    name: str
    numel: int
    start: int
    master: Tensor
    owner: Tensor
    offset: int

    def slice_of(self, state: Tensor) -> Tensor:
        """Return the view of an owner-shaped state tensor that belongs to this shard."""
        return state.detach().view(-1).narrow(0, self.offset, self.master.numel())


def _whole(name: str, owner: Tensor, offset: int, numel: int) -> Shard:
    return Shard(name, numel, 0, owner.detach().view(-1).narrow(0, offset, numel), owner, offset)


def _plain_torch(optimizer: Any, names: dict[Parameter, str]) -> Iterator[Shard]:
    """Stage 0 in fp32: the torch optimizer steps the parameters themselves."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.numel() > 0:
                yield _whole(names[param], param, 0, param.numel())


def _unfused(optimizer: Any, names: dict[Parameter, str]) -> Iterator[Shard]:
    """Stage 0 in bf16 or fp16: an fp32 copy of each parameter."""
    for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for param, master in zip(params, masters, strict=True):
            yield _whole(names[param], master, 0, param.numel())


def _fused(optimizer: Any, names: dict[Parameter, str]) -> Iterator[Shard]:
    """Stage 0 in bf16 or fp16 with DeepSpeed's FusedAdam: one flat fp32 tensor per group."""
    for params, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        offset = 0
        for param in params:
            yield _whole(names[param], flat, offset, param.numel())
            offset += param.numel()


def _mapped(groups: list[list[Parameter]], owners: list[Tensor], names: dict[Parameter, str]) -> Iterator[Shard]:
    """Stages 1 and 2: `_hp_mapping` gives the piece of each parameter in the rank's flat partition."""
    for params, owner in zip(groups, owners, strict=True):
        flat = owner.detach().view(-1)
        for param in params:
            mapping = getattr(param, "_hp_mapping", None)
            if mapping is None:
                yield Shard(names[param], param.numel(), 0, flat.narrow(0, 0, 0), owner, 0)
                continue
            piece, place = mapping.lp_fragment_address, mapping.hp_fragment_address
            master = flat.narrow(0, place.start, place.numel)
            yield Shard(names[param], param.numel(), piece.start, master, owner, place.start)


def _stage_1_2(optimizer: Any, names: dict[Parameter, str]) -> Iterator[Shard]:
    return _mapped(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, names)


def _bf16_stage_1(optimizer: Any, names: dict[Parameter, str]) -> Iterator[Shard]:
    """Stage 1 in bf16 with fp32 gradient accumulation."""
    return _mapped(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, names)


def _stage_3(optimizer: Any, names: dict[Parameter, str]) -> Iterator[Shard]:
    """Stage 3: ceil(numel / N) elements per rank, zero-padded at the end, one flat tensor per sub-group."""
    for params in optimizer.fp16_groups:
        for param in params:
            group, offset, padded = optimizer.grad_position[optimizer.get_param_id(param)]
            owner = optimizer.fp32_partitioned_groups_flat[group]
            start = min(padded * param.ds_zero_partition_rank, param.ds_numel)
            held = min(padded, param.ds_numel - start)
            master = owner.detach().view(-1).narrow(0, offset, held)
            yield Shard(names[param], param.ds_numel, start, master, owner, offset)


_LAYOUTS: dict[str, Callable[[Any, dict[Parameter, str]], Iterator[Shard]]] = {
    "FP16_UnfusedOptimizer": _unfused,
    "FP16_Optimizer": _fused,
    "DeepSpeedZeroOptimizer": _stage_1_2,
    "BF16_Optimizer": _bf16_stage_1,
    "DeepSpeedZeroOptimizer_Stage3": _stage_3,
}


def live_shards(engine: Any) -> list[Shard]:
    """Return the shards of an engine, in the order of the module's parameters.

    Every rank gets a shard for every optimized parameter, an empty one where it holds nothing of it.

    Args:
        engine: A ``DeepSpeedEngine`` built with a torch optimizer.

    Raises:
        UnsupportedEngine: If the optimizer wrapper is not one of those in deepspeed 0.19.
    """
    optimizer = engine.optimizer
    names = {param: name for name, param in engine.module.named_parameters()}
    layout = _LAYOUTS.get(type(optimizer).__name__)
    if layout is None:
        if optimizer is not engine.basic_optimizer:
            known = ", ".join(sorted(_LAYOUTS))
            raise UnsupportedEngine(
                f"deepspeed wrapped the optimizer in {type(optimizer).__name__}; the layouts known are: {known}. "
                "Use a deepspeed release that this version supports."
            )
        layout = _plain_torch
    position = {name: index for index, name in enumerate(names.values())}
    return sorted(layout(optimizer, names), key=lambda shard: position[shard.name])


def is_replicated(engine: Any) -> bool:
    """Whether every rank holds the whole optimizer state (stage 0)."""
    return bool(engine.zero_optimization_stage() == 0)


def write_weights(param: Parameter, whole: Tensor) -> None:
    """Set the weights that forward uses, or this rank's part of them, from the whole flattened tensor."""
    if getattr(param, "ds_tensor", None) is None:
        param.detach().copy_(whole.view(param.shape))
        return
    held, start, _ = local_weights(param)
    held.copy_(whole.narrow(0, start, held.numel()))


def local_weights(param: Parameter) -> tuple[Tensor, int, bool]:
    """Return what this rank holds of the weights that forward uses.

    Returns:
        The flattened elements held without padding, the position of the first, and whether every rank holds all.
    """
    partition = getattr(param, "ds_tensor", None)
    if partition is None:
        return param.detach().reshape(-1), 0, True
    sharded: Any = param
    padded = int(partition.ds_numel)
    start = min(padded * sharded.ds_zero_partition_rank, sharded.ds_numel)
    return partition.detach().view(-1).narrow(0, 0, min(padded, sharded.ds_numel - start)), start, False
