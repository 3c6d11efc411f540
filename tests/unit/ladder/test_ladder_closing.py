"""What is said to close the gap follows from the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ladder_cases import GIB, SETTINGS, failed, measurement, skipped

from lightning_zeroladder.costmodel import ModelCount
from lightning_zeroladder.ladder import (
    FailureKind,
    JobSize,
    NothingFits,
    Rung,
    SkipKind,
    TrialResult,
    decide,
)
from lightning_zeroladder.ladder.closing import what_closes

# 8 Gi parameters in bf16 with AdamW: 16 GiB of weights, as much of gradients, 96 GiB of optimizer state.
JOB = JobSize(ModelCount(8 * GIB, 0), world_size=4, weight_bytes=2, optimizer_bytes=12, accumulate=2)


def ran(rung: Rung, peak_gib: float) -> TrialResult:
    return TrialResult(rung, measurement=measurement(peak_gib=peak_gib, units=16384.0))


def test_parts_of_the_state() -> None:
    assert [JOB.state_bytes(Rung(stage), 4) // GIB for stage in range(4)] == [128, 56, 44, 32]
    assert [JOB.divided_bytes(Rung(stage)) // GIB for stage in range(4)] == [0, 96, 112, 128]
    assert JOB.state_bytes(Rung(3, (("offload_optimizer", "cpu"),)), 4) == 8 * GIB
    assert JOB.divided_bytes(Rung(3, (("offload_optimizer", "cpu"), ("offload_param", "cpu")))) == 0


def test_from_a_measured_peak() -> None:
    """Stage 3: 32 GiB of state, 48 GiB beyond it; 72 GiB may be used. 24 GiB are left for state: 128 / 24 = 5.3."""
    words = what_closes([ran(Rung(2), 95), ran(Rung(3), 80)], SETTINGS, JOB)
    assert words == [
        "What would close it, from stage 3:",
        "6 GPUs in place of 4.",
        "Shorter sequences or a smaller micro-batch: at most 6,826 of 8,192 tokens per rank and micro-batch (83 %), if "
        "the 48.0 GiB beyond the model's state grow with them.",
        "Tensor parallelism of degree 2, which divides weights and activations alike (about 40.0 GiB per rank); it "
        "needs another strategy.",
    ]


def test_so_many_ranks_do_close_it() -> None:
    peak = 80 * GIB
    state = JOB.state_bytes(Rung(3), 4)
    assert peak - state + JOB.state_bytes(Rung(3), 6) <= 72 * GIB < peak - state + JOB.state_bytes(Rung(3), 5)


def test_where_neither_more_ranks_nor_smaller_batches_do() -> None:
    ranks = what_closes([ran(Rung(0), 140)], SETTINGS, JOB)
    assert ranks[1] == "More GPUs alone do not (140.0 GiB of the 140.0 GiB are on every rank, however many there are)."
    assert ranks[2].startswith(
        "Not shorter sequences or a smaller micro-batch alone: all but the model's state is 12.0"
    )
    assert "degree 2," in ranks[3]
    assert "degree 4," in what_closes([ran(Rung(0), 150)], SETTINGS, JOB)[3]
    # Activations alone, 100 GiB, are more than may be used.
    assert what_closes([ran(Rung(3), 132)], SETTINGS, JOB)[1].startswith("More GPUs alone do not (100.0 GiB of")


def test_from_what_is_certain_where_nothing_was_measured() -> None:
    trials = [skipped(stage, SkipKind.CANNOT_FIT, needed_bytes=JOB.state_bytes(Rung(stage), 1)) for stage in (0, 3)]
    one = replace(JOB, world_size=1)
    words = what_closes(trials, SETTINGS, one)
    assert words[0] == "What would close it, from stage 0:"
    words = what_closes(trials[1:], SETTINGS, one)
    assert words[1] == "2 GPUs in place of 1 at least, before any activations."
    assert words[2] == (
        "Not shorter sequences or a smaller micro-batch: weights, gradients and optimizer state alone need 128.0 GiB "
        "of the 72.0 GiB that may be used."
    )
    assert "64.0 GiB per rank before any activations" in words[3]


def test_out_of_memory_without_a_figure() -> None:
    words = what_closes([failed(3, FailureKind.OUT_OF_MEMORY, "forward", 1, "")], SETTINGS, JOB)
    assert words[1] == "Twice the GPUs (8) would free 16.0 GiB on each."
    assert words[2] == "Shorter sequences or a smaller micro-batch: there are 40.0 GiB for activations and buffers."


def test_nothing_is_said_of_errors_or_without_sizes() -> None:
    error = failed(3, FailureKind.ERROR, "forward", 1, "KeyError")
    assert what_closes([error], SETTINGS, JOB) == []
    assert what_closes([ran(Rung(3), 80)], SETTINGS, None) == []


def test_it_is_part_of_the_error_and_of_the_reason() -> None:
    with pytest.raises(NothingFits, match=r"Twice the GPUs \(8\) would free 16.0 GiB on each"):
        decide([failed(3, FailureKind.OUT_OF_MEMORY, "forward", 1, "")], SETTINGS, JOB)
    decision = decide([ran(Rung(3), 80)], SETTINGS, JOB)
    assert not decision.fits
    assert "its headroom is short by 8.0 GiB" in decision.reason
    assert "What would close it, from stage 3: 6 GPUs in place of 4. Shorter sequences" in decision.reason
