from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zeroladder.costmodel import ModelCount, state_bytes


@pytest.mark.parametrize(("stage", "expected_gb"), [(0, 208.0), (1, 61.75), (2, 37.375), (3, 13.0)])
def test_13b_on_16_gpus(stage: int, expected_gb: float) -> None:
    count = ModelCount(trainable=13_000_000_000, frozen=0)
    # Exact: every share divides by 16.
    assert state_bytes(stage, count, world_size=16, weight_bytes=2, optimizer_bytes=12) / 1e9 == expected_gb


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, 2200 + 200 + 1200), (1, 2200 + 200 + 300), (2, 2200 + 50 + 300), (3, 550 + 50 + 300)]
)
def test_frozen_parameters_have_weights_only(stage: int, expected: int) -> None:
    count = ModelCount(trainable=100, frozen=1000)
    assert state_bytes(stage, count, world_size=4, weight_bytes=2, optimizer_bytes=12) == expected


@given(
    st.builds(ModelCount, st.integers(0, 10**12), st.integers(0, 10**12)),
    st.integers(1, 4096),
    st.sampled_from([2, 4]),
    st.integers(0, 16),
)
def test_higher_stages_never_need_more(count: ModelCount, world_size: int, weight: int, optimizer: int) -> None:
    sizes = [
        state_bytes(stage, count, world_size=world_size, weight_bytes=weight, optimizer_bytes=optimizer)
        for stage in range(4)
    ]
    assert sizes == sorted(sizes, reverse=True)
    if world_size == 1:
        assert len(set(sizes)) == 1


@pytest.mark.parametrize(("stage", "world_size", "message"), [(4, 1, "stage=4"), (0, 0, "world_size=0")])
def test_refused(stage: int, world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state_bytes(stage, ModelCount(1, 1), world_size=world_size, weight_bytes=2, optimizer_bytes=12)
