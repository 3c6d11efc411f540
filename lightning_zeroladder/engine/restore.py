"""Load a checkpoint of any layout into a live engine: every rank reads just what it keeps, straight from the shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zeroladder.checkpoint.errors import CheckpointMismatch
from lightning_zeroladder.checkpoint.matching import Match, match_parameters
from lightning_zeroladder.checkpoint.opening import Opened, open_checkpoint
from lightning_zeroladder.checkpoint.pickles import TensorRef
from lightning_zeroladder.checkpoint.reader import Account, Reader, verify
from lightning_zeroladder.checkpoint.state import MASTER, WEIGHTS, SavedParameter, SavedTensor
from lightning_zeroladder.checkpoint.trust import materialize, read_tensor
from lightning_zeroladder.engine.fragments import HeldParameter, OwnerState, check_alike, install
from lightning_zeroladder.engine.lifecycle import ClientOptimizer, write_scaler
from lightning_zeroladder.engine.publish import publish
from lightning_zeroladder.engine.shards import Shard, live_shards, local_weights
from lightning_zeroladder.engine.together import gather_objects, together

__all__ = ["Restored", "restore"]


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was loaded.

    Attributes:
        opened: The checkpoint.
        client: What Lightning or the user had added to it, as real objects.
        nbytes: Bytes of it that this rank read.
        kept: Parameters that the checkpoint does not have, which kept their values.
    """

    opened: Opened
    client: dict[str, Any]
    nbytes: int
    kept: tuple[str, ...]


@dataclass(slots=True)
class _Read:
    """What this rank read, on the host.

    Attributes:
        state: Optimizer state and fp32 weights of each optimized parameter.
        owners: The element-wise state once more, as the tensors that become the optimizer's.
        weights: Forward weights of the others, as much of each as the rank keeps.
        buffers: Buffers, whole.
        extras: Further entries of the module's state dict.
        groups: Hyperparameters of the optimizer's groups.
        client: What Lightning or the user had added.
    """

    owners: OwnerState
    state: dict[str, HeldParameter] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    client: dict[str, Any] = field(default_factory=dict)


def restore(
    engine: Any,
    client: ClientOptimizer | None,
    path: str | Path,
    *,
    strict: bool = True,
    without_frozen: bool = False,
    factored: bool = False,
    trusted: bool = False,
) -> Restored:
    """Load a checkpoint into a freshly built engine. A collective.

    Nothing of the engine is touched before every rank has read and verified its part.

    Args:
        engine: A live ``DeepSpeedEngine``; one without optimizer takes weights and buffers only.
        client: The torch optimizer that it steps; None to load weights and buffers only.
        path: The checkpoint.
        strict: Refuse a checkpoint that lacks parameters of the model or has others.
        without_frozen: The checkpoint was saved without frozen weights: they keep their values.
        factored: The optimizer keeps state of other shapes than its parameters where it sees them whole (stage 0).
        trusted: Run what the checkpoint's pickles name.

    Raises:
        BadCheckpoint: If it is damaged, or files are missing on some host; on every rank.
        CheckpointMismatch: If it belongs to another model or optimizer; on every rank.
        UnmovableState: If the stage steps parameters together whose state differs; on every rank.
    """
    names = None if client is None else client.names(engine.module)
    with Reader() as reader:
        opened = together(lambda: open_checkpoint(path, names, weights_only=client is None))
        match = together(lambda: _match(opened, engine, client, strict, without_frozen, factored))
        read = together(lambda: _read(opened, match, engine, client, reader, trusted))
        account = Account()
        for other in gather_objects(reader.account):
            account.merge(other)
        together(lambda: verify(account, reader, share=_share()))
        nbytes = reader.nbytes
    _write(read, match, engine, client, opened)
    return Restored(opened, read.client, nbytes, match.missing)


