"""The DeepSpeed config of a run and of each rung: checked, merged, never shared."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zeroladder.ladder import LadderSettings, Rung, check_settings, normalize_stages
from lightning_zeroladder.probe.memory import default_memory_limit
from lightning_zeroladder.report.data import RunReport, read_report

__all__ = [
    "check_config",
    "ladder_settings",
    "read_decision",
    "reconcile_accumulation",
    "rung_config",
    "with_memory_limit",
]

_REMOVED_PREFIX = "mics_"
_OFFLOADS = ("offload_optimizer", "offload_param")


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


def rung_config(
    base: Mapping[str, Any], rung: Rung, *, manual_optimization: bool, nvme_path: str | Path | None = None
) -> dict[str, Any]:
    """Return a config of its own for a rung.

    Args:
        base: The run's config after Lightning has filled in batch size, accumulation, clipping and precision.
        rung: What to run.
        manual_optimization: Whether the module calls backward and step itself. DeepSpeed then has to leave the end of
            an accumulation window to the caller, or stages 1 and 2 would keep the last micro-batch's gradient only.
        nvme_path: Where a rung that offloads to NVMe keeps its state.
    """
    config = copy.deepcopy(dict(base))
    zero = config.setdefault("zero_optimization", {})
    zero["stage"] = rung.stage
    zero.update(dict(rung.settings))
    for name in _OFFLOADS:
        if (device := rung.setting(name)) is not None:
            path = {"nvme_path": str(nvme_path)} if device == "nvme" else {}
            zero[name] = {**((base.get("zero_optimization") or {}).get(name) or {}), "device": device, **path}
    if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        # DeepSpeed would refuse any optimizer but its own; the user's keeps its state and its hyperparameters.
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if manual_optimization:
        config["managed_gradient_accumulation"] = False
        if rung.stage != 2:
            zero["overlap_comm"] = False  # DeepSpeed allows both together at stage 2 only
    return config


def ladder_settings(
    stages: Sequence[int],
    steps_per_rung: int,
    warmup_steps: int,
    headroom: float,
    memory_limit_bytes: int | None,
    exhaustive: bool,
) -> LadderSettings:
    """Check what the user asked of the ladder.

    Returns:
        The settings; a memory limit of 0 stands for one that is found out when the device is known.

    Raises:
        MisconfigurationException: If a setting cannot work.
    """
    try:
        settings = LadderSettings(
            stages=normalize_stages(stages),
            steps_per_rung=steps_per_rung,
            warmup_steps=warmup_steps,
            headroom=headroom,
            memory_limit_bytes=1 if memory_limit_bytes is None else memory_limit_bytes,
            exhaustive=exhaustive,
        )
        check_settings(settings)
    except ValueError as error:
        raise MisconfigurationException(f"ZeroAutoStrategy: {error}") from error
    return replace(settings, memory_limit_bytes=memory_limit_bytes or 0)


def check_rescue(on_oom: str, trial_timeout: float | None) -> None:
    """Refuse settings for failed rungs that have no meaning.

    Raises:
        MisconfigurationException: If one has none.
    """
    if on_oom not in ("climb", "raise"):
        raise MisconfigurationException(
            f"ZeroAutoStrategy(on_oom={on_oom!r}): must be 'climb' (move to the next stage) or 'raise' (end the run)."
        )
    if trial_timeout is not None and not trial_timeout > 0:
        raise MisconfigurationException(
            f"ZeroAutoStrategy(trial_timeout={trial_timeout}): must be above 0 seconds, or None for the default."
        )


def with_memory_limit(settings: LadderSettings, device: torch.device, local_ranks: int) -> LadderSettings:
    """Return the settings with the memory limit of the device where the user gave none.

    Args:
        settings: A limit of 0 is replaced.
        device: Device of this rank.
        local_ranks: Ranks on this host.
    """
    if settings.memory_limit_bytes != 0:
        return settings
    return replace(settings, memory_limit_bytes=default_memory_limit(device, local_ranks))


def read_decision(path: str | Path) -> RunReport:
    """Read the report of an earlier run.

    Raises:
        MisconfigurationException: If it is missing or no report.
    """
    try:
        return read_report(Path(path))
    except (ValueError, FileNotFoundError) as error:
        raise MisconfigurationException(f"ZeroAutoStrategy(decision='{path}'): {error}") from error
