"""One rank of one run of `lightning_zeroladder.proving`: ``python -m lightning_zeroladder.proof.worker JOB``."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module
from typing_extensions import override

from lightning_zeroladder import register
from lightning_zeroladder.callbacks import LadderCallback
from lightning_zeroladder.checkpoint.errors import BadCheckpoint, CheckpointMismatch
from lightning_zeroladder.engine.digest import checksum
from lightning_zeroladder.engine.fragments import DamagedState, UnmovableState, global_checksums
from lightning_zeroladder.proof.batches import Batches, user_batches
from lightning_zeroladder.proof.job import Job, Outcome
from lightning_zeroladder.proof.plan import BadJob, Plan, make_plan
from lightning_zeroladder.strategy import ZeroAutoStrategy

_SEED = 1
"""Where the config has none."""

_PROBLEM = 3
"""Exit status of a rank that has written down, in words, what is wrong."""

_EXPECTED = (MisconfigurationException, BadJob, BadCheckpoint, CheckpointMismatch, DamagedState, UnmovableState)

_TRAINER: dict[str, Any] = {
    "barebones": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "fast_dev_run": False,
    "limit_train_batches": None,
    "limit_val_batches": 0,
    "logger": False,
    "max_time": None,
    "num_nodes": 1,
    "num_sanity_val_steps": 0,
    "overfit_batches": 0.0,
    "profiler": None,
    "reload_dataloaders_every_n_epochs": 0,
}
"""What the proof sets in the user's Trainer."""

_LEFT_OUT = (
    LadderCallback,
    callbacks.Checkpoint,
    callbacks.DeviceStatsMonitor,
    callbacks.EarlyStopping,
    callbacks.LearningRateMonitor,
    callbacks.ModelSummary,
    callbacks.ProgressBar,
    callbacks.ThroughputMonitor,
    callbacks.Timer,
)
"""Callbacks that show, save, or end a run by what is not there in the proof (a logger, validation, time)."""


class _ProvingCLI(LightningCLI):
    """The user's job from their config, with the Trainer at the proof's size and layout."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.plan: Plan
        self.replaced: str | None = None
        super().__init__(
            args=["fit", *(word for config in job.configs for word in ("--config", config)), *job.arguments],
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=_SEED,
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        job, section = self.job, self.config["fit"]
        self.plan = job.plan or make_plan(job.request, section.trainer.accumulate_grad_batches)
        layout = job.layout(self.plan)
        if isinstance(section.seed_everything, bool):  # any seed, or none: the runs have to begin alike
            section.seed_everything = _SEED
        section.ckpt_path = str(job.checkpoint) if job.resumes else None
        section.trainer.strategy, self.replaced = _strategy(section.trainer.strategy, layout.stage, layout.accumulate)
        settings = {
            **_TRAINER,
            "accumulate_grad_batches": layout.accumulate,
            "default_root_dir": str(job.place),
            "devices": layout.devices,
            "max_steps": self.plan.steps,
        }
        for name, value in settings.items():
            section.trainer[name] = value

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        given = self._get(self.config_init, "trainer")["callbacks"] or []
        kept = [one for one in (given if isinstance(given, list) else [given]) if not isinstance(one, _LEFT_OUT)]
        self.watch = _Watch(self.job, self.plan)
        return super().instantiate_trainer(**kwargs, callbacks=[*kept, self.watch])

    def before_fit(self) -> None:
        _check(self.model, self.trainer, self.plan)
        _replace_batches(self.job, self.plan, self.trainer, self.model, self.datamodule)
        # Lightning divides a loss by the accumulation and DeepSpeed does so again: gradients would change in size.
        _scale_gradients(self.trainer.strategy, self.job.layout(self.plan).accumulate / self.plan.before.accumulate)


_CHANGED = ("stage", "decision", "global_batch")
"""Arguments of a strategy that a proof settles itself."""


def _strategy(given: Any, stage: int, accumulate: int) -> tuple[dict[str, Any], str | None]:
    """Return zero_auto at one stage with the DeepSpeed settings of the config's strategy, and that one's name."""
    kind, options = _resolve(given)
    deepspeed = issubclass(kind, DeepSpeedStrategy)
    ours = kind if issubclass(kind, ZeroAutoStrategy) else ZeroAutoStrategy
    options = {name: value for name, value in options.items() if name not in _CHANGED} if deepspeed else {}
    path = options.get("config") or os.environ.get(DeepSpeedStrategy.DEEPSPEED_ENV_VAR)
    if path is not None:
        options["config"] = _without_layout(_read_config(path), accumulate)
    options["stages"] = [stage]
    name = given if isinstance(given, str) else f"{kind.__module__}.{kind.__qualname__}"
    class_path = f"{ours.__module__}.{ours.__qualname__}"
    return {"class_path": class_path, "init_args": options}, None if ours is kind else name


def _resolve(given: Any) -> tuple[type[Any], dict[str, Any]]:
    """Return the class of a configured strategy, and its arguments."""
    if isinstance(given, str):
        if given not in StrategyRegistry:
            return object, {}
        entry = StrategyRegistry[given]
        return entry["strategy"], dict(entry["init_params"])
    module, _, name = given.class_path.rpartition(".")
    arguments = given.get("init_args")
    return getattr(importlib.import_module(module), name), vars(arguments) if arguments is not None else {}


def _read_config(given: Any) -> dict[str, Any]:
    if isinstance(given, dict | Namespace):
        return given if isinstance(given, dict) else dict(given.as_dict())
    path = Path(os.fspath(given))
    if not path.is_file():
        raise BadJob(f"The DeepSpeed config {path} does not exist.")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _without_layout(config: dict[str, Any], accumulate: int) -> dict[str, Any]:
    """Return a DeepSpeed config at the proof's accumulation, leaving the stage to the strategy."""
    zero = {name: value for name, value in config.get("zero_optimization", {}).items() if name != "stage"}
    config = {**config, "zero_optimization": zero}
    if "gradient_accumulation_steps" in config:
        config["gradient_accumulation_steps"] = accumulate
    return config


