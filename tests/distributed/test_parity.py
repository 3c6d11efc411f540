"""The stage never changes the result: a walk trains like every fixed stage and like plain DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
from harness import outcome, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

TOLERANCE = 1e-6
"""Losses are below 2, so this is a few fp32 roundings: stages add gradients in another order, nothing else differs."""


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """One launch per number of ranks, made when the first case asks."""
    return {}


@pytest.fixture
def results(
    request: pytest.FixtureRequest,
    launches: dict[int, list[dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    ranks: int = request.param
    if ranks not in launches:
        folder = tmp_path_factory.mktemp(f"parity-{ranks}")
        payload = {"ranks": ranks, "folder": str(folder / "cases")}
        launches[ranks] = run_ranks("parity_cases:run", payload, ranks=ranks, timeout_s=280, tmp_path=folder)
    return launches[ranks]


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    assert len(ours) == len(theirs) > 0
    return [abs(a - b) for a, b in zip(ours, theirs, strict=True)]


def assert_walked(walk: dict[str, Any], stages: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    reached = [move[1] for move in walk["moves"]]
    assert reached[: len(stages) - 1] == list(stages[1:])
    assert [move[2] for move in walk["moves"]][: len(stages) - 1] == [5 * index for index in range(1, len(stages))]
    assert walk["commit"] == ([stages[0], *reached])[-1]


@pytest.mark.parametrize(
    ("results", "case"),
    [(2, "fp32-k1"), (2, "fp32-k4"), (4, "fp32-k1"), (4, "fp32-k4")],
    indirect=["results"],
)
def test_fp32_walk_equals_fixed_stages_and_plain_deepspeed(results: list[dict[str, Any]], case: str) -> None:
    for data in outcome(results, case):
        assert_walked(data["walk"])
        for stage, losses in data["fixed"].items():
            assert max(differences(data["walk"]["losses"], losses)) <= TOLERANCE, f"fixed stage {stage}"
        for stage, losses in data["plain"].items():
            assert max(differences(data["walk"]["losses"], losses)) <= TOLERANCE, f"plain DeepSpeed stage {stage}"
        gaps = [*data["weight_gaps"].values(), *data["plain_weight_gaps"].values()]
        # Adam divides a gradient by its own size: where that is close to zero, a rounding moves a weight by a share
        # of lr = 1e-3.
        assert max(gaps) <= 2e-5


@pytest.mark.parametrize("results", [2, 4], indirect=True)
def test_ranks_see_different_batches(results: list[dict[str, Any]]) -> None:
    first = [data["walk"]["losses"][0] for data in outcome(results, "fp32-k1")]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("results", [2], indirect=True)
def test_stages_1_and_2_agree_bit_for_bit(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "stages12-k1"):
        assert_walked(data["walk"], (1, 2))
        for losses in [*data["fixed"], *data["plain"]]:
            assert data["walk"]["losses"] == losses
        assert data["weight_gaps"] == [0.0, 0.0]


@pytest.mark.parametrize("results", [2], indirect=True)
def test_stages_1_and_2_with_accumulation(results: list[dict[str, Any]]) -> None:
    """Stage 1 reduces the sum of the micro-batches, stage 2 sums the reduced: not the same bits in plain DeepSpeed."""
    for data in outcome(results, "stages12-k4"):
        assert_walked(data["walk"], (1, 2))
        assert data["fixed"] == data["plain"]
        until_move = data["walk"]["moves"][0][2] * 4
        assert data["walk"]["losses"][:until_move] == data["plain"][0][:until_move]
        for losses in data["plain"]:
            assert max(differences(data["walk"]["losses"], losses)) <= TOLERANCE


@pytest.mark.parametrize("case", ["bf16-mixed-k1", "bf16-mixed-k4"])
@pytest.mark.parametrize("results", [2], indirect=True)
def test_bf16_walk_deviates_no_more_than_fixed_stages_do(results: list[dict[str, Any]], case: str) -> None:
    for data in outcome(results, case):
        assert_walked(data["walk"])
        fixed = data["fixed"]
        among = max(max(differences(fixed[a], fixed[b])) for a in fixed for b in fixed)
        nearest = min(max(differences(data["walk"]["losses"], losses)) for losses in fixed.values())
        farthest = max(max(differences(data["walk"]["losses"], losses)) for losses in fixed.values())
        assert nearest <= max(among, TOLERANCE)
        assert farthest <= max(2 * among, TOLERANCE)  # it may lie on the other side of the nearest
        assert min(data["weight_gaps"].values()) <= max(*data["weight_gaps_among_fixed"], TOLERANCE)
