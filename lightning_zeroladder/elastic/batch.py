"""How many micro-batches make an optimizer step when the number of ranks has changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["KEEP", "SCALE", "BatchPlan", "Kept", "check_global_batch", "kept_of", "plan_batch", "rescaled_limit"]

KEEP = "keep"
SCALE = "scale"


@dataclass(frozen=True, slots=True)
class Kept:
    """What a run holds on to over all its resumes. Samples are counted over all ranks.

    Attributes:
        target: Samples per optimizer step that the run wants.
        actual: Samples per optimizer step that it had when it was saved.
        given: The Trainer's ``accumulate_grad_batches`` for which the target was set.
        divisor: The accumulation by which gradients are divided once more than a mean needs: Lightning and DeepSpeed
            both divide by theirs, so another one would change their size.
        unit: Samples per batch that ``limit_train_batches`` and ``val_check_interval`` were given for.
        micro_batch: Samples per micro-batch and rank; 0 if the dataloader does not tell, which counts as 1.
    """

    target: int
    actual: int
    given: int
    divisor: int
    unit: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The accumulation of a run.

    Attributes:
        accumulate: Micro-batches per optimizer step k.
        kept: What goes into the next checkpoint.
        loss_factor: What a loss is multiplied with, so that gradients keep the size they had at the first k.
        changed: Whether a checkpoint's optimizer steps had another number of samples.
        message: One line for the user; None if nothing is different.
    """

    accumulate: int
    kept: Kept
    loss_factor: float
    changed: bool
    message: str | None


def check_global_batch(value: str | int) -> str | int:
    """Return a valid setting.

    Raises:
        ValueError: If it is something else than ``"keep"``, ``"scale"`` or a positive number of samples.
    """
    known = value in (KEEP, SCALE) or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
    if not known:
        raise ValueError(
            f"global_batch={value!r}: say 'keep' (the samples per optimizer step stay), 'scale' (they follow the "
            "number of ranks), or how many samples an optimizer step shall have, such as 256."
        )
    return value


def kept_of(entries: Mapping[str, Any]) -> Kept | None:
    """Return what a checkpoint tells, None if it tells nothing that makes sense."""
    values = {name: entries.get(name) for name in Kept.__slots__}
    if not all(isinstance(value, int) and value >= (name != "micro_batch") for name, value in values.items()):
        return None
    return Kept(**values)  # type: ignore[arg-type]


def nearest_accumulation(target: int, unit: int) -> int:
    """Return the k at least 1 for which k * unit is nearest to the target; of two equally near ones the larger."""
    below = max(1, target // unit)
    return below if abs(below * unit - target) < abs((below + 1) * unit - target) else below + 1


def plan_batch(
    setting: str | int, given: int, world_size: int, micro_batch: int, kept: Kept | None, *, fixed: bool = False
) -> BatchPlan:
    """Choose the accumulation of a run.

    Args:
        setting: ``"keep"``, ``"scale"`` or samples per optimizer step.
        given: The Trainer's ``accumulate_grad_batches``.
        world_size: Data-parallel ranks N.
        micro_batch: Samples per micro-batch and rank m; 0 if the dataloader does not tell.
        kept: What the checkpoint says that the run resumes from; None for a new run.
        fixed: The accumulation cannot be changed (manual optimization).

    Raises:
        ValueError: If a number of samples is asked for and the micro-batch is not known.
    """
    unit = world_size * _micro_batch(micro_batch, kept)
    wanted = _target(setting, given, unit, micro_batch, kept)
    accumulate = given if fixed or wanted is None else nearest_accumulation(wanted, unit)
    actual = accumulate * unit
    target = actual if wanted is None or fixed else wanted
    by_hand = kept is None or kept.given != given
    divisor = given if by_hand or kept is None else kept.divisor
    unit_given = unit if by_hand or kept is None else kept.unit
    told = micro_batch if kept is None or (micro_batch and kept.micro_batch) else kept.micro_batch
    plan = Kept(target, actual, given, divisor, unit_given, told)
    old = kept.actual if kept is not None else wanted
    changed = kept is not None and actual != kept.actual
    message = _words(accumulate, given, actual, old, world_size, unit, by_hand=wanted is None)
    return BatchPlan(accumulate, plan, accumulate / divisor, changed, message)


def rescaled_limit(limit: int, given_for: int, unit: int) -> int:
    """Return a number of batches as so many batches of another size as hold the same samples, at least 1.

    Args:
        limit: Batches.
        given_for: Samples in one of them.
        unit: Samples in one of the others.
    """
    return max(1, round(limit * given_for / unit))


def _micro_batch(known: int, kept: Kept | None) -> int:
    """Return the samples to count a micro-batch as: a loader that does not tell is taken to be as it was."""
    if kept is not None and (known == 0 or kept.micro_batch == 0):
        return max(1, kept.micro_batch)
    return max(1, known)


def _target(setting: str | int, given: int, unit: int, micro_batch: int, kept: Kept | None) -> int | None:
    """Return the samples that an optimizer step shall have; None for as many as the Trainer's accumulation gives."""
    if isinstance(setting, int):
        if micro_batch == 0:
            raise ValueError(
                f"global_batch={setting} is in samples, and the training dataloader does not tell how many a batch "
                "has. Set train_micro_batch_size_per_gpu in the DeepSpeed config."
            )
        return setting
    if setting == SCALE or kept is None or kept.given != given:
        return None
    return kept.target


def _words(
    accumulate: int, given: int, actual: int, old: int | None, world_size: int, unit: int, *, by_hand: bool
) -> str | None:
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if old is None or actual == old:
        if accumulate == given:
            return None
        return (
            f"zero_auto: accumulate_grad_batches={accumulate} instead of {given} makes optimizer steps of {actual} "
            f"samples on {ranks}."
        )
    why = f"accumulate_grad_batches={accumulate}" if by_hand else f"{ranks} take {unit} samples at once"
    ratio = actual / old
    return (
        f"zero_auto: optimizer steps have {actual} samples instead of {old} ({why}). The usual rule is to multiply "
        f"the learning rate by {ratio:.3g} for SGD, by {math.sqrt(ratio):.3g} for Adam; it is left as it is."
    )
