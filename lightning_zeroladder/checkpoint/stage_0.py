"""Stage 0 of a native checkpoint: the torch optimizer's own state, whose parameters have numbers but no names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_zeroladder.checkpoint.archive import read_bytes
from lightning_zeroladder.checkpoint.casting import FLOATS, cast
from lightning_zeroladder.checkpoint.errors import CheckpointMismatch, UnnamedGroups
from lightning_zeroladder.checkpoint.pickles import TensorRef
from lightning_zeroladder.checkpoint.reader import Reader, verify
from lightning_zeroladder.checkpoint.state import MASTER, Piece, SavedParameter, SavedState, SavedTensor

__all__ = ["add_stage_0", "tied_names"]

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_COMPARED_ELEMENTS = 1024


def tied_names(tree: Any, buffers: Mapping[str, Any]) -> dict[str, str]:
    """Return names in the module whose tensor is the very same storage as an earlier one's, with that one's name."""
    seen: dict[tuple[str, int, tuple[int, ...]], str] = {}
    tied: dict[str, str] = {}
    for name, ref in tree["module"].items():
        if isinstance(ref, TensorRef) and name not in buffers and ref.numel:
            first = seen.setdefault((ref.storage.key, ref.offset, ref.shape), name)
            if first != name:
                tied[name] = first
    return tied


def add_stage_0(state: SavedState, tree: Any, groups: Sequence[Sequence[str]] | None) -> None:
    """Add the optimizer state of stage 0.

    Args:
        state: Receives the parameters.
        tree: The model states.
        groups: Names of the parameters of each group of the optimizer, where they are known.

    Raises:
        BadCheckpoint: If names are needed to tell which state belongs to which parameter.
        CheckpointMismatch: If the given groups do not fit.
    """
    saved = tree.get("optimizer")
    if not saved:
        return
    inner = saved.get("optimizer_state_dict", saved)
    state.groups = [{key: value for key, value in group.items() if key != "params"} for group in inner["param_groups"]]
    state.scaler = {name: saved[name] for name in _SCALER if saved.get(name) is not None}
    tied = tied_names(tree, state.buffers)
    module = {
        name: ref
        for name, ref in tree["module"].items()
        if isinstance(ref, TensorRef) and name not in state.buffers and name not in tied
    }
    if "fp32_groups_flat" in saved:
        _add_flat(state, module, saved, inner, groups)
        return
    masters: list[list[TensorRef | None]] = saved.get("fp32_groups") or [
        [None] * len(group["params"]) for group in inner["param_groups"]
    ]
    numbers = [group["params"] for group in inner["param_groups"]]
    shapes = [
        [_shape(inner["state"].get(number, {}), master) for number, master in zip(group, row, strict=True)]
        for group, row in zip(numbers, masters, strict=True)
    ]
    names = _named(state, module, groups, shapes, masters)
    for index, (group, row, members) in enumerate(zip(numbers, masters, names, strict=True)):
        for number, master, name in zip(group, row, members, strict=True):
            weights = master if master is not None else module[name]
            parameter = SavedParameter(name, weights.shape, index)
            state.parameters[name] = parameter
            if parameter.numel:
                parameter.tensors[MASTER] = _whole(weights)
            _add_state(parameter, inner["state"].get(number, {}))
    _sort_out_scalars(state)
    _share_steps(state)


def _share_steps(state: SavedState) -> None:
    """Give the parameters of a group one step count where DeepSpeed's FusedAdam, which keeps it in the group, saved it.

    Of the counts in the parameters' own states only the last one advances.
    """
    for index, group in enumerate(state.groups):
        members = [item for item in state.trained if item.group == index and isinstance(item.scalars.get("step"), int)]
        if "step" in group and "bias_correction" in group:
            for item in members:
                item.scalars["step"] = max(member.scalars["step"] for member in members)


def _sort_out_scalars(state: SavedState) -> None:
    """Tell the element-wise state of a parameter without dimensions from its step count: both are single values."""
    shaped = {key for parameter in state.trained for key in parameter.tensors} - {MASTER}
    for parameter in state.trained:
        if parameter.shape:
            continue
        for key, value in list(parameter.scalars.items()):
            if isinstance(value, TensorRef) and (key in shaped or (not shaped and key != "step")):
                parameter.tensors[key] = _whole(parameter.scalars.pop(key))


def _add_state(parameter: SavedParameter, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        if isinstance(value, TensorRef) and value.shape == parameter.shape and value.shape:
            parameter.tensors[key] = _whole(value)
        elif isinstance(value, TensorRef) and value.numel != 1:
            parameter.others[key] = value
        else:
            parameter.scalars[key] = value


def _whole(ref: TensorRef, start: int = 0, numel: int | None = None) -> SavedTensor:
    numel = ref.numel if numel is None else numel
    return SavedTensor(ref.dtype, numel, (Piece(0, numel, ref.source.span(ref, start, numel)),))


def _shape(entries: Mapping[str, Any], master: TensorRef | None) -> tuple[int, ...] | None:
    """Return the shape of the parameter that a numbered state belongs to, or None where nothing tells."""
    if master is not None:
        return master.shape
    shapes = {value.shape for value in entries.values() if isinstance(value, TensorRef) and value.shape}
    return shapes.pop() if len(shapes) == 1 else None


def _add_flat(
    state: SavedState,
    module: Mapping[str, TensorRef],
    saved: Mapping[str, Any],
    inner: Mapping[str, Any],
    groups: Sequence[Sequence[str]] | None,
) -> None:
    """DeepSpeed's fused optimizers: one flat tensor per group."""
    flats: list[TensorRef] = saved["fp32_groups_flat"]
    if groups is None:
        if len(flats) > 1 or flats[0].numel != sum(ref.numel for ref in module.values()):
            raise _unnamed(state, len(flats))
        groups = [list(module)]
    if len(groups) != len(flats):
        raise _other_groups(state, len(flats), len(groups))
    for index, (flat, members) in enumerate(zip(flats, groups, strict=True)):
        owner = inner["state"].get(inner["param_groups"][index]["params"][0], {})
        at = 0
        for name in members:
            parameter = SavedParameter(name, module[name].shape, index)
            state.parameters[name] = parameter
            parameter.tensors[MASTER] = _whole(flat, at, parameter.numel)
            for key, value in owner.items():
                if isinstance(value, TensorRef) and value.shape == flat.shape:
                    parameter.tensors[key] = _whole(value, at, parameter.numel)
                else:
                    _add_state(parameter, {key: value})
            at += parameter.numel
        if at > flat.numel:
            raise CheckpointMismatch(
                f"{state.folder}: group {index} holds {flat.numel} elements, the parameters named for it have {at}. "
                "Build the optimizer as the run did that saved it."
            )


