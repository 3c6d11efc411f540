from __future__ import annotations

import pytest

from lightning_zeroladder.engine.batching import batched_by_size


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([4, 6, 1], [[4, 6], [1]]),
        ([11, 1, 9, 1], [[11], [1, 9], [1]]),
        ([1, 30, 30], [[1], [30], [30]]),
        ([0, 0, 10, 0], [[0, 0, 10, 0]]),
    ],
)
def test_groups_keep_the_order_and_the_limit(sizes, expected):
    assert list(batched_by_size(sizes, lambda size: size, 10)) == expected
