from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from ladder_cases import GIB, SETTINGS, failed, ladders, ladders_that_ran, measurement, ran, skipped

from lightning_zeroladder.ladder import (
    Decision,
    Failure,
    FailureKind,
    LadderSettings,
    NothingFits,
    Rung,
    Skip,
    SkipKind,
    TrialResult,
    Verdict,
    candidates,
    decide,
    ladder_position,
    usable_bytes,
)
from lightning_zeroladder.ladder.decide import NOISE_CAP, noise_tolerance
from lightning_zeroladder.ladder.words import percent


def rows(decision: Decision) -> list[tuple[str, str]]:
    return [(row.verdict.value, row.words) for row in decision.results]


def test_fastest_that_fits_wins() -> None:
    decision = decide([ran(0, 2.0), ran(1, 1.0), ran(2, 1.25, peak_gib=30), ran(3, 0.5, peak_gib=75.1)], SETTINGS)
    assert decision.rung == Rung(1)
    assert decision.fits
    assert rows(decision) == [
        ("fits", "fits, 50 % slower than stage 1"),
        ("committed", "committed"),
        ("fits", "fits, 20 % slower than stage 1"),
        ("over margin", "peak 75.1 GiB leaves 6 % of 80.0 GiB, 10 % wanted"),
    ]
    assert decision.reason == (
        "Stage 1 is the fastest rung that fits: 1,000 tokens/s per rank, peak 40.0 GiB of 80.0 GiB. "
        "The next, stage 2, is 20 % slower."
    )


def test_difference_below_tie_goes_to_the_lower_stage() -> None:
    decision = decide([ran(1, 0.996), ran(0, 1.0)], SETTINGS)
    assert decision.rung == Rung(0)
    assert rows(decision) == [
        ("committed", "committed"),
        ("fits", "fits, within noise of stage 0: the lower stage wins"),
    ]
    assert decision.reason.endswith("Stage 1 is 0.4 % faster, which is within noise.")


@pytest.mark.parametrize(("spread", "winner"), [(0.02, 1), (0.08, 0)])
def test_noise_widens_the_tie(spread: float, winner: int) -> None:
    # 2 % apart, 100 steps each: two joint standard errors are 0.7 % at a spread of 2 % and 2.8 % at 8 %.
    assert decide([ran(0, 1.0, spread=spread), ran(1, 0.98, spread=spread)], SETTINGS).rung == Rung(winner)


def test_noise_cannot_tie_beyond_the_cap() -> None:
    assert decide([ran(0, 1.0, spread=9.0), ran(1, 0.94, spread=9.0)], SETTINGS).rung == Rung(1)
    assert decide([ran(0, 1.0, spread=9.0), ran(1, 0.96, spread=9.0)], SETTINGS).rung == Rung(0)


def test_a_single_step_is_noisy_not_exact() -> None:
    assert noise_tolerance(measurement(count=1), measurement(), SETTINGS) == NOISE_CAP
    assert noise_tolerance(measurement(count=2), measurement(), SETTINGS) == SETTINGS.tie


def test_a_users_tie_may_exceed_the_cap() -> None:
    assert decide([ran(0, 1.0), ran(1, 0.92)], replace(SETTINGS, tie=0.10)).rung == Rung(0)


def test_noisy_fastest_does_not_tie_two_quiet_trials() -> None:
    # Stage 2 is within its own noise of both; stages 0 and 1 are quiet and 2 % apart.
    trials = [ran(0, 1.0), ran(1, 0.98), ran(2, 0.975, spread=0.2)]
    assert decide(trials, SETTINGS).rung == Rung(1)


def test_a_rung_slower_than_a_lower_one_never_wins() -> None:
    # Stage 1 is noisy enough to tie with stage 2, yet stage 0 is both lower and faster.
    trials = [ran(0, 1.0), ran(1, 1.01, spread=0.3), ran(2, 0.97)]
    assert decide(trials, SETTINGS).rung == Rung(2)


