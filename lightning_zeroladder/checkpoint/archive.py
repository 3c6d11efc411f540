"""The zip archives that ``torch.save`` writes: where each tensor's bytes are, and how to read just some of them."""

from __future__ import annotations

import os
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from isal import isal_zlib

from lightning_zeroladder.checkpoint.dtypes import ITEMSIZE
from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.pickles import Opaque, TensorRef, load_tree

__all__ = ["Archive", "Record", "Span", "read_bytes", "read_record"]

_DEEPEST = 500
"""Levels of containers in a file; Python's own limit for functions that call themselves is 1000."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an archive.

    Attributes:
        path: The archive.
        name: Name inside it, without the folder that all records share.
        start: Position of its first byte in the file.
        nbytes: Length.
        crc: CRC-32 of its bytes, as the archive states it.
    """

    path: Path
    name: str
    start: int
    nbytes: int
    crc: int

    def __hash__(self) -> int:
        """Tell records apart by their numbers: paths take long, and every piece that is read looks its record up."""
        return hash((self.start, self.nbytes, self.crc))


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes within a record: ``nbytes`` from ``start``, counted from the record's first byte."""

    record: Record
    start: int
    nbytes: int


class Archive:
    """An archive written by ``torch.save``, opened without reading any tensor.

    Args:
        path: The file.

    Raises:
        BadCheckpoint: If it is not such an archive, or is cut off.
        OSError: If it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = path.stat().st_size
        if self.nbytes == 0:
            raise BadCheckpoint(f"{path} is empty (0 bytes): it was not written to its end. Use another checkpoint.")
        with path.open("rb") as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    self.records = {
                        name: self._record(name, info, file.fileno()) for name, info in _by_short_name(archive).items()
                    }
            # A damaged directory can point anywhere: to offsets that no file has, to names that are no text.
            except (
                *(zipfile.BadZipFile, LookupError, ArithmeticError, ValueError, OSError, struct.error),
                *(NotImplementedError, EOFError),
            ) as error:
                raise self._damaged(f"its directory cannot be read ({error})") from error
        if self.records.get("byteorder") is not None and self._small("byteorder") != b"little":
            raise self._damaged("it was written on a big-endian machine, or its record 'byteorder' is damaged")

    def _damaged(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.path} ({self.nbytes} bytes) is cut off, damaged, or not written by torch.save: {what}. "
            "Use another checkpoint or a good copy of this file."
        )

    def _record(self, name: str, info: zipfile.ZipInfo, fd: int) -> Record:
        full_name = info.orig_filename.encode("utf-8")
        header = os.pread(fd, _LOCAL_HEADER.size + len(full_name), info.header_offset)
        signature, *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        written = header[_LOCAL_HEADER.size :]
        if signature != b"PK\x03\x04" or name_length != len(full_name) or written != full_name:
            raise ValueError(f"record {info.filename!r} is not where the directory says")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"record {info.filename!r} is compressed")
        if start + info.file_size > self.nbytes:
            raise ValueError(f"record {info.filename!r} ends behind the end of the file")
        return Record(self.path, name, start, info.file_size, info.CRC)

    def _small(self, name: str) -> bytes:
        record = self.records.get(name)
        if record is None:
            raise self._damaged(f"it has no record {name!r}")
        data = read_bytes(Span(record, 0, record.nbytes))
        if isal_zlib.crc32(data) != record.crc:
            raise self._damaged(f"the checksum of its record {name!r} is wrong")
        return data

    @cached_property
    def pickle(self) -> bytes:
        """The pickle that describes what the archive holds.

        Raises:
            BadCheckpoint: If it is missing or damaged.
        """
        return self._small("data.pkl")

    @cached_property
    def tree(self) -> Any:
        """What the archive holds as plain data, with a `TensorRef` for each tensor.

        Raises:
            BadCheckpoint: If its pickle is damaged.
        """
        try:
            tree = load_tree(self.pickle, self)
        except BadCheckpoint as error:
            raise error if str(self.path) in str(error) else self._damaged(str(error)) from error
        if _deeper(tree, _DEEPEST):
            raise self._damaged("what it holds is nested too deeply")
        return tree

    def span(self, ref: TensorRef, start: int = 0, numel: int | None = None) -> Span:
        """Return where elements of a contiguous tensor are.

        Args:
            ref: A tensor of this archive.
            start: First element, within the flattened tensor.
            numel: Number of elements; all that follow when None.

        Raises:
            BadCheckpoint: If the archive does not hold them.
        """
        storage, whole = ref.storage, ref.numel
        size = ITEMSIZE[storage.dtype]
        record = self.records.get(f"data/{storage.key}")
        numel = whole - start if numel is None else numel
        if record is None or record.nbytes < storage.numel * size:
            held = "missing" if record is None else f"{record.nbytes} bytes"
            raise self._damaged(
                f"its record 'data/{storage.key}' should hold {storage.numel * size} bytes, it is {held}"
            )
        if not ref.contiguous:
            raise BadCheckpoint(
                f"{self.path}: a tensor of shape {ref.shape} lies scattered in its storage (strides {ref.stride}): "
                "weights and optimizer state are read where they are contiguous only. Save them with .contiguous()."
            )
        if start < 0 or numel < 0 or start + numel > whole or ref.offset + start + numel > storage.numel:
            raise self._damaged(
                f"elements {start} to {start + numel} of a tensor of {whole} elements at {ref.offset} of "
                f"{storage.numel} were asked for"
            )
        return Span(record, (ref.offset + start) * size, numel * size)

    def fingerprint(self) -> str:
        """Return a checksum of the file's whole content, made from the CRC-32 of each record: reads no tensor."""
        crc = 0
        for name in sorted(self.records):
            record = self.records[name]
            crc = isal_zlib.crc32(f"{name} {record.start} {record.nbytes} {record.crc}\n".encode(), crc)
        return f"zip-crc32:{crc:08x}"


