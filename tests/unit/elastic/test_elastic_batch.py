from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zeroladder.elastic.batch import (
    Kept,
    check_global_batch,
    kept_of,
    nearest_accumulation,
    plan_batch,
    rescaled_limit,
)

SMALL = st.integers(1, 64)


@pytest.mark.parametrize("value", ["keep", "scale", 1, 4096])
def test_settings_that_are_allowed(value):
    assert check_global_batch(value) == value


@pytest.mark.parametrize("value", ["kept", "", 0, -4, True, 2.5, None])
def test_settings_that_are_not(value):
    with pytest.raises(ValueError, match="say 'keep'"):
        check_global_batch(value)


@given(target=st.integers(1, 5000), unit=st.integers(1, 300))
def test_no_accumulation_is_nearer(target, unit):
    k = nearest_accumulation(target, unit)
    assert k >= 1
    distances = {other: abs(other * unit - target) for other in (max(1, k - 1), k, k + 1)}
    assert distances[k] == min(distances.values())


@given(k=SMALL, ranks=SMALL, now=SMALL, micro_batch=SMALL)
def test_global_batch_stays_where_the_ranks_divide_it(k, ranks, now, micro_batch):
    kept = plan_batch("keep", k, ranks, micro_batch, None).kept
    plan = plan_batch("keep", k, now, micro_batch, kept)
    if (k * ranks) % now == 0:
        assert plan.accumulate == k * ranks // now
        assert plan.kept.actual == kept.actual
        assert not plan.changed
        assert (plan.message is None) == (plan.accumulate == k)
    else:
        assert abs(plan.kept.actual - kept.actual) <= max(now * micro_batch // 2, now * micro_batch - kept.actual)
        assert (f"{plan.kept.actual} samples instead of {kept.actual}" in (plan.message or "")) == plan.changed


@given(k=SMALL, sizes=st.lists(SMALL, min_size=1, max_size=6), micro_batch=st.sampled_from([0, 1, 3, 8]))
def test_resizes_in_a_row_do_not_drift(k, sizes, micro_batch):
    first = plan_batch("keep", k, sizes[0], micro_batch, None)
    kept = first.kept
    for ranks in sizes[1:]:
        kept = plan_batch("keep", k, ranks, micro_batch, kept).kept
    back = plan_batch("keep", k, sizes[0], micro_batch, kept)
    assert back.accumulate == k
    assert back.kept == first.kept
    assert back.loss_factor == 1


@given(k=SMALL, ranks=SMALL, now=SMALL, micro_batch=SMALL)
def test_gradients_keep_their_size(k, ranks, now, micro_batch):
    """Lightning and DeepSpeed each divide by the accumulation: a mean over the samples divided by the first k."""
    kept = plan_batch("keep", k, ranks, micro_batch, None).kept
    plan = plan_batch("keep", k, now, micro_batch, kept)
    size = plan.loss_factor * plan.accumulate / plan.accumulate**2
    assert size == pytest.approx(1 / k)


def test_scale_keeps_the_accumulation_and_says_the_rule():
    kept = plan_batch("keep", 2, 4, 8, None).kept
    plan = plan_batch("scale", 2, 8, 8, kept)
    assert (plan.accumulate, plan.kept.actual, plan.changed) == (2, 128, True)
    assert "128 samples instead of 64 (accumulate_grad_batches=2)" in plan.message
    assert "by 2 for SGD, by 1.41 for Adam" in plan.message


def test_a_number_of_samples():
    fresh = plan_batch(256, 1, 4, 8, None)
    assert (fresh.accumulate, fresh.kept.target, fresh.loss_factor) == (8, 256, 8)
    assert "accumulate_grad_batches=8 instead of 1" in fresh.message
    assert plan_batch(256, 1, 2, 8, fresh.kept).accumulate == 16
    assert "240 samples instead of 256" in plan_batch(256, 1, 6, 8, fresh.kept).message
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu"):
        plan_batch(256, 1, 4, 0, None)


def test_another_accumulation_given_by_hand_is_followed():
    kept = plan_batch("keep", 1, 4, 8, None).kept
    plan = plan_batch("keep", 2, 2, 8, kept)
    assert (plan.accumulate, plan.message, plan.loss_factor) == (2, None, 1)
    assert plan.kept == Kept(32, 32, 2, 2, 16, 8)  # limits too are as the user gives them now
    assert "64 samples instead of 32" in plan_batch("keep", 4, 2, 8, kept).message


def test_another_micro_batch():
    kept = plan_batch("keep", 4, 2, 8, None).kept
    plan = plan_batch("keep", 4, 2, 16, kept)
    assert (plan.accumulate, plan.kept.actual) == (2, 64)


@pytest.mark.parametrize(("saved", "now"), [(0, 0), (0, 8), (8, 0)])
def test_a_loader_that_does_not_tell_is_taken_to_be_as_it_was(saved, now):
    kept = plan_batch("keep", 1, 4, saved, None).kept
    plan = plan_batch("keep", 1, 2, now, kept)
    assert plan.accumulate == 2
    assert plan_batch("keep", 1, 4, saved, plan.kept).accumulate == 1


def test_manual_optimization_is_left_alone():
    kept = plan_batch("keep", 1, 4, 8, None).kept
    plan = plan_batch("keep", 1, 2, 8, kept, fixed=True)
    assert (plan.accumulate, plan.loss_factor, plan.changed) == (1, 1, True)
    assert "16 samples instead of 32" in plan.message


@given(limit=st.integers(1, 500), before=SMALL, now=SMALL)
def test_limits_hold_the_same_samples(limit, before, now):
    made = rescaled_limit(limit, before, now)
    assert made >= 1
    assert abs(made * now - limit * before) <= max(now / 2, now - limit * before)


def test_what_a_manifest_tells():
    kept = Kept(32, 30, 2, 1, 16, 0)
    entries = {name: getattr(kept, name) for name in Kept.__slots__}
    assert kept_of(entries) == kept
    for name, wrong in itertools.product(Kept.__slots__, ("x", None, -1)):
        assert kept_of({**entries, name: wrong}) is None
    assert kept_of({**entries, "unit": 0}) is None
    assert kept_of({}) is None
