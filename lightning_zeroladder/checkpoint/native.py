"""Read what DeepSpeed's own ``save_checkpoint`` writes, at each ZeRO stage, as a `SavedState`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_zeroladder.checkpoint.archive import Archive, Span
from lightning_zeroladder.checkpoint.casting import FLOATS
from lightning_zeroladder.checkpoint.dtypes import ITEMSIZE
from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.folders import Folder
from lightning_zeroladder.checkpoint.pickles import Opaque, TensorRef
from lightning_zeroladder.checkpoint.stage_0 import add_stage_0, tied_names
from lightning_zeroladder.checkpoint.state import (
    MASTER,
    WEIGHTS,
    Piece,
    SavedParameter,
    SavedState,
    scalar_value,
    tensor_of,
)

__all__ = ["add_untrained", "hyperparameters", "own_states", "read_native", "reading_file", "scaler_of", "skeleton"]

_DEEPSPEED_ENTRIES = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "num_experts"),
        *("ds_autoep_layers", "universal_checkpoint_info", "checkpoint_parallel_dimensions"),
    }
)
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
"""Members of DeepSpeed's ``ZeroStageEnum``."""
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@contextmanager
def reading_file(file: Path) -> Iterator[None]:
    """Say which file does not hold what it should."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise BadCheckpoint(
            f"{file} does not hold what DeepSpeed 0.19 saves there ({type(error).__name__}: {error}). It is damaged, "
            "or of a release whose layout is not known."
        ) from error


def read_native(path: Path, groups: Sequence[Sequence[str]] | None = None, *, weights_only: bool = False) -> SavedState:
    """Open a native checkpoint of any stage. Reads no tensor but single values.

    Args:
        path: The folder with the files.
        groups: Parameter names of each group of the optimizer, for a checkpoint of stage 0, which does not name them.
            Without them they are found by shape and content where that is certain.
        weights_only: Leave out the optimizer state of stage 0: all parameters then count as not trained.

    Raises:
        BadCheckpoint: If it is not whole, or its files contradict each other.
    """
    folder = Folder.of(path)
    main = Archive(folder.model[0])
    with reading_file(main.path):
        tree = main.tree
        folder.check_ranks(int(tree["dp_world_size"]))
        state = skeleton(path, main, tree)
    optimizers = [Archive(file) for file in folder.optimizer]
    state.archives.extend(optimizers)
    others = [Archive(file) for file in folder.model[1:]]
    state.archives.extend(others)
    shards = [_optimizer_tree(archive, tree) for archive in optimizers]
    if shards:
        state.stage = _stage(shards[0])
    elif tree.get("param_shapes"):
        raise BadCheckpoint(
            f"{path} holds no optimizer states (*_optim_states.pt), but {main.path.name} was saved with them: files "
            "are missing. Copy them there, from every host."
        )
    for other in others:
        _same_run(main, other)
    owns = own_states(main, others)
    with reading_file(optimizers[0].path if optimizers else main.path):
        if not shards:
            state.stage = 0
            if not weights_only:
                add_stage_0(state, tree, groups)
        elif state.stage == 3:
            _add_stage_3(state, tree, shards)
        else:
            _add_stage_1_2(state, tree, shards)
    with reading_file(main.path):
        add_untrained(state, tree, owns)
        if len(others):
            state.buffers_of_rank = [own.buffers for own in owns]
    return state


def skeleton(folder: Path, main: Archive, tree: Any) -> SavedState:
    """Return what the model states tell about a checkpoint, without its parameters."""
    return SavedState(
        folder=folder,
        kind="native",
        stage=None,
        world_size=int(tree["dp_world_size"]),
        parameters={},
        aliases=dict(tree.get("shared_params") or {}),
        buffers=buffers_of(tree),
        groups=[],
        counters={name: int(tree[name]) for name in _COUNTERS if tree.get(name) is not None},
        scaler={},
        client={name: value for name, value in tree.items() if name not in _DEEPSPEED_ENTRIES},
        common={name: tree.get(name) for name in ("ds_config", "ds_version", "buffer_names", "mp_world_size")},
        archives=[main],
        precision=_precision(tree),
    )


def _precision(tree: Any) -> str:
    """Return the type of the weights in forward: what the config says, or that of the first weight."""
    config = tree.get("ds_config")
    if isinstance(config, dict):
        for key, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
            if isinstance(config.get(key), dict) and config[key].get("enabled") is True:
                return dtype
    buffers = set(tree["buffer_names"])
    weights = (value for name, value in tree["module"].items() if name not in buffers and isinstance(value, TensorRef))
    return next((value.dtype for value in weights if value.dtype in FLOATS), "float32")


def buffers_of(tree: Any) -> dict[str, TensorRef]:
    """Return the buffers among a rank's model states."""
    return {name: tree["module"][name] for name in tree["buffer_names"] if name in tree["module"]}


