from __future__ import annotations

import pytest

from lightning_zeroladder.ladder import Statistic, summarize


def test_median_and_scaled_deviation() -> None:
    # Deviations from 3 are 2, 1, 0, 1, 97: their median is 1.
    assert summarize([1.0, 2.0, 3.0, 4.0, 100.0]) == Statistic(median=3.0, spread=1.4826, count=5)


def test_one_sample_has_no_spread() -> None:
    assert summarize([0.25]) == Statistic(0.25, 0.0, 1)


def test_no_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summarize([])
