"""Write a native checkpoint for a given ZeRO stage and number of ranks, as DeepSpeed 0.19 itself would have saved it.

The layouts are those of `native` and `stage_0`, the other way round. DeepSpeed's classes occur in them by name only.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_zeroladder.checkpoint.casting import cast
from lightning_zeroladder.checkpoint.dtypes import ITEMSIZE
from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.pickles import Opaque, Size, TensorRef, opaque
from lightning_zeroladder.checkpoint.reader import Reader
from lightning_zeroladder.checkpoint.state import MASTER, WEIGHTS, SavedParameter, SavedState, SavedTensor
from lightning_zeroladder.checkpoint.universal import blocks_of, model_tree
from lightning_zeroladder.checkpoint.writer import NewTensor, write_archive, zeros

__all__ = ["native_bytes", "native_files"]

_ALIGNMENT = 2
"""Elements to which DeepSpeed aligns each rank's part of a flat group (4 bytes of fp16)."""

_DEFAULT_CLIPPING = 1.0
"""What DeepSpeed clips gradients at where its config does not say."""

File = tuple[str, Callable[[Path, Reader], int]]
"""Name of a file, and what writes it; returns the bytes written."""


def native_files(state: SavedState, stage: int, world_size: int) -> list[File]:
    """Return the files of the checkpoint in another layout.

    Args:
        state: The checkpoint.
        stage: ZeRO stage, 0 to 3.
        world_size: Data-parallel ranks.

    Raises:
        BadCheckpoint: If its state cannot be cut that way.
    """
    _check_movable(state, stage)
    if stage == 0:
        return [
            ("mp_rank_00_model_states.pt", lambda path, reader: write_archive(path, _stage_0(state, reader), reader))
        ]
    prefix = "bf16_" if state.precision == "bfloat16" else ""
    target = _Target(state, stage, world_size)
    files: list[File] = []
    for rank in range(1 if stage < 3 else world_size):
        name = "" if stage < 3 else f"zero_pp_rank_{rank}_"
        files.append((f"{name}mp_rank_00_model_states.pt", target.model_writer(rank)))
    for rank in range(world_size):
        files.append((f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", target.optimizer_writer(rank)))
    return files


def native_bytes(state: SavedState, stage: int) -> int:
    """Return about how many bytes the native form of a checkpoint takes at a stage."""
    trained = sum(
        item.numel * sum(ITEMSIZE[tensor.dtype] for key, tensor in item.tensors.items() if key != WEIGHTS)
        for item in state.trained
    )
    numel = sum(item.numel for item in state.parameters.values())
    return trained + (numel * ITEMSIZE[state.precision] if stage < 3 else 0) + (1 << 20)


def _check_movable(state: SavedState, stage: int) -> None:
    for item in state.trained:
        if item.others and (stage, state.stage) != (0, 0):
            key, ref = next(iter(item.others.items()))
            raise BadCheckpoint(
                f"{state.folder}: the optimizer keeps '{key}' of shape {ref.shape} for parameter '{item.name}' of "
                f"shape {item.shape}. State of another shape than its parameter cannot be divided among ranks the way "
                "ZeRO divides weights: such a checkpoint loads at stage 0 only."
            )


def _forward_weights(item: SavedParameter, precision: str, reader: Reader) -> NewTensor:
    """Return the weights that forward uses: as saved, or the fp32 ones rounded."""
    saved = item.tensors.get(WEIGHTS)
    if saved is not None and saved.dtype == precision:
        return NewTensor(precision, item.shape, blocks_of(saved, reader))
    master = item.tensors[MASTER] if item.numel else SavedTensor(precision, 0, ())
    return NewTensor(precision, item.shape, (cast(b, master.dtype, precision) for b in blocks_of(master, reader)))


def _model(state: SavedState, stage: int, world_size: int, reader: Reader) -> dict[str, Any]:
    trained = {item.name: item for item in state.trained}
    weights = None if stage == 3 else lambda name: _forward_weights(trained[name], state.precision, reader)
    tree = model_tree(state, reader, weights)
    del tree["universal_checkpoint_info"]
    tree["dp_world_size"] = world_size
    tree["ds_config"] = _config(state, stage)
    if stage < 2:
        tree["frozen_param_shapes"] = None
    return tree


def _config(state: SavedState, stage: int) -> Any:
    config = copy.deepcopy(state.common["ds_config"])
    if isinstance(config, dict):
        config["zero_optimization"] = {**(config.get("zero_optimization") or {}), "stage": stage}
    return config


def _stage_0(state: SavedState, reader: Reader) -> dict[str, Any]:
    tree = _model(state, 0, state.world_size, reader)
    tree["param_shapes"] = tree["shared_params"] = None
    entries: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    masters: list[list[NewTensor]] = []
    number = 0
    for index, values in enumerate(state.groups):
        members = [item for item in state.trained if item.group == index]
        groups.append({**values, "params": list(range(number, number + len(members)))})
        masters.append([])
        for item in members:
            entry: dict[str, Any] = {
                key: NewTensor(tensor.dtype, item.shape, blocks_of(tensor, reader))
                for key, tensor in item.tensors.items()
                if key not in (MASTER, WEIGHTS)
            }
            entry.update({key: _own(value, reader) for key, value in {**item.scalars, **item.others}.items()})
            if entry:
                entries[number] = entry
            master = item.tensors[MASTER]
            masters[-1].append(NewTensor(master.dtype, item.shape, blocks_of(master, reader)))
            number += 1
    inner = {"state": entries, "param_groups": groups}
    if state.precision == "float32":
        return {**tree, "optimizer": inner}
    shared = state.common.get("optimizer", {})
    scaler = {name: state.scaler[name] for name in state.scaler if name != "cur_hysteresis"}
    outer = {"dynamic_loss_scale": bool(shared.get("dynamic_loss_scale")), "cur_scale": 1.0, "cur_iter": 0, **scaler}
    return {**tree, "optimizer": {**outer, "optimizer_state_dict": inner, "fp32_groups": masters}}


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements of a parameter within a rank's flat tensor: ``numel`` from ``start``, placed at ``at``."""

    item: SavedParameter
    at: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class _Flat:
    """A rank's flat tensor: ``numel`` elements, those behind the parts are zero."""

    parts: tuple[_Part, ...]
    numel: int
    padding: int


class _Target:
    """Writes the files of stages 1 to 3."""

    def __init__(self, state: SavedState, stage: int, world_size: int) -> None:
        self._state = state
        self._stage = stage
        self._world_size = world_size
        groups = [[item for item in state.trained if item.group == index] for index in range(len(state.groups))]
        self._groups = groups
        self._sub_groups = [(index, part) for index, items in enumerate(groups) for part in self._cut(items)]
        for index, items in enumerate(groups):
            _check_alike(state, items, index)

    def _cut(self, items: list[SavedParameter]) -> list[list[SavedParameter]]:
        """Cut a group into stage 3's sub-groups."""
        config = self._state.common["ds_config"] or {}
        limit = int((config.get("zero_optimization") or {}).get("sub_group_size") or 10**9)
        parts: list[list[SavedParameter]] = [[]]
        size = 0
        for item in items:
            if size >= limit:
                parts.append([])
                size = 0
            parts[-1].append(item)
            size += -(-item.numel // self._world_size)
        return parts

    def model_writer(self, rank: int) -> Callable[[Path, Reader], int]:
        """Return what writes the model states of a rank."""

        def write(path: Path, reader: Reader) -> int:
            tree = _model(self._state, self._stage, self._world_size, reader)
            if self._stage == 3:
                self._shard_model(tree, rank, reader)
            elif self._stage == 2:
                tree["frozen_param_fragments"] = OrderedDict(
                    (name, tree["module"][name]) for name in tree["frozen_param_shapes"] if name in tree["module"]
                )
            return write_archive(path, tree, reader)

        return write

    def _shard_model(self, tree: dict[str, Any], rank: int, reader: Reader) -> None:
        module: OrderedDict[str, Any] = OrderedDict()
        fragments: OrderedDict[str, Any] = OrderedDict()
        for item in self._state.parameters.values():
            module[item.name] = NewTensor(self._state.precision, (0,), ())
            if not item.trained and WEIGHTS in item.tensors:
                part = self._piece(item, rank, 0)
                width = -(-item.numel // self._world_size)
                tensor = item.tensors[WEIGHTS]
                blocks = self._elements(_Flat((part,), width, 0), WEIGHTS, tensor.dtype, reader)
                fragments[item.name] = NewTensor(tensor.dtype, (width,), blocks)
        module.update({name: NewTensor(self._state.precision, (0,), ()) for name in self._state.aliases})
        ranks = self._state.buffers_of_rank
        module.update(ranks[rank] if len(ranks) == self._world_size else self._state.buffers)
        tree["module"] = module
        tree["param_shapes"] = [
            OrderedDict((item.name, Size(item.shape)) for item in items) for _, items in self._sub_groups
        ]
        tree["frozen_param_fragments"] = fragments

    def _piece(self, item: SavedParameter, rank: int, at: int) -> _Part:
        width = -(-item.numel // self._world_size)
        start = min(width * rank, item.numel)
        return _Part(item, at, start, min(width, item.numel - start))

    def _flats(self, rank: int) -> list[_Flat]:
        if self._stage < 3:
            return [self._flat_group(items, rank) for items in self._groups]
        flats = []
        for _, items in self._sub_groups:
            parts, at = [], 0
            for item in items:
                parts.append(self._piece(item, rank, at))
                at += -(-item.numel // self._world_size)
            flats.append(_Flat(tuple(parts), at, 0))
        return flats

    def _flat_group(self, items: list[SavedParameter], rank: int) -> _Flat:
        numel = sum(item.numel for item in items)
        unit = _ALIGNMENT * self._world_size
        width = -(-numel // unit) * unit // self._world_size
        left, right = width * rank, width * (rank + 1)
        parts, at = [], 0
        for item in items:
            first, last = max(left, at), min(right, at + item.numel)
            if first < last:
                parts.append(_Part(item, first - left, first - at, last - first))
            at += item.numel
        return _Flat(tuple(parts), width, max(0, min(width, right - numel)))

    def _elements(self, flat: _Flat, key: str, dtype: str, reader: Reader) -> Iterator[bytes | memoryview]:
        size, at = ITEMSIZE[dtype], 0
        for part in flat.parts:
            yield from zeros((part.at - at) * size)
            saved = part.item.tensors.get(key)
            if saved is None:
                yield from zeros(part.numel * size)
            else:
                for block in reader.blocks(*saved.locate(part.start, part.numel)):
                    yield cast(block, saved.dtype, dtype) if saved.dtype != dtype else block
            at = part.at + part.numel
        yield from zeros((flat.numel - at) * size)

    def optimizer_writer(self, rank: int) -> Callable[[Path, Reader], int]:
        """Return what writes the optimizer states of a rank."""

        def write(path: Path, reader: Reader) -> int:
            shard = self._stage_3_shard(rank, reader) if self._stage == 3 else self._stage_1_2_shard(rank, reader)
            common = self._state.common
            tree = {
                "optimizer_state_dict": {**self._shared(), **shard},
                "ds_config": _config(self._state, self._stage),
                "ds_version": common["ds_version"],
            }
            return write_archive(path, tree, reader)

        return write

    def _shared(self) -> dict[str, Any]:
        saved, config = self._state.common.get("optimizer", {}), self._state.common["ds_config"] or {}
        dynamic = bool(saved.get("dynamic_loss_scale", "scale_factor" in self._state.scaler))
        return {
            "loss_scaler": saved.get("loss_scaler") or _loss_scaler(self._state.scaler, dynamic),
            "dynamic_loss_scale": dynamic,
            "overflow": bool(saved.get("overflow", False)),
            "clip_grad": saved.get("clip_grad", config.get("gradient_clipping", _DEFAULT_CLIPPING)),
            "zero_stage": opaque("deepspeed.runtime.zero.config", "ZeroStageEnum", self._stage, called=True),
        }

    def _owner(self, items: list[SavedParameter], flat: _Flat, reader: Reader) -> dict[str, Any]:
        entry: dict[str, Any] = {}
        for key in dict.fromkeys(key for item in items for key in item.tensors):
            if key not in (MASTER, WEIGHTS):
                dtype = next(item.tensors[key].dtype for item in items if key in item.tensors)
                entry[key] = NewTensor(dtype, (flat.numel,), self._elements(flat, key, dtype, reader))
        for item in items:
            for key, value in item.scalars.items():
                if key not in entry:
                    entry[key] = _own(value, reader)
        return entry

    def _stage_1_2_shard(self, rank: int, reader: Reader) -> dict[str, Any]:
        flats = self._flats(rank)
        states = {
            index: entry
            for index, (items, flat) in enumerate(zip(self._groups, flats, strict=True))
            if (entry := self._owner(items, flat, reader))
        }
        lean = [replace(flat, numel=flat.numel - flat.padding) for flat in flats]
        return {
            "base_optimizer_state": {
                "state": states,
                "param_groups": [{**values, "params": [index]} for index, values in enumerate(self._state.groups)],
            },
            "single_partition_of_fp32_groups": [
                NewTensor("float32", (flat.numel,), self._elements(flat, MASTER, "float32", reader)) for flat in lean
            ],
            "group_paddings": [flat.padding for flat in flats],
            "param_alignment_paddings": [[0] * len(items) for items in self._groups],
            "partition_count": [self._world_size] * len(self._groups),
            "ds_version": self._state.common["ds_version"],
            "param_slice_mappings": [
                OrderedDict((part.item.name, _address(part)) for part in flat.parts) for flat in flats
            ],
        }

    def _stage_3_shard(self, rank: int, reader: Reader) -> dict[str, Any]:
        flats = self._flats(rank)
        states = {
            index: entry
            for index, ((_, items), flat) in enumerate(zip(self._sub_groups, flats, strict=True))
            if (entry := self._owner(items, flat, reader))
        }
        groups = [
            {**values, "params": [number for number, (index, _) in enumerate(self._sub_groups) if index == group]}
            for group, values in enumerate(self._state.groups)
        ]
        return {
            "partition_count": self._world_size,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "fp32_flat_groups": [
                NewTensor("float32", (flat.numel,), self._elements(flat, MASTER, "float32", reader)) for flat in flats
            ],
        }


def _own(value: Any, reader: Reader) -> Any:
    """Give a tensor memory of its own: step counts that share it would all advance with each of them."""
    if not isinstance(value, TensorRef):
        return value
    return NewTensor(value.dtype, value.shape, reader.blocks(value.source.span(value)))


def _address(part: _Part) -> Opaque:
    state = {"numel": part.numel, "start": part.at}
    return opaque("deepspeed.utils.tensor_fragment", "fragment_address", state=state)


def _loss_scaler(scaler: dict[str, Any], dynamic: bool) -> Opaque:
    if not dynamic:
        state = {"cur_scale": scaler.get("cur_scale", 1.0), "dynamic": False}
        return opaque("deepspeed.runtime.fp16.loss_scaler", "LossScaler", state=state)
    state = {
        **{"cur_scale": 65536.0, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000},
        **{"min_scale": 1, "delayed_shift": 1, "cur_hysteresis": 1, "consecutive_hysteresis": False},
        **{"raise_error_at_min_scale": True, "dynamic": True},
        **scaler,
    }
    return opaque("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", state=state)


def _check_alike(state: SavedState, items: list[SavedParameter], group: int) -> None:
    """Refuse a group whose parameters differ in what is one value for the whole flat tensor."""
    from lightning_zeroladder.checkpoint.state import scalar_value

    stepped = [item for item in items if item.scalars or set(item.tensors) - {MASTER, WEIGHTS}]
    for item in stepped[1:]:
        for key in stepped[0].scalars.keys() | item.scalars.keys():
            mine, theirs = (scalar_value(entry.scalars.get(key)) for entry in (item, stepped[0]))
            if mine != theirs:
                raise BadCheckpoint(
                    f"{state.folder}: {key} is {mine} for parameter '{item.name}' and {theirs} for "
                    f"'{stepped[0].name}'. Stages 1 to 3 step a parameter group as one tensor, which has one {key}: "
                    f"such a checkpoint (group {group}) loads at stage 0 only."
                )