def _by_short_name(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the records by their name below the folder that torch puts them in."""
    infos = archive.infolist()
    pickles = [info.filename for info in infos if info.filename.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise ValueError("it has no record 'data.pkl'" if not pickles else "it has several records 'data.pkl'")
    folder = pickles[0][: -len("data.pkl")]
    return {info.filename.removeprefix(folder): info for info in infos}


def read_record(span: Span) -> bytes:
    """Read a small record as a whole, compare it with its checksum, and return the bytes of a span within it.

    Raises:
        BadCheckpoint: If the record is damaged.
    """
    record = span.record
    data = read_bytes(Span(record, 0, record.nbytes))
    if isal_zlib.crc32(data) != record.crc:
        raise BadCheckpoint(
            f"{record.path}: the checksum of its record '{record.name}' is wrong. The file is damaged: use another "
            "checkpoint or a good copy."
        )
    return data[span.start : span.start + span.nbytes]


def read_bytes(span: Span) -> bytes:
    """Read a span into memory.

    Raises:
        BadCheckpoint: If the file is shorter than its directory says.
    """
    fd = os.open(span.record.path, os.O_RDONLY)
    try:
        data = os.pread(fd, span.nbytes, span.record.start + span.start)
        while len(data) < span.nbytes:
            more = os.pread(fd, span.nbytes - len(data), span.record.start + span.start + len(data))
            if not more:
                raise BadCheckpoint(f"{span.record.path} ends within its record '{span.record.name}'")
            data += more
        return data
    except OSError as error:  # one about a descriptor does not say which file
        raise OSError(error.errno, error.strerror, str(span.record.path)) from error
    finally:
        os.close(fd)


def _deeper(tree: Any, limit: int) -> bool:
    """Whether containers are nested beyond a limit, which would be the end of whatever walks through them."""
    level, seen = [tree], {id(tree)}
    for _ in range(limit):
        following = []
        for node in level:
            for value in _within(node):
                if isinstance(value, dict | list | tuple | Opaque) and id(value) not in seen:
                    seen.add(id(value))
                    following.append(value)
        if not following:
            return False
        level = following
    return True


def _within(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return [*node.values(), *vars(node).values()] if isinstance(node, OrderedDict) else node.values()
    if isinstance(node, Opaque):
        return (node.args, node.state, node.content, node.pairs)
    return node if isinstance(node, list | tuple) else ()
