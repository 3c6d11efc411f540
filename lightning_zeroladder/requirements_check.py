"""What zero_auto cannot train, said before anything is built."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_zeroladder.engine.optimizer_probe import OptimizerState

__all__ = ["check_accelerator", "check_optimizer", "check_trainer", "shardable_stages", "warn_of_pytorch_lightning"]

_REFUSED_CALLBACKS: dict[type[pl.Callback], str] = {
    BaseFinetuning: (
        "it changes the optimizer's parameter groups in mid-run, which DeepSpeed cannot follow. Freeze parameters "
        "before fit (requires_grad_(False)) and start another fit to unfreeze them"
    ),
    StochasticWeightAveraging: "it reads whole weights, which DeepSpeed shards. Average saved checkpoints instead",
    GradientAccumulationScheduler: (
        "DeepSpeed takes one accumulation for the whole run. Use Trainer(accumulate_grad_batches=...)"
    ),
    BatchSizeFinder: "it runs fit many times. Find the batch size with strategy='ddp' first",
    LearningRateFinder: "it rewinds the run through a checkpoint. Find the learning rate with strategy='ddp' first",
}


def warn_of_pytorch_lightning() -> None:
    """Warn where the other Lightning package is loaded: its Trainer does not know this strategy."""
    if "pytorch_lightning" in sys.modules:
        rank_zero_warn(
            "`pytorch_lightning` is imported. zero_auto works with `lightning` only: write `import lightning.pytorch "
            "as pl` instead of `import pytorch_lightning as pl`, for the Trainer as well as the LightningModule."
        )


def check_accelerator(accelerator: Accelerator | None) -> None:
    """Refuse accelerators other than CUDA and CPU.

    Raises:
        MisconfigurationException: For any other.
    """
    if not isinstance(accelerator, (CUDAAccelerator, CPUAccelerator)):
        raise MisconfigurationException(
            f"zero_auto runs on CUDA GPUs and on CPU; the Trainer uses {type(accelerator).__name__}. "
            "Pass Trainer(accelerator='gpu') or Trainer(accelerator='cpu')."
        )


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse what DeepSpeed cannot do in a fit.

    Raises:
        MisconfigurationException: For clipping by value, callbacks that cannot work, and remote checkpoint folders.
    """
    _check_checkpoint_folders(trainer)
    algorithm = trainer.gradient_clip_algorithm
    if trainer.gradient_clip_val and algorithm is not None and algorithm.value == "value":
        raise MisconfigurationException(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}, gradient_clip_algorithm='value'): DeepSpeed "
            "clips by norm only. Pass gradient_clip_algorithm='norm'."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise MisconfigurationException(f"{type(callback).__name__} does not work with zero_auto: {reason}.")


def _check_checkpoint_folders(trainer: pl.Trainer) -> None:
    """Refuse to find out at the first save that DeepSpeed writes local files only."""
    for callback in trainer.checkpoint_callbacks:
        folder = str(getattr(callback, "dirpath", None) or trainer.default_root_dir)
        if "://" in folder:
            raise MisconfigurationException(
                f"{type(callback).__name__} would save to {folder}. DeepSpeed writes its shards as local files: use a "
                "folder that every host sees (ModelCheckpoint(dirpath=...), default_root_dir), and copy from there."
            )


def shardable_stages(trainer: pl.Trainer, stages: Sequence[int]) -> tuple[int, ...]:
    """Return the stages that the run's callbacks can work with.

    Raises:
        MisconfigurationException: If none is left.
    """
    averaging = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]  # type: ignore[attr-defined]
    if not averaging or 3 not in stages:
        return tuple(stages)
    name = type(averaging[0]).__name__
    left = tuple(stage for stage in stages if stage != 3)
    if not left:
        raise MisconfigurationException(
            f"{name} reads whole weights, which stage 3 shards, and stages={tuple(stages)}."
        )
    rank_zero_warn(f"{name} reads whole weights, which stage 3 shards: the ladder tries stages {left} only.")
    return left


def check_optimizer(optimizer: Optimizer, state: OptimizerState | None, stages: Sequence[int]) -> None:
    """Refuse an optimizer whose state cannot move between stages.

    Raises:
        MisconfigurationException: If it keeps state of another shape than its parameters and several stages are tried.
    """
    if state is None or not state.other or len(stages) == 1:
        return
    raise MisconfigurationException(
        f"{type(optimizer).__name__} keeps {', '.join(repr(key) for key in state.other)}, which is not shaped like "
        "the parameters: ZeRO steps flattened shards, so it computes something else at each stage and its state "
        "cannot move. Use an element-wise optimizer (AdamW, SGD, Lion, RMSprop, ...), or fix one stage with "
        f"stages=({stages[0]},)."
    )