def _share() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _shape(param: Parameter) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def _match(
    opened: Opened, engine: Any, client: ClientOptimizer | None, strict: bool, without_frozen: bool, factored: bool
) -> Match:
    """Find each parameter of the model in the checkpoint."""
    params = {name: _shape(param) for name, param in engine.module.named_parameters()}
    optional = {name for name, param in engine.module.named_parameters() if not param.requires_grad}
    other_keys = set(engine.module.state_dict().keys()) - params.keys() if strict else set()
    match = match_parameters(
        opened.state,
        params,
        may_lack=set(params) if not strict else optional if without_frozen else set(),
        may_add=None if not strict else other_keys,
    )
    if client is not None:
        _check_optimizer(opened, match, engine, client, factored)
    return match


def _check_optimizer(opened: Opened, match: Match, engine: Any, client: ClientOptimizer, factored: bool) -> None:
    state, stage = opened.state, int(engine.zero_optimization_stage())
    if not state.trained:
        raise CheckpointMismatch(
            f"{state.folder} holds no optimizer state: it was saved without training. Load its weights into the model "
            "instead of passing ckpt_path to fit."
        )
    if len(state.groups) not in (0, len(client.groups)):
        raise CheckpointMismatch(
            f"{state.folder} was saved with {len(state.groups)} parameter groups, this optimizer has "
            f"{len(client.groups)}. Return the same groups in the same order from configure_optimizers."
        )
    others = next((item for item in state.trained if item.others), None)
    if factored and (state.stage == 0) != (stage == 0):
        kept = f" ('{next(iter(others.others))}' of parameter '{others.name}')" if others else ""
        raise CheckpointMismatch(
            f"{type(client.optimizer).__name__} keeps state that is not shaped like its parameters{kept} at stage 0 "
            f"and other state at stages 1 to 3. {state.folder} was saved at stage {state.stage}, this run is at "
            f"{stage}: use stages=({state.stage},), or an element-wise optimizer."
        )
    if others is not None and stage != 0:
        key, ref = next(iter(others.others.items()))
        raise CheckpointMismatch(
            f"{state.folder} holds '{key}' of shape {ref.shape} for parameter '{others.name}' of shape {others.shape}: "
            "state of another shape cannot be divided among ranks. Use stages=(0,)."
        )
    for shard in live_shards(engine):
        saved = match.saved.get(shard.name)
        if saved is not None and not saved.trained:
            raise CheckpointMismatch(
                f"Parameter '{shard.name}' is trained in this run but was frozen when {state.folder} was saved: there "
                "is no optimizer state for it. Freeze it, or load the weights only."
            )


def _read(
    opened: Opened, match: Match, engine: Any, client: ClientOptimizer | None, reader: Reader, trusted: bool
) -> _Read:
    """Read what this rank keeps."""
    shards = {shard.name: shard for shard in live_shards(engine)} if client is not None else {}
    read = _Read(OwnerState(list(shards.values())))
    for name, shard in shards.items():
        saved = match.saved.get(name)
        held = _held(shard, saved, read.owners, reader) if saved is not None else _blank(shard, match, read.owners)
        read.state[name] = held
    check_alike(list(shards.values()), read.state)
    for name, param in engine.module.named_parameters():
        if name not in shards and name in match.saved and match.saved[name].numel:
            read.weights[name] = _read_weights(match.saved[name], param, reader)
    state = opened.state
    rank, world_size = _share()
    own = state.buffers_of_rank[rank] if len(state.buffers_of_rank) == world_size else state.buffers
    for name, ref in own.items():
        read.buffers[match.prefix(name)] = read_tensor(ref, reader)
    where = str(state.folder)
    read.extras = {
        name: materialize(value, f"{where}, entry '{name}' of the module", trusted=trusted)
        for name, value in match.extras.items()
    }
    if client is not None:
        read.groups = [materialize(group, f"{where}, parameter groups", trusted=trusted) for group in state.groups]
    for key, value in state.client.items():
        read.client[key] = materialize(value, f"{state.archives[0].path}, entry '{key}'", trusted=trusted)
    return read


