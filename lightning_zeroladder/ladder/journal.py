"""The append-only record of a run's trials and decision: one JSON object per line.

Each line is written whole, ended by a newline and synced, so a process that dies leaves at most one torn line, at the
end and without its newline. Readers pass over it, and the next append removes it.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from lightning_zeroladder.ladder.serialize import JSON

__all__ = ["Journal", "read_journal"]


class Journal:
    """Appends events to a journal file; one writer at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Touch nothing yet: the first append creates ``path`` and its folders."""
        self.path = Path(path)

    def append(self, event: str, **fields: JSON) -> None:
        """Write one event and return when it is on disk.

        Args:
            event: What happened, for instance ``trial``.
            **fields: JSON values; ``event`` and ``time`` (ISO 8601, UTC) are added.

        Raises:
            ValueError: If ``fields`` holds ``time``.
            TypeError: If a value has no JSON form; nothing is written then.
        """
        if "time" in fields:
            raise ValueError("The field 'time' is set by the journal: give yours another name.")
        record = {"event": event, "time": datetime.now(UTC).isoformat(), **fields}
        line = json.dumps(record).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            _mend_tail(file)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events of a journal, oldest first, without a torn last line.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If any other line is not a JSON object; the message gives its number.
    """
    *lines, tail = Path(path).read_bytes().split(b"\n")
    events = []
    for number, line in enumerate(lines, start=1):
        event = _parse(line)
        if event is None:
            raise ValueError(
                f"{os.fspath(path)}, line {number}: not a JSON object, only the last line may be torn. "
                "Remove or repair the line."
            )
        events.append(event)
    last = _parse(tail)
    return events if last is None else [*events, last]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:  # torn JSON or torn UTF-8
        return None
    return value if isinstance(value, dict) else None


def _mend_tail(file: BinaryIO) -> None:
    """Cut off a last line that is torn; end one that lacks only its newline."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    tail = file.read().rpartition(b"\n")[2]
    if _parse(tail) is None:
        file.truncate(size - len(tail))
    else:
        file.write(b"\n")
