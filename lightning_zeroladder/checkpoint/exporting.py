"""Export whole weights from a checkpoint of any stage as safetensors, streaming.

The safetensors library writes only tensors that are in memory; a model need not fit there, so the format is written
here: eight bytes with the length of the header, the header as JSON, and the tensors one after the other.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_zeroladder.checkpoint.archive import Span
from lightning_zeroladder.checkpoint.casting import FLOATS, cast
from lightning_zeroladder.checkpoint.converting import Progress
from lightning_zeroladder.checkpoint.dtypes import ITEMSIZE
from lightning_zeroladder.checkpoint.errors import BadCheckpoint, UnnamedGroups
from lightning_zeroladder.checkpoint.opening import Opened, open_checkpoint
from lightning_zeroladder.checkpoint.output import check_parent, check_space
from lightning_zeroladder.checkpoint.pickles import TensorRef
from lightning_zeroladder.checkpoint.reader import BLOCK_BYTES, Reader, verify
from lightning_zeroladder.checkpoint.state import MASTER, WEIGHTS, SavedTensor

__all__ = ["DTYPES", "Exported", "export", "size_of"]

_NAMES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"},
    **{"int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64"},
}

DTYPES = {
    **{"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"},
    **{name: name for name in FLOATS},
}
"""Spellings of the types that weights can be exported in."""

_UNITS = {
    **{"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}

_SHOWN = 5
"""Names of parameters that a message has room for."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote.

    Attributes:
        files: The safetensors files, in order, and the index last where there is one.
        tensors: Number of tensors.
        nbytes: Bytes of the tensors.
        tied: Names left out because they are another name of a tensor that is there.
    """

    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    tied: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to be exported: where its bytes are, and the type it gets.

    Attributes:
        name: Name in the module.
        shape: Shape.
        spans: Its bytes, in order; unless it is scattered.
        source: Type of the elements there.
        target: Type of the elements in the file.
        scattered: A buffer whose elements do not lie one after the other, as those of ``expand`` and ``t`` do.
    """

    name: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    source: str
    target: str
    scattered: TensorRef | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.target]

    def blocks(self, reader: Reader) -> Iterator[bytes | memoryview]:
        for span in self.spans:
            for block in reader.blocks(span):
                yield cast(block, self.source, self.target)
        if self.scattered is not None:
            for gathered in _gathered(self.scattered, reader):
                yield cast(gathered, self.source, self.target)