def _blank(shard: Shard, match: Match, owners: OwnerState) -> HeldParameter:
    """Make the state of a parameter that the checkpoint does not have: zeros, and the weights it has now."""
    tensors = {MASTER: shard.master.detach().to("cpu", copy=True)}
    model = next((item for item in match.saved.values() if item.trained), None)
    if model is None:
        return HeldParameter(shard.numel, shard.start, tensors, {})
    for key, tensor in model.tensors.items():
        if key not in (MASTER, WEIGHTS):
            tensors[key] = owners.place(shard, key, _dtype(tensor)).zero_()
    scalars = {key: _scalar(value) for key, value in model.scalars.items()}
    return HeldParameter(shard.numel, shard.start, tensors, scalars)


def _dtype(tensor: SavedTensor) -> torch.dtype:
    found: torch.dtype = getattr(torch, tensor.dtype)
    return found


def _read_into(piece: Tensor, tensor: SavedTensor, start: int, reader: Reader) -> None:
    if piece.numel():
        reader.read_into(tensor.locate(start, piece.numel()), piece.view(torch.uint8).numpy().data)


def _scalar(value: Any) -> Any:
    if not isinstance(value, TensorRef):
        return value
    with Reader() as reader:
        read = read_tensor(value, reader)
        verify(reader.account, reader)
    return read


def _held(shard: Shard, saved: SavedParameter, owners: OwnerState, reader: Reader) -> HeldParameter:
    tensors: dict[str, Tensor] = {}
    for key, tensor in saved.tensors.items():
        if key == MASTER:
            tensors[key] = torch.empty(shard.master.numel(), dtype=_dtype(tensor))
        elif key != WEIGHTS:
            tensors[key] = owners.place(shard, key, _dtype(tensor))
        else:
            continue
        _read_into(tensors[key], tensor, shard.start, reader)
    scalars = {key: _scalar(value) for key, value in saved.scalars.items()}
    others = {key: read_tensor(ref, reader) for key, ref in saved.others.items()}
    return HeldParameter(shard.numel, shard.start, tensors, scalars, others)


def _read_weights(saved: SavedParameter, param: Parameter, reader: Reader) -> Tensor:
    """Read as much of a parameter's forward weights as this rank keeps."""
    weights, start, _ = local_weights(param)
    whole = saved.tensors.get(WEIGHTS)
    if whole is None or (MASTER in saved.tensors and _dtype(whole) != param.dtype):
        whole = saved.tensors[MASTER]
    piece = torch.empty(weights.numel(), dtype=_dtype(whole))
    _read_into(piece, whole, start, reader)
    return piece


def _write(read: _Read, match: Match, engine: Any, client: ClientOptimizer | None, opened: Opened) -> None:
    """Put everything into the engine."""
    module: Module = engine.module
    with torch.no_grad():
        if client is not None:
            # Where the engine was built on other devices, scalars stay on the host, as torch's optimizers keep them.
            install({name: _on_device(held, engine) for name, held in read.state.items()}, read.owners, engine)
        for name, param in module.named_parameters():
            if name in read.weights:
                _write_weights(param, read.weights[name])
        live = dict(module.named_buffers())
        for name, values in read.buffers.items():
            if name in live and live[name].shape == values.shape:
                live[name].copy_(values)
            elif name in live:
                read.extras[name] = values  # lets the module say what it thinks of another shape
        if read.extras:
            module.load_state_dict(read.extras, strict=False)
    if client is None:
        return
    publish(engine)
    client.set_hyperparameters(read.groups)
    for name, value in opened.state.counters.items():
        setattr(engine, name, value)
    write_scaler(engine, opened.state.scaler)


def _on_device(held: HeldParameter, engine: Any) -> HeldParameter:
    if not held.others:
        return held
    others = {key: value.to(engine.device) for key, value in held.others.items()}
    return HeldParameter(held.numel, held.start, held.tensors, held.scalars, others)


def _write_weights(param: Parameter, values: Tensor) -> None:
    weights, _, whole = local_weights(param)
    if whole:
        param.data.copy_(values.view(param.shape))
    else:
        weights.copy_(values)
