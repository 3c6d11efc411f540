"""The order of the rungs beyond the plain stages, and when they are reached."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ladder_cases import GIB, SETTINGS, measurement

from lightning_zeroladder.ladder import (
    Beyond,
    Buckets,
    Commit,
    Decision,
    Failure,
    FailureKind,
    HostShare,
    LadderSettings,
    Measurement,
    NothingFits,
    Option,
    Rung,
    SkipKind,
    TrialResult,
    TryRung,
    ladder_position,
    next_action,
    usable_bytes,
)
from lightning_zeroladder.ladder.buckets import near_miss, shortfall_bytes
from lightning_zeroladder.ladder.fitting import escalation_level

M = 1 << 20
BUCKETS = Buckets(
    reduce=500 * M, allgather=400 * M, prefetch=50 * M, live=1000 * M, trainable=900 * M, parameters=900 * M,
    element_bytes=2, overlap=True, allocated_whole=True,
)  # fmt: skip
SHARES = {stage: HostShare(floor_bytes=4 * GIB, freed_bytes=60 * GIB) for stage in (1, 2, 3)}
BEYOND = Beyond(optimizer_on_host=SHARES, parameters_on_host=HostShare(GIB, 70 * GIB))
WEIGHTS_TOO = (("offload_optimizer", "cpu"), ("offload_param", "cpu"))
OPTIMIZER = (("offload_optimizer", "cpu"),)

Outcome = Callable[[Rung], TrialResult]


def out_of_memory(rung: Rung) -> TrialResult:
    return TrialResult(rung, failure=Failure(FailureKind.OUT_OF_MEMORY, "backward", 1, "CUDA out of memory"))


def broken(rung: Rung) -> TrialResult:
    return TrialResult(rung, failure=Failure(FailureKind.ERROR, "forward", 1, "KeyError: 'x'"))


def peak(gib: float, step_s: float = 1.0) -> Outcome:
    return lambda rung: TrialResult(rung, measurement=measurement(step_s, peak_gib=gib))


def walk(
    outcome: Outcome,
    beyond: Beyond = BEYOND,
    settings: LadderSettings = SETTINGS,
    floors: dict[int, int] | None = None,
) -> tuple[list[Rung], Decision | str, tuple[TrialResult, ...]]:
    """Climb a ladder whose trials end as ``outcome`` says."""
    tried: list[Rung] = []
    trials: tuple[TrialResult, ...] = ()
    while True:
        try:
            trials, action = next_action(settings, trials, floors or {}, 4, beyond)
        except NothingFits as error:
            return tried, str(error), trials
        if isinstance(action, Commit):
            return tried, action.decision, trials
        assert isinstance(action, TryRung)
        assert action.rung not in {trial.rung for trial in trials}
        tried.append(action.rung)
        trials = (*trials, outcome(action.rung))


def labels(rungs: list[Rung]) -> list[str]:
    return [rung.label for rung in rungs]


def test_the_whole_order_where_everything_runs_out_of_memory() -> None:
    tried, words, _ = walk(out_of_memory)
    assert labels(tried) == [
        *(f"stage {stage}" for stage in range(4)),
        *(f"stage {stage} (activation checkpointing)" for stage in range(4)),
        *(f"stage {stage} (offload_optimizer=cpu)" for stage in (1, 2, 3)),
        *(f"stage {stage} (activation checkpointing, offload_optimizer=cpu)" for stage in (1, 2, 3)),
        "stage 3 (offload_optimizer=cpu, offload_param=cpu)",
        "stage 3 (activation checkpointing, offload_optimizer=cpu, offload_param=cpu)",
    ]
    assert isinstance(words, str)
    assert words.startswith("No rung of the ladder could be run with 80.0 GiB")


def test_nvme_is_the_last_resort() -> None:
    tried, _, _ = walk(out_of_memory, replace(BEYOND, nvme=True))
    assert labels(tried)[-2:] == [
        "stage 3 (offload_optimizer=nvme, offload_param=nvme)",
        "stage 3 (activation checkpointing, offload_optimizer=nvme, offload_param=nvme)",
    ]


@pytest.mark.parametrize(
    "first_fitting",
    [
        Rung(2),
        Rung(1, (), True),
        Rung(0, (), True),
        Rung(2, OPTIMIZER),
        Rung(3, OPTIMIZER, True),
        Rung(3, WEIGHTS_TOO),
        Rung(3, WEIGHTS_TOO, True),
    ],
)
def test_the_first_escalation_that_fits_is_the_last_one_tried(first_fitting: Rung) -> None:
    def outcome(rung: Rung) -> TrialResult:
        return peak(40)(rung) if ladder_position(rung) >= ladder_position(first_fitting) else out_of_memory(rung)

    tried, decision, _ = walk(outcome)
    assert isinstance(decision, Decision)
    assert (decision.rung, decision.fits) == (first_fitting, True)
    assert max(map(escalation_level, tried)) == escalation_level(first_fitting)


def test_stages_of_one_escalation_compete() -> None:
    """Stage 3 with checkpointing is faster here than stage 2 with it, which fits as well."""

    def outcome(rung: Rung) -> TrialResult:
        if not rung.checkpoint_activations or rung.stage < 2:
            return out_of_memory(rung)
        return peak(40, 1.0 if rung.stage == 2 else 0.5)(rung)

    _, decision, _ = walk(outcome)
    assert isinstance(decision, Decision)
    assert decision.rung == Rung(3, (), True)


def test_an_error_that_is_not_about_memory_reaches_no_escalation() -> None:
    tried, words, _ = walk(broken)
    assert tried == [Rung(stage) for stage in range(4)]
    assert "KeyError" in str(words)


def test_plain_stages_that_are_too_large_for_certain() -> None:
    """Recomputing frees nothing of weights and optimizer state: no row for it where these alone are too large."""
    tried, _, trials = walk(out_of_memory, floors={0: 208 * GIB, 1: 100 * GIB, 2: 90 * GIB, 3: 81 * GIB})
    assert tried[0] == Rung(1, OPTIMIZER)
    assert [trial.rung for trial in trials if trial.skip] == [Rung(stage) for stage in range(4)]


def test_an_offload_that_frees_too_little_is_not_tried() -> None:
    """With 200 GiB measured, 60 GiB less is still too much; the weights too are 70 GiB less."""
    tried, decision, trials = walk(peak(200))
    assert tried == [Rung(stage) for stage in range(4)] + [Rung(stage, (), True) for stage in range(4)]
    skipped = {trial.rung: trial.skip for trial in trials if trial.skip}
    first = skipped[Rung(1, OPTIMIZER)]
    assert first is not None
    assert (first.kind, first.needed_bytes) == (SkipKind.CANNOT_FIT, 140 * GIB)
    assert isinstance(decision, Decision)
    assert not decision.fits


def test_options_that_cannot_run_are_skipped_in_words_once_each() -> None:
    why = {
        Option.CHECKPOINTING: "no block of the model repeats",
        Option.OPTIMIZER_ON_HOST: "FusedAdam steps on the GPU only",
        Option.PARAMETERS_ON_HOST: "the same",
        Option.NVME: "async_io does not build",
    }
    tried, words, _ = walk(out_of_memory, replace(BEYOND, nvme=True, unavailable=why))
    assert tried == [Rung(stage) for stage in range(4)]
    assert str(words).splitlines()[5:9] == [
        "- stage 0 (activation checkpointing): not tried: no block of the model repeats",
        "- stage 1 (offload_optimizer=cpu): not tried: FusedAdam steps on the GPU only",
        "- stage 3 (offload_optimizer=cpu, offload_param=cpu): not tried: the same",
        "- stage 3 (offload_optimizer=nvme, offload_param=nvme): not tried: async_io does not build",
    ]


# Near misses ----------------------------------------------------------------------------------------------------


def near(rung: Rung) -> TrialResult:
    """Misses 72 GiB by 1 GiB: less than two buckets of 500 Mi elements hold."""
    return peak(73)(rung)


def test_a_near_miss_is_tried_with_half_the_buckets_before_the_next_stage() -> None:
    half = (("allgather_bucket_size", 200 * M), ("reduce_bucket_size", 250 * M))

    def outcome(rung: Rung) -> TrialResult:
        return {Rung(0): out_of_memory, Rung(1): near, Rung(1, half): peak(71.9)}.get(rung, peak(30, 0.9))(rung)

    tried, decision, _ = walk(outcome, replace(BEYOND, buckets=BUCKETS))
    assert tried == [Rung(0), Rung(1), Rung(1, half), Rung(2), Rung(3)]
    assert isinstance(decision, Decision)
    assert decision.rung == Rung(2)


def test_buckets_are_halved_twice_and_no_more() -> None:
    def outcome(rung: Rung) -> TrialResult:
        return out_of_memory(rung) if rung.stage == 0 else peak(72.1)(rung)

    tried, _, _ = walk(outcome, replace(BEYOND, buckets=BUCKETS), replace(SETTINGS, stages=(0, 2)))
    assert [rung.setting("reduce_bucket_size") for rung in tried if rung.stage == 2][:3] == [None, 250 * M, 125 * M]
    assert labels(tried)[4] == "stage 0 (activation checkpointing)"


def test_no_halving_where_a_lower_stage_fits_already() -> None:
    tried, _, _ = walk(lambda rung: peak(20)(rung) if rung.stage == 0 else near(rung), replace(BEYOND, buckets=BUCKETS))
    assert tried == [Rung(stage) for stage in range(4)]


def test_stage_3_halves_what_it_fetches_ahead_and_keeps_gathered() -> None:
    assert BUCKETS.halved(Rung(3)) == Rung(
        3,
        (
            ("reduce_bucket_size", 250 * M),
            ("stage3_max_live_parameters", 450 * M),  # half of the model, of which it can hold no more
            ("stage3_prefetch_bucket_size", 25 * M),
        ),
    )
    assert BUCKETS.halved(Rung(0)) is None


def test_what_buckets_hold() -> None:
    assert BUCKETS.held_bytes(Rung(0)) == 0
    assert BUCKETS.held_bytes(Rung(1)) == 2 * 2 * 500 * M  # two of them
    assert replace(BUCKETS, overlap=False).held_bytes(Rung(2)) == 2 * 500 * M
    assert BUCKETS.held_bytes(Rung(3)) == 2 * (500 + 900) * M
    small = replace(BUCKETS, trainable=M, overlap=False)
    assert small.held_bytes(Rung(2)) == 2 * 500 * M  # a device sets the whole bucket aside
    assert replace(small, allocated_whole=False).held_bytes(Rung(2)) == 2 * M
    assert BUCKETS.held_bytes(Rung(2, (("reduce_bucket_size", 100),))) == 2 * 2 * 100


def test_shortfall() -> None:
    assert shortfall_bytes(near(Rung(1)), SETTINGS) == GIB
    assert shortfall_bytes(peak(70)(Rung(1)), SETTINGS) == -2 * GIB
    assert shortfall_bytes(out_of_memory(Rung(1)), SETTINGS) == pytest.approx(8 * GIB)
    assert shortfall_bytes(broken(Rung(1)), SETTINGS) is None
    assert not near_miss(peak(70)(Rung(1)), SETTINGS, BUCKETS)
    assert not near_miss(out_of_memory(Rung(1)), SETTINGS, BUCKETS)
    assert near_miss(out_of_memory(Rung(1)), replace(SETTINGS, headroom=0.01), BUCKETS)


@given(
    st.integers(1, 3),
    st.builds(
        Buckets,
        reduce=st.integers(1, 10**10),
        allgather=st.integers(2, 10**10),
        prefetch=st.integers(0, 10**10),
        live=st.integers(0, 10**10),
        trainable=st.integers(1, 10**9),
        parameters=st.integers(10**9, 10**11),
        element_bytes=st.sampled_from([2, 4]),
        overlap=st.booleans(),
        allocated_whole=st.booleans(),
    ),
)
def test_halved_buckets_are_smaller_even_and_end(stage: int, buckets: Buckets) -> None:
    rungs = [Rung(stage)]
    while (smaller := buckets.halved(rungs[-1])) is not None:
        rungs.append(smaller)
        assert len(rungs) < 40
        assert all(int(value) % 2 == 0 and int(value) >= 1 << 16 for _, value in smaller.settings)
    for larger, smaller in pairwise(rungs):
        assert buckets.held_bytes(smaller) <= buckets.held_bytes(larger)


# Stage 3 across nodes -------------------------------------------------------------------------------------------


def test_hpz_is_a_rung_wherever_there_are_nodes_of_several_ranks() -> None:
    hpz = Rung(3, (("zero_hpz_partition_size", 8),))
    tried, _, _ = walk(peak(40), replace(BEYOND, nodes=2, ranks_per_node=8))
    assert tried == [*(Rung(stage) for stage in range(4)), hpz]
    for beyond in (replace(BEYOND, nodes=1, ranks_per_node=8), replace(BEYOND, nodes=2, ranks_per_node=1)):
        assert hpz not in walk(peak(40), beyond)[0]
    without_3 = replace(SETTINGS, stages=(0, 1, 2))
    assert hpz not in walk(peak(40), replace(BEYOND, nodes=2, ranks_per_node=8), without_3)[0]


def test_rounded_communication_only_where_allowed_and_after_hpz() -> None:
    beyond = replace(BEYOND, nodes=2, ranks_per_node=8, allow_quantized=True)
    assert labels(walk(peak(40), beyond)[0])[4:] == [
        "stage 3 (zero_hpz_partition_size=8)",
        "stage 3 (zero_hpz_partition_size=8, zero_quantized_weights=True)",
        "stage 3 (zero_hpz_partition_size=8, zero_quantized_gradients=True)",
    ]
    why = dict.fromkeys((Option.QUANTIZED_WEIGHTS, Option.QUANTIZED_GRADIENTS), "needs a CUDA device")
    tried, decision, _ = walk(peak(40), replace(beyond, unavailable=why))
    assert len(tried) == 5
    assert isinstance(decision, Decision)
    assert [row.words for row in decision.results][-2:] == ["not tried: needs a CUDA device"] * 2


# Whatever the trials say ----------------------------------------------------------------------------------------


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    """An outcome for each rung that may be met, drawn when it is first asked for."""
    seen: dict[Rung, TrialResult] = {}
    kinds = st.sampled_from([out_of_memory, out_of_memory, broken, peak(73), peak(85), peak(200), peak(60), peak(71.5)])

    def outcome(rung: Rung) -> TrialResult:
        if rung not in seen:
            made = draw(kinds)(rung)
            if made.measurement is not None:
                step = replace(made.measurement.step_s, median=draw(st.sampled_from([0.5, 1.0, 2.0])))
                made = replace(made, measurement=replace(made.measurement, step_s=step))
            seen[rung] = made
        return seen[rung]

    return outcome


beyonds = st.builds(
    Beyond,
    buckets=st.none() | st.just(BUCKETS),
    optimizer_on_host=st.sampled_from([{}, SHARES]),
    parameters_on_host=st.none() | st.just(HostShare(GIB, 70 * GIB)),
    nvme=st.booleans(),
    nodes=st.integers(1, 2),
    ranks_per_node=st.integers(1, 2),
    allow_quantized=st.booleans(),
    unavailable=st.dictionaries(st.sampled_from(Option), st.just("missing")),
)
floors_of_stages = st.dictionaries(st.integers(0, 3), st.integers(1 * GIB, 120 * GIB))


def fits(measured: Measurement) -> bool:
    return measured.peak_bytes <= usable_bytes(SETTINGS)


@given(outcomes(), beyonds, floors_of_stages)
def test_a_rung_that_keeps_the_margin_is_never_passed_over_for_one_that_does_not(
    outcome: Outcome, beyond: Beyond, floors: dict[int, int]
) -> None:
    tried, decision, trials = walk(outcome, beyond, floors=floors)
    ran = {t.rung: t.measurement for t in trials if t.measurement is not None and t.failure is None}
    some_fit = any(map(fits, ran.values()))
    if isinstance(decision, str):
        assert not ran
        return
    assert decision.fits == some_fit == fits(ran[decision.rung])
    assert len(tried) <= 3 * (4 + 4 + 2 * 3 + 2 + 2 + 3)


@given(outcomes(), beyonds, floors_of_stages)
def test_escalations_are_reached_only_when_no_plain_stage_fits(
    outcome: Outcome, beyond: Beyond, floors: dict[int, int]
) -> None:
    tried, _, trials = walk(outcome, beyond, floors=floors)
    outcome_of = {trial.rung: trial for trial in trials}
    for rung in tried:
        level = escalation_level(rung)
        for other, trial in outcome_of.items():
            if escalation_level(other) < level and trial.measurement is not None:
                assert not fits(trial.measurement), f"{rung.label} was tried though {other.label} fits"
        if level:
            assert all(Rung(stage) in outcome_of for stage in range(4))


@given(outcomes(), beyonds, floors_of_stages, st.randoms(use_true_random=False))
def test_the_order_of_the_trials_does_not_matter(
    outcome: Outcome, beyond: Beyond, floors: dict[int, int], shuffle: random.Random
) -> None:
    trials: tuple[TrialResult, ...] = ()
    while True:
        mixed = list(trials)
        shuffle.shuffle(mixed)
        try:
            trials, action = next_action(SETTINGS, trials, floors, 4, beyond)
        except NothingFits:
            with pytest.raises(NothingFits):
                next_action(SETTINGS, mixed, floors, 4, beyond)
            return
        assert next_action(SETTINGS, mixed, floors, 4, beyond)[1] == action
        if isinstance(action, Commit):
            return
        trials = (*trials, outcome(action.rung))


@given(st.permutations([Rung(3, WEIGHTS_TOO, True), Rung(3, OPTIMIZER), Rung(0, (), True), Rung(3), Rung(1)]))
def test_the_table_lists_rungs_in_the_order_in_which_they_come(rungs: list[Rung]) -> None:
    assert sorted(rungs, key=ladder_position) == [
        Rung(1), Rung(3), Rung(0, (), True), Rung(3, OPTIMIZER), Rung(3, WEIGHTS_TOO, True)
    ]  # fmt: skip


def test_a_run_that_offers_nothing_beyond_the_stages_ends_with_them() -> None:
    trials: tuple[TrialResult, ...] = tuple(out_of_memory(Rung(stage)) for stage in range(4))
    with pytest.raises(NothingFits):
        next_action(SETTINGS, trials, {}, 4)
    measured = tuple(peak(79.0)(Rung(stage)) for stage in range(4))
    _, action = next_action(SETTINGS, measured, {}, 4)
    assert isinstance(action, Commit)
    assert not action.decision.fits
