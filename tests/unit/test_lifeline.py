"""The line between ranks, with the ends of two ranks in one process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_zeroladder.engine import lifeline, sockets
from lightning_zeroladder.engine.lifeline import Lifeline, Note, OtherRankFailed, RanksLost
from lightning_zeroladder.engine.sockets import GROUP_SOCKETS, GroupSockets

pytestmark = pytest.mark.timeout(60)


def note(rank: int, steps: int = 0, *, fatal: bool = False) -> Note:
    return Note(rank, "here", "out of memory", "forward", "OutOfMemoryError", f"rank {rank}", "trace", steps, fatal)


@pytest.fixture
def lines() -> Iterator[list[Lifeline]]:
    first = Lifeline(0, 2, "127.0.0.1", 0, set())
    both = [first, Lifeline(1, 2, "127.0.0.1", first.port, set())]
    yield both
    on_all([lambda line=line: line.close(together=True) for line in both])


def on_all(actions: list[Callable[[], Any]]) -> list[Any]:
    """Do something on every rank at once; returns what each returned."""
    results: list[Any] = [None] * len(actions)

    def run(number: int) -> None:
        results[number] = actions[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def until(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 10
    while not (value := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return value


def test_the_word_reaches_all_and_the_first_one_counts(lines):
    assert lines[1].fail(note(1)) == note(1)
    assert lines[0].fail(note(0)) == note(1)
    assert until(lambda: lines[0].note) == note(1)
    assert until(lambda: lines[1].note) == note(1)
    with pytest.raises(OtherRankFailed, match="OutOfMemoryError: rank 1"), lines[0].guarded():
        raise AssertionError("must not be entered")
    regrouped(lines)


def regrouped(lines: list[Lifeline]) -> list[Any]:
    made: list[Any] = []

    def leave(line: Lifeline) -> Any:
        line.wait_for_cut()
        told = line.leave({"rank": line.rank})
        line.regroup(lambda: None, made.append)
        return told

    told = on_all([lambda line=line: leave(line) for line in lines])
    assert told == [[{"rank": 0}, {"rank": 1}]] * 2
    return made


def test_ranks_meet_again_and_a_new_generation_begins(lines):
    lines[0].fail(note(0))
    stores = regrouped(lines)
    assert [line.generation for line in lines] == [1, 1]
    assert [line.note for line in lines] == [None, None]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"  # both talk to one store
    with lines[0].guarded():
        assert lines[0].inside
    assert not lines[0].inside
    lines[1].fail(note(1))
    assert until(lambda: lines[0].note) == note(1)
    regrouped(lines)


def test_a_rank_that_is_behind_gets_time_to_complete_its_step(lines, monkeypatch):
    monkeypatch.setattr(lifeline, "_CATCH_UP_S", 30.0)  # far longer than the test waits
    lines[0].steps, lines[1].steps = 5, 4
    with lines[1].guarded():
        lines[0].fail(note(0, steps=5))
        until(lambda: lines[1].note)
        time.sleep(2 * lifeline._SETTLE_S)
        assert not lines[1]._cut.is_set()
        lines[1].steps = 5
        assert lines[1]._cut.wait(10.0)
    regrouped(lines)


def test_a_rank_that_never_comes_to_a_guarded_place_is_cut_all_the_same(lines):
    lines[0].fail(note(0))
    assert lines[1]._cut.wait(5.0)
    regrouped(lines)


def test_a_rank_without_a_sign_of_life_is_named(lines, monkeypatch):
    monkeypatch.setattr(lifeline, "_SILENT_S", 0.5)
    monkeypatch.setattr(lines[1], "_show_life", lambda *_: None)
    lines[0].fail(note(0))
    lines[0].wait_for_cut()
    with pytest.raises(RanksLost, match=r"rank 1 does not answer any more.*ckpt_path"):
        lines[0].leave({})
    regrouped(lines)


def test_a_hang_is_seen_when_all_stand_still(lines):
    for line in lines:
        line.watch_for_hangs(0.4)
    with lines[0].guarded():
        time.sleep(1.2)
        assert lines[0].note is None  # the other rank is not in a micro-batch: it may wait for data
        with lines[1].guarded():
            said = until(lambda: lines[0].note)
    assert (said.kind, said.message) == ("hang", "no rank completed a micro-batch for 0 s")
    regrouped(lines)


def test_progress_is_no_hang(lines):
    for line in lines:
        line.watch_for_hangs(0.6)
    with lines[0].guarded(), lines[1].guarded():
        for _ in range(8):
            time.sleep(0.2)
            lines[0].beat()
        assert lines[0].note is None
        for line in lines:
            line.watch_for_hangs(None)


def connection() -> tuple[socket.socket, socket.socket, socket.socket]:
    listening = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listening.getsockname())
    return listening, client, listening.accept()[0]


def test_sockets_of_groups_are_cut_and_no_others():
    group = GroupSockets()
    before = connection()
    with group.noting():
        inside = connection()
    assert group
    assert group.cut(set()) == 2
    for end in inside[1:]:
        end.settimeout(1)
        assert end.recv(1) == b""  # ended
    inside[1].sendall(b"x")  # what it writes still goes out
    inside[0].settimeout(0.1)
    with pytest.raises(TimeoutError):
        inside[0].accept()  # still listens
    before[1].sendall(b"x")
    assert before[2].recv(1) == b"x"
    assert not group
    for end in (*before, *inside):
        end.close()


def test_connections_to_a_store_that_this_process_serves_are_spared():
    group = GroupSockets()
    with group.noting():
        listening, client, accepted = connection()
    assert group.cut({listening.getsockname()[1]}) == 1  # the client's end: it may wait for the store
    client.settimeout(1)
    assert client.recv(1) == b""
    accepted.settimeout(0.1)
    with pytest.raises(TimeoutError):
        accepted.recv(1)
    for end in (listening, client, accepted):
        end.close()


def test_a_group_that_is_done_just_when_another_thread_cuts_is_cut_too(monkeypatch):
    group, listed, cuts = GroupSockets(), sockets._open_sockets, []
    cutting = threading.Thread(target=lambda: cuts.append(group.cut(set())))

    def listed_while_another_cuts() -> dict[int, str]:
        found = listed()
        if inside and cutting.ident is None:  # the group is made, and is being noted
            cutting.start()
            cutting.join(0.2)
        return found

    inside: tuple[socket.socket, ...] = ()
    monkeypatch.setattr(sockets, "_open_sockets", listed_while_another_cuts)
    with group.noting():
        inside = connection()
    cutting.join(5)
    assert cuts == [2]
    assert inside[1].recv(1) == b""
    for end in inside:
        end.close()


def test_a_group_that_is_made_after_the_cut_is_cut_until_the_main_thread_is_away(lines):
    late: list[socket.socket] = []

    def make_a_group_late() -> None:
        with lines[1].guarded():
            lines[0].fail(note(0))
            assert lines[1]._cut.wait(5)
            with GROUP_SOCKETS.noting():
                late.extend(connection())
            late[1].settimeout(2)
            assert late[1].recv(1) == b""
            raise OtherRankFailed

    with pytest.raises(OtherRankFailed):
        make_a_group_late()
    for end in late:
        end.close()
    regrouped(lines)


def test_a_number_that_went_to_another_file_is_not_cut():
    group = GroupSockets()
    with group.noting():
        listening, client, accepted = connection()
    numbers = [end.fileno() for end in (listening, client, accepted)]
    for end in (listening, client, accepted):
        end.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in numbers]
    again = connection()
    assert group.cut(set()) == 0
    again[1].sendall(b"x")
    assert again[2].recv(1) == b"x"
    for number in others:
        os.close(number)
    for end in again:
        end.close()
