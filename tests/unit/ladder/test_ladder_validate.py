from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from ladder_cases import SETTINGS

from lightning_zeroladder.ladder import check_settings, normalize_stages


def test_defaults_with_a_limit_pass() -> None:
    check_settings(SETTINGS)
    check_settings(replace(SETTINGS, stages=(3,), steps_per_rung=2, warmup_steps=0, headroom=0.0, tie=0.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": ()}, r"stages=\(\): must name at least one"),
        ({"stages": (0, 4)}, r"stages=\(0, 4\).*Remove 4"),
        ({"stages": (1, 1)}, r"named once. Pass \(1,\)"),
        ({"stages": (2, 1)}, r"ascending. Pass \(1, 2\)"),
        ({"steps_per_rung": 1, "warmup_steps": 0}, r"steps_per_rung=1: must be at least 2"),
        ({"warmup_steps": 200}, r"warmup_steps=200.*below steps_per_rung=200"),
        ({"warmup_steps": -1}, r"warmup_steps=-1"),
        ({"headroom": 1.0}, r"headroom=1.0: must be at least 0 and below 1"),
        ({"headroom": math.nan}, r"headroom=nan"),
        ({"headroom": -0.1}, r"headroom=-0.1"),
        ({"memory_limit_bytes": 0}, r"memory_limit_bytes=0: must be above 0"),
        ({"tie": -0.1}, r"tie=-0.1: must be 0 or more"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings(replace(SETTINGS, **change))


def test_normalize_stages() -> None:
    assert normalize_stages([3, 0, 2]) == (0, 2, 3)
