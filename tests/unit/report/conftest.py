from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_zeroladder.ladder.types import (
    Decision,
    Failure,
    FailureKind,
    LadderSettings,
    Measurement,
    Rung,
    RungResult,
    Skip,
    SkipKind,
    Statistic,
    StepBreakdown,
    TrialResult,
    Verdict,
)
from lightning_zeroladder.report import SCHEMA, Move, RunContext, RunReport

GIB = 2**30


def measurement(step_s: float, peak_gib: float, *, unit: str = "tokens") -> Measurement:
    return Measurement(
        step_s=Statistic(median=step_s, spread=0.01 * step_s, count=100),
        breakdown=StepBreakdown(
            data_s=0.0012, forward_s=0.0345, backward_s=0.0789, communication_s=0.0101, optimizer_s=1.2345
        ),
        units_per_step=4096.0,
        unit=unit,
        peak_bytes=int(peak_gib * GIB),
        reserved_bytes=None,
        warmup_steps=20,
    )


@pytest.fixture
def measure() -> Callable[..., Measurement]:
    return measurement


@pytest.fixture
def run_report() -> RunReport:
    """Four rungs: over margin, committed, failed after some steps, skipped."""
    results = (
        RungResult(
            TrialResult(Rung(0), measurement=measurement(0.256, 75.0)), Verdict.OVER_MARGIN, "6 % free, 10 % wanted"
        ),
        RungResult(TrialResult(Rung(1), measurement=measurement(0.25, 40.25)), Verdict.COMMITTED, "fastest that fits"),
        RungResult(
            TrialResult(
                Rung(2, (("overlap_comm", False),)),
                failure=Failure(FailureKind.OUT_OF_MEMORY, "backward", 3, "CUDA out of memory [try less]"),
            ),
            Verdict.FAILED,
            "out of memory [backward]",
        ),
        RungResult(
            TrialResult(Rung(3), skip=Skip(SkipKind.CANNOT_WIN, best_case_gain=0.004)),
            Verdict.SKIPPED,
            "skipped: at best 0.4 % faster than stage 1",
        ),
    )
    return RunReport(
        schema=SCHEMA,
        complete=True,
        context=RunContext(
            world_size=8,
            nodes=2,
            accumulate=4,
            precision="bf16-mixed",
            parameters=1_234_000_000,
            trainable_parameters=1_234_000_000,
            device="cuda",
            optimizer="AdamW",
            versions={"python": "3.11.7", "torch": "2.13.0"},
            hardware={"gpu": "H200", "cpus": 16, "memory_bytes": 128 * GIB},
        ),
        settings=LadderSettings(memory_limit_bytes=80 * GIB),
        decision=Decision(Rung(1), True, "stage 1 is the fastest rung that keeps 10 % free.", results),
        moves=(Move(0, 1, 200, 1.5, 0), Move(1, 2, 400, 2.25, 4096)),
        ds_config={"zero_optimization": {"stage": 1, "reduce_bucket_size": 500_000_000}, "bf16": {"enabled": True}},
    )
