"""The words of the ladder as frozen dataclasses: rungs, trials, measurements and the decision.

Pure data. Nothing here knows torch.distributed, deepspeed, a clock or a file.
Times are seconds, memory is bytes, both per rank; where ranks differ, times are the slowest rank's and memory the
largest rank's.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "Decision",
    "Failure",
    "FailureKind",
    "LadderSettings",
    "Measurement",
    "Rung",
    "RungResult",
    "Skip",
    "SkipKind",
    "Statistic",
    "StepBreakdown",
    "TrialResult",
    "Verdict",
]

ZERO_STAGES: tuple[int, ...] = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Rung:
    """One configuration to try.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        settings: ``zero_optimization`` keys that differ from the run's base config, sorted by name.
            ``offload_optimizer`` and ``offload_param`` have the device as their value, ``cpu`` or ``nvme``.
        checkpoint_activations: Whether the repeated blocks of the model are recomputed in backward.
    """

    stage: int
    settings: tuple[tuple[str, bool | int | str], ...] = ()
    checkpoint_activations: bool = False

    @property
    def extras(self) -> str:
        """What is added to the plain stage, for instance ``activation checkpointing, offload_optimizer=cpu``."""
        words = ["activation checkpointing"] if self.checkpoint_activations else []
        return ", ".join([*words, *(f"{name}={value}" for name, value in self.settings)])

    @property
    def label(self) -> str:
        """What a person calls the rung, for instance ``stage 2``."""
        return f"stage {self.stage} ({self.extras})" if self.extras else f"stage {self.stage}"

    @property
    def slug(self) -> str:
        """The label as a name for loggers: ``stage_2``, ``stage_3_offload_optimizer_cpu``."""
        return re.sub(r"[^A-Za-z0-9]+", "_", self.label).strip("_")

    def setting(self, name: str) -> bool | int | str | None:
        """Value of a ``zero_optimization`` key; None where the rung leaves it as the base config has it."""
        return dict(self.settings).get(name)


@dataclass(frozen=True, slots=True)
class Statistic:
    """A median with its spread.

    Attributes:
        median: Median of the samples.
        spread: Robust standard deviation (1.4826 times the median absolute deviation), same unit as the median.
        count: Number of samples.
    """

    median: float
    spread: float
    count: int

    @property
    def standard_error(self) -> float:
        """Standard error of the median for roughly normal noise: 1.2533 spread / sqrt(count)."""
        return 1.2533 * self.spread / math.sqrt(self.count) if self.count else math.inf


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Where one optimizer step (all its micro-batches) spends its time, in seconds.

    ``communication_s`` is the part of communication that is not hidden behind compute; it is taken out of the phase
    it happened in, so the five parts add up to about the step time.
    """

    data_s: float
    forward_s: float
    backward_s: float
    communication_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a trial measured.

    Attributes:
        step_s: Wall time of one optimizer step, validation and other loops excluded.
        breakdown: Medians per optimizer step.
        units_per_step: Tokens (or samples) that one rank processes per optimizer step.
        unit: ``tokens`` or ``samples``.
        peak_bytes: Peak memory: allocated on CUDA, resident on CPU.
        reserved_bytes: Peak reserved by the allocator on CUDA; None on CPU.
        warmup_steps: Steps run before counting began.
    """

    step_s: Statistic
    breakdown: StepBreakdown
    units_per_step: float
    unit: str
    peak_bytes: int
    reserved_bytes: int | None
    warmup_steps: int

    @property
    def throughput(self) -> float:
        """Units per second and rank (tokens/s/GPU)."""
        return self.units_per_step / self.step_s.median

    @property
    def relative_error(self) -> float:
        """Standard error of the throughput, relative to it."""
        return self.step_s.standard_error / self.step_s.median


class FailureKind(StrEnum):
    """Why a rung could not be measured to the end."""

    OUT_OF_MEMORY = "out of memory"
    ERROR = "error"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Failure:
    """A rung that failed while it was tried.

    Attributes:
        kind: What happened.
        phase: Where: ``construction``, ``forward``, ``backward``, ``optimizer step`` or ``moving state``.
        step: Optimizer steps that the trial had completed, plus 1.
        message: The exception as raised.
    """

    kind: FailureKind
    phase: str
    step: int
    message: str


class SkipKind(StrEnum):
    """Why a rung was not tried at all."""

    CANNOT_FIT = "cannot fit"
    CANNOT_WIN = "cannot win"
    CANNOT_RUN = "cannot run"
    RUN_ENDED = "run ended"


@dataclass(frozen=True, slots=True)
class Skip:
    """A rung that was not tried.

    Attributes:
        kind: Why.
        needed_bytes: Predicted lower bound of memory per rank (``CANNOT_FIT``).
        best_case_gain: Gain over the best rung if everything that can hide were hidden (``CANNOT_WIN``), e.g. 0.004.
        rival: The best rung that ``best_case_gain`` refers to (``CANNOT_WIN``).
        reason: What is missing on this machine or in this model (``CANNOT_RUN``), as a phrase.
    """

    kind: SkipKind
    needed_bytes: int | None = None
    best_case_gain: float | None = None
    rival: Rung | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One rung with what came of it; exactly one of the other fields is set, or measurement and failure both.

    A trial that measured some steps and then failed keeps both: the failure counts.
    """

    rung: Rung
    measurement: Measurement | None = None
    failure: Failure | None = None
    skip: Skip | None = None


@dataclass(frozen=True, slots=True)
class LadderSettings:
    """What the user asked of the ladder.

    Attributes:
        stages: Stages to consider, ascending.
        steps_per_rung: Largest number of optimizer steps of a trial, warm-up included.
        warmup_steps: Optimizer steps at the start of each trial that are not counted.
        headroom: Share of the memory limit that must stay free, 0 to 1.
        memory_limit_bytes: Memory per rank.
        exhaustive: Try every stage for its full number of steps: no skips by speed, no early end.
        tie: Relative difference in throughput that is never worth a higher stage.
    """

    stages: tuple[int, ...] = ZERO_STAGES
    steps_per_rung: int = 200
    warmup_steps: int = 20
    headroom: float = 0.10
    memory_limit_bytes: int = 0
    exhaustive: bool = False
    tie: float = 0.005


class Verdict(StrEnum):
    """The short form of what became of a rung."""

    COMMITTED = "committed"
    FITS = "fits"
    OVER_MARGIN = "over margin"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class RungResult:
    """A row of the table: a trial with its verdict in words.

    Attributes:
        trial: The trial.
        verdict: Short form.
        words: A phrase such as ``fits, 12 % slower than stage 1``.
    """

    trial: TrialResult
    verdict: Verdict
    words: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What to run from now on, and why.

    Attributes:
        rung: The rung to commit to.
        fits: Whether it keeps the headroom.
        reason: One or two sentences that name the figures they rest on.
        results: One entry per rung of the ladder, in ladder order.
    """

    rung: Rung
    fits: bool
    reason: str
    results: tuple[RungResult, ...]
