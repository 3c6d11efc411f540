"""Any checkpoint into any stage at any world size: every bit of the state comes back, and the loss goes on."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoint_cases import DTYPES, PAIRS, STAGES, STEPS
from harness import outcome, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TOLERANCE = 1e-6
"""Losses are below 4: a few fp32 roundings, from gradients added in another order."""

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def saved(root: Any) -> dict[int, Results]:
    """One launch per number of ranks that saves; each trains and saves at every stage in both dtypes."""
    made = {}
    for ranks in sorted({origin for origin, _ in PAIRS}):
        folder = root / f"save-{ranks}"
        payload = {"root": str(root), "folder": str(folder / "cases"), "phase": "save"}
        made[ranks] = run_ranks("checkpoint_cases:run", payload, ranks=ranks, timeout_s=200, tmp_path=folder)
    return made


@pytest.fixture(scope="module")
def launches() -> dict[int, Results]:
    return {}


def loaded(root: Any, launches: dict[int, Results], ranks: int) -> Results:
    if ranks not in launches:
        folder = root / f"load-{ranks}"
        payload = {"root": str(root), "folder": str(folder / "cases"), "phase": "load"}
        launches[ranks] = run_ranks("checkpoint_cases:run", payload, ranks=ranks, timeout_s=500, tmp_path=folder)
    return launches[ranks]


@pytest.mark.parametrize("dtype", DTYPES)
def test_stages_save_the_same_state(saved: dict[int, Results], dtype: str) -> None:
    """The digests do not depend on the stage; that they are equal says that the reference itself is sound."""
    for results in saved.values():
        keys = {frozenset(data["digest"]) for stage in STAGES for data in outcome(results, f"{dtype}-{stage}")}
        assert len(keys) == 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("source", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("origin", "ranks"), PAIRS)
def test_pair(
    saved: dict[int, Results],
    root: Any,
    launches: dict[int, Results],
    origin: int,
    ranks: int,
    dtype: str,
    source: int,
    stage: int,
) -> None:
    for data in outcome(loaded(root, launches, ranks), f"{origin}-{dtype}-{source}-{stage}"):
        assert data["keys"] > 50
        assert data["differs"] == []
        assert data["client"] == [1, 2.5, "three"]
        assert len(data["losses"]) == len(data["expected"]) == STEPS
        if dtype == "fp32":
            apart = max(abs(a - b) for a, b in zip(data["losses"], data["expected"], strict=True))
            assert apart <= TOLERANCE
