"""Say what a checkpoint is, what it can be loaded into, and whether it is whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_zeroladder.checkpoint.archive import Archive, Span
from lightning_zeroladder.checkpoint.converting import Progress
from lightning_zeroladder.checkpoint.errors import BadCheckpoint, CheckpointMismatch, UnnamedGroups
from lightning_zeroladder.checkpoint.folders import find_checkpoint
from lightning_zeroladder.checkpoint.layout import native_files
from lightning_zeroladder.checkpoint.manifest import MANIFEST
from lightning_zeroladder.checkpoint.native import hyperparameters
from lightning_zeroladder.checkpoint.opening import Opened, open_checkpoint
from lightning_zeroladder.checkpoint.pickles import TensorRef
from lightning_zeroladder.checkpoint.reader import Reader, verify
from lightning_zeroladder.checkpoint.state import SavedState, scalar_value

__all__ = ["Inspection", "inspect", "inspection_to_json"]

_FAMILIES = (
    ({"exp_avg", "exp_avg_sq"}, "Adam-like"),
    ({"exp_avg_sq_row"}, "Adafactor-like"),
    ({"square_avg"}, "RMSprop-like"),
    ({"momentum_buffer"}, "SGD-like, with momentum"),
    ({"exp_avg"}, "Lion-like"),
    ({"sum"}, "Adagrad-like"),
)
"""What keys of the state suggest, where no manifest names the optimizer's class; the first that fits counts."""

_FILES = ("*_model_states.pt", "*optim_states.pt", "zero/*.pt", "zero/*/*.pt", MANIFEST)
"""What DeepSpeed calls the files of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint is.

    Attributes:
        path: The folder with the files.
        kind: ``native`` or ``universal``; None if it could not be opened.
        stage: ZeRO stage it was saved at; None for a universal one.
        world_size: Ranks that saved it.
        precision: Type of the weights in forward.
        parameters: Elements of all parameters.
        trained: Elements of trained parameters; None where the checkpoint does not tell.
        frozen: Elements of the others; None where the checkpoint does not tell.
        tensors: Number of parameters.
        largest: The largest parameters with their shapes, at most five.
        nbytes: Bytes of its files.
        state_bytes: Bytes of weights and optimizer state in them.
        optimizer: Class of the optimizer, or what its state suggests, such as ``Adam-like``; ``unknown`` or ``none``.
        state_keys: Keys of the element-wise optimizer state.
        groups: Number of parameter groups.
        learning_rates: Of each parameter group; None for one that has no such value.
        counters: DeepSpeed's counters.
        accumulate: Micro-batches per optimizer step, by the manifest or else DeepSpeed's config; None if unknown.
        micro_batch: Samples per micro-batch and rank, likewise.
        versions: Versions of the packages that saved it, as far as it tells.
        manifest: Whether it has a manifest.
        loads_into: What it can be loaded into, in words.
        whole: Whether every file is there and sound; None if not every byte was read.
        problem: What is wrong, if something is.
    """

    path: str
    kind: str | None = None
    stage: int | None = None
    world_size: int = 0
    precision: str = ""
    parameters: int = 0
    trained: int | None = 0
    frozen: int | None = 0
    tensors: int = 0
    largest: tuple[tuple[str, tuple[int, ...]], ...] = ()
    nbytes: int = 0
    state_bytes: int = 0
    optimizer: str = ""
    state_keys: tuple[str, ...] = ()
    groups: int = 0
    learning_rates: tuple[float | None, ...] = ()
    counters: Mapping[str, int] | None = None
    accumulate: int | None = None
    micro_batch: int | None = None
    versions: Mapping[str, str] | None = None
    manifest: bool = False
    loads_into: str = ""
    whole: bool | None = None
    problem: str = ""


def inspection_to_json(inspection: Inspection) -> dict[str, Any]:
    """Return an inspection as what JSON can carry."""
    return asdict(inspection)


def inspect(checkpoint: str | Path, *, full: bool = True, progress: Progress | None = None) -> Inspection:
    """Look at a checkpoint.

    Args:
        checkpoint: A native checkpoint of any stage, or a universal one.
        full: Read every byte of it once and compare it with the checksums in the files.
        progress: Called now and then with the bytes read and the bytes there are.

    Returns:
        What it is. Damage is no error here: ``whole`` is False and ``problem`` says what is wrong.

    Raises:
        BadCheckpoint: If there is no checkpoint at that path.
        OSError: If it cannot be read.
    """
    found = find_checkpoint(checkpoint)
    try:
        opened, named = _open(checkpoint)
    except (BadCheckpoint, CheckpointMismatch) as error:
        if found.root == found.folder and not _files(found.folder):
            raise
        return Inspection(path=str(found.folder), whole=False, problem=str(error))
    problem = ""
    if full:
        try:
            _read_all(opened, progress)
        except BadCheckpoint as error:
            problem = str(error)
    return _describe(opened, named=named, whole=not problem if full else None, problem=problem)