def _named(
    state: SavedState,
    module: Mapping[str, TensorRef],
    groups: Sequence[Sequence[str]] | None,
    shapes: Sequence[Sequence[tuple[int, ...] | None]],
    masters: Sequence[Sequence[TensorRef | None]],
) -> list[list[str]]:
    """Return the parameter name of every number."""
    if groups is not None:
        if len(groups) != len(shapes):
            raise _other_groups(state, len(shapes), len(groups))
        return [
            _subsequence(state, module, index, members, row)
            for index, (members, row) in enumerate(zip(groups, shapes, strict=True))
        ]
    flat = [shape for row in shapes for shape in row]
    in_order = list(module)
    if len(shapes) == 1 and len(flat) == len(in_order):
        pairs = zip(flat, in_order, strict=True)
        if all(shape is None or shape == module[name].shape for shape, name in pairs):
            return [in_order]
    return _by_content(state, module, shapes, masters)


def _subsequence(
    state: SavedState,
    module: Mapping[str, TensorRef],
    index: int,
    members: Sequence[str],
    row: Sequence[tuple[int, ...] | None],
) -> list[str]:
    """Return the members that the saved group has: all of them, or those whose shapes follow each other as saved."""
    found: list[str] = []
    for name in members:
        if len(found) == len(row):
            break
        if name not in module:
            raise CheckpointMismatch(f"{state.folder} holds no parameter '{name}'. Build the model as it was saved.")
        if len(members) == len(row) or row[len(found)] in (None, module[name].shape):
            found.append(name)
    fits = all(shape in (None, module[name].shape) for name, shape in zip(found, row, strict=False))
    if len(found) != len(row) or not fits:
        raise CheckpointMismatch(
            f"{state.folder}: parameter group {index} was saved with {len(row)} parameters of other shapes than the "
            f"{len(members)} of this optimizer. Build the optimizer with the same groups in the same order."
        )
    return found


def _by_content(
    state: SavedState,
    module: Mapping[str, TensorRef],
    shapes: Sequence[Sequence[tuple[int, ...] | None]],
    masters: Sequence[Sequence[TensorRef | None]],
) -> list[list[str]]:
    """Find each parameter by its shape and, where there are fp32 weights, by their rounded values."""
    free = dict(module)
    names: list[list[str]] = []
    alike: list[tuple[int, list[str]]] = []
    for shape_row, master_row in zip(shapes, masters, strict=True):
        names.append([])
        for shape, master in zip(shape_row, master_row, strict=True):
            fits = [name for name, ref in free.items() if ref.shape == shape and (not master or _same(master, ref))]
            if master and not fits:
                _check_damage([master, *(ref for ref in free.values() if ref.shape == shape)])
            if shape is None or not fits or (len(fits) > 1 and master is None):
                raise _unnamed(state, len(shapes))
            alike.append((len(names) - 1, fits))
            names[-1].append(fits[0])
            del free[fits[0]]
    # Those that are equal so far, such as the scales of norms, are told apart by their order, which a group keeps.
    if any(not set(fits) <= set(names[index]) for index, fits in alike):
        raise _unnamed(state, len(shapes))
    return names


def _same(master: TensorRef, weights: TensorRef) -> bool:
    if master.dtype not in FLOATS or weights.dtype not in FLOATS:
        return False
    numel = min(master.numel, _COMPARED_ELEMENTS)
    exact = read_bytes(master.source.span(master, 0, numel))
    rounded = read_bytes(weights.source.span(weights, 0, numel))
    return bytes(cast(exact, master.dtype, weights.dtype)) == rounded


def _check_damage(refs: Sequence[TensorRef]) -> None:
    """Say so if tensors do not match because their bytes are not those that were saved."""
    with Reader() as reader:
        for ref in refs:
            for _ in reader.blocks(ref.source.span(ref)):
                pass
        verify(reader.account, reader)


def _unnamed(state: SavedState, groups: int) -> UnnamedGroups:
    return UnnamedGroups(
        f"{state.folder} was saved at stage 0, where DeepSpeed writes the optimizer state of its {groups} parameter "
        "groups without names, and shapes do not tell them apart. Load it in a run (fit with ckpt_path, which knows "
        "the groups), or save it again with zero_auto, whose manifest has the names."
    )


def _other_groups(state: SavedState, saved: int, given: int) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"{state.folder} was saved with {saved} parameter groups, this optimizer has {given}. Build the optimizer with "
        "the same groups in the same order."
    )
