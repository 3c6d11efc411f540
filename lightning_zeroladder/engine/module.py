"""Put a module back as it was before DeepSpeed took it over."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zeroladder.engine.batching import batched_by_size
from lightning_zeroladder.engine.shards import local_weights

__all__ = [
    "ModuleLedger",
    "WeightPiece",
    "assemble_weights",
    "drop_prefetches",
    "is_partitioned",
    "own_storage",
    "reclaim_weights",
    "wait_for_prefetches",
    "weight_pieces",
]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

_LEFTOVERS = frozenset(
    {"_external_params", "_original_parameters", "pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt"}
)
"""Attributes that stage 3 sets on modules, some of them only in the first forward."""

_GATHER_ELEMENTS = 8 << 20


def is_partitioned(param: Parameter) -> bool:
    """Whether stage 3 has divided the parameter among ranks."""
    return hasattr(param, "ds_tensor")


def _is_deepspeeds(name: str, value: Any) -> bool:
    owner = getattr(value, "__module__", None) or ""
    return name.startswith("ds_") or name in _LEFTOVERS or (callable(value) and owner.startswith("deepspeed"))


def _own_attributes(item: Any) -> set[str]:
    return {name for name, value in vars(item).items() if not _is_deepspeeds(name, value)}


class ModuleLedger:
    """What a module looked like before an engine was built on it, so that the engine's traces can be taken off.

    Only what DeepSpeed added goes: hooks and attributes that user code sets during training stay.

    Args:
        module: The module about to be handed to ``deepspeed.initialize``.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._hooks_before = self._hook_ids()
        self._attributes_before = {id(part): _own_attributes(part) for part in self._parts()}
        self._hooks_added: list[tuple[dict[int, Any], int]] = []
        self._attributes_added: dict[int, set[str]] = {}

    def _parts(self) -> Iterator[Module | Parameter]:
        yield from self._module.modules()
        yield from self._module.parameters()

    def _hook_ids(self) -> set[tuple[int, int]]:
        return {(id(hooks), key) for hooks in self._hook_dicts() for key in hooks}

    def _hook_dicts(self) -> Iterator[dict[int, Any]]:
        for module in self._module.modules():
            for name in _HOOKS:
                yield getattr(module, name)

    def note_additions(self) -> None:
        """Record what the engine added; call right after it is built."""
        self._hooks_added = [
            (hooks, key) for hooks in self._hook_dicts() for key in hooks if (id(hooks), key) not in self._hooks_before
        ]
        self._attributes_added = {
            id(part): set(vars(part)) - self._attributes_before.get(id(part), set()) for part in self._parts()
        }

    def restore(self) -> None:
        """Take the engine's hooks, containers and attributes off the module and its parameters."""
        for hooks, key in self._hooks_added:
            hooks.pop(key, None)
        for part in self._parts():
            before = self._attributes_before.get(id(part), set())
            added = self._attributes_added.get(id(part), set())
            for name, value in list(vars(part).items()):
                if name not in before and (name in added or _is_deepspeeds(name, value)):
                    delattr(part, name)
        for module in self._module.modules():
            if type(module._parameters) is not dict:
                module._parameters = dict(module._parameters)


def wait_for_prefetches(module: Module) -> None:
    """Let gathers that stage 3 began ahead of time end; a step that broke off leaves some under way. A collective."""
    under_way: dict[Parameter, Any] = getattr(module, "ds_inflight_param_registry", {})
    while under_way:
        _, handle = under_way.popitem()
        handle.wait()


def drop_prefetches(module: Module) -> None:
    """Forget gathers under way: the process group that they wait for is lost."""
    getattr(module, "ds_inflight_param_registry", {}).clear()


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """What a rank holds of a parameter's weights.

    Attributes:
        shape: Shape of the whole.
        start: First element held, of the flattened whole.
        weights: The elements held, one-dimensional.
        whole: Whether the rank holds all of them.
    """

    shape: torch.Size
    start: int
    weights: Tensor
    whole: bool


def weight_pieces(module: Module) -> dict[Parameter, WeightPiece]:
    """Return what this rank holds of each parameter's weights, without any other rank. Copies nothing."""
    pieces = {}
    for param in module.parameters():
        weights, start, whole = local_weights(param)
        shape = cast(Any, param).ds_shape if is_partitioned(param) else param.shape
        pieces[param] = WeightPiece(torch.Size(shape), start, weights, whole)
    return pieces


def assemble_weights(pieces: dict[Parameter, WeightPiece], partitioned: Collection[int], device: torch.device) -> None:
    """Give every parameter whole weights of its own, from the pieces that the ranks hold. A collective.

    Where a rank has the whole and others have pieces, because an engine broke off while it divided the parameters,
    every rank gives the piece that is its own.

    Args:
        pieces: What this rank holds, in the order of the module.
        partitioned: Positions of the parameters that some rank holds a piece of only.
        device: Where the ranks communicate.
    """
    params = list(pieces)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    divided = [params[position] for position in sorted(partitioned)]
    for batch in batched_by_size(divided, lambda param: pieces[param].shape.numel(), _GATHER_ELEMENTS):
        for param in batch:
            piece = pieces.pop(param)
            numel = piece.shape.numel()
            width = -(-numel // world_size)
            start = min(width * rank, numel)
            own = piece.weights.narrow(0, start, min(width, numel - start)) if piece.whole else piece.weights
            # Bytes have one owner each, so adding up integers is exact.
            size = own.element_size()
            buffer = torch.zeros(-(-numel * size // 8) * 8, dtype=torch.uint8, device=device)
            buffer[: numel * size].view(own.dtype).narrow(0, start, own.numel()).copy_(own)
            dist.all_reduce(buffer.view(torch.int64))
            param.grad = None
            param.data = buffer[: numel * size].view(own.dtype).view(piece.shape).clone()
    while pieces:
        param, piece = pieces.popitem()
        param.grad = None
        param.data = own_storage(piece.weights.view(piece.shape))


def reclaim_weights(module: Module) -> list[tuple[Parameter, Tensor]]:
    """Return every parameter with whole weights of its own: gathered after stage 3, out of flat buffers after 1 and 2.

    A few parameters are gathered at a time, so the extra memory is the weights themselves plus one batch. The
    parameters are not changed yet: stage 3 still owns them. A collective where parameters are partitioned.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    owned: list[tuple[Parameter, Tensor]] = []
    partitioned = [param for param in module.parameters() if is_partitioned(param)]
    for batch in batched_by_size(partitioned, lambda param: int(cast(Any, param).ds_numel), _GATHER_ELEMENTS):
        with GatheredParameters(batch), torch.no_grad():
            owned.extend((param, param.detach().clone()) for param in batch)
    for param in module.parameters():
        if not is_partitioned(param):
            owned.append((param, param.detach()))
    return owned


def own_storage(weights: Tensor) -> Tensor:
    """Return the tensor itself, or a copy if it is a view into a larger storage."""
    if weights.untyped_storage().nbytes() > weights.numel() * weights.element_size():
        return weights.clone()
    return weights
