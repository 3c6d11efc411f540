"""Each rung beyond the plain stages is reached when memory forces it, and the loss goes on through it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from harness import outcome, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

TOLERANCE = 1e-6
"""Losses are below 2, so this is a few fp32 roundings: stages add gradients in another order, nothing else differs."""

PLAIN = [f"stage {stage}" for stage in range(4)]
CHECKPOINTED = [f"stage {stage} (activation checkpointing)" for stage in range(4)]
OPTIMIZER_ON_HOST = [f"stage {stage} (offload_optimizer=cpu)" for stage in (1, 2, 3)]
BOTH = [f"stage {stage} (activation checkpointing, offload_optimizer=cpu)" for stage in (1, 2, 3)]
WEIGHTS_TOO = [
    "stage 3 (offload_optimizer=cpu, offload_param=cpu)",
    "stage 3 (activation checkpointing, offload_optimizer=cpu, offload_param=cpu)",
]
EVERYTHING = [*PLAIN, *CHECKPOINTED, *OPTIMIZER_ON_HOST, *BOTH, *WEIGHTS_TOO]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("escalations")
    payload = {"folder": str(folder / "cases")}
    return run_ranks("escalation_cases:run", payload, ranks=2, timeout_s=340, tmp_path=folder)


def assert_one_curve(data: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    losses, fixed = data["losses"], data["fixed"]
    assert len(losses) == len(fixed) > 0
    assert len(set(losses)) == len(losses)  # it trains: a curve that stands still would be continued by anything
    assert max(abs(ours - theirs) for ours, theirs in zip(losses, fixed, strict=True)) <= tolerance


@pytest.mark.parametrize(("case", "accumulate"), [("everything", 1), ("everything-k2", 2)])
def test_one_curve_through_every_escalation(results: list[dict[str, Any]], case: str, accumulate: int) -> None:
    for data in outcome(results, case):
        assert data["tried"] == EVERYTHING
        assert data["committed"] == EVERYTHING[-1]
        assert (data["on_host"], data["weights_on_host"]) == (True, True)
        assert_one_curve(data)
        assert data["gap"] <= 1e-5  # a weight after 51 steps of Adam, lr 1e-3
        assert data["rungs"] == [rung for rung in EVERYTHING for _ in range(3 * accumulate)] + [EVERYTHING[-1]] * (
            3 * accumulate
        )


def test_one_curve_in_bf16(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "everything-bf16"):
        assert data["tried"] == EVERYTHING
        # bf16 keeps 8 bits: runs at different stages differ by a few 1e-3 in the loss after a hundred steps.
        assert_one_curve(data, 5e-3)


def test_where_recomputing_is_enough_nothing_is_offloaded(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "checkpointing"):
        assert data["tried"] == [*PLAIN, *CHECKPOINTED]
        assert data["committed"] in CHECKPOINTED
        assert not data["on_host"]
        assert_one_curve(data)
        recomputed = data["calls"] - data["fixed_calls"]
        assert recomputed == sum(rung in CHECKPOINTED for rung in data["rungs"]) > 0


def test_where_the_optimizer_on_the_host_is_enough_the_weights_stay(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "optimizer"):
        assert data["tried"] == [*PLAIN, *CHECKPOINTED, *OPTIMIZER_ON_HOST]
        assert data["committed"] in OPTIMIZER_ON_HOST
        assert (data["on_host"], data["weights_on_host"]) == (True, False)
        assert data["calls"] - data["fixed_calls"] == 4 * 3  # recomputing was turned off again
        assert_one_curve(data)


@pytest.mark.parametrize(
    ("case", "stage", "keys"),
    [
        ("near-miss-1", 1, ["allgather_bucket_size", "reduce_bucket_size"]),
        ("near-miss-3", 3, ["reduce_bucket_size", "stage3_max_live_parameters", "stage3_prefetch_bucket_size"]),
    ],
)
def test_a_near_miss_halves_the_buckets_until_it_fits(
    results: list[dict[str, Any]], case: str, stage: int, keys: list[str]
) -> None:
    for data in outcome(results, case):
        assert len(data["tried"]) == 4
        half, quarter = data["tried"][2:]
        assert data["tried"][:2] == ["stage 0", f"stage {stage}"]
        assert all(f"{key}={data['reduce_bucket'] * 2}" in half for key in keys)
        assert all(f"{key}={data['reduce_bucket']}" in quarter for key in keys)
        assert data["committed"] == quarter
        assert_one_curve(data)


def test_recomputing_works_where_stage_3_keeps_no_weight_gathered(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "released-at-once"):
        assert "stage 3 (activation checkpointing)" in data["tried"]
        assert_one_curve(data)
        assert math.isclose(data["gap"], 0.0, abs_tol=1e-6)


@pytest.mark.parametrize(
    ("case", "tried"),
    [
        ("oom-checkpointing", [*PLAIN, *CHECKPOINTED]),
        ("oom-offload", [*PLAIN, *CHECKPOINTED, *OPTIMIZER_ON_HOST]),
    ],
)
def test_the_ladder_climbs_to_them_out_of_memory_as_well(
    results: list[dict[str, Any]], case: str, tried: list[str]
) -> None:
    for data in outcome(results, case):
        assert data["tried"] == tried
        assert data["committed"] in tried[8:] or data["committed"] in CHECKPOINTED[1:]
        assert_one_curve(data)


def test_a_run_can_begin_offloaded(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "too-large"):
        assert data["tried"] == OPTIMIZER_ON_HOST
        assert data["on_host"]
        assert len(data["skipped"]) == 4
        assert_one_curve(data)


def test_what_cannot_be_done_is_said(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "unavailable"):
        assert data["skipped"] == ["not tried: rounding needs DeepSpeed's CUDA kernels"] * 2
        assert "no part of the model is of class Blok" in data["refused"]
        assert "Block" in data["refused"].split("several instances")[1]
        assert_one_curve(data)
