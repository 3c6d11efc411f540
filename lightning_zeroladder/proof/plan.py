"""How the round trip is laid out: which ranks take which micro-batches, and after which step it is saved."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["BadJob", "Layout", "Plan", "Request", "check_request", "make_plan"]

_STAGES = (0, 1, 2, 3)


class BadJob(ValueError):
    """The job cannot be proven as asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for.

    Attributes:
        devices: Ranks that train and save.
        to_devices: Ranks that resume; None to choose.
        stage: ZeRO stage at first.
        to_stage: ZeRO stage after the resume.
        steps: Optimizer steps of the uninterrupted run.
    """

    devices: int
    to_devices: int | None
    stage: int
    to_stage: int
    steps: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is spread.

    Attributes:
        devices: Ranks.
        stage: ZeRO stage.
        accumulate: Micro-batches per rank and optimizer step.
    """

    devices: int
    stage: int
    accumulate: int

    def micro_batch(self, rank: int, index: int) -> int:
        """Return the number, within the whole run, of the ``index``-th micro-batch that a rank takes.

        Ranks take turns, so the micro-batches of an optimizer step are the same ones in every layout of the same global
        batch.
        """
        return index * self.devices + rank

    def __str__(self) -> str:
        """Return it in words."""
        ranks = "1 device" if self.devices == 1 else f"{self.devices} devices"
        return f"{ranks}, stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The round trip.

    Attributes:
        before: Layout that trains and saves.
        after: Layout that resumes, with the same global batch.
        steps: Optimizer steps of the uninterrupted run.
        saved_after: Step after which the checkpoint is saved.
    """

    before: Layout
    after: Layout
    steps: int
    saved_after: int

    @property
    def global_batch(self) -> int:
        """Micro-batches per optimizer step on all ranks together."""
        return self.before.devices * self.before.accumulate


def check_request(request: Request) -> None:
    """Check what can be checked without the job's config.

    Raises:
        BadJob: If a number cannot work.
    """
    for name, value, least in (
        ("devices", request.devices, 1),
        ("to_devices", request.to_devices, 1),
        ("steps", request.steps, 2),
    ):
        if value is not None and value < least:
            raise BadJob(f"{name}={value}: must be at least {least}.")
    for name, stage in (("stage", request.stage), ("to_stage", request.to_stage)):
        if stage not in _STAGES:
            raise BadJob(f"{name}={stage}: ZeRO has the stages 0, 1, 2 and 3.")


def make_plan(request: Request, accumulate: int) -> Plan:
    """Lay out the round trip.

    Args:
        request: What was asked for.
        accumulate: Micro-batches per rank and optimizer step in the job's config.

    Raises:
        BadJob: If no round trip with the same global batch can be made of it.
    """
    check_request(request)
    total = accumulate * request.devices
    divisors = [count for count in range(1, total + 1) if total % count == 0]
    # Fewer ranks where that is possible: it is what needs no more devices than there are.
    to_devices = request.to_devices or max((count for count in divisors if count < request.devices), default=1)
    if to_devices not in divisors:
        raise BadJob(
            f"to_devices={to_devices}: an optimizer step has {total} micro-batches ({accumulate} on each of "
            f"{request.devices} devices), which {to_devices} devices cannot share evenly, and losses can only be "
            f"compared over the same global batch. Choose one of {', '.join(map(str, divisors))}, or another "
            "accumulate_grad_batches."
        )
    after = total // to_devices
    # Lightning counts accumulation windows from the batches that the checkpoint says were seen.
    unit = after // math.gcd(after, accumulate)
    saved_after = max(request.steps // 2 // unit, 1) * unit
    if saved_after >= request.steps:
        raise BadJob(
            f"steps={request.steps}: with {accumulate} micro-batches per step before and {after} after, a checkpoint "
            f"can be resumed after multiples of {unit} steps: at least {unit + 1} steps are needed."
        )
    return Plan(
        Layout(request.devices, request.stage, accumulate),
        Layout(to_devices, request.to_stage, after),
        request.steps,
        saved_after,
    )
