from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zeroladder.engine.digest import checksum

MODULUS = 1 << 64


@settings(deadline=None, max_examples=50)
@given(
    numel=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]),
)
def test_pieces_add_up_to_the_whole_however_it_is_cut(numel, cuts, dtype):
    values = torch.arange(numel).mul(37).remainder(251).to(dtype)
    bounds = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    total = sum(checksum(values[a:b], a).item() for a, b in itertools.pairwise(bounds))
    assert (total - checksum(values, 0).item()) % MODULUS == 0


@settings(deadline=None, max_examples=50)
@given(index=st.integers(0, 299_999), bit=st.integers(0, 31))
def test_any_flipped_bit_shows(index, bit):
    values = torch.linspace(-1, 1, 300_000)
    before = checksum(values, 0).item()
    bits = values.view(torch.int32)
    bits[index] ^= (1 << bit) if bit < 31 else -(1 << 31)
    assert checksum(values, 0).item() != before


def test_order_sign_of_zero_and_position_count():
    a = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert checksum(a, 0).item() != checksum(a.flip(0), 0).item()
    assert checksum(a, 0).item() != checksum(a, 1).item()
    assert checksum(torch.tensor([0.0]), 0).item() != checksum(torch.tensor([-0.0]), 0).item()
    assert checksum(a[:0], 0).item() == 0
