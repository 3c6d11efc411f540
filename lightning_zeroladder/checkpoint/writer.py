"""Write archives that ``torch.load`` reads, streaming: a tensor goes from its source to the file in small blocks."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from isal import isal_zlib

from lightning_zeroladder.checkpoint.dtypes import ITEMSIZE
from lightning_zeroladder.checkpoint.pickles import Placed, TensorRef, dump_tree
from lightning_zeroladder.checkpoint.reader import Reader

__all__ = ["NewTensor", "write_archive", "zeros"]

_ALIGNMENT = 64
_RESERVE_BYTES = 1 << 20
_FALLOC_FL_KEEP_SIZE = 1
_LIMIT_32 = 0xFFFFFFFF
_BLOCK = bytes(1 << 16)
_GATHER_BYTES = 1 << 16
"""What is shorter waits for the rest of its record, until this much is waiting."""


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A tensor to be written.

    Attributes:
        dtype: Name of the element type.
        shape: Shape; the elements are written in row-major order.
        blocks: Its bytes, in order; asked for once.
    """

    dtype: str
    shape: tuple[int, ...]
    blocks: Iterable[bytes | memoryview] = field(repr=False)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def zeros(nbytes: int) -> Iterator[bytes | memoryview]:
    """Yield ``nbytes`` zero bytes in blocks."""
    while nbytes > 0:
        yield memoryview(_BLOCK)[: min(nbytes, len(_BLOCK))]
        nbytes -= len(_BLOCK)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class _Placing:
    """Gives each tensor of a tree a record. Tensors that share memory in the source share it here."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._shared: dict[tuple[int, str, int, int], str] = {}
        self._new: dict[int, str] = {}
        self.records: list[tuple[str, int, Iterable[bytes | memoryview]]] = []

    def place(self, value: Any) -> Placed | None:
        if isinstance(value, NewTensor):
            if id(value) not in self._new:
                self._new[id(value)] = self._record(value.dtype, value.numel, value.blocks)
            key = self._new[id(value)]
            return Placed(key, value.dtype, value.numel, 0, value.shape, _row_major(value.shape))
        if not isinstance(value, TensorRef):
            return None
        # A tensor that lies scattered in its storage is copied with the whole of it.
        whole = value if value.contiguous else value.storage_tensor()
        identity = (id(value.source), value.storage.key, whole.offset, whole.numel)
        key = self._shared.get(identity, "")
        if not key:
            key = self._record(value.dtype, whole.numel, self._reader.blocks(value.source.span(whole)))
            self._shared[identity] = key
        if value.contiguous:
            return Placed(key, value.dtype, value.numel, 0, value.shape, _row_major(value.shape))
        return Placed(key, value.dtype, whole.numel, value.offset, value.shape, value.stride)

    def _record(self, dtype: str, numel: int, blocks: Iterable[bytes | memoryview]) -> str:
        key = str(len(self.records))
        self.records.append((f"data/{key}", numel * ITEMSIZE[dtype], blocks))
        return key


def write_archive(path: Path, tree: Any, reader: Reader) -> int:
    """Write a tree as ``torch.save`` would.

    Args:
        path: File to write; replaced where it exists.
        tree: Plain data, with `TensorRef` for tensors to be copied and `NewTensor` for those to be made.
        reader: Reads what is copied, and keeps account of it.

    Returns:
        Bytes written.

    Raises:
        TypeError: If the tree holds what has no place in a checkpoint.
        OSError: If the file cannot be written.
    """
    placing = _Placing(reader)
    pickled = dump_tree(tree, placing.place)
    with path.open("wb", buffering=0) as file:
        _reserve(file, sum(nbytes for _, nbytes, _ in placing.records))
        zip_file = _Zip(file, "archive")
        zip_file.add("data.pkl", len(pickled), [pickled])
        zip_file.add("byteorder", 6, [b"little"])
        for name, nbytes, blocks in placing.records:
            zip_file.add(name, nbytes, blocks)
        zip_file.add("version", 2, [b"3\n"])
        return zip_file.close()


def _reserve(file: BinaryIO, nbytes: int) -> None:
    """Have a large file's blocks allocated at once where the file system can: writing it is then a third faster.

    Not ``os.posix_fallocate``, which writes zeros where it cannot.
    """
    if nbytes < _RESERVE_BYTES:
        return
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return
    arguments = (file.fileno(), _FALLOC_FL_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(nbytes))
    if fallocate(*arguments) != 0 and ctypes.get_errno() == errno.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))


class _Zip:
    """The zip format as torch writes it: records stored uncompressed, each starting at a multiple of 64 bytes.

    The standard library's zipfile cannot align records, and computes its checksums with a slower zlib.
    """

    def __init__(self, file: BinaryIO, folder: str) -> None:
        self._file = file
        self._folder = folder
        self._at = 0
        self._waiting = bytearray()
        self._entries: list[tuple[bytes, int, int, int]] = []
        self._late: list[tuple[int, int]] = []

    def _write(self, data: bytes | memoryview) -> None:
        self._at += len(data)
        if len(data) < _GATHER_BYTES:
            self._waiting += data
        if max(len(data), len(self._waiting)) >= _GATHER_BYTES:
            self._flush()
        if len(data) >= _GATHER_BYTES:
            self._write_now(data)

    def _flush(self) -> None:
        self._write_now(self._waiting)
        self._waiting = bytearray()

    def _write_now(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            try:
                written = self._file.write(view)
            except OSError as error:  # one about a descriptor does not say which file
                raise OSError(error.errno, error.strerror, str(self._file.name)) from error
            view = view[written:]

    def add(self, name: str, nbytes: int, blocks: Iterable[bytes | memoryview]) -> None:
        """Write a record of ``nbytes`` bytes."""
        self._flush()
        encoded = f"{self._folder}/{name}".encode()
        header_at = self._at
        self._write(self._local_header(encoded, nbytes, 0))
        written, crc = 0, 0
        for block in blocks:
            crc = isal_zlib.crc32(block, crc)
            written += len(block)
            self._write(block)
        if written != nbytes:
            raise RuntimeError(f"record {name} of {self._file.name}: {written} bytes came, {nbytes} were announced")
        self._entries.append((encoded, header_at, nbytes, crc))
        self._set_checksum(header_at + 14, crc)

    def _set_checksum(self, at: int, crc: int) -> None:
        """Put a checksum into a record's header; into one that is in the file already when all is written."""
        waiting_at = self._at - len(self._waiting)
        if at >= waiting_at:
            struct.pack_into("<I", self._waiting, at - waiting_at, crc)
        else:
            self._late.append((at, crc))

    def _local_header(self, name: bytes, nbytes: int, crc: int) -> bytes:
        large = nbytes >= _LIMIT_32
        zip64 = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if large else b""
        size = _LIMIT_32 if large else nbytes
        start = self._at + 30 + len(name) + len(zip64)
        padding = -(start + 4) % _ALIGNMENT
        extra = zip64 + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        header = struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0x21, crc, size, size, len(name), len(extra))
        return header + name + extra

    def close(self) -> int:
        """Write the directory; return the size of the file."""
        directory_at = self._at
        for name, at, nbytes, crc in self._entries:
            large = nbytes >= _LIMIT_32
            fields = ([nbytes, nbytes] if large else []) + ([at] if at >= _LIMIT_32 else [])
            extra = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
            size = _LIMIT_32 if large else nbytes
            head = struct.pack("<4s6H3I", b"PK\1\2", 45, 45, 0, 0, 0, 0x21, crc, size, size)
            tail = struct.pack("<5H2I", len(name), len(extra), 0, 0, 0, 0, min(at, _LIMIT_32))
            self._write(head + tail + name + extra)
        size, count = self._at - directory_at, len(self._entries)
        end_at = self._at
        self._write(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, directory_at))
        self._write(struct.pack("<4sIQI", b"PK\6\7", 0, end_at, 1))
        few = min(count, 0xFFFF)
        self._write(
            struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, few, few, min(size, _LIMIT_32), min(directory_at, _LIMIT_32), 0)
        )
        self._flush()
        for at, crc in self._late:
            self._file.seek(at)
            self._write_now(struct.pack("<I", crc))
        return self._at
