from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops.progress import _BatchProgress

from lightning_zeroladder.elastic.position import batches_left
from lightning_zeroladder.elastic.run import ElasticRun, _batches_done, _set_progress


def test_a_setting_that_cannot_be_followed_is_refused_at_once():
    with pytest.raises(MisconfigurationException, match="ZeroAutoStrategy: global_batch='big'"):
        ElasticRun("big")


@given(
    count=st.integers(1, 500),
    ranks=st.integers(1, 8),
    micro_batch=st.integers(1, 8),
    share=st.floats(0, 1),
    drop=st.booleans(),
)
def test_an_epoch_ends_with_its_last_sample(count, ranks, micro_batch, share, drop):
    """However many samples were seen: Lightning runs as many batches more as the loader has left."""
    seen = int(count * share)
    whole = batches_left(count, ranks, micro_batch, drop_samples=False, drop_last=drop)
    left = batches_left(count - seen, ranks, micro_batch, drop_samples=False, drop_last=drop)
    done = _batches_done(whole, -1, [seen], [left], (micro_batch * ranks,))
    assert 0 <= done <= whole
    assert whole - done == left


@given(limit=st.integers(1, 50), unit=st.integers(1, 20), share=st.floats(0, 0.999))
def test_a_limit_ends_it_earlier(limit, unit, share):
    seen = int(limit * unit * share)
    done = _batches_done(limit, -1, [seen], [10**6], (unit,))
    assert 0 <= done < limit
    assert abs(seen + (limit - done) * unit - limit * unit) < unit  # the samples of the limit, to a batch


def test_without_a_length_batches_are_counted_on():
    assert _batches_done(float("inf"), 7, [0], [], (0,)) == 7
    assert _batches_done(5, 7, [0, 0], [], (4, 4)) == 4  # several loaders: at least one batch is left


@pytest.mark.parametrize(
    ("ready", "started", "processed", "completed"),
    [(6, 6, 6, 5), (6, 6, 6, 6), (7, 7, 6, 6)],
    ids=["saved at the end of a batch", "saved between batches", "saved as a batch failed"],
)
def test_progress_keeps_how_far_the_last_batch_had_come(ready, started, processed, completed):
    progress = _BatchProgress()
    for tracker, more in ((progress.current, 0), (progress.total, 18)):
        names = {"ready": ready, "started": started, "processed": processed, "completed": completed}
        for name, value in names.items():
            setattr(tracker, name, value + more)
    _set_progress(progress, 12, 36)
    for tracker, more in ((progress.current, 0), (progress.total, 36)):
        assert tracker.processed == 12 + more
        assert tracker.ready - tracker.processed == ready - processed
        assert tracker.started == tracker.ready
        assert tracker.processed - tracker.completed == processed - completed
