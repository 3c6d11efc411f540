from __future__ import annotations

from dataclasses import replace

import pytest
from ladder_cases import GIB, SETTINGS, failed, ran, skipped

from lightning_zeroladder.ladder import (
    Commit,
    FailureKind,
    NothingFits,
    Rung,
    SkipKind,
    TryRung,
    decide,
    ended_early,
    next_action,
    single_device,
)

FLOORS = {0: 208 * GIB, 1: 62 * GIB, 2: 38 * GIB, 3: 13 * GIB}
COMPUTE_BOUND = ran(1, 1.0, forward_s=0.4, backward_s=0.6)
OOM = (FailureKind.OUT_OF_MEMORY, "backward", 1, "CUDA out of memory")


def test_skips_what_cannot_fit_and_tries_the_next() -> None:
    trials, action = next_action(SETTINGS, (), FLOORS, 16)
    assert trials == (skipped(0, SkipKind.CANNOT_FIT, needed_bytes=208 * GIB),)
    assert action == TryRung(Rung(1))


def test_floor_at_the_limit_is_tried() -> None:
    assert next_action(SETTINGS, (), {0: 80 * GIB}, 2) == ((), TryRung(Rung(0)))


def test_climbs_after_a_failure() -> None:
    trials = (failed(0, *OOM), failed(1, *OOM))
    assert next_action(SETTINGS, trials, {}, 2) == (trials, TryRung(Rung(2)))


def test_skips_what_cannot_win_and_commits() -> None:
    trials, action = next_action(SETTINGS, (COMPUTE_BOUND,), FLOORS, 16)
    assert [trial.rung.stage for trial in trials] == [1, 0, 2, 3]
    assert [trial.skip.kind for trial in trials[1:] if trial.skip] == [
        SkipKind.CANNOT_FIT,
        SkipKind.CANNOT_WIN,
        SkipKind.CANNOT_WIN,
    ]
    assert action == Commit(decide(trials, SETTINGS))
    assert isinstance(action, Commit)
    assert action.decision.rung == Rung(1)
    assert action.decision.results[3].words == "cannot beat stage 1: at best as fast, not tried"


def test_exhaustive_skips_nothing_by_speed() -> None:
    settings = replace(SETTINGS, exhaustive=True)
    _, action = next_action(settings, (COMPUTE_BOUND,), FLOORS, 16)
    assert action == TryRung(Rung(2))


def test_only_the_stages_asked_for() -> None:
    settings = replace(SETTINGS, stages=(2, 3))
    assert next_action(settings, (), {}, 2)[1] == TryRung(Rung(2))
    _, action = next_action(settings, (ran(2, 1.0), ran(3, 2.0)), {}, 2)
    assert isinstance(action, Commit)
    assert action.decision.rung == Rung(2)


def test_nothing_fits_propagates() -> None:
    with pytest.raises(NothingFits, match=r"128\.0 GiB per rank, at stage 0"):
        next_action(replace(SETTINGS, stages=(0,)), (), FLOORS, 16)


def test_walk_ends() -> None:
    trials, action = next_action(SETTINGS, (), {}, 4)
    tried = []
    while isinstance(action, TryRung):
        tried.append(action.rung.stage)
        trials, action = next_action(SETTINGS, (*trials, ran(action.rung.stage, 1.0 - 0.1 * len(tried))), {}, 4)
    assert tried == [0, 1, 2, 3]
    assert action.decision.rung == Rung(3)


def test_single_device() -> None:
    decision = single_device(replace(SETTINGS, stages=(1, 2)), FLOORS)
    assert (decision.rung, decision.fits) == (Rung(1), True)
    assert decision.reason == "one device: nothing to shard"
    assert [row.words for row in decision.results] == ["committed", "one device: nothing to shard, not tried"]


def test_single_device_too_small() -> None:
    decision = single_device(SETTINGS, FLOORS)
    assert (decision.rung, decision.fits) == (Rung(0), False)
    assert decision.reason == (
        "one device: nothing to shard; model states alone need 208.0 GiB of 80.0 GiB, 10 % wanted free"
    )


def test_ended_early_decides_among_what_is_known() -> None:
    decision = ended_early(SETTINGS, (ran(0, 1.0), ran(1, 0.5)), Rung(2))
    assert (decision.rung, decision.fits) == (Rung(1), True)
    assert [row.words for row in decision.results] == [
        "fits, 50 % slower than stage 1",
        "committed",
        "not tried: the run ended first",
        "not tried: the run ended first",
    ]
    assert decision.reason.endswith("The run ended before a trial of stage 2, stage 3 was measured.")


def test_ended_early_counts_a_cut_off_trial() -> None:
    assert ended_early(SETTINGS, (ran(0, 1.0), ran(1, 0.5)), Rung(1)).rung == Rung(1)


def test_ended_early_with_nothing_measured() -> None:
    decision = ended_early(SETTINGS, (failed(0, *OOM),), Rung(1))
    assert (decision.rung, decision.fits) == (Rung(1), False)
    assert decision.reason == "The run ended before any rung was measured; stage 1 is where it stood."
    assert [row.words for row in decision.results] == [
        "out of memory in backward at step 1",
        "committed",
        "not tried: the run ended first",
        "not tried: the run ended first",
    ]


def test_ended_early_before_the_first_rung() -> None:
    assert ended_early(SETTINGS, (failed(0, *OOM),), None).rung == Rung(1)


def test_ended_early_with_every_rung_failed() -> None:
    with pytest.raises(NothingFits):
        ended_early(SETTINGS, [failed(stage, *OOM) for stage in range(4)], Rung(3))


def test_ended_early_after_the_whole_ladder() -> None:
    trials = [ran(stage, 1.0 + stage) for stage in range(4)]
    assert ended_early(SETTINGS, trials, Rung(0)) == decide(trials, SETTINGS)
