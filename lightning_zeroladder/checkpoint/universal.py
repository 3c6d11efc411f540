"""DeepSpeed's universal checkpoints: a folder per parameter, a file per state key. Read and written here.

What is written loads with DeepSpeed's ``load_universal`` at stages 1, 2 and 3 (where the optimizer has Adam's keys) and
holds what DeepSpeed's own converter leaves out: state of any optimizer, buffers, frozen weights in their own type.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_zeroladder.checkpoint.archive import Archive
from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.native import (
    add_untrained,
    hyperparameters,
    own_states,
    reading_file,
    scaler_of,
    skeleton,
)
from lightning_zeroladder.checkpoint.pickles import Size, TensorRef
from lightning_zeroladder.checkpoint.reader import Reader
from lightning_zeroladder.checkpoint.state import (
    MASTER,
    WEIGHTS,
    Piece,
    SavedParameter,
    SavedState,
    SavedTensor,
    tensor_of,
)
from lightning_zeroladder.checkpoint.writer import NewTensor, write_archive

__all__ = [
    "blocks_of",
    "model_tree",
    "parameter_folders",
    "read_universal",
    "universal_bytes",
    "write_common",
    "write_parameter",
]

_OURS = "lightning_zeroladder"
_STEP = "step"


def parameter_folders(folder: Path) -> list[Path]:
    """Return the folder of each parameter.

    Raises:
        BadCheckpoint: If a conversion that did not end left its temporary files.
    """
    temporary = folder / "tmp"
    if temporary.is_dir():
        raise BadCheckpoint(
            f"{temporary} is what DeepSpeed's converter leaves when it does not end, or when another conversion wrote "
            "into the same folder: the weights beside it can be wrong. Convert again into a new folder."
        )
    return sorted(entry for entry in (folder / "zero").iterdir() if entry.is_dir())


def read_universal(folder: Path) -> SavedState:
    """Open a universal checkpoint, ours or DeepSpeed's. Reads no tensor but single values.

    Args:
        folder: The folder with ``zero`` in it.

    Raises:
        BadCheckpoint: If it is not whole.
    """
    present = {entry.name for entry in parameter_folders(folder)}
    models = [Archive(path) for path in _model_files(folder)]
    shared = Archive(_existing(folder / "zero" / "optimizer_state.pt"))
    main = models[0]
    with reading_file(main.path):
        tree = main.tree
        state = skeleton(folder, main, tree)
        state.kind, state.stage = "universal", None
        state.archives += [shared, *models[1:]]
        shapes = [dict(entry) for entry in tree["param_shapes"] or []]
        _check_ranks(folder, models, int(tree["dp_world_size"]))
    with reading_file(shared.path):
        optimizer = shared.tree
        groups = optimizer["param_groups"]
        ours = optimizer.get(_OURS) or {}
        state.groups = hyperparameters(optimizer)
        state.scaler = dict(ours.get("scaler") or scaler_of(optimizer))
        state.common["optimizer"] = {
            name: optimizer[name]
            for name in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
            if name in optimizer
        }
        scalars = ours.get("scalars") or {}
        group_of = _group_of(groups, len(shapes))
    for index, entry in enumerate(shapes):
        for name, shape in entry.items():
            if name not in present:
                raise BadCheckpoint(f"{folder / 'zero'} has no folder of parameter '{name}': it is not whole.")
            parameter = SavedParameter(name, tuple(shape), group_of[index], scalars=dict(scalars.get(name) or {}))
            state.parameters[name] = parameter
            _add_shared_scalars(parameter, optimizer.get("optimizer_state_dict"), index)
            _read_parameter(state, parameter, folder / "zero" / name, (ours.get("keys") or {}).get(name, ()))
    if not ours:
        _check_keys(state)
    with reading_file(main.path):
        stage_3 = tree.get("frozen_param_fragments") is not None and not _has_weights(tree)
        state.stage = 3 if stage_3 else 0
        owns = own_states(main, models[1:] if stage_3 else ())
        add_untrained(state, tree, owns)
        state.stage = None
        if stage_3:
            state.buffers_of_rank = [own.buffers for own in owns]
    return state


def _add_shared_scalars(parameter: SavedParameter, inner: Any, index: int) -> None:
    """Add the single values of a sub-group, which DeepSpeed's converter leaves here for stage 3, not with each one."""
    shared = ((inner or {}).get("state") or {}).get(index) or {}
    for key, value in shared.items():
        if value is not None and (not isinstance(value, TensorRef) or value.numel == 1):
            parameter.scalars.setdefault(key, value)