def _gathered(ref: TensorRef, reader: Reader) -> Iterator[bytes]:
    """Yield the elements of a scattered tensor in order. Its storage is held in memory, as there is no other way."""
    whole = ref.source.span(ref.storage_tensor())
    data = bytearray(whole.nbytes)
    reader.read_into([whole], memoryview(data))
    size = ITEMSIZE[ref.dtype]
    elements = np.frombuffer(data, dtype=np.dtype((np.void, size)))[ref.offset :]
    strided = np.lib.stride_tricks.as_strided(elements, ref.shape, [stride * size for stride in ref.stride])
    rows = max(1, BLOCK_BYTES * ref.shape[0] // (ref.numel * size))
    for first in range(0, ref.shape[0], rows):
        yield strided[first : first + rows].tobytes()


def size_of(text: str | int) -> int:
    """Return a size such as ``5GB``, ``500MB``, ``1.5GiB`` or ``1000`` in bytes.

    Raises:
        ValueError: If it is none.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    nbytes = int(float(match.group(1)) * unit) if match is not None and unit is not None else 0
    if nbytes < 1:
        raise ValueError(f"max_shard_size={text!r}: give a size such as 5GB, 500MB or 1.5GiB.")
    return nbytes


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    progress: Progress | None = None,
) -> Exported:
    """Write whole weights and buffers as safetensors.

    Trained parameters come from their fp32 weights, others and buffers from where the forward pass has them. Of tied
    weights one name is written, as Hugging Face's libraries do: a safetensors file does not hold the same memory twice.
    The other names are in the file's metadata under ``tied``, a JSON object of the name that is left out and the name
    that is there. The files appear when all is written and verified; what a killed export left, the same command
    overwrites.

    Args:
        checkpoint: A native checkpoint of any stage, or a universal one.
        out: A new file that ends in ``.safetensors``. Larger models go to ``<name>-00001-of-00002.safetensors`` and so
            on, with ``<name>.safetensors.index.json`` beside them, as Hugging Face's libraries read them.
        dtype: ``fp32``, ``bf16``, ``fp16`` or ``fp64`` for all floating-point tensors. Default: fp32 for what was
            trained, its own type for the rest. What fp16 has no room for becomes infinite, as it does in torch.
        max_shard_size: Largest file, such as ``5GB``; a tensor that is larger gets a file of its own.
        progress: Called now and then with the bytes written and the bytes expected.

    Raises:
        ValueError: For a type or a size that does not exist, or another kind of file name.
        BadCheckpoint: If the checkpoint is damaged or does not hold all weights.
        FileExistsError: If the file is there already.
        OSError: If there is no room, or a folder cannot be read or written.
    """
    target = _target_dtype(dtype)
    limit, path = size_of(max_shard_size), Path(out)
    index = path.with_name(f"{path.name}.index.json")
    _check_names(path, index)
    opened = _open(checkpoint)
    tensors = _tensors(opened, target)
    shards = _shards(tensors, limit)
    names = _file_names(path, len(shards))
    # Of several files the index comes last: without it they are what a killed export left.
    files = [*names, index] if len(names) > 1 else names
    nbytes = sum(tensor.nbytes for tensor in tensors)
    with _appearing(files, nbytes) as aside, Reader() as reader:
        done = 0
        for name, shard in zip(aside, shards, strict=False):
            for written in _write(name, shard, opened.state.aliases, reader):
                done += written
                if progress is not None:
                    progress(done, nbytes)
        verify(reader.account, reader)
        if len(names) > 1:
            aside[-1].write_text(_index(names, shards, nbytes), encoding="utf-8")
    return Exported(tuple(files), len(tensors), nbytes, opened.state.aliases)


def _check_names(path: Path, index: Path) -> None:
    if path.suffix != ".safetensors":
        raise ValueError(f"out={str(path)!r}: give a file name that ends in .safetensors.")
    for name in (path, index):
        if name.exists():
            raise FileExistsError(f"{name} exists already. Give the name of a new file, or remove it first.")
    check_parent(path)


@contextmanager
def _appearing(files: Sequence[Path], nbytes: int) -> Iterator[list[Path]]:
    """Give names to write ``nbytes`` under, which become ``files`` at the end, in order, or go away."""
    aside = [file.with_name(f".{file.name}.partial") for file in files]
    for name in aside:
        name.unlink(missing_ok=True)
    check_space(files[0].parent, nbytes)
    shown: list[Path] = []
    try:
        yield aside
        for name, file in zip(aside, files, strict=True):
            name.rename(file)
            shown.append(file)
    except BaseException:
        for name in (*aside, *shown):
            name.unlink(missing_ok=True)
        raise


def _open(checkpoint: str | Path) -> Opened:
    """Open a checkpoint, without the optimizer's state where only that is what cannot be told apart."""
    try:
        return open_checkpoint(checkpoint)
    except UnnamedGroups:
        opened = open_checkpoint(checkpoint, weights_only=True)
        if opened.state.precision != "float32":  # the fp32 weights would be lost
            raise
        return opened


def _target_dtype(dtype: str | None) -> str | None:
    if dtype is None:
        return None
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: weights are exported as {', '.join(sorted(DTYPES))}.")
    return DTYPES[dtype]


def _tensors(opened: Opened, target: str | None) -> list[_Tensor]:
    state, known = opened.state, opened.manifest
    found: list[_Tensor] = []
    # DeepSpeed saves not even the names of what it leaves out; a manifest has them.
    present = {**state.parameters, **state.aliases}
    missing = [name for name in (known.parameters if known else ()) if name not in present]
    for item in state.parameters.values():
        saved = item.tensors.get(MASTER) or item.tensors.get(WEIGHTS)
        if saved is None and item.numel:
            missing.append(item.name)
            continue
        saved = saved or SavedTensor("float32" if item.trained else state.precision, 0, ())
        spans = tuple(piece.span for piece in saved.pieces)
        found.append(_Tensor(item.name, item.shape, spans, saved.dtype, _as(saved.dtype, target)))
    if missing:
        raise BadCheckpoint(
            f"{state.folder} does not hold the weights of {_listed(missing)}: it was saved without frozen parameters. "
            "Save it with them (exclude_frozen_parameters=False)."
        )
    for name, ref in {**state.extras, **state.buffers}.items():
        if isinstance(ref, TensorRef) and name not in state.parameters:
            spans = (ref.source.span(ref),) if ref.contiguous else ()
            scattered = None if ref.contiguous else ref
            found.append(_Tensor(name, ref.shape, spans, ref.dtype, _as(ref.dtype, target), scattered))
    for tensor in found:
        if tensor.target not in _NAMES:
            raise BadCheckpoint(f"{state.folder}: '{tensor.name}' is {tensor.target}, which safetensors does not have.")
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + more


def _as(dtype: str, target: str | None) -> str:
    return target if target is not None and dtype in FLOATS else dtype


def _shards(tensors: Sequence[_Tensor], limit: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    # The format leaves no holes: with the widest elements first, all are aligned and can be mapped into memory.
    return [sorted(shard, key=lambda tensor: -ITEMSIZE[tensor.target]) for shard in shards]


def _file_names(path: Path, count: int) -> list[Path]:
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{number:05d}-of-{count:05d}{path.suffix}") for number in range(1, count + 1)]


def _write(path: Path, shard: Sequence[_Tensor], tied: Mapping[str, str], reader: Reader) -> Iterator[int]:
    """Write one file; yields the bytes of tensors written, block by block."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "tied": json.dumps(dict(tied))}}
    at = 0
    for tensor in shard:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.target],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in shard:
                for block in tensor.blocks(reader):
                    file.write(block)
                    yield len(block)
    except OSError as error:  # one about a descriptor does not say which file
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _index(names: Sequence[Path], shards: Sequence[Sequence[_Tensor]], nbytes: int) -> str:
    weight_map = {tensor.name: name.name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": weight_map}, indent=1) + "\n"
