"""What a checkpoint holds, whatever its layout: parameters, and for each piece of their state where its bytes are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_zeroladder.checkpoint.archive import Archive, Span, read_bytes, read_record
from lightning_zeroladder.checkpoint.dtypes import ITEMSIZE
from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.pickles import TensorRef

__all__ = ["MASTER", "WEIGHTS", "Piece", "SavedParameter", "SavedState", "SavedTensor", "scalar_value", "tensor_of"]

MASTER = "fp32"
"""Key of the weights that the optimizer steps."""

WEIGHTS = "weights"
"""Key of the weights that forward uses, where a checkpoint keeps them whole."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of a flattened tensor, and the bytes that hold it.

    Attributes:
        start: First element.
        numel: Number of elements, at least 1.
        span: Their bytes.
    """

    start: int
    numel: int
    span: Span


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in pieces.

    Attributes:
        dtype: Name of the element type.
        numel: Elements of the whole.
        pieces: In order; together they cover the tensor.
    """

    dtype: str
    numel: int
    pieces: tuple[Piece, ...]

    def locate(self, start: int, numel: int) -> list[Span]:
        """Return the bytes of elements ``start`` to ``start + numel``, in order."""
        size = ITEMSIZE[self.dtype]
        spans = []
        for piece in self.pieces:
            first, last = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            if first < last:
                at = piece.span.start + (first - piece.start) * size
                spans.append(Span(piece.span.record, at, (last - first) * size))
        return spans


@dataclass(slots=True)
class SavedParameter:
    """One parameter with its optimizer state.

    Attributes:
        name: Name in the module.
        shape: Shape.
        group: Index of its parameter group; None if it is not trained.
        tensors: State of the parameter's shape by key: ``fp32``, ``exp_avg``, ..., and ``weights``.
        scalars: State that is one value: a Python value or a `TensorRef` to one element.
        others: State of another shape.
    """

    name: str
    shape: tuple[int, ...]
    group: int | None
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    others: dict[str, TensorRef] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def trained(self) -> bool:
        """Whether an optimizer steps it."""
        return self.group is not None


@dataclass(slots=True)
class SavedState:
    """A checkpoint, opened.

    Attributes:
        folder: The folder with its files.
        kind: ``native`` or ``universal``.
        stage: ZeRO stage it was saved at; None for a universal one.
        world_size: Ranks that saved it.
        parameters: By name, trained ones in the order of the optimizer's groups.
        aliases: Names of tied parameters by the name they are another name of.
        buffers: By name, as rank 0 saved them.
        groups: Hyperparameters of each parameter group.
        counters: DeepSpeed's counters by name.
        scaler: State of the loss scaler by name.
        client: What Lightning or the user added, as a tree.
        common: DeepSpeed's own entries that are no state of the parameters (``ds_config``, ...), as a tree.
        archives: Every file read.
        precision: dtype of the weights in forward.
        buffers_of_rank: Buffers of each rank, where ranks saved their own.
        extras: Further entries of the module's state dict; at stages 0 to 2 with the weights that are not trained.
    """

    folder: Path
    kind: str
    stage: int | None
    world_size: int
    parameters: dict[str, SavedParameter]
    aliases: dict[str, str]
    buffers: dict[str, TensorRef]
    groups: list[dict[str, Any]]
    counters: dict[str, int]
    scaler: dict[str, Any]
    client: dict[str, Any]
    common: dict[str, Any]
    archives: list[Archive]
    precision: str
    buffers_of_rank: Sequence[Mapping[str, TensorRef]] = ()
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> list[SavedParameter]:
        """Parameters with optimizer state, in order."""
        return [parameter for parameter in self.parameters.values() if parameter.trained]

    @property
    def state_keys(self) -> list[str]:
        """Keys of the element-wise optimizer state that occur."""
        keys = {key: None for parameter in self.trained for key in parameter.tensors if key not in (MASTER, WEIGHTS)}
        return list(keys)


def tensor_of(name: str, key: str, numel: int, dtype: str, pieces: Iterable[Piece], where: str) -> SavedTensor:
    """Put a tensor together, checking that its pieces cover it.

    Args:
        name: Parameter, for the message.
        key: State key, for the message.
        numel: Elements of the whole.
        dtype: Name of the element type.
        pieces: In any order.
        where: What they were found in, for the message.

    Raises:
        BadCheckpoint: If elements are missing or there twice.
    """
    ordered = sorted((piece for piece in pieces if piece.numel), key=lambda piece: piece.start)
    reached = 0
    for piece in ordered:
        if piece.start != reached:
            what = "are in no file" if piece.start > reached else "are there twice"
            first, last = min(reached, piece.start), max(reached, piece.start)
            raise BadCheckpoint(f"{where}: elements {first} to {last} of {key} of parameter '{name}' {what}.")
        reached += piece.numel
    if reached != numel:
        raise BadCheckpoint(f"{where}: {key} of parameter '{name}' has {numel} elements, the files hold {reached}.")
    return SavedTensor(dtype, numel, tuple(ordered))


_SMALL_BYTES = 4096

_NUMBERS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i", "bool": "<?", "uint8": "<B", "int16": "<h"}


def scalar_value(value: Any) -> Any:
    """Return a state value that is one number, reading it where it is still on disk.

    Raises:
        BadCheckpoint: If its type is none of those that count steps.
    """
    if not isinstance(value, TensorRef):
        return value
    import struct

    if value.dtype not in _NUMBERS:
        raise BadCheckpoint(f"{value.source.path}: a single value of type {value.dtype} cannot be read")
    span = value.source.span(value)
    small = span.record.nbytes <= _SMALL_BYTES
    return struct.unpack(_NUMBERS[value.dtype], read_record(span) if small else read_bytes(span))[0]
