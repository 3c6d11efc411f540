"""Where a rung stands on the ladder, which trials count, and which of them fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_zeroladder.ladder.types import LadderSettings, Measurement, Rung, TrialResult

__all__ = ["Candidate", "candidates", "escalation_level", "fastest_fitting", "ladder_position", "usable_bytes"]

LadderPosition = tuple[int, int, tuple[tuple[str, float, str], ...]]

_OFFLOAD_LEVELS = {("offload_optimizer", "cpu"): 1, ("offload_param", "cpu"): 2, ("offload_optimizer", "nvme"): 3}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rung that ran to the end of its trial, with what was measured."""

    rung: Rung
    measurement: Measurement

    def fits(self, settings: LadderSettings) -> bool:
        """Whether the peak leaves the headroom."""
        return self.measurement.peak_bytes <= usable_bytes(settings)


def escalation_level(rung: Rung) -> int:
    """How much more than its stage a rung takes to fit, 0 for plain stages with or without other settings.

    1 is activation checkpointing; each step of offloading adds 2: the optimizer to the host, the weights too, NVMe.
    """
    offload = max((_OFFLOAD_LEVELS.get((name, str(value)), 0) for name, value in rung.settings), default=0)
    return 2 * offload + int(rung.checkpoint_activations)


def ladder_position(rung: Rung) -> LadderPosition:
    """Sort key: the plain stages first, each before the same stage with settings, then one escalation after another."""
    settings = tuple(
        (name, 0.0 if isinstance(value, str) else float(value), str(value)) for name, value in rung.settings
    )
    return escalation_level(rung), rung.stage, settings


def usable_bytes(settings: LadderSettings) -> float:
    """Memory per rank in bytes that a rung may use and still keep the headroom."""
    return (1.0 - settings.headroom) * settings.memory_limit_bytes


def candidates(trials: Iterable[TrialResult]) -> list[Candidate]:
    """The trials that were measured and did not fail, in ladder order."""
    found = [
        Candidate(trial.rung, trial.measurement)
        for trial in trials
        if trial.measurement is not None and trial.failure is None
    ]
    return sorted(found, key=lambda candidate: ladder_position(candidate.rung))


def fastest_fitting(trials: Iterable[TrialResult], settings: LadderSettings) -> Candidate | None:
    """The candidate of highest throughput that fits (the lower rung on an exact tie); None if there is none."""
    fitting = [candidate for candidate in candidates(trials) if candidate.fits(settings)]
    return max(fitting, key=lambda candidate: candidate.measurement.throughput, default=None)
