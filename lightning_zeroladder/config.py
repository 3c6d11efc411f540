"""The DeepSpeed config of a run and of each rung: checked, merged, never shared."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zeroladder.ladder import Rung

__all__ = ["check_config", "reconcile_accumulation", "rung_config"]

_REMOVED_PREFIX = "mics_"


def check_config(config: Mapping[str, Any], stages: Sequence[int]) -> None:
    """Refuse keys that cannot work and warn of those that the ladder overrides.

    Args:
        config: A DeepSpeed config as the user gave it.
        stages: Stages that the ladder may try.

    Raises:
        MisconfigurationException: If the config names a removed feature or a stage outside ``stages``.
    """
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return
    removed = sorted(key for key in zero if key.startswith(_REMOVED_PREFIX))
    if removed:
        raise MisconfigurationException(
            f"The DeepSpeed config sets {', '.join(removed)}: MiCS was removed from DeepSpeed. Delete these keys; to "
            "shard inside a node and replicate across nodes set zero_hpz_partition_size to the GPUs per node."
        )
    stage = zero.get("stage")
    if stage is None:
        return
    if stage not in stages:
        raise MisconfigurationException(
            f"The DeepSpeed config sets zero_optimization.stage={stage}, but stages={tuple(stages)}. Delete the key, "
            f"or pass ZeroAutoStrategy(stages=({stage},)) to train at that stage."
        )
    if len(stages) > 1:
        rank_zero_warn(
            f"zero_optimization.stage={stage} in the DeepSpeed config is ignored: the ladder tries stages "
            f"{tuple(stages)}. Pass stages=({stage},) to fix it."
        )


def reconcile_accumulation(config: dict[str, Any], accumulate_grad_batches: int) -> None:
    """Drop ``gradient_accumulation_steps`` from a config if it equals the Trainer's.

    Raises:
        MisconfigurationException: If it differs.
    """
    given = config.pop("gradient_accumulation_steps", accumulate_grad_batches)
    if given not in (accumulate_grad_batches, "auto"):
        raise MisconfigurationException(
            f"The DeepSpeed config sets gradient_accumulation_steps={given}, the Trainer has "
            f"accumulate_grad_batches={accumulate_grad_batches}. Give it to one of them only."
        )


def rung_config(base: Mapping[str, Any], rung: Rung, *, manual_optimization: bool) -> dict[str, Any]:
    """Return a config of its own for a rung.

    Args:
        base: The run's config after Lightning has filled in batch size, accumulation, clipping and precision.
        rung: What to run.
        manual_optimization: Whether the module calls backward and step itself. DeepSpeed then has to leave the end of
            an accumulation window to the caller, or stages 1 and 2 would keep the last micro-batch's gradient only.
    """
    config = copy.deepcopy(dict(base))
    zero = config.setdefault("zero_optimization", {})
    zero["stage"] = rung.stage
    zero.update(dict(rung.settings))
    if manual_optimization:
        config["managed_gradient_accumulation"] = False
        if rung.stage != 2:
            zero["overlap_comm"] = False  # DeepSpeed allows both together at stage 2 only
    return config