def _has_weights(tree: Any) -> bool:
    """Whether the model states hold whole weights; in those of stage 3 all are empty."""
    frozen = tree.get("frozen_param_shapes") or {}
    shapes = {**{name: shape for entry in tree["param_shapes"] or [] for name, shape in entry.items()}, **frozen}
    held = {name: ref for name, ref in tree["module"].items() if name in shapes and isinstance(ref, TensorRef)}
    return frozen.keys() <= held.keys() and all(ref.shape == tuple(shapes[name]) for name, ref in held.items())


def _group_of(groups: Sequence[Any], entries: int) -> dict[int, int]:
    """Return the parameter group of each entry of ``param_shapes``: at stage 3 a group can have several."""
    if entries == len(groups):
        return {index: index for index in range(entries)}
    return {number: index for index, group in enumerate(groups) for number in group["params"]}


def _model_files(folder: Path) -> list[Path]:
    whole = folder / "mp_rank_00_model_states.pt"
    if whole.exists():
        return [whole]
    files: list[Path] = []
    while (folder / f"zero_pp_rank_{len(files)}_mp_rank_00_model_states.pt").exists():
        files.append(folder / f"zero_pp_rank_{len(files)}_mp_rank_00_model_states.pt")
    return files or [_existing(whole)]


def _check_ranks(folder: Path, models: Sequence[Archive], world_size: int) -> None:
    """Compare the model states of stage 3, one of each rank, with the number of ranks that saved them."""
    if models[0].path.name.startswith("zero_pp_rank_") and len(models) != world_size:
        raise BadCheckpoint(
            f"{folder} comes from {world_size} ranks, but has model states of {len(models)}: those behind "
            f"{models[-1].path.name} are missing or left over. The universal checkpoint is not whole."
        )


def _check_keys(state: SavedState) -> None:
    """Check that parameters of a group have the same files: DeepSpeed's converter lists them nowhere."""
    for group in range(len(state.groups)):
        members = {item.name: {*item.tensors, *item.scalars} for item in state.trained if item.group == group}
        every = set().union(*members.values())
        for name, keys in members.items():
            if missing := sorted(every - keys):
                raise BadCheckpoint(
                    f"{state.folder / 'zero' / name / missing[0]}.pt is missing, which other parameters of its group "
                    "have: the universal checkpoint is not whole."
                )


def _existing(path: Path) -> Path:
    if not path.exists():
        raise BadCheckpoint(f"{path} is missing: the universal checkpoint is not whole.")
    return path


def _read_parameter(state: SavedState, parameter: SavedParameter, folder: Path, keys: Sequence[str]) -> None:
    for path in [_existing(folder / f"{key}.pt") for key in keys] or sorted(folder.glob("*.pt")):
        archive = Archive(path)
        state.archives.append(archive)
        with reading_file(path):
            value = archive.tree
            value = value["param"] if isinstance(value, dict) else value
            if not isinstance(value, TensorRef) or (path.stem == _STEP and value.numel == 1):
                parameter.scalars.setdefault(path.stem, value)
                continue
            piece = Piece(0, value.numel, archive.span(value))
            parameter.tensors[path.stem] = tensor_of(
                parameter.name, path.stem, parameter.numel, value.dtype, [piece], str(path)
            )
    if MASTER not in parameter.tensors and parameter.numel:
        raise BadCheckpoint(f"{folder / 'fp32.pt'} is missing: the universal checkpoint is not whole.")


def write_parameter(folder: Path, parameter: SavedParameter, reader: Reader) -> int:
    """Write the files of one trained parameter below ``folder/zero``.

    Returns:
        Bytes written.
    """
    target = folder / "zero" / parameter.name
    target.mkdir(parents=True, exist_ok=True)
    written = 0
    for key, tensor in parameter.tensors.items():
        if key != WEIGHTS:
            tree = {"param": NewTensor(tensor.dtype, parameter.shape, blocks_of(tensor, reader)), "cat_dim": 0}
            written += write_archive(target / f"{key}.pt", tree, reader)
    if _STEP in parameter.scalars:
        written += write_archive(target / f"{_STEP}.pt", parameter.scalars[_STEP], reader)
    return written