def test_plain_stage_comes_before_its_settings() -> None:
    other = TrialResult(Rung(3, (("reduce_bucket_size", 1000),)), measurement=measurement(0.999))
    decision = decide([other, ran(3)], SETTINGS)
    assert decision.rung == Rung(3)
    assert decision.results[1].words == "fits, within noise of stage 3: the lower rung wins"


def test_no_headroom_takes_the_smallest_peak() -> None:
    decision = decide([ran(2, 0.5, peak_gib=85), ran(3, 1.0, peak_gib=75.1)], SETTINGS)
    assert decision.rung == Rung(3)
    assert not decision.fits
    assert decision.reason == (
        "No rung keeps 10 % of 80.0 GiB free. Stage 3 needs the least, but its headroom is short by 3.1 GiB: "
        "peak 75.1 GiB leaves 6 % of 80.0 GiB, 10 % wanted."
    )
    assert rows(decision) == [
        ("over margin", "peak 85.0 GiB is beyond the limit of 80.0 GiB, 10 % wanted free"),
        ("committed", "committed"),
    ]


def test_near_equal_percentages_are_told_apart() -> None:
    decision = decide([ran(0, peak_gib=60), ran(1, peak_gib=72.02)], SETTINGS)
    assert decision.results[1].words == "peak 72.0 GiB leaves 9.975 % of 80.0 GiB, 10.000 % wanted"


def test_words_of_failures_and_skips() -> None:
    after_steps = TrialResult(
        Rung(3), measurement(0.1), Failure(FailureKind.ERROR, "forward", 3, "\nRuntimeError: boom\nmore")
    )
    trials = [
        skipped(0, SkipKind.CANNOT_FIT, needed_bytes=208 * GIB),
        failed(1, FailureKind.OUT_OF_MEMORY, "backward", 1, "CUDA out of memory"),
        ran(2),
        after_steps,
        TrialResult(Rung(3, (("a", 1),)), skip=Skip(SkipKind.CANNOT_WIN, best_case_gain=0.004)),
        TrialResult(Rung(3, (("b", 1),)), skip=Skip(SkipKind.CANNOT_WIN, best_case_gain=-0.03, rival=Rung(0))),
        TrialResult(Rung(3, (("c", 1),)), skip=Skip(SkipKind.RUN_ENDED)),
    ]
    decision = decide(trials, SETTINGS)
    assert decision.rung == Rung(2)
    assert rows(decision) == [
        ("skipped", "needs 208.0 GiB of 80.0 GiB, not tried"),
        ("failed", "out of memory in backward at step 1"),
        ("committed", "committed"),
        ("failed", "failed in forward at step 3: RuntimeError: boom"),
        ("skipped", "cannot beat stage 2: at best 0.4 % faster, not tried"),
        ("skipped", "cannot beat stage 0: at best 3 % slower, not tried"),
        ("skipped", "not tried: the run ended first"),
    ]


def test_nothing_ran() -> None:
    trials = [
        failed(3, FailureKind.OUT_OF_MEMORY, "construction", 1, "CUDA out of memory. Tried to allocate 2 GiB"),
        failed(2, FailureKind.ERROR, "forward", 1, "RuntimeError: shapes differ"),
        skipped(0, SkipKind.CANNOT_FIT, needed_bytes=208 * GIB),
        skipped(1, SkipKind.CANNOT_FIT, needed_bytes=100 * GIB),
    ]
    with pytest.raises(NothingFits) as caught:
        decide(trials, SETTINGS)
    assert str(caught.value).splitlines() == [
        "No rung of the ladder could be run with 80.0 GiB of memory per rank.",
        "- stage 0: needs 208.0 GiB of 80.0 GiB, not tried",
        "- stage 1: needs 100.0 GiB of 80.0 GiB, not tried",
        "- stage 2: error in forward at step 1: RuntimeError: shapes differ",
        "- stage 3: out of memory in construction at step 1: CUDA out of memory. Tried to allocate 2 GiB",
        "The smallest known shortfall is 20.0 GiB per rank, at stage 1.",
        "What would help: more GPUs to shard over, a smaller micro-batch or shorter sequences, tensor parallelism.",
        "The errors that are not about memory need a fix in the module or its configuration.",
    ]


