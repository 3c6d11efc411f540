"""Which rung wins.

Only rungs that ran without failing and keep the headroom compete. A rung *beats* another when its throughput is higher
by more than noise. The winner is the lowest rung that no rung beats and that no lower rung outruns: usually the lowest
within noise of the fastest. The comparison is made with every fitting rung rather than with the fastest alone, so a
noisy fastest trial cannot make two clearly different quiet trials a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from lightning_zeroladder.ladder.closing import JobSize, what_closes
from lightning_zeroladder.ladder.fitting import Candidate, candidates, ladder_position, usable_bytes
from lightning_zeroladder.ladder.types import (
    Decision,
    FailureKind,
    LadderSettings,
    Measurement,
    RungResult,
    SkipKind,
    TrialResult,
    Verdict,
)
from lightning_zeroladder.ladder.validate import check_memory_limit
from lightning_zeroladder.ladder.words import (
    failure_words,
    gib,
    over_margin_words,
    percent,
    rate_words,
    skip_words,
    speed_words,
    title,
)

__all__ = ["NOISE_CAP", "NothingFits", "decide", "noise_tolerance", "rung_result"]

NOISE_CAP = 0.05  # a trial noisier than this must not make every rung a tie, and so the lowest stage win by default


class NothingFits(ValueError):
    """No rung of the ladder could be run; the message says what is missing and what would help."""


def decide(trials: Sequence[TrialResult], settings: LadderSettings, job: JobSize | None = None) -> Decision:
    """Choose the rung to commit to.

    Args:
        trials: What came of each rung, in any order, each rung once.
        settings: What the user asked for; ``headroom``, ``memory_limit_bytes`` and ``tie`` count here.
        job: Sizes from which it is said what would help where nothing fits.

    Returns:
        The decision, its results in ladder order. When rungs ran but none keeps the headroom, the one with the
        smallest peak, with ``fits=False``.

    Raises:
        NothingFits: If no rung ran to the end of its trial.
        ValueError: If a rung is given twice or without an outcome, or the memory limit is not positive.
    """
    check_memory_limit(settings)
    ordered = _in_ladder_order(trials)
    ran = candidates(ordered)
    if not ran:
        raise NothingFits(_nothing_fits_message(ordered, settings, job))
    fitting = [candidate for candidate in ran if candidate.fits(settings)]
    if fitting:
        winner = _winner(fitting, settings)
        reason = _reason(winner, fitting, settings)
    else:
        winner = min(ran, key=lambda candidate: candidate.measurement.peak_bytes)
        reason = " ".join([_over_margin_reason(winner, settings), *what_closes(ordered, settings, job)])
    result = partial(rung_result, settings=settings, committed=winner)
    return Decision(rung=winner.rung, fits=bool(fitting), reason=reason, results=tuple(map(result, ordered)))


def noise_tolerance(a: Measurement, b: Measurement, settings: LadderSettings) -> float:
    """Relative difference in throughput that counts as a tie.

    Twice the joint standard error, at most ``NOISE_CAP``, at least ``settings.tie``. One counted step says nothing
    about noise, so it counts as noisy rather than as exact.
    """
    joint = math.hypot(*(m.relative_error if m.step_s.count > 1 else math.inf for m in (a, b)))
    return max(settings.tie, min(2.0 * joint, NOISE_CAP))


def _in_ladder_order(trials: Sequence[TrialResult]) -> list[TrialResult]:
    ordered = sorted(trials, key=lambda trial: ladder_position(trial.rung))
    for trial, following in pairwise(ordered):
        if trial.rung == following.rung:
            raise ValueError(f"{trial.rung.label} is given twice, each rung may have one trial: keep its last trial.")
    for trial in ordered:
        if trial.measurement is None and trial.failure is None and trial.skip is None:
            raise ValueError(f"{trial.rung.label} has no measurement, failure or skip: one of them must be set.")
    return ordered


def _shortfall(slow: Measurement, fast: Measurement) -> float:
    """By how much ``slow`` falls behind ``fast``, relative to ``fast``; negative if it is ahead."""
    return 1.0 - slow.throughput / fast.throughput


def _tied(slow: Measurement, fast: Measurement, settings: LadderSettings) -> bool:
    return _shortfall(slow, fast) <= noise_tolerance(slow, fast, settings)


def _winner(fitting: Sequence[Candidate], settings: LadderSettings) -> Candidate:
    highest = -math.inf
    for candidate in fitting:  # in ladder order
        outruns_lower = candidate.measurement.throughput > highest
        if outruns_lower and all(_tied(candidate.measurement, other.measurement, settings) for other in fitting):
            return candidate
        highest = max(highest, candidate.measurement.throughput)
    raise AssertionError("the fastest candidate cannot be beaten")


def rung_result(trial: TrialResult, settings: LadderSettings, committed: Candidate) -> RungResult:
    """The row of the table for ``trial``, in words relative to the committed rung."""
    if trial.rung == committed.rung:
        return RungResult(trial, Verdict.COMMITTED, "committed")
    if trial.failure is not None:
        return RungResult(trial, Verdict.FAILED, failure_words(trial.failure))
    if trial.measurement is not None:
        if trial.measurement.peak_bytes > usable_bytes(settings):
            return RungResult(trial, Verdict.OVER_MARGIN, over_margin_words(trial.measurement.peak_bytes, settings))
        return RungResult(trial, Verdict.FITS, _fits_words(trial, trial.measurement, settings, committed))
    assert trial.skip is not None
    return RungResult(trial, Verdict.SKIPPED, skip_words(trial.skip, settings, committed.rung))


def _fits_words(trial: TrialResult, measurement: Measurement, settings: LadderSettings, committed: Candidate) -> str:
    winner = committed.measurement
    if ladder_position(trial.rung) > ladder_position(committed.rung) and _tied(measurement, winner, settings):
        lower = "stage" if trial.rung.stage > committed.rung.stage else "rung"
        return f"fits, within noise of {committed.rung.label}: the lower {lower} wins"
    return f"fits, {percent(_shortfall(measurement, winner))} slower than {committed.rung.label}"


def _reason(winner: Candidate, fitting: Sequence[Candidate], settings: LadderSettings) -> str:
    name, rate = title(winner.rung.label), rate_words(winner.measurement, settings)
    others = [candidate for candidate in fitting if candidate.rung != winner.rung]
    if not others:
        return f"{name} is the only rung measured that keeps {percent(settings.headroom)} of memory free: {rate}."
    rival = max(others, key=lambda candidate: candidate.measurement.throughput)
    gain = rival.measurement.throughput / winner.measurement.throughput - 1.0
    if gain > 0:
        words = f"{title(rival.rung.label)} is {speed_words(gain)}, which is within noise."
        return f"{name} is the lowest rung within noise of the fastest: {rate}. {words}"
    words = speed_words(-_shortfall(rival.measurement, winner.measurement))
    return f"{name} is the fastest rung that fits: {rate}. The next, {rival.rung.label}, is {words}."


def _over_margin_reason(winner: Candidate, settings: LadderSettings) -> str:
    peak = winner.measurement.peak_bytes
    return (
        f"No rung keeps {percent(settings.headroom)} of {gib(settings.memory_limit_bytes)} free. "
        f"{title(winner.rung.label)} needs the least, but its headroom is short by "
        f"{gib(peak - usable_bytes(settings))}: {over_margin_words(peak, settings)}."
    )


def _nothing_fits_message(ordered: Sequence[TrialResult], settings: LadderSettings, job: JobSize | None) -> str:
    limit = settings.memory_limit_bytes
    lines = [f"No rung of the ladder could be run with {gib(limit)} of memory per rank."]
    for trial in ordered:
        if trial.failure is not None:
            where = f"{trial.failure.kind} in {trial.failure.phase} at step {trial.failure.step}"
            lines.append(f"- {trial.rung.label}: {where}: {trial.failure.message}")
        elif trial.skip is not None:
            lines.append(f"- {trial.rung.label}: {skip_words(trial.skip, settings, None)}")
    needs = [(t.skip.needed_bytes, t.rung.label) for t in ordered if t.skip and t.skip.needed_bytes is not None]
    if needs:
        needed, label = min(needs)
        lines.append(f"The smallest known shortfall is {gib(needed - limit)} per rank, at {label}.")
    return "\n".join([*lines, *_what_would_help(ordered, settings, job)])


def _what_would_help(ordered: Sequence[TrialResult], settings: LadderSettings, job: JobSize | None) -> list[str]:
    kinds = {trial.failure.kind for trial in ordered if trial.failure}
    skipped = any(trial.skip is not None and trial.skip.kind is SkipKind.CANNOT_FIT for trial in ordered)
    advice = []
    if skipped or FailureKind.OUT_OF_MEMORY in kinds or not kinds:
        advice = what_closes(ordered, settings, job) or [
            "What would help: more GPUs to shard over, a smaller micro-batch or shorter sequences, tensor parallelism."
        ]
    if FailureKind.ERROR in kinds:
        advice.append("The errors that are not about memory need a fix in the module or its configuration.")
    return advice
