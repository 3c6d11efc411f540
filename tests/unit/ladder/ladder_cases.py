"""Builders and strategies shared by the ladder's tests."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_zeroladder.ladder import (
    Failure,
    FailureKind,
    LadderSettings,
    Measurement,
    Rung,
    Skip,
    SkipKind,
    Statistic,
    StepBreakdown,
    TrialResult,
)

GIB = 2**30
SETTINGS = LadderSettings(memory_limit_bytes=80 * GIB)


def measurement(
    step_s: float = 1.0,
    *,
    peak_gib: float = 40.0,
    spread: float = 0.0,
    count: int = 100,
    units: float = 1000.0,
    optimizer_s: float = 0.0,
    forward_s: float = 0.0,
    backward_s: float = 0.0,
    communication_s: float = 0.0,
) -> Measurement:
    breakdown = StepBreakdown(0.0, forward_s, backward_s, communication_s, optimizer_s)
    statistic = Statistic(step_s, spread, count)
    return Measurement(statistic, breakdown, units, "tokens", int(peak_gib * GIB), None, 20)


def ran(stage: int, step_s: float = 1.0, **kwargs: float) -> TrialResult:
    return TrialResult(Rung(stage), measurement=measurement(step_s, **kwargs))  # type: ignore[arg-type]


def failed(stage: int, kind: FailureKind, phase: str, step: int, message: str) -> TrialResult:
    return TrialResult(Rung(stage), failure=Failure(kind, phase, step, message))


def skipped(stage: int, kind: SkipKind, **kwargs: float) -> TrialResult:
    return TrialResult(Rung(stage), skip=Skip(kind, **kwargs))  # type: ignore[arg-type]


finite = st.floats(min_value=1e-3, max_value=1e3)
rungs = st.builds(
    Rung,
    stage=st.integers(0, 3),
    settings=st.dictionaries(
        st.sampled_from(["overlap_comm", "reduce_bucket_size", "offload"]),
        st.booleans() | st.integers(0, 10**9) | st.sampled_from(["cpu", "none"]),
    ).map(lambda settings: tuple(sorted(settings.items(), key=lambda item: item[0]))),
    checkpoint_activations=st.booleans(),
)
measurements = st.builds(
    Measurement,
    step_s=st.builds(Statistic, median=finite, spread=st.floats(0, 1), count=st.integers(1, 200)),
    breakdown=st.builds(StepBreakdown, finite, finite, finite, finite, finite),
    units_per_step=finite,
    unit=st.sampled_from(["tokens", "samples"]),
    peak_bytes=st.integers(1 * GIB, 90 * GIB),
    reserved_bytes=st.none() | st.integers(1, 90 * GIB),
    warmup_steps=st.integers(0, 20),
)
failures = st.builds(Failure, st.sampled_from(FailureKind), st.just("backward"), st.integers(1, 9), st.text())
skips = st.builds(
    Skip,
    st.sampled_from(SkipKind),
    st.none() | st.integers(0, 10**12),
    st.none() | st.floats(-1, 1),
    st.none() | rungs,
    st.none() | st.text(),
)


def trial_results(rung: st.SearchStrategy[Rung] = rungs) -> st.SearchStrategy[TrialResult]:
    return (
        st.builds(TrialResult, rung, measurement=measurements)
        | st.builds(TrialResult, rung, measurement=measurements, failure=failures)
        | st.builds(TrialResult, rung, failure=failures)
        | st.builds(TrialResult, rung, skip=skips)
    )


ladders = st.lists(trial_results(), min_size=1, max_size=6, unique_by=lambda trial: trial.rung)
ladders_that_ran = st.lists(
    st.builds(TrialResult, rungs, measurement=measurements), min_size=1, max_size=6, unique_by=lambda trial: trial.rung
)