def test_errors_alone_bring_no_advice_on_memory() -> None:
    with pytest.raises(NothingFits) as caught:
        decide([failed(0, FailureKind.ERROR, "forward", 1, "KeyError: 'x'")], SETTINGS)
    assert "What would help" not in str(caught.value)
    assert "KeyError: 'x'" in str(caught.value)


@pytest.mark.parametrize(
    ("trials", "settings", "words"),
    [
        ([ran(0), ran(0, 2.0)], SETTINGS, "given twice"),
        ([TrialResult(Rung(0))], SETTINGS, "no measurement"),
        ([ran(0)], LadderSettings(), "memory_limit_bytes=0"),
    ],
)
def test_bad_input(trials: list[TrialResult], settings: LadderSettings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decide(trials, settings)


@pytest.mark.parametrize(
    ("share", "words"), [(0.123, "12 %"), (0.004, "0.4 %"), (0.0097, "1 %"), (0.0094, "0.9 %"), (0.5, "50 %")]
)
def test_percent(share: float, words: str) -> None:
    assert percent(share) == words


@given(ladders_that_ran)
def test_never_breaks_the_margin_while_a_rung_keeps_it(trials: list[TrialResult]) -> None:
    decision = decide(trials, SETTINGS)
    peaks = {trial.rung: trial.measurement.peak_bytes for trial in trials if trial.measurement}
    some_fit = any(peak <= usable_bytes(SETTINGS) for peak in peaks.values())
    assert decision.fits == some_fit == (peaks[decision.rung] <= usable_bytes(SETTINGS))
    if not some_fit:
        assert peaks[decision.rung] == min(peaks.values())


@given(ladders_that_ran)
def test_winner_is_within_noise_of_the_fastest_and_no_lower_rung_is_faster(trials: list[TrialResult]) -> None:
    decision = decide(trials, SETTINGS)
    assume(decision.fits)
    fitting = [candidate for candidate in candidates(trials) if candidate.fits(SETTINGS)]
    winner = next(candidate.measurement for candidate in fitting if candidate.rung == decision.rung)
    for other in fitting:
        # The last factor allows for rounding.
        assert winner.throughput >= (1 - NOISE_CAP) * other.measurement.throughput * (1 - 1e-12)
        if ladder_position(other.rung) < ladder_position(decision.rung):
            assert other.measurement.throughput < winner.throughput


@given(ladders, st.randoms(use_true_random=False))
def test_order_of_trials_does_not_matter(trials: list[TrialResult], shuffle: random.Random) -> None:
    def outcome(given: list[TrialResult]) -> Decision | str:
        try:
            return decide(given, SETTINGS)
        except NothingFits as nothing:
            return str(nothing)

    shuffled = list(trials)
    shuffle.shuffle(shuffled)
    assert outcome(shuffled) == outcome(trials) == outcome(trials)


@given(ladders)
def test_results_are_the_trials_in_ladder_order_with_one_committed(trials: list[TrialResult]) -> None:
    try:
        decision = decide(trials, SETTINGS)
    except NothingFits:
        assert all(trial.measurement is None or trial.failure for trial in trials)
        return
    assert [row.trial for row in decision.results] == sorted(trials, key=lambda t: ladder_position(t.rung))
    assert [r.trial.rung for r in decision.results if r.verdict is Verdict.COMMITTED] == [decision.rung]
    assert all("-" not in row.words for row in decision.results if row.verdict is Verdict.FITS)