@dataclass(frozen=True, slots=True)
class OwnState:
    """What the model states of one rank hold that those of others do not.

    Attributes:
        buffers: By name.
        fragments: At stage 3, the rank's part of each weight that is not trained.
    """

    buffers: dict[str, TensorRef]
    fragments: dict[str, TensorRef]


def own_states(main: Archive, others: Sequence[Archive]) -> list[OwnState]:
    """Return what each rank's model states hold of their own, ``main``'s first.

    Most ranks write the same description with other content, and there are as many files as ranks, so a description
    that was read before is not read again.
    """
    owns = []
    for archive in (main, *others):
        with reading_file(archive.path):
            same = archive.pickle == main.pickle
            tree = main.tree if same else archive.tree
            buffers, fragments = buffers_of(tree), dict(tree.get("frozen_param_fragments") or {})
            if same and archive is not main:
                buffers, fragments = (
                    {name: replace(ref, source=archive) for name, ref in refs.items()} for refs in (buffers, fragments)
                )
            owns.append(OwnState(buffers, fragments))
    return owns


def _optimizer_tree(archive: Archive, model: Any) -> Any:
    with reading_file(archive.path):
        tree = archive.tree
        shard = tree["optimizer_state_dict"]
        if tree.get("ds_config") != model.get("ds_config"):
            raise BadCheckpoint(
                f"{archive.path} was saved with another DeepSpeed config than the model states beside "
                "it: it belongs to another run. Put the right file there."
            )
        count = shard.get("partition_count")
        counts = set(count) if isinstance(count, list) else {count}
        if count is not None and counts != {model["dp_world_size"]}:
            raise BadCheckpoint(
                f"{archive.path} is the shard of a run on {', '.join(map(str, sorted(counts)))} ranks, the model "
                f"states beside it are of {model['dp_world_size']}: they belong to different runs."
            )
        return shard


def _same_run(main: Archive, other: Archive) -> None:
    with reading_file(other.path):
        if other.pickle == main.pickle:
            return
        for name in ("dp_world_size", "ds_version", "param_shapes", *_COUNTERS):
            mine, theirs = main.tree.get(name), other.tree.get(name)
            if mine != theirs:
                raise BadCheckpoint(
                    f"{other.path} and {main.path.name} belong to different runs or moments: {name} is "
                    f"{_short(theirs)} and {_short(mine)}. Put the files of one checkpoint together."
                )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _stage(shard: Mapping[str, Any]) -> int:
    stage = shard.get("zero_stage", 1)  # the bf16 wrapper of stage 1 does not write it
    if not isinstance(stage, Opaque):
        return int(stage)
    if stage.name_in_pickle[1] == "getattr":  # Python 3.11.0 to 3.11.3 write a member of an enum by its name
        return _STAGES[stage.args[1]]
    return int(stage.args[0])