def blocks_of(tensor: SavedTensor, reader: Reader) -> Iterator[memoryview]:
    """Yield the bytes of a tensor that lies in pieces."""
    return reader.blocks(*(piece.span for piece in tensor.pieces))


def universal_bytes(state: SavedState) -> int:
    """Return about how many bytes the universal form of a checkpoint takes."""
    tensors = (
        piece.span.nbytes
        for parameter in state.trained
        for key, tensor in parameter.tensors.items()
        if key != WEIGHTS
        for piece in tensor.pieces
    )
    files = sum(1 + len(parameter.tensors) for parameter in state.trained)
    return sum(tensors) + 1024 * files + 2 * sum(_nbytes(state, name) for name in _untrained(state))


def _untrained(state: SavedState) -> list[str]:
    return [parameter.name for parameter in state.parameters.values() if not parameter.trained]


def _nbytes(state: SavedState, name: str) -> int:
    tensors = state.parameters[name].tensors.values()
    return sum(piece.span.nbytes for tensor in tensors for piece in tensor.pieces)


def write_common(folder: Path, state: SavedState, reader: Reader) -> int:
    """Write what is not a trained parameter's: model states, and the optimizer's groups and counters.

    Returns:
        Bytes written.
    """
    (folder / "zero").mkdir(parents=True, exist_ok=True)
    written = write_archive(folder / "zero" / "optimizer_state.pt", _optimizer_tree(state), reader)
    # DeepSpeed looks for the first name at stages 1 and 2, for the second at stage 3.
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        written += write_archive(folder / name, model_tree(state, reader), reader)
    return written


def _optimizer_tree(state: SavedState) -> dict[str, Any]:
    groups = [{**values, "params": [index]} for index, values in enumerate(state.groups)]
    first = next((parameter.scalars for parameter in state.trained if _STEP in parameter.scalars), {})
    # DeepSpeed's stage 3 takes the step count of all parameters from here; it has no other place for it.
    inner = {"state": {0: {_STEP: first.get(_STEP)}}, "param_groups": groups}
    own = {
        "scaler": state.scaler,
        "keys": {item.name: [key for key in item.tensors if key != WEIGHTS] for item in state.trained},
        "scalars": {parameter.name: parameter.scalars for parameter in state.trained},
    }
    shared = {"ds_version": state.common["ds_version"], **state.common.get("optimizer", {})}
    return {**shared, "param_groups": groups, "optimizer_state_dict": inner, _OURS: own}


def model_tree(state: SavedState, reader: Reader, weights: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Return the model states: buffers, weights that no optimizer steps, counters, and what Lightning added.

    Args:
        state: The checkpoint.
        reader: Reads what is copied.
        weights: Called with the name of a trained parameter, returns its forward weights; leave out to have none.
    """
    module: OrderedDict[str, Any] = OrderedDict()
    for parameter in state.parameters.values():
        if parameter.trained and weights is not None:
            module[parameter.name] = weights(parameter.name)
        elif not parameter.trained and WEIGHTS in parameter.tensors:
            tensor = parameter.tensors[WEIGHTS]
            module[parameter.name] = NewTensor(tensor.dtype, parameter.shape, blocks_of(tensor, reader))
    for name, of in state.aliases.items():
        if of in module:
            module[name] = module[of]
    module.update({name: value for name, value in state.extras.items() if name not in state.parameters})
    module.update(state.buffers)
    shapes = [
        OrderedDict((item.name, Size(item.shape)) for item in state.trained if item.group == index)
        for index in range(len(state.groups))
    ]
    frozen = OrderedDict((name, Size(state.parameters[name].shape)) for name in _untrained(state))
    return {
        "module": module,
        "buffer_names": list(state.buffers),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": frozen,
        "shared_params": dict(state.aliases),
        "frozen_param_fragments": None,
        "data_sampler": None,
        "random_ltd": None,
        **{"skipped_steps": 0, "global_steps": 0, "global_samples": 0, **state.counters},
        "dp_world_size": state.world_size,
        "mp_world_size": 1,
        "ds_config": state.common["ds_config"],
        "ds_version": state.common["ds_version"],
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
        **state.client,
    }
