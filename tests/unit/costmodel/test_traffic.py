from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zeroladder.costmodel.traffic import Collective, Moment, StageSettings, TrafficModel, flows, sent_elements

PSI = 1_000_000


def textbook(settings: StageSettings, accumulate: int) -> float:
    """Elements in units of the parameter count, for a ring of very many ranks."""
    return sent_elements(settings, TrafficModel(PSI), world_size=10**9, accumulate=accumulate) / PSI


@pytest.mark.parametrize(
    ("settings", "one", "eight"),
    [
        (StageSettings(0), 2, 2),
        (StageSettings(1), 3, 3),
        (StageSettings(2), 3, 17),
        (StageSettings(1, multi_rank_buckets=False), 2, 2),
        (StageSettings(2, multi_rank_buckets=False), 2, 9),
        (StageSettings(3, persistence_threshold=0, refetch=False), 2, 16),
        (StageSettings(3, persistence_threshold=0), 3, 24),
    ],
)
def test_what_deepspeed_was_seen_to_send(settings: StageSettings, one: int, eight: int) -> None:
    """Counted on the wire with deepspeed 0.19.8, bf16, 1 and 8 micro-batches per step."""
    assert textbook(settings, 1) == pytest.approx(one)
    assert textbook(settings, 8) == pytest.approx(eight)


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_the_factor_of_a_ring_is_exact(ranks: int) -> None:
    once = PSI * (ranks - 1) / ranks
    model = TrafficModel(PSI)
    assert sent_elements(StageSettings(0), model, world_size=ranks, accumulate=4) == 2 * once
    assert sent_elements(StageSettings(2, multi_rank_buckets=False), model, world_size=ranks, accumulate=4) == 5 * once


def test_small_weights_of_stage_3_are_gathered_once_per_step() -> None:
    model = TrafficModel(trainable=1000, frozen=500, persistent=100, frozen_persistent=50)
    found = {flow.what: (flow.collective, flow.moment, flow.elements) for flow in flows(StageSettings(3), model)}
    assert found == {
        "weights for forward": (Collective.ALL_GATHER, Moment.MICRO_BATCH, 1350),
        "weights for backward": (Collective.ALL_GATHER, Moment.MICRO_BATCH, 1350),
        "gradients": (Collective.REDUCE_SCATTER, Moment.MICRO_BATCH, 1000),
        "small weights": (Collective.ALL_GATHER, Moment.BOUNDARY, 100),
    }


@given(st.integers(0, 3), st.integers(1, 64), st.integers(1, 64), st.booleans())
def test_more_micro_batches_never_send_less(stage: int, accumulate: int, ranks: int, multi: bool) -> None:
    settings, model = StageSettings(stage, multi_rank_buckets=multi), TrafficModel(PSI, frozen=PSI // 2)
    less = sent_elements(settings, model, world_size=ranks, accumulate=accumulate)
    more = sent_elements(settings, model, world_size=ranks, accumulate=accumulate + 1)
    assert more >= less
    assert (more == less) == (stage < 2 or ranks == 1)


@pytest.mark.parametrize(("stage", "ranks", "accumulate"), [(4, 2, 1), (0, 0, 1), (0, 2, 0)])
def test_refused(stage: int, ranks: int, accumulate: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        sent_elements(StageSettings(stage), TrafficModel(PSI), world_size=ranks, accumulate=accumulate)
