from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_links import LINKS, line

from lightning_zeroladder.costmodel.links import Sample, Where, ring_bytes
from lightning_zeroladder.costmodel.links_file import links_from_json, links_to_json, read_links, write_links
from lightning_zeroladder.costmodel.traffic import Collective


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """1 GB over 8 ranks in 10 ms: the factors are 2 (n - 1) / n, (n - 1) / n, (n - 1) / n and 1."""
    found = {
        collective: Sample(collective, Where.INSIDE, 8, 10**9, 0.01, 0.0, 5, True).bus_bytes_per_s
        for collective in Collective
    }
    assert found == {
        Collective.ALL_REDUCE: pytest.approx(175e9),
        Collective.ALL_GATHER: pytest.approx(87.5e9),
        Collective.REDUCE_SCATTER: pytest.approx(87.5e9),
        Collective.REDUCE: pytest.approx(100e9),
    }


@pytest.mark.parametrize("collective", list(Collective))
def test_seconds_follow_the_measured_curve(collective: Collective) -> None:
    for sample in LINKS.of(collective, Where.ACROSS):
        assert LINKS.seconds(collective, Where.ACROSS, sample.nbytes, ranks=16) == pytest.approx(sample.median_s)
    middle = LINKS.seconds(collective, Where.ACROSS, 3 * 2**20, ranks=16)
    assert middle == pytest.approx(20e-6 + ring_bytes(collective, 3 * 2**20, 16) / 40e9)
    # Nothing is quicker than the smallest call, and beyond the largest its bandwidth goes on.
    assert LINKS.seconds(collective, Where.ACROSS, 1, ranks=16) == LINKS.of(collective, Where.ACROSS)[0].median_s
    far = LINKS.seconds(collective, Where.ACROSS, 2**32, ranks=16)
    assert far == pytest.approx(16 * LINKS.of(collective, Where.ACROSS)[-1].median_s)


def test_another_number_of_ranks_sends_other_bytes() -> None:
    """Half the ring bytes of an all-reduce over 2 ranks against very many: half the time beyond the latency."""
    few = LINKS.seconds(Collective.ALL_REDUCE, Where.ACROSS, 2**30, ranks=2)
    many = LINKS.seconds(Collective.ALL_REDUCE, Where.ACROSS, 2**30, ranks=10**6)
    assert many / few == pytest.approx(2, rel=1e-3)


@given(st.sampled_from(list(Collective)), st.floats(1, 1e12), st.floats(1, 10), st.integers(2, 4096))
def test_more_bytes_never_take_less(collective: Collective, nbytes: float, more: float, ranks: int) -> None:
    less = LINKS.seconds(collective, Where.INSIDE, nbytes, ranks=ranks)
    assert LINKS.seconds(collective, Where.INSIDE, nbytes * more, ranks=ranks) >= less * (1 - 1e-12)


def test_bandwidth_and_latency() -> None:
    assert LINKS.bytes_per_s(Collective.REDUCE, Where.INSIDE) == pytest.approx(200e9, rel=0.02)
    assert LINKS.latency_s(Collective.REDUCE, Where.INSIDE) == pytest.approx(20e-6, rel=0.01)


def test_what_was_not_measured_is_said() -> None:
    inside = replace(LINKS, samples=tuple(line(Collective.REDUCE, Where.INSIDE, 2, 1e-5, 1e9)))
    with pytest.raises(ValueError, match=r"all-reduce across nodes was not measured .measured were: reduce inside a"):
        inside.seconds(Collective.ALL_REDUCE, Where.ACROSS, 1, ranks=2)
    assert (inside.has(Where.INSIDE), inside.has(Where.ACROSS)) == (True, False)


def test_overlap() -> None:
    """1 ms of products beside 2 ms of all-reduce: 2.25 ms hide three quarters of the products."""
    overlap = LINKS.overlaps[0]
    assert overlap.slow_down == pytest.approx(0.5)
    assert overlap.hidden == pytest.approx(0.75)
    assert replace(overlap, both_s=9.0).hidden == 0
    assert replace(overlap, both_s=1e-3, product_during_s=0.5e-3).hidden == 1
    assert replace(overlap, product_during_s=0.5e-3).slow_down == 0


def test_a_file_brings_back_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "links.json"
    write_links(file, LINKS)
    assert read_links(file) == LINKS
    assert [path.name for path in file.parent.iterdir()] == ["links.json"]


def test_a_file_that_is_missing_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="write it with zeroladder bench"):
        read_links(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"kind": "zero')
    with pytest.raises(ValueError, match="is not JSON"):
        read_links(tmp_path / "torn.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("kind"), "was not written by zeroladder bench"),
        (lambda data: data.update(schema=2), "has schema 2, expected 1: measure again"),
        (lambda data: data["samples"][0].pop("ranks"), "is damaged: key 'ranks' is missing"),
        (lambda data: data["samples"][0].update(median_s=0.0), "is damaged: median_s=0.0 must be above 0"),
        (lambda data: data["samples"][0].update(median_s=float("nan")), "is damaged: median_s=nan must be above 0"),
        (lambda data: data["samples"][0].update(ranks=1), "is damaged: ranks=1 must be at least 2"),
        (lambda data: data["samples"][0].update(collective="gossip"), "is damaged: 'gossip' is not a valid Collective"),
        (lambda data: data["samples"].clear(), "is damaged: it has no samples"),
        (lambda data: data["machine"].update(nodes=0), "is damaged: nodes=0"),
        (lambda data: data["machine"].update(color="red"), "is damaged: .*color"),
    ],
)
def test_a_file_that_is_something_else(change: Any, says: str) -> None:
    data = json.loads(json.dumps(links_to_json(LINKS)))
    change(data)
    with pytest.raises(ValueError, match=says):
        links_from_json(data)


def test_wrong_results_are_found() -> None:
    assert LINKS.wrong() == ()
    bad = replace(LINKS.samples[3], correct=False)
    assert replace(LINKS, samples=(*LINKS.samples, bad)).wrong() == (bad,)
