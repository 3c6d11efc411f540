"""Training state as fragments: take a rank's share out of a live engine, pour shares into another one.

A held state keeps on the host what the rank owned: for each parameter a piece of the fp32 weights and of every
optimizer state tensor, plus the values that are not shaped like the parameter (step counts). Pouring hands each
rank exactly the elements its new engine owns, one bucket of parameters at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zeroladder.engine.batching import batched_by_size
from lightning_zeroladder.engine.digest import checksum
from lightning_zeroladder.engine.shards import Shard, is_replicated, live_shards, local_weights, write_weights

__all__ = [
    "DamagedState",
    "HeldParameter",
    "HeldState",
    "OwnerState",
    "UnmovableState",
    "check_alike",
    "count_weights",
    "install",
    "pour",
    "recount",
    "salvage",
    "take",
]

MASTER = "fp32"
"""Key of the fp32 weights among a fragment's tensors."""

BUCKET_BYTES = 32 << 20
"""Pouring gathers whole parameters up to this many bytes at a time, or one larger parameter."""


class UnmovableState(RuntimeError):
    """Some optimizer state cannot be divided among ranks the way ZeRO divides weights."""


class DamagedState(RuntimeError):
    """The training state after a move differs from the one before it, or ranks disagree about it."""


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One rank's share of one parameter's optimizer state, on the host.

    Attributes:
        numel: Elements of the whole parameter.
        start: First element held, within the flattened parameter.
        tensors: One-dimensional pieces by state key; the fp32 weights under ``fp32``.
        scalars: State that is one value per parameter, by key.
        others: Whole tensors of another shape than the parameter's, by key: stage 0 alone can take them.
    """

    numel: int
    start: int
    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    others: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldState:
    """A rank's share of the training state, with the checksums of the whole.

    Attributes:
        parameters: By parameter name, in the order of the module, the same names on every rank.
        checksums: Checksum of the whole state by ``name/key``, the same on every rank.
    """

    parameters: dict[str, HeldParameter]
    checksums: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Host bytes held by this rank."""
        return sum(piece.nbytes for held in self.parameters.values() for piece in held.tensors.values())


