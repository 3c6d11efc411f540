"""Whether the stage that a run has committed to still stands when it resumes on other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from lightning_zeroladder.costmodel.memory import ModelCount, state_bytes
from lightning_zeroladder.ladder.fitting import usable_bytes
from lightning_zeroladder.ladder.types import (
    Decision,
    FailureKind,
    LadderSettings,
    Measurement,
    Rung,
    SkipKind,
    TrialResult,
)
from lightning_zeroladder.ladder.words import gib

__all__ = ["DecisionKey", "OnResize", "Projection", "Resized", "Stand", "project", "stand"]

_MEMORY_ERROR = 0.05
"""Share of the memory limit by which a projected peak may be wrong: padding, buckets, what an allocator holds."""

_TIME_ERROR = 0.10
"""Share by which projected throughputs may be wrong against each other where ranks and accumulation change only."""

_FOLLOWED = ("world_size", "accumulate")
"""What may differ for measurements to be carried over; with anything else they mean little."""

_WORDS = {
    "model": "the model's shapes",
    "world_size": "the number of ranks",
    "nodes": "the number of nodes",
    "device": "the device",
    "micro_batch": "the micro-batch",
    "accumulate": "the accumulation",
    "precision": "the precision",
    "optimizer": "the optimizer",
    "settings": "the settings",
    "versions": "the versions of the libraries",
}


class OnResize(StrEnum):
    """What to do with the stage after a resume."""

    AUTO = "auto"
    KEEP = "keep"
    WALK = "walk"


@dataclass(frozen=True, slots=True)
class DecisionKey:
    """What a decision rests on. Two runs with equal keys would measure the same.

    Attributes:
        model: Digest of the names and shapes of the parameters and of which are trained.
        world_size: Data-parallel ranks N.
        nodes: Machines they run on.
        device: Name of the device, such as ``NVIDIA H100 80GB HBM3``.
        micro_batch: Samples per micro-batch and rank; 0 if unknown.
        accumulate: Micro-batches per optimizer step k.
        precision: Lightning's name.
        optimizer: Class of the optimizer.
        settings: Digest of the ladder's settings and the DeepSpeed config without the stage.
        versions: Packages and their versions.
    """

    model: str
    world_size: int
    nodes: int
    device: str
    micro_batch: int
    accumulate: int
    precision: str
    optimizer: str
    settings: str
    versions: tuple[tuple[str, str], ...]

    def differences(self, other: DecisionKey) -> tuple[str, ...]:
        """Return the names of the attributes that are not the same."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))


@dataclass(frozen=True, slots=True)
class Resized:
    """The change of size, and what a rank's share of the state is made of.

    Attributes:
        before: Ranks and accumulation that were measured.
        after: Ranks and accumulation of this run.
        count: Parameter elements.
        weight_bytes: Bytes of a weight and of a gradient.
        optimizer_bytes: Bytes of optimizer state per trained element.
    """

    before: tuple[int, int]
    after: tuple[int, int]
    count: ModelCount
    weight_bytes: int
    optimizer_bytes: int

    def state_bytes(self, stage: int, world_size: int) -> int:
        """Model state of a rank in bytes."""
        return state_bytes(
            stage,
            self.count,
            world_size=world_size,
            weight_bytes=self.weight_bytes,
            optimizer_bytes=self.optimizer_bytes,
        )


@dataclass(frozen=True, slots=True)
class Projection:
    """A measured rung, at another size.

    Attributes:
        rung: The rung.
        peak_bytes: Projected peak per rank.
        step_s: Projected seconds of an optimizer step.
        throughput: Units per second and rank.
    """

    rung: Rung
    peak_bytes: int
    step_s: float
    throughput: float


@dataclass(frozen=True, slots=True)
class Stand:
    """What becomes of a decision.

    Attributes:
        keep: Whether to train on at its rung without a trial.
        stages: Otherwise the stages to try, the most promising first.
        reason: Why, in a sentence.
    """

    keep: bool
    stages: tuple[int, ...]
    reason: str


def project(rung: Rung, measured: Measurement, resized: Resized) -> Projection:
    """Carry a measurement over to another number of ranks and another accumulation.

    Memory: the rank's share of the model state changes, everything else stays (the micro-batch does). Time: forward,
    backward and waiting for data go with the accumulation k; the optimizer step with the share of the state that a
    stage shards; communication with the share (N - 1) / N that a ring sends, and with k in the stages that send in
    every micro-batch (2 and 3).
    """
    (ranks, k), (ranks_now, k_now) = resized.before, resized.after
    stage, part = rung.stage, measured.breakdown
    windows = k_now / k
    ring = ((ranks_now - 1) / ranks_now) / ((ranks - 1) / ranks) if ranks > 1 else 1.0
    sends = ring * (windows if stage >= 2 else 1.0)
    sharded = ranks / ranks_now if stage >= 1 else 1.0
    known = part.data_s + part.forward_s + part.backward_s + part.communication_s + part.optimizer_s
    step_s = (
        (part.data_s + part.forward_s + part.backward_s) * windows
        + part.communication_s * sends
        + part.optimizer_s * sharded
        + (measured.step_s.median - known) * windows
    )
    peak = measured.peak_bytes - resized.state_bytes(stage, ranks) + resized.state_bytes(stage, ranks_now)
    return Projection(rung, max(0, peak), step_s, measured.units_per_step * windows / step_s)


