"""Nothing is trained on a damaged state: every rank stops and names what differs."""

from __future__ import annotations

from typing import Any

import pytest
from harness import outcome, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("digest")
    payload = {"folder": str(folder / "cases")}
    return run_ranks("digest_cases:run", payload, ranks=2, timeout_s=200, tmp_path=folder)


def test_an_undamaged_state_passes(results: list[dict[str, Any]]) -> None:
    assert outcome(results, "untouched") == [{"message": None}] * 2


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("flip-02-fp32", ["model.body.0.weight/fp32", "model.body.2.weight/fp32"]),
        ("flip-13-exp_avg", ["model.body.0.weight/exp_avg", "model.body.2.weight/exp_avg"]),
        ("flip-30-exp_avg_sq", ["model.body.0.weight/exp_avg_sq", "model.body.2.weight/exp_avg_sq"]),
    ],
)
def test_one_flipped_bit_on_one_rank_is_named_on_every_rank(
    results: list[dict[str, Any]], case: str, names: list[str]
) -> None:
    messages = [data["message"] for data in outcome(results, case)]
    assert messages[0] == messages[1]
    assert messages[0] is not None
    assert sum(f": {name}. Training stopped" in messages[0] for name in names) == 1, messages[0]


@pytest.mark.parametrize(("case", "name"), [("held-weights", "model.scale"), ("held-frozen", "model.fixed")])
def test_weights_that_change_during_a_move_are_named(results: list[dict[str, Any]], case: str, name: str) -> None:
    for data in outcome(results, case):
        assert data["message"] is not None
        assert f"{name}/weights" in data["message"]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("replica-0", "model.body.0.bias/"),
        ("replica-1", "model.body.0.bias/weights"),
        ("replica-2-frozen", "model.fixed/weights"),
        ("replica-state", "model.body.2.weight/exp_avg"),
    ],
)
def test_replicas_that_differ_are_named_before_a_move(results: list[dict[str, Any]], case: str, name: str) -> None:
    for data in outcome(results, case):
        assert data["message"] is not None
        assert f"'{name}" in data["message"]
        assert "should be the same on every rank but is not" in data["message"]
