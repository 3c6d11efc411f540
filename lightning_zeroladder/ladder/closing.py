"""What would close the gap where no rung fits: how many ranks, how many tokens, what degree of tensor parallelism.

Computed from the smallest memory that any rung was seen, or is certain, to need. Memory per rank is taken as

    held whole + divided / N + the rest (activations, buffers, and on CPU the program itself)

of which the first two follow from the model's size (Rajbhandari et al., 2020, section 5) and the rest is what a
measured peak has beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_zeroladder.costmodel import ModelCount, state_bytes
from lightning_zeroladder.ladder.fitting import ladder_position, usable_bytes
from lightning_zeroladder.ladder.types import FailureKind, LadderSettings, Measurement, Rung, TrialResult
from lightning_zeroladder.ladder.words import gib, percent

__all__ = ["JobSize", "what_closes"]


@dataclass(frozen=True, slots=True)
class JobSize:
    """The numbers of a run that decide its memory.

    Attributes:
        count: Parameters.
        world_size: Data-parallel ranks N.
        weight_bytes: Bytes of a weight and of a gradient.
        optimizer_bytes: Bytes of optimizer state per trained element, an fp32 copy of the weights included.
        accumulate: Micro-batches per optimizer step.
    """

    count: ModelCount
    world_size: int
    weight_bytes: int
    optimizer_bytes: int
    accumulate: int = 1

    def state_bytes(self, rung: Rung, world_size: int) -> int:
        """Weights, gradients and optimizer state per rank on the device, in bytes, on so many ranks."""
        host = rung.setting("offload_optimizer") is not None
        weights_too = rung.setting("offload_param") is not None
        return state_bytes(
            rung.stage,
            ModelCount(self.count.trainable, 0 if weights_too else self.count.frozen),
            world_size=world_size,
            weight_bytes=0 if weights_too else self.weight_bytes,
            optimizer_bytes=0 if host else self.optimizer_bytes,
        )

    def divided_bytes(self, rung: Rung) -> int:
        """The part of `state_bytes` that is divided among ranks, times their number."""
        many = 1 << 40
        return self.state_bytes(rung, 1) - self.state_bytes(rung, many)


@dataclass(frozen=True, slots=True)
class _Need:
    """What a rung needs per rank.

    Attributes:
        rung: The rung.
        needed_bytes: Measured peak, or the least that it certainly needs.
        measurement: None where it is the latter.
    """

    rung: Rung
    needed_bytes: int
    measurement: Measurement | None


def what_closes(trials: Sequence[TrialResult], settings: LadderSettings, job: JobSize | None) -> list[str]:
    """Say by which change of the job the rung that needs least would keep the headroom, a sentence each.

    Args:
        trials: All rungs, none of which fits.
        settings: Memory limit and headroom.
        job: The job's sizes; None: nothing can be said.

    Returns:
        Sentences, none if nothing is known about memory.
    """
    if job is None:
        return []
    need = _smallest_need(trials, job)
    if need is None:
        return []
    usable = usable_bytes(settings)
    words = [_ranks_words(need, usable, job), _batch_words(need, usable, job), _tensor_parallel_words(need, usable)]
    return [f"What would close it, from {need.rung.label}:", *words]


def _smallest_need(trials: Sequence[TrialResult], job: JobSize) -> _Need | None:
    """The rung that needs least: of those measured if any was, else by what is certain."""
    ordered = sorted(trials, key=lambda trial: ladder_position(trial.rung))
    measured = [
        _Need(trial.rung, trial.measurement.peak_bytes, trial.measurement)
        for trial in ordered
        if trial.measurement is not None and trial.failure is None
    ]
    certain = [_Need(trial.rung, _certain(trial, job), None) for trial in ordered if _is_about_memory(trial)]
    return min(measured or certain, key=lambda need: need.needed_bytes, default=None)


def _is_about_memory(trial: TrialResult) -> bool:
    if trial.failure is not None:
        return trial.failure.kind is FailureKind.OUT_OF_MEMORY
    return trial.skip is not None and trial.skip.needed_bytes is not None


def _certain(trial: TrialResult, job: JobSize) -> int:
    if trial.skip is not None and trial.skip.needed_bytes is not None:
        return trial.skip.needed_bytes
    return job.state_bytes(trial.rung, job.world_size)


def _ranks_words(need: _Need, usable: float, job: JobSize) -> str:
    divided = job.divided_bytes(need.rung)
    whole = need.needed_bytes - divided / job.world_size
    if whole >= usable or not divided:
        kept = f"{gib(whole)} of the {gib(need.needed_bytes)} are on every rank, however many there are"
        return f"More GPUs alone do not ({kept})."
    ranks = math.ceil(divided / (usable - whole))
    if ranks <= job.world_size:  # what is certain leaves room, and yet it ran out: activations are the rest
        saved = divided / job.world_size / 2
        return f"Twice the GPUs ({2 * job.world_size}) would free {gib(saved)} on each."
    least = "" if need.measurement is not None else " at least, before any activations"
    return f"{ranks} GPUs in place of {job.world_size}{least}."


def _batch_words(need: _Need, usable: float, job: JobSize) -> str:
    state = job.state_bytes(need.rung, job.world_size)
    if need.measurement is None:
        if state >= usable:
            return (
                f"Not shorter sequences or a smaller micro-batch: weights, gradients and optimizer state alone need "
                f"{gib(state)} of the {gib(usable)} that may be used."
            )
        return (
            f"Shorter sequences or a smaller micro-batch: there are {gib(usable - state)} for activations and buffers."
        )
    rest = need.needed_bytes - state
    over = need.needed_bytes - usable
    if over >= rest:
        return (
            f"Not shorter sequences or a smaller micro-batch alone: all but the model's state is {gib(rest)}, which is "
            f"less than the {gib(over)} that are missing."
        )
    share = 1 - over / rest
    now = need.measurement.units_per_step / job.accumulate
    unit = need.measurement.unit
    return (
        f"Shorter sequences or a smaller micro-batch: at most {math.floor(now * share):,} of {now:,.0f} {unit} per "
        f"rank and micro-batch ({percent(share)}), if the {gib(rest)} beyond the model's state grow with them."
    )


def _tensor_parallel_words(need: _Need, usable: float) -> str:
    degree = 2 ** max(1, math.ceil(math.log2(need.needed_bytes / usable)))
    least = "" if need.measurement is not None else " before any activations"
    return (
        f"Tensor parallelism of degree {degree}, which divides weights and activations alike (about "
        f"{gib(need.needed_bytes / degree)} per rank{least}); it needs another strategy."
    )
