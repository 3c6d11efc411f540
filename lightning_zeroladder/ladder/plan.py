"""What to do next: try a rung or commit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_zeroladder.ladder.beyond import Beyond, Group, escalations, plain_groups, without_offload
from lightning_zeroladder.ladder.bound import cannot_win
from lightning_zeroladder.ladder.buckets import HALVINGS, near_miss, shortfall_bytes
from lightning_zeroladder.ladder.closing import JobSize
from lightning_zeroladder.ladder.decide import NothingFits, decide
from lightning_zeroladder.ladder.fitting import (
    candidates,
    escalation_level,
    fastest_fitting,
    ladder_position,
    usable_bytes,
)
from lightning_zeroladder.ladder.types import (
    Decision,
    Failure,
    LadderSettings,
    Rung,
    RungResult,
    Skip,
    SkipKind,
    TrialResult,
    Verdict,
)
from lightning_zeroladder.ladder.validate import check_memory_limit
from lightning_zeroladder.ladder.words import failure_words, gib, percent, skip_words

__all__ = ["Commit", "TryRung", "climb", "ended_early", "next_action", "single_device"]


@dataclass(frozen=True, slots=True)
class TryRung:
    """Run a trial of ``rung``."""

    rung: Rung


@dataclass(frozen=True, slots=True)
class Commit:
    """Settle on ``decision.rung``."""

    decision: Decision


def next_action(
    settings: LadderSettings,
    trials: Sequence[TrialResult],
    floors: Mapping[int, int],
    world_size: int,
    beyond: Beyond | None = None,
    job: JobSize | None = None,
) -> tuple[tuple[TrialResult, ...], TryRung | Commit]:
    """Walk the ladder from the lowest stage to the first rung that is worth trying.

    The plain stages come first. A stage that misses the headroom by less than its communication buffers hold is tried
    again with smaller ones before the next stage, unless a rung fits already. When no plain stage fits for lack of
    memory, the escalations follow one after the other until one fits.

    Args:
        settings: What the user asked for.
        trials: What is known so far; a rung with any entry is dealt with.
        floors: Bytes per rank that each stage certainly needs; a stage that is missing is taken to need nothing.
        world_size: Data-parallel ranks N.
        beyond: What there is beyond the plain stages. Default: nothing.
        job: Sizes from which the error says what would help.

    Returns:
        The trials extended by the rungs skipped on the way, and the rung to try or the decision to commit to.

    Raises:
        NothingFits: If every rung is dealt with and none ran.
    """
    check_memory_limit(settings)
    escalates, beyond = beyond is not None, beyond or Beyond()
    known = tuple(trials)
    while (following := _following(settings, known, floors, beyond, escalates=escalates)) is not None:
        rung, missing = following
        skip = Skip(SkipKind.CANNOT_RUN, reason=missing) if missing else None
        skip = skip or _skip(rung, settings, known, floors, beyond, world_size)
        if skip is None:
            return known, TryRung(rung)
        known = (*known, TrialResult(rung, skip=skip))
    return known, Commit(decide(known, settings, job))


def climb(settings: LadderSettings, failed_stages: Collection[int], failed: Rung, failure: Failure) -> Rung:
    """Return the rung to go on with when a step fails after the commit.

    Args:
        settings: What the user asked for.
        failed_stages: Stages that have failed in this run since the commit.
        failed: The rung that failed now.
        failure: How.

    Raises:
        NothingFits: If no higher stage is left.
    """
    higher = [stage for stage in sorted(settings.stages) if stage > failed.stage and stage not in failed_stages]
    if not higher:
        raise NothingFits(
            f"{failed.label} {failure_words(failure)} after the ladder had committed to it, and no higher stage is "
            f"left to go on with: {failure.message}. Resume from the last checkpoint with a smaller micro-batch, "
            "shorter sequences or more GPUs."
        )
    return Rung(higher[0])


def single_device(settings: LadderSettings, floors: Mapping[int, int]) -> Decision:
    """Commit to the lowest stage without a trial: with one device every stage holds the whole state.

    ``fits`` says whether the certain lower bound ``floors[stage]`` keeps the headroom. The committed entry carries no
    measurement, failure or skip.
    """
    check_memory_limit(settings)
    rung, *others = (Rung(stage) for stage in sorted(settings.stages))
    floor = floors.get(rung.stage, 0)
    fits = floor <= usable_bytes(settings)
    reason = "one device: nothing to shard"
    if not fits:
        reason += f"; model states alone need {gib(floor)} of {gib(settings.memory_limit_bytes)}"
        reason += f", {percent(settings.headroom)} wanted free"
    skip = Skip(SkipKind.CANNOT_WIN, best_case_gain=0.0, rival=rung)
    rows = [RungResult(TrialResult(rung), Verdict.COMMITTED, "committed")]
    words = "one device: nothing to shard, not tried"
    rows += [RungResult(TrialResult(other, skip=skip), Verdict.SKIPPED, words) for other in others]
    return Decision(rung, fits, reason, tuple(rows))


def ended_early(settings: LadderSettings, trials: Sequence[TrialResult], current: Rung | None) -> Decision:
    """Decide from what is known when the run ends before the ladder does.

    Args:
        settings: What the user asked for.
        trials: What is known, a cut-off trial of ``current`` included if it was measured.
        current: The rung that was running, if any.

    Returns:
        The decision among the measured rungs. If none was measured: ``current``, or else the lowest untried rung, with
        ``fits=False`` because nothing is known.

    Raises:
        NothingFits: If every rung was dealt with and none ran.
    """
    check_memory_limit(settings)
    ended = Skip(SkipKind.RUN_ENDED)
    known = list(trials)
    if current is not None and all(trial.rung != current for trial in known):
        known.append(TrialResult(current, skip=ended))
    known += [TrialResult(Rung(stage), skip=ended) for stage in _untried(settings, known)]
    known.sort(key=lambda trial: ladder_position(trial.rung))
    untried = [trial.rung for trial in known if trial.skip == ended]
    if untried and not candidates(known):
        return _unmeasured(current if current in untried else untried[0], known, settings)
    decision = decide(known, settings)
    if not untried:
        return decision
    names = ", ".join(rung.label for rung in untried)
    return replace(decision, reason=f"{decision.reason} The run ended before a trial of {names} was measured.")


def _following(
    settings: LadderSettings,
    known: Sequence[TrialResult],
    floors: Mapping[int, int],
    beyond: Beyond,
    *,
    escalates: bool,
) -> tuple[Rung, str | None] | None:
    """The lowest rung that is not dealt with, and what it lacks to be run; None at the end of the ladder."""
    outcomes = {trial.rung: trial for trial in known}
    fitting = [candidate.rung for candidate in candidates(known) if candidate.fits(settings)]
    for group in plain_groups(settings, beyond):
        if (found := _first_open(group, outcomes, settings, beyond, halve=not fitting)) is not None:
            return found
    for group in escalations(settings, beyond) if escalates else ():
        rungs = tuple(rung for rung in group.rungs if _worth_a_row(rung, settings, floors, beyond))
        if not rungs:
            continue
        reached = any(escalation_level(rung) < escalation_level(rungs[0]) for rung in fitting)
        if reached or not _short_of_memory(known, settings):
            return None
        found = _first_open(Group(rungs, group.option), outcomes, settings, beyond, halve=not fitting)
        if found is not None:
            return found
    return None


def _first_open(
    group: Group, outcomes: Mapping[Rung, TrialResult], settings: LadderSettings, beyond: Beyond, *, halve: bool
) -> tuple[Rung, str | None] | None:
    missing = beyond.unavailable.get(group.option) if group.option is not None else None
    for rung in group.rungs[:1] if missing else group.rungs:
        tried: Rung | None = rung
        for _ in range(HALVINGS + 1):
            if tried is None:
                break
            if tried not in outcomes:
                return tried, missing
            if not halve or beyond.buckets is None or not near_miss(outcomes[tried], settings, beyond.buckets):
                break
            tried = beyond.buckets.halved(tried)
    return None


def _untried(settings: LadderSettings, trials: Sequence[TrialResult]) -> list[int]:
    dealt_with = {trial.rung for trial in trials}
    return [stage for stage in sorted(settings.stages) if Rung(stage) not in dealt_with]


def _short_of_memory(trials: Sequence[TrialResult], settings: LadderSettings) -> bool:
    """Whether memory is why a rung did not fit: nothing beyond the stages helps against an error."""
    too_large = any(trial.skip is not None and trial.skip.kind is SkipKind.CANNOT_FIT for trial in trials)
    return too_large or any((shortfall_bytes(trial, settings) or 0) > 0 for trial in trials)


def _worth_a_row(rung: Rung, settings: LadderSettings, floors: Mapping[int, int], beyond: Beyond) -> bool:
    """Whether recomputing can help: it frees nothing of what is too large without it."""
    return not rung.checkpoint_activations or _certain_bytes(rung, floors, beyond) <= settings.memory_limit_bytes


def _certain_bytes(rung: Rung, floors: Mapping[int, int], beyond: Beyond) -> int:
    share = beyond.host_share(rung)
    return floors.get(rung.stage, 0) if share is None else share.floor_bytes


def _bytes_after_offload(rung: Rung, known: Sequence[TrialResult], beyond: Beyond) -> int:
    """At least what a rung needs, from what the same rung needed without its offload; 0 if that was not measured."""
    share = beyond.host_share(rung)
    before = next((trial for trial in known if trial.rung == without_offload(rung)), None)
    if share is None or before is None or before.measurement is None or before.failure is not None:
        return 0
    return before.measurement.peak_bytes - share.freed_bytes


def _skip(
    rung: Rung,
    settings: LadderSettings,
    trials: Sequence[TrialResult],
    floors: Mapping[int, int],
    beyond: Beyond,
    world_size: int,
) -> Skip | None:
    floor = _certain_bytes(rung, floors, beyond)
    if floor > settings.memory_limit_bytes:
        return Skip(SkipKind.CANNOT_FIT, needed_bytes=floor)
    left = _bytes_after_offload(rung, trials, beyond)
    if left > usable_bytes(settings):
        return Skip(SkipKind.CANNOT_FIT, needed_bytes=left)
    if settings.exhaustive:
        return None
    gain = cannot_win(rung.stage, trials, settings, world_size)
    if gain is None:
        return None
    best = fastest_fitting(trials, settings)
    return Skip(SkipKind.CANNOT_WIN, best_case_gain=gain, rival=best.rung if best else None)


def _unmeasured(rung: Rung, known: Sequence[TrialResult], settings: LadderSettings) -> Decision:
    rows = tuple(_unmeasured_row(trial, rung, settings) for trial in known)
    reason = f"The run ended before any rung was measured; {rung.label} is where it stood."
    return Decision(rung, False, reason, rows)


def _unmeasured_row(trial: TrialResult, rung: Rung, settings: LadderSettings) -> RungResult:
    if trial.rung == rung:
        return RungResult(trial, Verdict.COMMITTED, "committed")
    if trial.failure is not None:
        return RungResult(trial, Verdict.FAILED, failure_words(trial.failure))
    assert trial.skip is not None
    return RungResult(trial, Verdict.SKIPPED, skip_words(trial.skip, settings, None))
