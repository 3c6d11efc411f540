"""What is predicted to go over the wire is what goes over it, on the installed release of DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
from harness import outcome, run_ranks
from traffic_cases import ACCUMULATE, VARIANTS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def launches() -> dict[int, list[dict[str, Any]]]:
    return {}


@pytest.mark.parametrize("accumulate", ACCUMULATE)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_predicted_traffic_is_counted(
    launches: dict[int, list[dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
    ranks: int,
    variant: str,
    accumulate: int,
) -> None:
    if ranks not in launches:
        folder = tmp_path_factory.mktemp(f"traffic-{ranks}")
        payload = {"folder": str(folder / "cases")}
        launches[ranks] = run_ranks("traffic_cases:run", payload, ranks=ranks, timeout_s=240, tmp_path=folder)
    for data in outcome(launches[ranks], f"{variant}-k{accumulate}"):
        assert data["counted"] == pytest.approx(data["predicted"], rel=0.01), data
