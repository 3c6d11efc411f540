"""Which rungs, in which order, when to stop, which wins; and the journal that records it."""

from __future__ import annotations

from lightning_zeroladder.ladder.beyond import Beyond, HostShare, Option
from lightning_zeroladder.ladder.bound import best_case_step_s, cannot_win
from lightning_zeroladder.ladder.buckets import Buckets
from lightning_zeroladder.ladder.closing import JobSize
from lightning_zeroladder.ladder.decide import NothingFits, decide
from lightning_zeroladder.ladder.fitting import Candidate, candidates, fastest_fitting, ladder_position, usable_bytes
from lightning_zeroladder.ladder.journal import Journal, read_journal
from lightning_zeroladder.ladder.plan import Commit, TryRung, climb, ended_early, next_action, single_device
from lightning_zeroladder.ladder.serialize import (
    JSON,
    decision_from_json,
    settings_from_json,
    to_json,
    trial_from_json,
)
from lightning_zeroladder.ladder.statistics import summarize
from lightning_zeroladder.ladder.stopping import MIN_STEPS, enough
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
from lightning_zeroladder.ladder.validate import check_settings, normalize_stages

__all__ = [
    "JSON",
    "MIN_STEPS",
    "Beyond",
    "Buckets",
    "Candidate",
    "Commit",
    "Decision",
    "Failure",
    "FailureKind",
    "HostShare",
    "JobSize",
    "Journal",
    "LadderSettings",
    "Measurement",
    "NothingFits",
    "Option",
    "Rung",
    "RungResult",
    "Skip",
    "SkipKind",
    "Statistic",
    "StepBreakdown",
    "TrialResult",
    "TryRung",
    "Verdict",
    "best_case_step_s",
    "candidates",
    "cannot_win",
    "check_settings",
    "climb",
    "decide",
    "decision_from_json",
    "ended_early",
    "enough",
    "fastest_fitting",
    "ladder_position",
    "next_action",
    "normalize_stages",
    "read_journal",
    "settings_from_json",
    "single_device",
    "summarize",
    "to_json",
    "trial_from_json",
    "usable_bytes",
]
