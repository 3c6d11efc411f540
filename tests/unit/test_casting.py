from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zeroladder.checkpoint.casting import FLOATS, cast
from lightning_zeroladder.checkpoint.dtypes import ITEMSIZE

PAIRS = list(itertools.product(FLOATS, FLOATS))

INTEGER = {8: np.uint64, 4: np.uint32, 2: np.uint16}
"""To look at the bits of an element of so many bytes."""


def check(data: bytes, source: str, target: str) -> None:
    """Compare with torch, bit for bit; a nan only has to stay one, torch's own kernels differ in its other bits."""
    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, source))
    expected = tensor.to(getattr(torch, target))
    found = torch.frombuffer(bytearray(cast(data, source, target)), dtype=getattr(torch, target))
    assert found.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    bits = INTEGER[ITEMSIZE[target]]
    left, right = (t[~nan].view(torch.uint8).numpy().view(bits) for t in (found, expected))
    assert left.tolist() == right.tolist()


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=8, max_size=1024).map(lambda data: data[: len(data) // 8 * 8]))
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_random_bits_are_rounded_as_torch_does(source, target, data):
    check(data, source, target)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_every_value_of_the_short_types(source, target):
    check(np.arange(1 << 16, dtype=np.uint16).tobytes(), source, target)


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_around_every_value_of_the_short_types(target):
    """Just below, at and just above the middle between two neighbours, where rounding decides; denormals as well."""
    short = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(getattr(torch, target))
    values = short[short.isfinite()].double().unique()
    middle = (values[1:] + values[:-1]) / 2
    for source in ("float32", "float64"):
        exact = middle.to(getattr(torch, source))
        below, above = (torch.nextafter(exact, torch.full_like(exact, end)) for end in (-torch.inf, torch.inf))
        for tensor in (exact, below, above):
            check(tensor.numpy().tobytes(), source, target)


SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1e-40, -1e-38, 6e-8, 5.96e-8, 65504.0, 65520.0]
SPECIAL += [65519.99, 3.3895e38, 3.4028e38, 1e300, 1e-300, 5e-324, 1 + 2**-8, 1 + 2**-11, 1 + 2**-11 + 2**-40]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_special_values(source, target):
    data = torch.tensor(SPECIAL, dtype=torch.float64).to(getattr(torch, source))
    check(bytes(data.view(torch.uint8).numpy()), source, target)


@pytest.mark.parametrize(
    ("source", "target"), [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")]
)
def test_there_and_back_changes_no_bit(source, target):
    bits = np.arange(1 << 16, dtype=np.uint16).tobytes()
    values = torch.frombuffer(bytearray(bits), dtype=getattr(torch, source))
    data = bytes(values[~values.isnan()].view(torch.uint8).numpy())
    assert bytes(cast(cast(data, source, target), target, source)) == data


def test_the_same_type_is_handed_on():
    data = b"abcd"
    assert cast(data, "float32", "float32") is data
    assert cast(data, "int8", "int8") is data


def test_nothing_stays_nothing():
    for source, target in PAIRS:
        assert len(cast(b"", source, target)) == 0


def test_types_that_are_not_converted():
    with pytest.raises(ValueError, match="cannot convert int64 to float32: only float64, float32, float16, bfloat16"):
        cast(bytes(8), "int64", "float32")
    with pytest.raises(ValueError, match="cannot convert float32 to int64"):
        cast(bytes(8), "float32", "int64")
