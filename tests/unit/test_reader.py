from __future__ import annotations

import errno
import itertools
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zeroladder.checkpoint import reader as reader_module
from lightning_zeroladder.checkpoint.archive import Record, Span
from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.reader import Account, Reader, Run, verify

DATA = random.Random(5).randbytes(997)
AT = 64
"""Where the record begins in its file."""

RUNS = st.lists(
    st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(
        lambda ends: (min(ends), max(ends) - min(ends))
    ),
    max_size=8,
)


def write(path: Path, data: bytes, name: str = "data/0") -> Record:
    """A file that holds a record with the checksum of DATA."""
    path.write_bytes(bytes(AT) + data + bytes(100))
    return Record(path, name, AT, len(data), zlib.crc32(DATA))


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return write(tmp_path_factory.mktemp("reader") / "x.pt", DATA)


def read(reader: Reader, record: Record, *runs: tuple[int, int]) -> bytes:
    target = bytearray(sum(nbytes for _, nbytes in runs))
    reader.read_into([Span(record, start, nbytes) for start, nbytes in runs], memoryview(target))
    return bytes(target)


@given(RUNS)
def test_bytes_are_those_asked_for_and_accounted_for(record, runs):
    with Reader() as reader:
        assert read(reader, record, *runs) == b"".join(DATA[start : start + nbytes] for start, nbytes in runs)
        assert reader.nbytes == sum(nbytes for _, nbytes in runs)
        noted = reader.account.runs.get(record, [])
    for run in noted:
        assert run.crc == zlib.crc32(DATA[run.start : run.start + run.nbytes])
    assert sum(run.nbytes for run in noted) == reader.nbytes
    assert all(a.start + a.nbytes != b.start for a, b in itertools.pairwise(noted))  # merged where they meet


@given(st.lists(st.integers(0, len(DATA)), max_size=8), st.randoms(use_true_random=False))
def test_cuts_in_any_order_combine_without_reading_again(record, cuts, order):
    bounds = [0, *sorted(cuts), len(DATA)]
    runs = [(a, b - a) for a, b in itertools.pairwise(bounds)]
    order.shuffle(runs)
    with Reader() as reader:
        read(reader, record, *runs)
        verify(reader.account, reader)
        assert reader.nbytes == len(DATA)


@given(st.lists(RUNS, min_size=1, max_size=3))
def test_gaps_and_overlaps_of_several_ranks_are_filled_in(record, ranks):
    account = Account()
    for runs in ranks:
        with Reader() as reader:
            read(reader, record, *runs)
            account.merge(reader.account)
    with Reader() as reader:
        verify(account, reader)
        assert reader.nbytes <= len(DATA)


def runs_apart(runs: list[tuple[int, int]]) -> bool:
    ordered = sorted({run for run in runs if run[1]})
    return all(start + nbytes <= other for (start, nbytes), (other, _) in itertools.pairwise(ordered))


@settings(deadline=None)
@given(RUNS.filter(bool), st.integers(0, len(DATA) - 1), st.integers(0, 7), st.booleans())
def test_a_flipped_bit_anywhere_shows_also_where_nobody_read(tmp_path_factory, runs, place, bit, early):
    path = tmp_path_factory.mktemp("flipped") / "x.pt"
    damaged = bytearray(DATA)
    damaged[place] ^= 1 << bit
    record = write(path, bytes(damaged) if early else DATA)
    with Reader() as reader:
        read(reader, record, *runs)
        if not early:  # damaged on disk after it was read
            write(path, bytes(damaged))
            if runs_apart(runs) and any(start <= place < start + nbytes for start, nbytes in runs):
                verify(reader.account, reader)  # what was read is what was written; it is not read again
                return
        with pytest.raises(BadCheckpoint, match=r"x\.pt: the bytes of its record 'data/0' are not those that were"):
            verify(reader.account, reader)


def test_a_record_that_nobody_read_is_not_looked_at(tmp_path):
    write(tmp_path / "x.pt", bytes(len(DATA)))
    with Reader() as reader:
        verify(reader.account, reader)
        assert reader.nbytes == 0


