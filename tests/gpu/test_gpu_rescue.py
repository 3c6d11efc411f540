"""A rank that runs out of GPU memory is recovered from in the same processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import outcome, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gpu_rescue")
    payload = {"folder": str(folder / "cases")}
    return run_ranks("gpu_rescue_cases:run", payload, ranks=2, timeout_s=800, tmp_path=folder)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_out_of_memory_on_one_rank(by_rank: list[dict[str, Any]], stage: int) -> None:
    ranks = outcome(by_rank, f"stage_{stage}")
    assert [data["failed"] for data in ranks] == [0, 1]
    assert ranks[0]["failures"] == [[stage, "out of memory"]]
    for data in ranks:
        assert data["gap"] < 1e-5
        assert data["allocated_mib"] < 256