def _files(folder: Path) -> list[Path]:
    return sorted({path for name in _FILES for path in folder.glob(name) if path.is_file()})


def _open(checkpoint: str | Path) -> tuple[Opened, bool]:
    """Open a checkpoint, one of stage 0 also where the names of its optimizer's state cannot be found out.

    Returns:
        The checkpoint, and whether they are known.
    """
    try:
        return open_checkpoint(checkpoint), True
    except UnnamedGroups:
        return open_checkpoint(checkpoint, weights_only=True), False


def _read_all(opened: Opened, progress: Progress | None) -> None:
    """Read every record of every file once, also of files that opening it leaves alone, such as second copies."""
    opened_already = {archive.path: archive for archive in opened.state.archives}
    others = [Archive(path) for path in _files(opened.found.folder) if path not in opened_already and _is_archive(path)]
    archives = [*opened_already.values(), *others]
    total, done = sum(archive.nbytes for archive in archives), 0
    for archive in archives:
        with Reader() as reader:
            for record in archive.records.values():
                at = record.start
                for block in reader.blocks(Span(record, 0, record.nbytes)):
                    at += len(block)
                    if progress is not None:
                        progress(done + at, total)
            verify(reader.account, reader)
        done += archive.nbytes


def _is_archive(path: Path) -> bool:
    return path.suffix == ".pt"


def _describe(opened: Opened, *, named: bool, whole: bool | None, problem: str) -> Inspection:
    state, known = opened.state, opened.manifest
    sizes = sorted(state.parameters.values(), key=lambda item: -item.numel)
    tensors = (tensor for item in state.parameters.values() for tensor in item.tensors.values())
    keys, groups = (tuple(state.state_keys), state.groups) if named else _numbered(state)
    return Inspection(
        path=str(state.folder),
        kind=state.kind,
        stage=state.stage,
        world_size=state.world_size,
        precision=state.precision,
        parameters=sum(item.numel for item in sizes),
        trained=sum(item.numel for item in state.trained) if named else None,
        frozen=sum(item.numel for item in sizes if not item.trained) if named else None,
        tensors=len(sizes),
        largest=tuple((item.name, item.shape) for item in sizes[:5]),
        nbytes=sum(path.stat().st_size for path in _files(opened.found.folder)),
        state_bytes=sum(piece.span.nbytes for tensor in tensors for piece in tensor.pieces),
        optimizer=(known.optimizer if known else None) or _family(state, keys, groups),
        state_keys=keys,
        groups=len(groups),
        learning_rates=tuple(_number(group.get("lr")) for group in groups),
        counters=dict(state.counters),
        accumulate=known.accumulate if known else _setting(state, "gradient_accumulation_steps"),
        micro_batch=known.micro_batch if known else _setting(state, "train_micro_batch_size_per_gpu"),
        versions=dict(known.versions) if known else {"deepspeed": str(state.common.get("ds_version") or "unknown")},
        manifest=known is not None,
        loads_into=_loads_into(state, named=named),
        whole=whole,
        problem=problem,
    )


def _numbered(state: SavedState) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return the state keys and groups of an optimizer whose state has numbers in place of names."""
    saved = state.archives[0].tree["optimizer"]
    inner = saved.get("optimizer_state_dict", saved)
    keys = {
        key: None
        for entry in inner["state"].values()
        for key, value in entry.items()
        if isinstance(value, TensorRef) and value.shape
    }
    return tuple(keys), hyperparameters(inner)


def _number(value: Any) -> float | None:
    """Return a hyperparameter that is a number, or a tensor of one."""
    try:
        found = scalar_value(value)
    except BadCheckpoint:
        return None
    return float(found) if isinstance(found, int | float) else None


def _setting(state: SavedState, name: str) -> int | None:
    config = state.common.get("ds_config")
    value = config.get(name) if isinstance(config, dict) else None
    return value if isinstance(value, int) else None


def _family(state: SavedState, keys: Collection[str], groups: Collection[object]) -> str:
    if not groups:
        return "none"
    present = {*keys, *(key for item in state.trained for key in item.others)}
    return next((name for family, name in _FAMILIES if family <= present), "unknown")


def _loads_into(state: SavedState, *, named: bool) -> str:
    if not named:
        return "any stage, any world size, in a run, which knows the names that its optimizer's state lacks"
    if not state.trained:
        return "evaluation: it holds weights but no optimizer state"
    try:
        native_files(state, 1, state.world_size)
    except BadCheckpoint as error:
        return f"stage 0 only, any world size: {error}"
    return "any stage, any world size"