def stand(
    setting: OnResize,
    before: DecisionKey,
    now: DecisionKey,
    decision: Decision,
    resized: Resized,
    settings: LadderSettings,
) -> Stand:
    """Decide whether a committed rung stands.

    Args:
        setting: What the user asked for.
        before: The key that the decision was made under.
        now: The key of this run.
        decision: The decision, with what was measured.
        resized: The change of size.
        settings: Limit and headroom of this run, and the stages that it may try.
    """
    rung, changed = decision.rung, before.differences(now)
    if setting is OnResize.WALK:
        return Stand(False, settings.stages, "on_resize='walk': every stage is tried again.")
    if not changed:
        return Stand(True, (), f"Nothing has changed that the decision for {rung.label} rests on.")
    words = " and ".join(_WORDS[name] for name in changed)
    if setting is OnResize.KEEP:
        return Stand(True, (), f"on_resize='keep': {rung.label} is kept although {words} changed.")
    if rung.stage not in settings.stages:
        return Stand(False, settings.stages, f"{rung.label} is not among the stages of this run.")
    if any(name not in _FOLLOWED for name in changed):
        return Stand(False, settings.stages, f"What was measured says little now that {words} changed.")
    return _compare(decision, resized, settings)


def _compare(decision: Decision, resized: Resized, settings: LadderSettings) -> Stand:
    """Compare projections of everything that was measured, and find what may have become possible."""
    trials = [result.trial for result in decision.results if result.trial.rung.stage in settings.stages]
    rows = {
        trial.rung: project(trial.rung, trial.measurement, resized)
        for trial in trials
        if trial.measurement is not None and trial.failure is None
    }
    usable, unsure = usable_bytes(settings), _MEMORY_ERROR * settings.memory_limit_bytes
    ours, ranks = rows.get(decision.rung), f"{resized.before[0]} to {resized.after[0]} ranks"
    fitting = {rung: row for rung, row in rows.items() if row.peak_bytes <= usable + unsure}
    open_again = _open_again(trials, resized, usable)
    order = _order(fitting, open_again, settings)
    label = decision.rung.label
    if ours is None:
        return Stand(False, order, f"{label} was never measured: it cannot be judged for {ranks}.")
    if ours.peak_bytes > usable + unsure:
        need = f"{gib(ours.peak_bytes)} of {gib(usable)}"
        return Stand(False, order, f"From {ranks}, {label} would need {need}: it may not fit.")
    if ours.peak_bytes > usable - unsure:
        need = f"{gib(ours.peak_bytes)} of {gib(usable)}"
        return Stand(False, order, f"From {ranks}, {label} would need about {need}: too near to tell.")
    if open_again:
        names = ", ".join(f"stage {stage}" for stage in open_again)
        return Stand(False, order, f"From {ranks}, {names} may fit now, which did not before.")
    best = max(fitting.values(), key=lambda row: row.throughput)
    lead = best.throughput / ours.throughput - 1
    if best.rung == decision.rung:
        return _against_the_next(decision.rung, fitting, order, ranks)
    if lead <= settings.tie:
        return Stand(True, (), f"From {ranks}, {label} still fits and is as fast as {best.rung.label}.")
    return Stand(False, order, f"From {ranks}, {best.rung.label} should be {100 * lead:.0f} % faster than {label}.")


def _against_the_next(rung: Rung, fitting: Mapping[Rung, Projection], order: tuple[int, ...], ranks: str) -> Stand:
    ours = fitting[rung]
    others = [row for other, row in fitting.items() if other != rung]
    if not others:
        return Stand(True, (), f"From {ranks}, {rung.label} still fits, and no other stage does.")
    second = max(others, key=lambda row: row.throughput)
    lead = ours.throughput / second.throughput - 1
    faster = f"should be {100 * lead:.0f} % faster than {second.rung.label}"
    if lead < _TIME_ERROR:
        return Stand(False, order, f"From {ranks}, {rung.label} {faster}: too near to tell.")
    return Stand(True, (), f"From {ranks}, {rung.label} still fits and {faster}.")


def _open_again(trials: Sequence[TrialResult], resized: Resized, usable: float) -> tuple[int, ...]:
    """Return the stages that had no room and have some now, since more ranks share the state."""
    stages = []
    for trial in trials:
        lacked = (trial.failure is not None and trial.failure.kind is FailureKind.OUT_OF_MEMORY) or (
            trial.skip is not None and trial.skip.kind is SkipKind.CANNOT_FIT
        )
        stage, (ranks, _), (ranks_now, _) = trial.rung.stage, resized.before, resized.after
        shrinks = resized.state_bytes(stage, ranks_now) < resized.state_bytes(stage, ranks)
        if lacked and shrinks and resized.state_bytes(stage, ranks_now) <= usable:
            stages.append(stage)
    return tuple(stages)


def _order(
    fitting: Mapping[Rung, Projection], open_again: tuple[int, ...], settings: LadderSettings
) -> tuple[int, ...]:
    """Return a short ladder: what is near the projected best, the best first, and what was never measured.

    Where that leaves nothing, the stages that shard more are all that is left.
    """
    rows = sorted(fitting.values(), key=lambda row: -row.throughput)
    near = [row.rung.stage for row in rows if row.throughput >= (1 - _TIME_ERROR) * rows[0].throughput]
    found = tuple(dict.fromkeys((*near, *open_again)))
    return found or settings.stages
