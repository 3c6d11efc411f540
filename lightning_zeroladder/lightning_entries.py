"""What Lightning expects to find in a loaded checkpoint, also where plain DeepSpeed saved it."""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_zeroladder.checkpoint.opening import Opened
from lightning_zeroladder.engine.restore import Restored

__all__ = ["describe_load", "lightning_entries"]

_VERSION = "pytorch-lightning_version"


def lightning_entries(restored: Restored, trainer: pl.Trainer) -> dict[str, Any]:
    """Return the checkpoint dictionary that Lightning's connector goes on with.

    A checkpoint of plain DeepSpeed has no loops: the number of optimizer steps taken becomes ``trainer.global_step``,
    the epoch starts anew, and a scheduler's state is handed to the first scheduler.
    """
    entries = dict(restored.client)
    if _VERSION in entries:
        entries.pop("lr_scheduler", None)
        return entries
    steps = restored.opened.state.counters.get("global_steps", 0)
    entries.update({_VERSION: version("lightning"), "epoch": 0, "global_step": steps, "state_dict": {}})
    scheduler = entries.pop("lr_scheduler", None)
    has_scheduler = bool(trainer.strategy.lr_scheduler_configs)
    entries["lr_schedulers"] = [scheduler] if scheduler is not None and has_scheduler else []
    if trainer.state.fn == TrainerFn.FITTING:
        loop = copy.deepcopy(trainer.fit_loop.state_dict())
        progress = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
        for count in progress.values():
            count["ready"] = count["completed"] = steps
        entries["loops"] = {"fit_loop": loop}
    return entries


def describe_load(opened: Opened, stage: int, world_size: int) -> str:
    """Return one line: from what the checkpoint was loaded into what."""
    state = opened.state
    ranks = "1 rank" if state.world_size == 1 else f"{state.world_size} ranks"
    saved = f"stage {state.stage} on {ranks}" if state.stage is not None else "the universal format"
    now = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return f"zero_auto: loaded {opened.found.root}, saved at {saved}, into stage {stage} on {now}."
