"""What we write loads in plain DeepSpeed, what it writes loads here, and any optimizer's state survives."""

from __future__ import annotations

from typing import Any

import pytest
from compatible_cases import NATIVE_TO_STOCK, STOCK_UNIVERSAL, UNIVERSAL_TO_STOCK
from harness import outcome, run_ranks
from test_optimizers import NAMES

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(750)]

TOLERANCE = 1e-6
"""Losses are below 4: a few fp32 roundings."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compatible")
    payload = {"folder": str(folder / "cases")}
    return run_ranks("compatible_cases:run", payload, ranks=2, timeout_s=700, tmp_path=folder)


def assert_goes_on(data: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    assert len(data["losses"]) == len(data["expected"]) == 3
    assert max(abs(a - b) for a, b in zip(data["losses"], data["expected"], strict=True)) <= tolerance


@pytest.mark.parametrize(("source", "stage"), UNIVERSAL_TO_STOCK)
def test_deepspeed_loads_our_universal_checkpoint(results: list[dict[str, Any]], source: int, stage: int) -> None:
    """From stage 0 too, and from 1 and 2 to 3 and back, which its own converter cannot."""
    for data in outcome(results, f"universal-{source}-{stage}"):
        assert_goes_on(data)
        assert data["steps"] == 6


@pytest.mark.parametrize(("source", "stage"), [(0, 2), (2, 3)])
def test_deepspeed_loads_the_universal_copy_that_a_save_leaves(
    results: list[dict[str, Any]], source: int, stage: int
) -> None:
    for data in outcome(results, f"saved-universal-{source}-{stage}"):
        assert_goes_on(data)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("source", "stage"), NATIVE_TO_STOCK)
def test_deepspeed_loads_our_native_checkpoint_of_another_stage(
    results: list[dict[str, Any]], source: int, stage: int, dtype: str
) -> None:
    for data in outcome(results, f"native-{dtype}-{source}-{stage}"):
        # bf16 runs of different stages differ by themselves; a lost moment would show as more.
        assert_goes_on(data, TOLERANCE if dtype == "fp32" else 3e-2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("source", [0, 1, 2, 3])
def test_we_load_what_deepspeed_saved(results: list[dict[str, Any]], source: int, dtype: str) -> None:
    for data in outcome(results, f"stock-{dtype}-{source}"):
        assert data["differs"] == []
        assert data["note"] == "kept"
        assert_goes_on(data, TOLERANCE if dtype == "fp32" else 3e-2)


@pytest.mark.parametrize(("source", "stage"), STOCK_UNIVERSAL)
def test_we_load_what_deepspeeds_converter_made(results: list[dict[str, Any]], source: int, stage: int) -> None:
    for data in outcome(results, f"stock-universal-{source}-{stage}"):
        assert data["differs"] == []  # buffers and frozen weights included, which DeepSpeed itself would not load
        assert_goes_on(data)


@pytest.mark.parametrize("pair", [(0, 3), (3, 1), (2, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_any_optimizer_state_comes_back(results: list[dict[str, Any]], name: str, pair: tuple[int, int]) -> None:
    for data in outcome(results, f"optimizer-{name}-{pair[0]}-{pair[1]}"):
        assert data["differs"] == []
        assert_goes_on(data)


@pytest.mark.parametrize("pair", [(0, 3), (3, 0), (2, 1)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam"])
def test_deepspeeds_own_optimizers(results: list[dict[str, Any]], name: str, dtype: str, pair: tuple[int, int]) -> None:
    for data in outcome(results, f"optimizer-{name}-{dtype}-{pair[0]}-{pair[1]}"):
        # FusedAdam counts its steps in the last parameter of a group; here each of them gets the count.
        assert [name for name in data["differs"] if not (name.endswith("/step") and name.startswith("model"))] == []
        assert_goes_on(data, TOLERANCE if dtype == "fp32" else 3e-2)


def test_ranks_agree_on_what_is_missing_and_on_which_host(results: list[dict[str, Any]]) -> None:
    by_rank = outcome(results, "other-host")
    for data in by_rank:
        assert data["message"].startswith("BadCheckpoint: ")
        assert f"on host {data['host']} the optimizer states of rank 0 are missing" in data["message"]
        assert len(data["losses"]) == 1
    assert "on rank 1" in by_rank[0]["message"]


def test_hosts_without_a_shared_file_system_save_their_parts(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "own-folders"):
        assert data == {"seen": ["ours"], "differs": []}


def test_a_full_disk_is_found_out_before_writing(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "no-space"):
        assert "kB are needed, 1.0 kB are free" in data["message"]
        assert data["differs"] == []
        assert data["left"] == ["ours"]


def test_parameters_that_are_stepped_together_need_the_same_step_count(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "uneven-steps"):
        assert data["messages"][0] is None
        assert data["messages"][1].startswith("UnmovableState: Parameters 'embed.weight' and ")
        assert data["untouched"]


@pytest.mark.parametrize(("source", "stage"), [(0, 0), (1, 2)])
def test_adafactor_goes_on_where_it_sees_the_same_shapes(
    results: list[dict[str, Any]], source: int, stage: int
) -> None:
    for data in outcome(results, f"factored-{source}-{stage}"):
        assert data["message"] is None
        assert_goes_on(data)


@pytest.mark.parametrize(("source", "stage", "named"), [(0, 2, "row_var"), (2, 0, "stages=(2,)")])
def test_adafactor_is_refused_where_it_would_see_others(
    results: list[dict[str, Any]], source: int, stage: int, named: str
) -> None:
    for data in outcome(results, f"factored-{source}-{stage}"):
        assert data["message"].startswith("CheckpointMismatch: Adafactor keeps state that is not shaped like")
        assert named in data["message"]
        assert data["untouched"]
