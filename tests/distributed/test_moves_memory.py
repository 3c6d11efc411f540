"""Twenty moves in a row leave memory where it was."""

from __future__ import annotations

from typing import Any

import pytest
from harness import outcome, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

PARAMETERS = 10 * 1000 * 1001 + 8 * 1000 + 1001


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("memory")
    payload = {"folder": str(folder / "cases")}
    # glibc's threshold grows with use, and freed tensors then stay in its heap. Fixed, resident memory is what is in
    # use.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    results = run_ranks("memory_cases:run", payload, ranks=2, timeout_s=250, tmp_path=folder, extra_env=env)
    return outcome(results, "twenty_moves")


def test_resident_memory_is_back_after_each_move(by_rank: list[Any]) -> None:
    for data in by_rank:
        resident = data["resident"]
        assert len(resident) == 20
        # The first engine of each kind (stage 3, stages 1 and 2, stage 0) brings libraries and thread pools along.
        shown = [round(value / 2**20, 1) for value in resident]
        assert abs(resident[-1] / resident[2] - 1) <= 0.01, shown
        assert max(resident[2:]) / resident[2] - 1 <= 0.01, shown


def test_live_tensors_are_the_weights_and_the_held_share(by_rank: list[Any]) -> None:
    for data in by_rank:
        weights_bytes = 4 * PARAMETERS
        for live, held in zip(data["live"], data["held"], strict=True):
            # fp32 weights and two AdamW moments, half of the elements on each rank; padding adds a few elements.
            assert held == pytest.approx(3 * 4 * PARAMETERS / 2, rel=1e-3)
            assert live == pytest.approx(weights_bytes + held, rel=5e-3)
        assert max(data["live"]) == pytest.approx(min(data["live"]), rel=1e-3)


def test_training_went_on(by_rank: list[Any]) -> None:
    for data in by_rank:
        assert len(data["losses"]) == 21
        assert len(set(data["losses"])) == 21