def scaler_of(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the loss scaler in a rank's optimizer states."""
    scaler = shard.get("loss_scaler")
    attributes = scaler.attributes if isinstance(scaler, Opaque) else {}
    return {name: attributes[name] for name in _SCALER if attributes.get(name) is not None}


def hyperparameters(optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a torch optimizer's state dict says about its groups, without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer["param_groups"]]


Members = Mapping[str, tuple[int, int, int]]
"""What a flat tensor consists of, by parameter: position in it, first element of the parameter, number of elements."""


class _Gathering:
    """Collects the pieces of every parameter's state over the ranks' shards."""

    def __init__(self, state: SavedState, folder: Path) -> None:
        self._state = state
        self._folder = folder
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        self._dtypes: dict[tuple[str, str], str] = {}
        self._values: dict[int, Any] = {}

    def declare(self, name: str, shape: Sequence[int], group: int) -> None:
        """Note a trained parameter."""
        self._state.parameters[name] = SavedParameter(name, tuple(shape), group)

    def add(self, key: str, flat: TensorRef, members: Members) -> None:
        """Add the elements of a rank's flat tensor."""
        archive: Archive = flat.source
        whole, dtype, held = archive.span(flat), flat.dtype, flat.numel
        size = ITEMSIZE[dtype]
        for name, (at, start, numel) in members.items():
            if numel <= 0:
                continue
            if at < 0 or at + numel > held:
                raise BadCheckpoint(
                    f"{archive.path}: elements {at} to {at + numel} of a flat tensor of {held} should be those of "
                    f"parameter '{name}'. The file is damaged or belongs to another run."
                )
            piece = Piece(start, numel, Span(whole.record, whole.start + at * size, numel * size))
            self._pieces.setdefault((name, key), []).append(piece)
            if self._dtypes.setdefault((name, key), dtype) != dtype:
                raise BadCheckpoint(f"{archive.path}: {key} of '{name}' is {dtype}, on other ranks it is not.")

    def add_owner(self, owner: Mapping[str, Any], sizes: set[int], members: Members) -> None:
        """Add the optimizer state of a flat tensor.

        Args:
            owner: State by key.
            sizes: Elements of the flat tensor, with and without padding.
            members: What the tensor consists of.
        """
        for key, value in owner.items():
            if isinstance(value, TensorRef) and bool(value.shape) and value.numel in sizes:
                self.add(key, value, members)
                continue
            for name in members:
                if isinstance(value, TensorRef) and value.numel != 1:
                    self._state.parameters[name].others.setdefault(key, value)
                else:
                    self._scalar(name, key, value)

    def _scalar(self, name: str, key: str, value: Any) -> None:
        scalars = self._state.parameters[name].scalars
        known = scalars.setdefault(key, value)
        if known is not value and self._value(known) != self._value(value):
            where = value.source.path if isinstance(value, TensorRef) else self._folder
            raise BadCheckpoint(
                f"{where}: {key} of parameter '{name}' is {self._value(value)}, the other ranks have "
                f"{self._value(known)}. The shards are of different moments or runs: put those of one together."
            )

    def _value(self, value: Any) -> Any:
        """Return a single value; one that many parameters share is read once."""
        if id(value) not in self._values:
            self._values[id(value)] = scalar_value(value)
        return self._values[id(value)]

    def finish(self) -> None:
        """Put the pieces together."""
        for (name, key), pieces in self._pieces.items():
            parameter = self._state.parameters[name]
            dtype = self._dtypes[name, key]
            parameter.tensors[key] = tensor_of(name, key, parameter.numel, dtype, pieces, str(self._folder))
        for parameter in self._state.trained:
            if MASTER not in parameter.tensors and parameter.numel:
                raise BadCheckpoint(
                    f"{self._folder} holds no fp32 weights of the trained parameter '{parameter.name}'."
                )


def _add_stage_1_2(state: SavedState, tree: Any, shards: Sequence[Any]) -> None:
    """Stages 1 and 2: each group is one flat tensor, cut into as many parts as there are ranks."""
    gathering = _Gathering(state, state.folder)
    for group, shapes in enumerate(tree["param_shapes"]):
        for name, shape in shapes.items():
            gathering.declare(name, shape, group)
    reached: dict[str, int] = {}
    for shard in shards:
        base = shard["base_optimizer_state"]
        states = base if isinstance(base, list) else base["state"]
        for group, (flat, mapping) in enumerate(
            zip(shard["single_partition_of_fp32_groups"], shard["param_slice_mappings"], strict=True)
        ):
            members: dict[str, tuple[int, int, int]] = {}
            for name, address in mapping.items():
                at, numel = _address(address)
                members[name] = (at, reached.get(name, 0), numel)
                reached[name] = reached.get(name, 0) + numel
            gathering.add(MASTER, flat, members)
            owner = states[group] if isinstance(states, list) else states.get(group, {})
            sizes = {flat.numel, flat.numel + int(shard["group_paddings"][group])}
            gathering.add_owner(owner, sizes, members)
    gathering.finish()
    first = shards[0]["base_optimizer_state"]
    state.groups = hyperparameters(first) if not isinstance(first, list) else []
    state.scaler = scaler_of(shards[0])
    state.common["optimizer"] = _global_entries(shards[0])


def _global_entries(shard: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: shard[name] for name in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad") if name in shard
    }


def _address(address: Any) -> tuple[int, int]:
    if isinstance(address, Opaque):
        values = address.attributes or dict(zip(("numel", "start"), address.args, strict=False))
        return int(values["start"]), int(values["numel"])
    return int(address.start), int(address.numel)


def _add_stage_3(state: SavedState, tree: Any, shards: Sequence[Any]) -> None:
    """Stage 3: of each parameter every rank has ceil(numel / N) elements, zero-padded at the end."""
    gathering = _Gathering(state, state.folder)
    sub_groups = [dict(shapes) for shapes in tree["param_shapes"]]
    group_of = {
        sub_group: group
        for group, entry in enumerate(shards[0]["optimizer_state_dict"]["param_groups"])
        for sub_group in entry["params"]
    }
    for index, shapes in enumerate(sub_groups):
        for name, shape in shapes.items():
            gathering.declare(name, shape, group_of[index])
    for rank, shard in enumerate(shards):
        states = shard["optimizer_state_dict"]["state"]
        for index, (shapes, flat) in enumerate(zip(sub_groups, shard["fp32_flat_groups"], strict=True)):
            members: dict[str, tuple[int, int, int]] = {}
            at = 0
            for name in shapes:
                whole = state.parameters[name].numel
                width = -(-whole // len(shards))
                start = min(width * rank, whole)
                members[name] = (at, start, min(width, whole - start))
                at += width
            if at > flat.numel:
                raise BadCheckpoint(f"{flat.source.path}: sub-group {index} has {flat.numel} elements, not {at}.")
            gathering.add(MASTER, flat, members)
            gathering.add_owner(states.get(index, {}), {flat.numel}, members)
    gathering.finish()
    state.groups = hyperparameters(shards[0]["optimizer_state_dict"])
    state.scaler = scaler_of(shards[0])
    state.common["optimizer"] = _global_entries(shards[0])


def add_untrained(state: SavedState, tree: Any, owns: Sequence[OwnState]) -> None:
    """Add weights that no optimizer steps, and the whole forward weights where the files have them.

    Args:
        state: Is added to.
        tree: The first rank's model states.
        owns: What each rank's hold of their own.
    """
    frozen = dict(tree.get("frozen_param_shapes") or {})
    where = str(state.folder)
    for name, shape in frozen.items():
        parameter = SavedParameter(name, tuple(shape), None)
        if state.stage == 3:
            width = -(-parameter.numel // len(owns))
            pieces = []
            for rank, held in enumerate(own.fragments for own in owns):
                start = min(width * rank, parameter.numel)
                numel = min(width, parameter.numel - start)
                pieces.append(Piece(start, numel, held[name].source.span(held[name], 0, numel)))
            dtype = owns[0].fragments[name].dtype
            parameter.tensors[WEIGHTS] = tensor_of(name, WEIGHTS, parameter.numel, dtype, pieces, where)
        state.parameters[name] = parameter
    tied = tied_names(tree, state.buffers)
    state.aliases = {**{name: of for name, of in tied.items() if name not in state.parameters}, **state.aliases}
    known = {*state.buffers, *state.aliases, *(item.name for item in state.trained)}
    state.extras = {name: value for name, value in tree["module"].items() if name not in known}
    if state.stage == 3:
        state.extras = {
            name: value
            for name, value in state.extras.items()
            # What is left of a sharded weight, under its own name or a tied one, is an empty tensor.
            if name not in frozen and not (isinstance(value, TensorRef) and value.numel == 0)
        }
        return
    for name, ref in tree["module"].items():
        if name in state.buffers or name in state.aliases or not isinstance(ref, TensorRef):
            continue
        parameter = state.parameters.setdefault(name, SavedParameter(name, ref.shape, None))
        if parameter.shape != ref.shape:
            raise BadCheckpoint(f"{where}: '{name}' has the shapes {parameter.shape} and {ref.shape}.")
        if parameter.numel:
            piece = Piece(0, ref.numel, ref.source.span(ref))
            parameter.tensors[WEIGHTS] = tensor_of(name, WEIGHTS, ref.numel, ref.dtype, [piece], where)
