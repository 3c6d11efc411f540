"""Read spans of archives, keeping account of what was read, so that the archives' checksums can be verified."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Lock

from isal import isal_zlib

from lightning_zeroladder.checkpoint.archive import Record, Span
from lightning_zeroladder.checkpoint.errors import BadCheckpoint

__all__ = ["Account", "Reader", "Run", "verify"]

BLOCK_BYTES = 1 << 20
"""Copying moves this much at a time: little enough to stay in a core's cache from reading to writing."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a record that were read: from ``start``, ``nbytes`` of them, with their CRC-32."""

    start: int
    nbytes: int
    crc: int


@dataclass(slots=True)
class Account:
    """What was read of each record, in the order of reading; runs that follow each other are merged.

    Attributes:
        runs: By record.
    """

    runs: dict[Record, list[Run]] = field(default_factory=dict)

    def note(self, record: Record, start: int, data: bytes | memoryview) -> None:
        """Note bytes that were just read."""
        self.add(record, Run(start, len(data), isal_zlib.crc32(data)))

    def add(self, record: Record, run: Run) -> None:
        """Note a run that was just read."""
        runs = self.runs.setdefault(record, [])
        if runs and runs[-1].start + runs[-1].nbytes == run.start:
            last = runs[-1]
            crc = isal_zlib.crc32_combine(last.crc, run.crc, run.nbytes)
            runs[-1] = Run(last.start, last.nbytes + run.nbytes, crc)
        else:
            runs.append(run)

    def merge(self, other: Account) -> None:
        """Add what another account noted."""
        for record, runs in other.runs.items():
            self.runs.setdefault(record, []).extend(runs)


class Reader:
    """Reads spans, from several threads if need be. A context manager: closes the files."""

    def __init__(self) -> None:
        self.account = Account()
        self.nbytes = 0
        self._files: dict[Path, int] = {}
        self._buffers: list[memoryview] = []
        self._lock = Lock()

    def __enter__(self) -> Reader:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _file(self, path: Path) -> int:
        fd = self._files.get(path)
        if fd is not None:
            return fd
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]

    def read_into(self, spans: Iterable[Span], target: memoryview) -> None:
        """Fill ``target`` with the bytes of ``spans``, one after the other.

        Raises:
            BadCheckpoint: If a file ends too early.
        """
        at = 0
        for span in spans:
            for offset in range(0, max(span.nbytes, 1), BLOCK_BYTES):
                nbytes = min(BLOCK_BYTES, span.nbytes - offset)
                self._fill(span.record, span.start + offset, target[at : at + nbytes])
                at += nbytes
        if at != len(target):
            raise BadCheckpoint(f"{at} bytes were found where {len(target)} were looked for")

    def blocks(self, *spans: Span) -> Iterator[memoryview]:
        """Yield the bytes of spans, one after the other, in blocks. A block is overwritten by the next one."""
        # Memory that was used before is in the cache and need not be asked for page by page.
        buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(BLOCK_BYTES))
        filled = 0
        try:
            for span in spans:
                done = 0
                while done < span.nbytes:
                    nbytes = min(span.nbytes - done, BLOCK_BYTES - filled)
                    self._fill(span.record, span.start + done, buffer[filled : filled + nbytes])
                    done, filled = done + nbytes, filled + nbytes
                    if filled == BLOCK_BYTES:
                        yield buffer
                        filled = 0
            if filled:
                yield buffer[:filled]
        finally:
            self._buffers.append(buffer)

    def _fill(self, record: Record, start: int, target: memoryview) -> None:
        fd, at, rest = self._file(record.path), 0, target
        while rest:
            try:
                count = os.preadv(fd, (rest,), record.start + start + at)
            except OSError as error:  # one about a descriptor does not say which file
                raise OSError(error.errno, error.strerror, str(record.path)) from error
            if not count:
                raise BadCheckpoint(f"{record.path} ends within its record '{record.name}'")
            at += count
            rest = target[at:]
        run = Run(start, at, isal_zlib.crc32(target))
        with self._lock:
            self.nbytes += at
            self.account.add(record, run)


def verify(account: Account, reader: Reader, *, share: tuple[int, int] = (0, 1)) -> None:
    """Compare what was read with the checksums in the archives, reading what nobody read of a record.

    CRC-32 values of neighbouring runs combine into that of the whole record, so bytes need not be read twice.

    Args:
        account: What was read, by all ranks if several read.
        reader: Reads the gaps.
        share: (i, n): look after every n-th record from the i-th on.

    Raises:
        BadCheckpoint: If a record's bytes are not those that were written.
    """
    ordered = sorted(account.runs.items(), key=lambda item: (str(item[0].path), item[0].start))
    for record, runs in ordered[share[0] :: share[1]]:
        crc = _combined(record, runs, reader)
        if crc != record.crc:
            raise BadCheckpoint(
                f"{record.path}: the bytes of its record '{record.name}' are not those that were written (CRC-32 "
                f"{crc:08x}, expected {record.crc:08x}). The file is damaged: use another checkpoint or a good copy."
            )


def _combined(record: Record, runs: Iterable[Run], reader: Reader) -> int:
    """Return the CRC-32 of a record from those of its runs."""
    # Ranks that hold the same state read the same runs; those that cut it differently read runs that overlap.
    ordered = sorted({run for run in runs if run.nbytes}, key=lambda run: (run.start, run.nbytes))
    if any(run.start + run.nbytes > other.start for run, other in pairwise(ordered)):
        return _compared(record, ordered, reader)
    crc, reached = 0, 0
    for run in ordered:
        crc = _extended(crc, record, reached, run.start, reader)
        crc = isal_zlib.crc32_combine(crc, run.crc, run.nbytes)
        reached = run.start + run.nbytes
    return _extended(crc, record, reached, record.nbytes, reader)


def _compared(record: Record, runs: Iterable[Run], reader: Reader) -> int:
    """Return the CRC-32 of a record as it is in the file now, after comparing runs that overlap with it."""
    bounds = {0, record.nbytes, *(run.start for run in runs), *(run.start + run.nbytes for run in runs)}
    before, crc, reached = {}, 0, 0
    for at in sorted(bounds):
        crc = before[at] = _extended(crc, record, reached, at, reader)
        reached = at
    for run in runs:
        end = run.start + run.nbytes
        if crc == record.crc and isal_zlib.crc32_combine(before[run.start], run.crc, run.nbytes) != before[end]:
            raise BadCheckpoint(
                f"{record.path}: bytes {run.start} to {end} of its record '{record.name}' are not the same wherever "
                "they are read. The copies on the hosts differ, or the disk is failing: use another checkpoint or a "
                "good copy."
            )
    return crc


def _extended(crc: int, record: Record, start: int, end: int, reader: Reader) -> int:
    """Return the CRC-32 of what ``crc`` is that of and the bytes of a record from ``start`` to ``end``, read now."""
    if start < end:
        for block in reader.blocks(Span(record, start, end - start)):
            crc = isal_zlib.crc32(block, crc)
    return crc
