from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from lightning_zeroladder.ladder import Journal, read_journal


def test_events_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run" / "ladder" / "journal.jsonl")
    journal.append("start", stages=[0, 1], note="größer\nline")
    journal.append("commit", rung={"stage": 1})
    first, second = read_journal(journal.path)
    assert (first["event"], first["stages"], first["note"]) == ("start", [0, 1], "größer\nline")
    assert (second["event"], second["rung"]) == ("commit", {"stage": 1})
    assert datetime.fromisoformat(first["time"]).utcoffset() == timedelta(0)
    assert journal.path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("tail", [b'{"event": "tri', b"7", b'{"event": "\xc3', b"\x00\x00"])
def test_torn_tail_is_passed_over_then_removed(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append("start")
    path.write_bytes(path.read_bytes() + tail)
    assert [event["event"] for event in read_journal(path)] == ["start"]
    Journal(path).append("resume")
    assert [event["event"] for event in read_journal(path)] == ["start", "resume"]
    assert all(json.loads(line)["event"] for line in path.read_text().splitlines())


def test_tail_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event": "start"}')
    assert read_journal(path) == [{"event": "start"}]
    Journal(path).append("resume")
    assert [event["event"] for event in read_journal(path)] == ["start", "resume"]


def test_every_cut_of_a_journal_can_be_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for number in range(2):
        Journal(path).append("trial", number=number)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        known = read_journal(path)
        assert known == [json.loads(line) for line in whole.splitlines()][: len(known)]
        Journal(path).append("resume")
        assert read_journal(path)[:-1] == known


@pytest.mark.parametrize("bad", [b'{"event": ', b"", b"3", b"\xff"])
def test_a_bad_line_before_the_last_is_an_error(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event": "a"}\n' + bad + b'\n{"event": "b"}\n')
    with pytest.raises(ValueError, match="line 2: not a JSON object"):
        read_journal(path)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with pytest.raises(FileNotFoundError):
        read_journal(path)
    path.touch()
    assert read_journal(path) == []


def test_refused_fields_leave_no_trace(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(ValueError, match="time"):
        journal.append("start", time="now")
    with pytest.raises(TypeError):
        journal.append("start", value=object())  # type: ignore[arg-type]
    assert not journal.path.exists()
