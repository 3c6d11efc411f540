from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DistributedSampler

from lightning_zeroladder.elastic.position import Position, batches_left, position_of
from lightning_zeroladder.elastic.sampler import InjectedRank, ResumableSampler, share

RANKS = st.integers(1, 7)
COUNT = st.integers(1, 200)


def samplers(count, ranks, **options):
    data = list(range(count))
    return [ResumableSampler(DistributedSampler(data, ranks, rank, **options)) for rank in range(ranks)]


@given(count=COUNT, ranks=RANKS, epoch=st.integers(0, 3), shuffle=st.booleans(), drop=st.booleans())
def test_a_whole_epoch_is_what_the_injected_sampler_yields(count, ranks, epoch, shuffle, drop):
    for rank in range(ranks):
        theirs = DistributedSampler(list(range(count)), ranks, rank, shuffle=shuffle, seed=5, drop_last=drop)
        ours = ResumableSampler(theirs)
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


def test_the_users_own_order_too():
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist()
    for rank in range(4):
        theirs = DistributedSamplerWrapper(order, num_replicas=4, rank=rank, shuffle=True, seed=2)
        ours = ResumableSampler(theirs)
        assert list(ours) == list(theirs)
    ours.begin(0, 8)
    theirs.num_replicas, theirs.rank, theirs.num_samples, theirs.total_size = 1, 0, 30, 30
    assert list(ours) == share(list(theirs), 8, 4, 3, drop_last=False)


@settings(max_examples=60)
@given(count=COUNT, micro_batch=st.integers(1, 5), sizes=st.lists(st.tuples(RANKS, st.integers(0, 6)), max_size=4))
def test_any_resizes_see_each_sample_once(count, micro_batch, sizes):
    """Only the last ranks pad, and the n-th batches of all ranks are the next samples of the order."""
    seen: list[int] = []
    order = samplers(count, 1, seed=9)[0].order()
    for ranks, batches in [*sizes, (3, 10**6)]:
        shares = []
        for sampler in samplers(count, ranks, seed=9):
            sampler.begin(0, len(seen))
            made = list(BatchSampler(sampler, micro_batch, False))[:batches]
            shares.append([item for batch in made for item in batch])
        if batches * micro_batch * ranks >= count - len(seen):
            break
        step = [item for turn in zip(*shares, strict=True) for item in turn]
        assert step == order[len(seen) : len(seen) + batches * micro_batch * ranks]
        seen += step
    last = [item for part in shares for item in part]
    total = Counter(seen + last)
    assert set(total) == set(range(count))
    assert sum(total.values()) - count < ranks


@given(left=st.integers(0, 300), ranks=RANKS, micro_batch=st.integers(1, 9), drop=st.booleans(), last=st.booleans())
def test_batches_left_is_what_a_loader_yields(left, ranks, micro_batch, drop, last):
    part = share(list(range(left)), 0, ranks, 0, drop_last=drop)
    made = list(BatchSampler(part, micro_batch, last))
    assert batches_left(left, ranks, micro_batch, drop_samples=drop, drop_last=last) == len(made)


def test_begin_says_whether_an_iterator_is_stale():
    sampler = samplers(20, 2)[0]
    assert sampler.begin(1, 8)
    assert not sampler.begin(1, 8)
    assert sampler.begin(1, 10)
    sampler.set_epoch(2)
    assert sampler.begin(1, 10)


def test_the_next_epoch_is_whole_again():
    sampler = samplers(20, 2)[0]
    sampler.begin(1, 8)
    assert len(list(sampler)) == 6
    sampler.set_epoch(2)
    assert len(list(sampler)) == 10


def test_a_loader_that_is_cycled_gets_all_of_it_in_the_next_round():
    sampler = samplers(20, 2)[0]
    sampler.begin(0, 8)
    assert [len(list(sampler)), len(list(sampler))] == [6, 10]


def test_an_epoch_that_was_begun_keeps_its_order_under_another_seed():
    """A job that is started again may draw another seed; the epochs after this one follow it."""
    before = samplers(20, 2, seed=1)[0]
    sampler = samplers(20, 2, seed=7)[0]
    sampler.begin(0, 8, seed=1)
    assert list(sampler) == share(before.order(), 8, 2, 0, drop_last=False)
    sampler.set_epoch(1)
    before.set_epoch(1)
    assert sampler.order() != before.order()
    other = samplers(20, 2, seed=7)[0]
    other.set_epoch(1)
    assert sampler.order() == other.order()


def test_length_is_that_of_an_epoch():
    sampler = samplers(20, 2)[0]
    sampler.begin(0, 8)
    assert (len(sampler), sampler.whole) == (10, 20)


@pytest.mark.parametrize("rank", [0, 3])
def test_injected_rank_is_a_rank(rank):
    sampler = DistributedSampler(list(range(9)), num_replicas=4, rank=InjectedRank(rank))
    assert isinstance(sampler.rank, InjectedRank)
    assert sampler.rank == rank


def test_position_comes_back():
    position = Position(3, False, 7, (56, 12), (8, 0), (0, 4), (5, 0), (90, 0), 1, 4)
    assert position_of(position.entries()) == position
    assert position.inside
    assert not Position(3, True, 7, (), (), (), (), (), 0, 4).inside
    assert not Position(3, False, 0, (0,), (8,), (0,), (5,), (9,), 0, 4).inside