def _check(model: pl.LightningModule, trainer: pl.Trainer, plan: Plan) -> None:
    if not model.automatic_optimization:
        raise BadJob(
            f"{type(model).__name__} uses manual optimization: it decides itself which batches make an optimizer step, "
            "so the same global batch cannot be given to another number of devices. Prove it with "
            "automatic_optimization = True."
        )
    wanted, there = max(plan.before.devices, plan.after.devices), torch.cuda.device_count()
    if isinstance(trainer.accelerator, CUDAAccelerator) and wanted > there:
        raise BadJob(
            f"{wanted} devices are asked for, this machine has {there} GPUs. Ask for fewer, or add "
            "--trainer.accelerator=cpu."
        )


def _replace_batches(
    job: Job, plan: Plan, trainer: pl.Trainer, model: pl.LightningModule, data: pl.LightningDataModule | None
) -> None:
    """Have the run train on recorded batches, or record them, in the place of the user's dataloader."""
    owner: Any = data if data is not None and is_overridden("train_dataloader", data) else model
    if not is_overridden("train_dataloader", owner):
        return  # Lightning says so
    layout, first = job.layout(plan), job.first_step(plan)
    loaders, rank = owner.train_dataloader, trainer.global_rank

    def number(index: int) -> int:
        return layout.micro_batch(rank, first * layout.accumulate + index)

    def recorded() -> Batches:
        return Batches(job.batches, number, None, job.batch_size)

    def recording() -> Batches:
        found = loaders()
        size = getattr(getattr(found, "batch_sampler", None), "batch_size", None)

        def source() -> Iterator[Any]:
            return user_batches(trainer, found)

        return Batches(job.batches, number, source, size)

    owner.train_dataloader = recording if job.records else recorded


def _scale_gradients(strategy: Any, factor: float) -> None:
    backward = strategy.backward

    @functools.wraps(backward)
    def scaled(closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return backward(closure_loss * factor, *args, **kwargs)

    if factor != 1:
        strategy.backward = scaled


class _Watch(callbacks.Callback):
    """Notes the loss of each micro-batch and the state when it is saved or loaded; saves in the middle."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self.outcome = Outcome(plan)
        self._job = job
        self._layout = job.layout(plan)
        self._index = job.first_step(plan) * self._layout.accumulate

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.outcome.precision = str(trainer.precision)
        self.outcome.batch_size = int(strategy.deepspeed_engine.train_micro_batch_size_per_gpu())
        if self._job.resumes:
            self.outcome.state = _state(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number = self._layout.micro_batch(trainer.global_rank, self._index)
        self.outcome.losses[number] = float(outputs["loss"]) * self._layout.accumulate  # Lightning has divided it
        self._index += 1
        step, inside = divmod(self._index, self._layout.accumulate)
        if inside:
            return
        if trainer.is_global_zero:
            self._job.progress.write_text(str(step), encoding="utf-8")
        if self._job.records and step == self.outcome.plan.saved_after:
            self.outcome.state = _state(trainer)
            trainer.save_checkpoint(self._job.checkpoint)


def _state(trainer: pl.Trainer) -> dict[str, int]:
    """Return checksums of the training state and of the buffers that checkpoints have. A collective."""
    strategy: Any = trainer.strategy
    sums = global_checksums(strategy.deepspeed_engine)
    for name, buffer in _saved_buffers(trainer.lightning_module):
        if buffer.element_size() <= 8:
            sums[f"{name}/buffer"] = int(checksum(buffer.reshape(-1), 0))
    return sums if trainer.is_global_zero else {}


def _saved_buffers(module: Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however that ended."""

    def wait() -> None:
        os.read(0, 1)  # returns when the other end is closed
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(path: Path) -> int:
    """Run one rank; returns its exit status."""
    _end_with_parent()
    job, rank = Job.read(path), int(os.environ["RANK"])
    register()
    warnings.filterwarnings("ignore", ".*torch.distributed.* is deprecated.*", FutureWarning)
    try:
        cli = _ProvingCLI(job)
    except _EXPECTED as error:
        job.problem(rank).write_text(" ".join(str(error).split()), encoding="utf-8")
        return _PROBLEM
    cli.watch.outcome.strategy = cli.replaced
    cli.watch.outcome.write(job.outcome(rank))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
