"""What the runs of a round trip say about the job: passed or not, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_zeroladder.proof.job import Outcome
from lightning_zeroladder.proof.plan import Plan

__all__ = ["Proof", "differing_state", "judge", "largest_difference", "step_losses", "tolerance_for"]

_NOISE = 3.0
"""How many times as much as between two uninterrupted runs losses may differ after a resume, where those differ."""

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Proof:
    """What a round trip showed.

    Differences are relative to the largest loss of the uninterrupted run among the steps compared.

    Attributes:
        passed: Whether state and losses came back.
        reason: What that rests on, in words.
        plan: Layouts, steps, and the step after which the checkpoint was saved.
        precision: Lightning's precision.
        uninterrupted: Mean loss over the global batch of each step after the checkpoint.
        resumed: The same in the resumed run.
        difference: Largest difference of the two.
        tolerance: Largest difference allowed.
        tolerance_reason: Why that much.
        state_tensors: Tensors of the training state that were compared bit for bit.
        state_differs: Those of them that were not after loading what they were when saving.
        repeat_difference: Largest difference between two uninterrupted runs; None where it was not needed.
        control_difference: Largest difference of a run that resumed in the layout that saved; None where not needed.
        strategy: Strategy of the config that zero_auto took the place of, if any.
    """

    passed: bool
    reason: str
    plan: Plan
    precision: str
    uninterrupted: tuple[float, ...]
    resumed: tuple[float, ...]
    difference: float
    tolerance: float
    tolerance_reason: str
    state_tensors: int
    state_differs: tuple[str, ...]
    repeat_difference: float | None = None
    control_difference: float | None = None
    strategy: str | None = None

    @property
    def steps(self) -> range:
        """Numbers of the steps compared, 1 for the first of the run."""
        return range(self.plan.saved_after + 1, self.plan.steps + 1)


def tolerance_for(precision: str) -> tuple[float, str]:
    """Return the tolerance for a precision of Lightning, and the reason for it."""
    if precision.startswith(("32", "64")):
        return 1e-5, "in fp32 sums are added in another order, nothing else differs"
    bits = "bf16 keeps three" if precision.startswith("bf16") else "fp16 keeps four"
    return 2e-2, f"{bits} digits, and what is rounded differently once grows from step to step"


def step_losses(outcomes: Sequence[Outcome], plan: Plan) -> tuple[float, ...]:
    """Return the mean loss over the global batch of each step after the checkpoint.

    Args:
        outcomes: Of the ranks of one run.
        plan: The plan.

    Raises:
        ValueError: If the run ended before its last step.
    """
    by_number = {number: loss for outcome in outcomes for number, loss in outcome.losses.items()}
    size, losses = plan.global_batch, []
    for step in range(plan.saved_after, plan.steps):
        numbers = range(step * size, (step + 1) * size)
        if not all(number in by_number for number in numbers):
            raise ValueError(f"ended after step {step} of {plan.steps}: something in the job stopped it")
        losses.append(math.fsum(by_number[number] for number in numbers) / size)
    return tuple(losses)


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest difference relative to the largest loss; infinite where a loss is not a number."""
    if not all(map(math.isfinite, (*losses, *reference))):
        return math.inf
    scale = max(map(abs, reference)) or 1.0
    return max(abs(loss - other) for loss, other in zip(losses, reference, strict=True)) / scale


def differing_state(saved: Mapping[str, int], loaded: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names of what is not the same in two sets of checksums."""
    return tuple(sorted(name for name in saved.keys() | loaded.keys() if saved.get(name) != loaded.get(name)))


def judge(
    *,
    difference: float,
    tolerance: float,
    state_differs: Sequence[str],
    state_tensors: int,
    finite: bool,
    repeat: float | None = None,
    control: float | None = None,
) -> tuple[bool | None, str]:
    """Return whether the round trip passed, and why.

    Args:
        difference: Largest difference of the resumed run.
        tolerance: Largest one allowed.
        state_differs: Tensors that differ after loading.
        state_tensors: Tensors compared.
        finite: Whether the uninterrupted run's losses are all numbers.
        repeat: Largest difference between two uninterrupted runs.
        control: Largest difference of a run that resumed in the layout that saved.

    Returns:
        None instead of whether it passed where ``repeat`` and then ``control`` are needed to tell.
    """
    if state_differs:
        more = f" and {len(state_differs) - _SHOWN} more" if len(state_differs) > _SHOWN else ""
        return False, (
            f"{len(state_differs)} of {state_tensors} tensors of the training state are not, after loading, what they "
            f"were when saving: {', '.join(state_differs[:_SHOWN])}{more}. Something changes them while a checkpoint "
            "is loaded, such as on_load_checkpoint of the module or of a callback."
        )
    if not finite:
        return False, "the losses of the uninterrupted run are not all numbers, so there is nothing to compare with"
    if difference <= tolerance:
        return True, "the state came back bit for bit and the losses go on as in the uninterrupted run"
    if repeat is None:
        return None, "the losses differ"
    if repeat > tolerance:
        alike = difference <= _NOISE * repeat
        said = f"with the same batches and seeds, two uninterrupted runs of this job already differ by {repeat:.1e}"
        if alike:
            return True, (
                f"the state came back bit for bit; {said}, so losses cannot tell more than that: they differ by "
                f"{difference:.1e} after the resume, which is no more than {_NOISE:g} times as much"
            )
        return False, f"{said}, but after the resume they differ by {difference:.1e}"
    if control is None:
        return None, "the losses differ"
    if control > tolerance:
        return False, (
            f"the state came back bit for bit, but a run that is resumed in the layout that saved differs as well, by "
            f"{control:.1e}: the job depends on something that its checkpoints do not hold, such as an attribute that "
            "counts, or a random generator of its own. Keep it in a buffer, or save it in on_save_checkpoint."
        )
    return False, (
        f"the state came back bit for bit, and a run that is resumed in the layout that saved goes on as it should "
        f"(difference {control:.1e}): the job computes something else on another number of devices or at another "
        "stage. SyncBatchNorm, a loss over what all ranks gathered, code that asks for its rank, and optimizers that "
        "look at whole tensors (LAMB) do."
    )