@pytest.mark.parametrize("other", [(100, 50), (120, 10), (80, 100), (100, 897), (50, 947)])
def test_hosts_whose_copies_differ_are_told(tmp_path, other):
    """One host has a good copy and one a damaged one, under the same path; whichever of them verifies."""
    start, nbytes = other
    damaged = bytearray(DATA)
    damaged[125] ^= 4
    accounts = []
    for data, runs in ((DATA, [(0, 100), (100, 50), (150, 847)]), (bytes(damaged), [(start, nbytes)])):
        write(tmp_path / "x.pt", data)
        with Reader() as reader:
            record = write(tmp_path / "x.pt", data)
            for run in runs[::-1]:
                read(reader, record, run)
            accounts.append(reader.account)
    for copy in (DATA, bytes(damaged)):
        write(tmp_path / "x.pt", copy)
        merged = Account()
        for account in accounts:
            merged.merge(account)
        with Reader() as reader, pytest.raises(BadCheckpoint, match=r"x\.pt: (the )?bytes .*of its record 'data/0'"):
            verify(merged, reader)


def test_each_record_is_verified_by_one_of_those_who_share(tmp_path):
    records = [write(tmp_path / f"{index}.pt", DATA) for index in range(5)]
    whole = Run(0, len(DATA), zlib.crc32(DATA))
    found = []
    for rank, wrong in itertools.product(range(2), records):
        runs = {record: [whole] for record in records}
        runs[wrong] = [Run(0, len(DATA), 0)]
        with Reader() as reader:
            try:
                verify(Account(runs), reader, share=(rank, 2))
            except BadCheckpoint as error:
                found.append((rank, wrong.path.name, str(wrong.path) in str(error)))
    assert found == [(0, "0.pt", True), (0, "2.pt", True), (0, "4.pt", True), (1, "1.pt", True), (1, "3.pt", True)]


def test_runs_that_follow_each_other_become_one():
    account, record = Account(), Record(Path("x"), "data/0", 0, 8, 0)
    account.note(record, 0, b"ab")
    account.note(record, 2, b"cd")
    account.note(record, 6, b"gh")
    account.note(record, 4, b"ef")
    account.note(record, 6, b"")
    assert account.runs[record] == [
        Run(0, 4, zlib.crc32(b"abcd")),
        Run(6, 2, zlib.crc32(b"gh")),
        Run(4, 2, zlib.crc32(b"ef")),
    ]
    other = Account()
    other.note(record, 1, b"b")
    other.merge(account)
    assert other.runs[record][0] == Run(1, 1, zlib.crc32(b"b"))
    assert other.runs[record][1:] == account.runs[record]


@pytest.mark.parametrize("block", [1, 7, 996, 997, 5000])
def test_blocks_make_up_the_span(record, monkeypatch, block):
    monkeypatch.setattr(reader_module, "BLOCK_BYTES", block)
    with Reader() as reader:
        blocks = [bytes(part) for part in reader.blocks(Span(record, 3, 990))]
        verify(reader.account, reader)
    assert b"".join(blocks) == DATA[3:993]
    assert {len(part) for part in blocks[:-1]} <= {block}
    assert reader.account.runs[record][0] == Run(3, 990, zlib.crc32(DATA[3:993]))


def test_an_empty_span_has_no_blocks(record):
    with Reader() as reader:
        assert list(reader.blocks(Span(record, 5, 0))) == []


def test_threads_share_a_reader(tmp_path):
    records = [write(tmp_path / f"{index}.pt", DATA) for index in range(3)]
    spans = [(records[index % 3], start, 1 + index % 50) for index, start in enumerate(range(0, 900, 3))]
    with Reader() as reader, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: read(reader, job[0], job[1:]), spans))
        verify(reader.account, reader)
    assert found == [DATA[start : start + nbytes] for _, start, nbytes in spans]


def test_a_target_of_another_size_is_refused(record):
    for size in (3, 5):
        with Reader() as reader, pytest.raises(BadCheckpoint, match=f"4 bytes were found where {size} were looked"):
            reader.read_into([Span(record, 0, 4)], memoryview(bytearray(size)))


def test_a_file_that_ends_early(tmp_path):
    record = write(tmp_path / "x.pt", DATA)
    with (tmp_path / "x.pt").open("r+b") as file:
        file.truncate(AT + 500)
    with Reader() as reader, pytest.raises(BadCheckpoint, match=rf"{record.path} ends within its record 'data/0'"):
        read(reader, record, (490, 20))


def test_reading_says_which_file_fails(tmp_path):
    with Reader() as reader:
        with pytest.raises(FileNotFoundError, match=r"gone\.pt"):
            read(reader, Record(tmp_path / "gone.pt", "data/0", 0, 4, 0), (0, 4))
        with pytest.raises(OSError, match=str(tmp_path)) as caught:
            read(reader, Record(tmp_path, "data/0", 0, 4, 0), (0, 4))
    assert caught.value.errno == errno.EISDIR
    assert caught.value.filename == str(tmp_path)
