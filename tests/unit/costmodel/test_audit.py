from __future__ import annotations

import pytest

from lightning_zeroladder.costmodel.audit import Audit, Counted, Place, compare, merge_backward, textbook_multiple
from lightning_zeroladder.costmodel.traffic import StageSettings, TrafficModel

MODEL = TrafficModel(trainable=1000)
ONE = Counted(1000, 2000, 1)


def audit(settings: StageSettings, counted: dict[tuple[str, Place], Counted], *, k: int = 8) -> Audit:
    return compare(settings, MODEL, counted, world_size=2, accumulate=k, element_bytes=2, release="0.0")


def gradients_of_stage_2(name: str, elements: float) -> dict[tuple[str, Place], Counted]:
    return {
        (name, Place.BACKWARD): Counted(elements, 2 * elements, 8),
        ("all-gather", Place.BOUNDARY): Counted(500, 1000, 1),
    }


def test_the_default_of_stage_2_is_confirmed_and_differs_from_the_textbook() -> None:
    found = audit(StageSettings(2), gradients_of_stage_2("all-reduce", 8000))
    assert found.confirmed
    assert found.multiple == 17  # 2k + 1
    assert [(line.predicted_elements, line.predicted_bytes, line.error) for line in found.lines] == [
        (8000, 16000, 0),
        (500, 1000, 0),
    ]
    verdict, difference, reason = found.words()
    assert verdict.startswith("Confirmed")
    assert difference == (
        "The ZeRO paper says 9 times the parameters (k + 1), deepspeed 0.0 sends 17.00 times: 89 % more."
    )
    assert "use_multi_rank_bucket_allreduce: false" in reason


def test_reduced_to_owners_it_is_the_textbook() -> None:
    found = audit(StageSettings(2, multi_rank_buckets=False), gradients_of_stage_2("reduce", 4000))
    assert found.confirmed
    assert found.words()[1:] == ("That is what the ZeRO paper says: 9 times the parameters (k + 1).",)


@pytest.mark.parametrize(("elements", "right"), [(8080, True), (8100, False), (7900, False)])
def test_one_percent_decides(elements: float, right: bool) -> None:
    assert audit(StageSettings(2), gradients_of_stage_2("all-reduce", elements)).confirmed is right


def test_the_right_sum_of_other_collectives_is_refuted() -> None:
    """A release that reduces where an all-reduce was predicted, twice as often."""
    found = audit(StageSettings(2), gradients_of_stage_2("reduce", 8000))
    assert found.error == 0
    assert not found.confirmed
    assert "all-reduce in backward: predicted 8,000 elements, counted 0" in found.words()[0]
    assert "reduce in backward: predicted 0 elements, counted 8,000" in found.words()[0]
    assert [line.error for line in found.lines] == [None, 0, -1]


def test_nothing_counted_is_refuted() -> None:
    found = audit(StageSettings(0), {})
    assert not found.confirmed
    assert found.words()[0].startswith("Refuted")


def test_stage_3_that_keeps_weights_says_so_and_one_that_gathers_again_does_not() -> None:
    gather = Counted(4000, 8000, 8)
    scatter = {("reduce-scatter", Place.BACKWARD): Counted(4000, 8000, 8)}
    kept = audit(StageSettings(3, refetch=False), {("all-gather", Place.FORWARD): gather, **scatter})
    assert kept.confirmed
    assert any("still there in backward" in sentence for sentence in kept.words())
    again = audit(
        StageSettings(3, refetch=True),
        {("all-gather", Place.FORWARD): gather, ("all-gather", Place.BACKWARD): gather, **scatter},
    )
    assert again.confirmed
    assert again.words()[1:] == ("That is what the ZeRO paper says: 24 times the parameters (3k).",)


def test_what_the_last_backward_alone_calls_is_the_boundarys() -> None:
    every = merge_backward([{"reduce": ONE}, {"reduce": ONE}], frozenset({"reduce"}))
    assert every == {("reduce", Place.BACKWARD): Counted(2000, 4000, 2)}
    last = merge_backward([{}, {"reduce": ONE}], frozenset())
    assert last == {("reduce", Place.BOUNDARY): ONE}


def test_with_one_micro_batch_the_prediction_says_where() -> None:
    assert merge_backward([{"reduce": ONE}], frozenset({"reduce"})) == {("reduce", Place.BOUNDARY): ONE}
    assert merge_backward([{"reduce": ONE}], frozenset()) == {("reduce", Place.BACKWARD): ONE}


def test_limits() -> None:
    with pytest.raises(ValueError, match="stage=4: must be one of 0, 1, 2, 3"):
        textbook_multiple(4, 1)
    with pytest.raises(ValueError, match="ranks=1, accumulate=1: at least 2 ranks"):
        compare(StageSettings(0), MODEL, {}, world_size=1, accumulate=1, element_bytes=2, release="0.0")
