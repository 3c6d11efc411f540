"""Links between real processes: every collective is right, timed at every size, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
from harness import outcome, run_ranks

from lightning_zeroladder.costmodel.links import Links, Where
from lightning_zeroladder.costmodel.links_file import links_from_json
from lightning_zeroladder.costmodel.traffic import Collective

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

RANKS = 4


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("links")
    payload = {"folder": str(folder / "cases")}
    return run_ranks("links_cases:run", payload, ranks=RANKS, timeout_s=240, tmp_path=folder)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_links_are_measured(launch: list[dict[str, Any]], per_node: int, precision: str) -> None:
    found = outcome(launch, f"{precision}-{per_node}")
    assert all(data["links"] == found[0]["links"] for data in found)  # every rank got the same
    links: Links = links_from_json(found[0]["links"])
    machine = links.machine
    assert (machine.device, machine.backend, machine.precision) == ("cpu", "gloo", precision)
    assert (machine.nodes, machine.per_node) == (RANKS // per_node, per_node)
    wheres = {1: {Where.ACROSS: 4}, 2: {Where.INSIDE: 2, Where.ACROSS: 4}, 4: {Where.INSIDE: 4}}[per_node]
    assert {sample.where for sample in links.samples} == set(wheres)
    assert {overlap.where for overlap in links.overlaps} == set(wheres)
    for where, ranks in wheres.items():
        for collective in Collective:
            samples = links.of(collective, where)
            assert [sample.nbytes for sample in samples][:2] == [1024, 8192]
            assert all(sample.ranks == ranks and sample.correct and sample.calls >= 3 for sample in samples)
            # A thousand times the bytes take longer than no more than a few: the clock runs around the call.
            assert links.seconds(collective, where, 2**24, ranks=ranks) > links.latency_s(collective, where)
    assert found[0]["told"] == len(links.samples)


def test_no_group_is_left_behind(launch: list[dict[str, Any]]) -> None:
    assert {data["groups"] for case in ("fp32-1", "fp32-2", "bf16-4") for data in outcome(launch, case)} == {1}


def test_the_short_form_takes_a_second_or_two(launch: list[dict[str, Any]]) -> None:
    for data in outcome(launch, "quick"):
        links = links_from_json(data["links"])
        assert {sample.collective for sample in links.samples} == set(Collective)
        assert all(len(links.of(collective, Where.INSIDE)) >= 2 for collective in Collective)
        assert len(links.overlaps) == 1
        assert data["took_s"] < 10  # 1.5 s on a quiet machine; four ranks on two busy cores take a multiple


@pytest.mark.parametrize("collective", list(Collective))
def test_a_wrong_result_is_noticed(launch: list[dict[str, Any]], collective: Collective) -> None:
    assert outcome(launch, f"wrong {collective}") == [[collective]] * RANKS