def _share(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the (start, numel) of a rank's even share of ``numel`` elements."""
    width = -(-numel // world_size)
    start = min(rank * width, numel)
    return start, min(width, numel - start)


def _split_state(shard: Shard, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the shard's view of each state tensor, and the state that is a single value."""
    views: dict[str, Tensor] = {MASTER: shard.master}
    scalars: dict[str, Any] = {}
    state: Mapping[str, Any] = optimizer.state.get(shard.owner, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == shard.owner.shape and value.dim() > 0:
            views[key] = shard.slice_of(value)
        elif not isinstance(value, Tensor) or value.numel() == 1:
            scalars[key] = value
        else:
            raise UnmovableState(
                f"{type(optimizer).__name__} keeps '{key}' of shape {tuple(value.shape)} for parameter '{shard.name}' "
                f"of {shard.numel} elements. State must have the parameter's shape or be a single value to move "
                "between ZeRO stages. Use an element-wise optimizer (AdamW, SGD, Lion, ...), or one fixed stage."
            )
    return views, scalars


def _shared_steps(optimizer: Optimizer) -> dict[int, int]:
    """Return the step count of each parameter, by identity, where DeepSpeed's FusedAdam has one for a whole group.

    It counts in the state of the last parameter that had a gradient, and leaves the others' at where they began.
    """
    if type(optimizer).__name__ != "FusedAdam":
        return {}
    steps: dict[int, int] = {}
    for group in optimizer.param_groups:
        states = [optimizer.state.get(param, {}) for param in group["params"]]
        reached = max((state["step"] for state in states if "step" in state), default=0)
        steps.update({id(param): reached for param in group["params"]})
    return steps


def _copy_scalar(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _device(engine: Any) -> torch.device:
    """Return the device on which the engine's ranks communicate."""
    return torch.device(engine.device)


def _checksum_entries(engine: Any) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (``name/key``, checksum of what this rank holds, whether every rank holds it all)."""
    replicated = is_replicated(engine)
    masters: dict[str, tuple[Tensor, Tensor]] = {}
    for shard in live_shards(engine):
        views, _ = _split_state(shard, engine.basic_optimizer)
        for key, view in views.items():
            value = checksum(view, shard.start)
            if key == MASTER:
                masters[shard.name] = view, value
            yield f"{shard.name}/{key}", value, replicated
    for name, param in engine.module.named_parameters():
        weights, start, whole = local_weights(param)
        master = masters.get(name)
        # In fp32 stages 0 and 3 train the forward weights themselves: the same memory need not be read twice.
        same = master is not None and _same_memory(master[0], weights)
        yield f"{name}/weights", master[1] if master is not None and same else checksum(weights, start), whole


def _same_memory(first: Tensor, second: Tensor) -> bool:
    return (first.data_ptr(), first.numel(), first.dtype) == (second.data_ptr(), second.numel(), second.dtype)


def global_checksums(engine: Any) -> dict[str, int]:
    """Return the checksums of the whole training state of a live engine, equal on every rank.

    Covers the fp32 weights, every element-wise optimizer state tensor and the weights used in forward, frozen ones
    included. A collective: every rank must call it.

    Raises:
        DamagedState: If ranks that should hold the same values do not.
    """
    entries = list(_checksum_entries(engine))
    if not entries:
        return {}
    local = torch.stack([value.to(_device(engine)) for _, value, _ in entries])
    if dist.get_world_size() == 1:
        return dict(zip([name for name, _, _ in entries], local.tolist(), strict=True))
    of_rank = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(of_rank, local)
    by_rank = torch.stack(of_rank)
    sums = by_rank.sum(dim=0).tolist()
    lowest, highest = by_rank.amin(dim=0).tolist(), by_rank.amax(dim=0).tolist()
    result: dict[str, int] = {}
    for index, (name, _, whole) in enumerate(entries):
        if whole and lowest[index] != highest[index]:
            raise DamagedState(
                f"'{name}' should be the same on every rank but is not. Something changed it on some ranks only, "
                "for instance code that writes weights without the other ranks. Training stopped: nothing was saved "
                "over. Find the code that changes this parameter, or resume from the last checkpoint."
            )
        result[name] = highest[index] if whole else sums[index]
    return result


def take(engine: Any) -> HeldState:
    """Copy this rank's share of an engine's training state to the host.

    Where the engine holds the state on every rank, each rank takes an even share. A collective: every rank must call
    it, after an optimizer step and before the next backward.

    Args:
        engine: A live ``DeepSpeedEngine``.

    Raises:
        UnmovableState: If some optimizer state is neither shaped like its parameter nor a single value.
        DamagedState: If ranks that should hold the same values do not.
    """
    return HeldState(salvage(engine), global_checksums(engine))


def salvage(engine: Any) -> dict[str, HeldParameter]:
    """Copy this rank's share of an engine's training state to the host without any other rank.

    Args:
        engine: A ``DeepSpeedEngine``, which may have broken off in the middle of forward or backward: neither changes
            the state.

    Raises:
        UnmovableState: If some optimizer state is neither shaped like its parameter nor a single value.
    """
    replicated, rank, world_size = is_replicated(engine), dist.get_rank(), dist.get_world_size()
    parameters: dict[str, HeldParameter] = {}
    steps = _shared_steps(engine.basic_optimizer)
    for shard in live_shards(engine):
        views, scalars = _split_state(shard, engine.basic_optimizer)
        if "step" in scalars and id(shard.owner) in steps:
            scalars["step"] = steps[id(shard.owner)]
        skip, held = _share(shard.numel, rank, world_size) if replicated else (0, shard.master.numel())
        tensors = {key: view.narrow(0, skip, held).detach().to("cpu", copy=True) for key, view in views.items()}
        copied = {key: _copy_scalar(value) for key, value in scalars.items()}
        parameters[shard.name] = HeldParameter(shard.numel, shard.start + skip, tensors, copied)
    return parameters


def count_weights(module: Module, device: torch.device) -> dict[str, int]:
    """Return the checksums of the weights of a whole module. A collective.

    Raises:
        DamagedState: If they differ between ranks.
    """
    named = dict(module.named_parameters())
    if not named:
        return {}
    local = torch.stack([checksum(param.detach().reshape(-1), 0) for param in named.values()]).to(device)
    lowest, highest = local.clone(), local.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
    odd = [name for name, differs in zip(named, (lowest != highest).tolist(), strict=True) if differs]
    if odd:
        raise DamagedState(
            f"The weights of {', '.join(odd[:3])} differ between ranks after a rung was left. Training stopped; resume "
            "from the last checkpoint."
        )
    return {f"{name}/weights": value for name, value in zip(named, local.tolist(), strict=True)}


def recount(parameters: Mapping[str, HeldParameter], device: torch.device) -> dict[str, int]:
    """Return the checksums of the whole state of which each rank holds a share. A collective."""
    entries = [
        (f"{name}/{key}", checksum(piece, held.start))
        for name, held in parameters.items()
        for key, piece in held.tensors.items()
    ]
    if not entries:
        return {}
    total = torch.stack([value for _, value in entries]).to(device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return dict(zip([name for name, _ in entries], total.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One state tensor of one parameter on its way through a bucket."""

    name: str
    key: str
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, rounded up to 8 so that the bucket can be added up as int64."""
        return -(-self.numel * self.dtype.itemsize // 8) * 8


def _gather_bucket(bucket: list[_Entry], held: HeldState, device: torch.device) -> dict[tuple[str, str], Tensor]:
    """Return the whole tensors of a bucket on every rank.

    Each rank writes its pieces into a zeroed byte buffer and the buffers are added up as integers: every byte has one
    owner, so the sum is exact, whatever the dtype and whatever the layout of the source.
    """
    buffer = torch.zeros(sum(entry.nbytes for entry in bucket), dtype=torch.uint8, device=device)
    whole: dict[tuple[str, str], Tensor] = {}
    offset = 0
    for entry in bucket:
        target = buffer.narrow(0, offset, entry.numel * entry.dtype.itemsize).view(entry.dtype)
        source = held.parameters[entry.name]
        piece = source.tensors[entry.key]
        target.narrow(0, source.start, piece.numel()).copy_(piece)
        whole[entry.name, entry.key] = target
        offset += entry.nbytes
    if dist.get_world_size() > 1:
        dist.all_reduce(buffer.view(torch.int64))
    return whole


def check_alike(shards: list[Shard], held: Mapping[str, HeldParameter]) -> None:
    """Check that parameters which are stepped as one flat tensor have the same state keys and single values.

    Raises:
        UnmovableState: If two of them differ.
    """
    first_of: dict[int, tuple[str, dict[str, Any], list[str]]] = {}
    for shard in shards:
        source = held[shard.name]
        keys = _state_keys(source)
        first = first_of.setdefault(id(shard.owner), (shard.name, source.scalars, keys))
        if first[2] != keys or not _same_scalars(first[1], source.scalars):
            raise UnmovableState(
                f"Parameters '{first[0]}' and '{shard.name}' are stepped as one flat tensor at this stage but carry "
                f"different optimizer state ({first[2]} {first[1]} and {keys} {source.scalars}). "
                "Put them in separate parameter groups, or use one fixed stage."
            )


def _state_keys(source: HeldParameter) -> list[str]:
    """Return the keys in the order they came in: every rank must list the state tensors alike."""
    return [key for key in source.tensors if key != MASTER]


def _install_empty_state(shards: list[Shard], held: Mapping[str, HeldParameter], optimizer: Optimizer) -> None:
    """Give every owner tensor a zeroed state with the held keys and single values."""
    check_alike(shards, held)
    optimizer.state.clear()
    for shard in shards:
        source = held[shard.name]
        keys = _state_keys(source)
        if not keys and not source.scalars and not source.others:
            continue
        state = optimizer.state[shard.owner]
        state.update(source.others)
        for key in keys:
            if key not in state:
                state[key] = torch.zeros_like(shard.owner, dtype=source.tensors[key].dtype, requires_grad=False)
        for key, value in source.scalars.items():
            state.setdefault(key, value.clone() if isinstance(value, Tensor) else value)


def _same_scalars(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(
        bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b))) if a is not None and b is not None else a is b
        for a, b in ((first[key], second[key]) for key in first)
    )


def pour(held: HeldState, engine: Any, *, with_weights: bool = False) -> None:
    """Write a held state into a freshly built engine, then check that nothing changed on the way. A collective.

    Args:
        held: What `take` returned on this rank.
        engine: A live ``DeepSpeedEngine`` over the same module and torch optimizer.
        with_weights: Also make the weights used in forward from the fp32 weights. Without it they are not written:
            they stay in the module through a move.

    Raises:
        UnmovableState: If the new stage steps parameters together whose state differs.
        DamagedState: If a checksum differs from the one taken before the move.
    """
    shards = {shard.name: shard for shard in live_shards(engine)}
    if shards.keys() != held.parameters.keys():
        odd = ", ".join(sorted(shards.keys() ^ held.parameters.keys()))
        raise DamagedState(f"The optimized parameters changed during a move: {odd}. Training stopped.")
    optimizer: Optimizer = engine.basic_optimizer
    module = dict(engine.module.named_parameters())
    _install_empty_state(list(shards.values()), held.parameters, optimizer)
    entries = (
        _Entry(name, key, source.numel, piece.dtype)
        for name, source in held.parameters.items()
        for key, piece in source.tensors.items()
    )
    for bucket in batched_by_size(entries, lambda entry: entry.nbytes, BUCKET_BYTES):
        for (name, key), whole in _gather_bucket(bucket, held, _device(engine)).items():
            shard = shards[name]
            piece = whole.narrow(0, shard.start, shard.master.numel())
            target = shard.master if key == MASTER else shard.slice_of(optimizer.state[shard.owner][key])
            target.copy_(piece)
            if with_weights and key == MASTER:
                write_weights(module[name], whole)
    after = global_checksums(engine)
    if with_weights:  # what forward uses was not counted before
        after = {name: value for name, value in after.items() if name in held.checksums}
    _compare(held.checksums, after)


class OwnerState:
    """Room on the host for the optimizer state of each tensor that the torch optimizer steps.

    Pieces are read straight into it, and the tensors then become the optimizer's state as they are.

    Args:
        shards: All shards of an engine.
    """

    def __init__(self, shards: list[Shard]) -> None:
        self._places: dict[int, list[tuple[int, int]]] = {}
        for shard in shards:
            self._places.setdefault(id(shard.owner), []).append((shard.offset, shard.master.numel()))
        self.tensors: dict[int, dict[str, Tensor]] = {}

    def place(self, shard: Shard, key: str, dtype: torch.dtype) -> Tensor:
        """Return where the state of a shard goes; its content is undefined."""
        made = self.tensors.setdefault(id(shard.owner), {})
        if key not in made:
            made[key] = torch.empty(shard.owner.numel(), dtype=dtype)
            self._clear_padding(made[key], self._places[id(shard.owner)])
        whole = made[key]
        if whole.dtype != dtype:
            raise UnmovableState(
                f"'{key}' of parameter '{shard.name}' is {dtype}, that of others stepped with it is {whole.dtype}. Put "
                "them in separate parameter groups, or use stages=(0,)."
            )
        return whole.narrow(0, shard.offset, shard.master.numel())

    @staticmethod
    def _clear_padding(whole: Tensor, places: list[tuple[int, int]]) -> None:
        reached = 0
        for offset, numel in sorted(places):
            whole[reached:offset].zero_()
            reached = max(reached, offset + numel)
        whole[reached:].zero_()


def install(parameters: Mapping[str, HeldParameter], owners: OwnerState, engine: Any) -> None:
    """Write state into a freshly built engine, of which this rank has exactly what the engine keeps on it.

    The weights used in forward are not written: see `engine.publish`. Not a collective.

    Args:
        parameters: By name, every parameter that the engine optimizes; only those that `check_alike` has passed.
        owners: Their element-wise optimizer state.
        engine: A live ``DeepSpeedEngine`` that has not stepped.
    """
    optimizer: Optimizer = engine.basic_optimizer
    optimizer.state.clear()
    for shard in live_shards(engine):
        source = parameters[shard.name]
        shard.master.copy_(source.tensors[MASTER])
        tensors = owners.tensors.get(id(shard.owner), {})
        if not tensors and not source.scalars and not source.others:
            continue
        state = optimizer.state[shard.owner]
        for key, tensor in tensors.items():  # in their order: every rank must list the state tensors alike
            if key not in state:
                state[key] = tensor.view(shard.owner.shape).to(shard.owner.device)
        for key, value in {**source.scalars, **source.others}.items():
            state.setdefault(key, value.clone() if isinstance(value, Tensor) else value)


def _compare(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    wrong = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise DamagedState(
            f"The training state after the move differs from the one before it: {shown}. Training stopped before any "
            "step was taken on it; the last checkpoint is untouched. Use a fixed stage "
            "(ZeroAutoStrategy(stages=(2,))) and report the model and versions."
        )
