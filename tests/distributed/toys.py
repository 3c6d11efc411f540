"""Tiny models, their data, and the two kinds of run that tests compare: a walk and a fixed stage."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_zeroladder import ZeroAutoStrategy

WIDTH = 24
STEPS_PER_RUNG = 5
WALK_STEPS = 4 * STEPS_PER_RUNG
MAX_STEPS = WALK_STEPS + 4
BATCH = 4

CONFIG: dict[str, Any] = {
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage3_param_persistence_threshold": 0},  # or stage 3 shards nothing of a tiny model
}


def network(width: int = WIDTH) -> nn.Module:
    """Odd sizes on purpose: no layer divides evenly among 2 or 4 ranks."""
    return nn.Sequential(
        nn.Linear(width, 31), nn.LayerNorm(31), nn.GELU(), nn.Linear(31, 17), nn.GELU(), nn.Linear(17, 1)
    )


def samples(count: int, seed: int = 7) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def loader(batches: int = 1000, seed: int = 7) -> DataLoader[Any]:
    """Batches per rank and epoch, in order; every rank gets others of the same data set."""
    rank, ranks = _place()
    data = TensorDataset(samples(batches * BATCH * ranks, seed))
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, ranks, rank, shuffle=False))


def _place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def target(x: Tensor) -> Tensor:
    return torch.sin(x[:, :1]) + 0.5 * x[:, 1:2]


class Toy(pl.LightningModule):
    """A regression that remembers the loss, learning rates and stage of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []
        self.lrs: list[list[float]] = []
        self.stages: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        (x,) = batch
        out = self.net(x.to(next(self.parameters()).dtype))
        return ((out.float() - target(x)) ** 2).mean()

    def forward(self, batch: Any) -> Tensor:
        return self.loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.note(loss)
        return loss

    def note(self, loss: Tensor) -> None:
        self.losses.append(loss.item())
        self.lrs.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        self.stages.append(stage_of(self.trainer.strategy))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def stage_of(strategy: Any) -> int:
    return strategy.rung.stage if strategy.rung is not None else -1


@dataclass
class Run:
    """A finished fit."""

    model: Any
    trainer: pl.Trainer
    strategy: Any
    weights: dict[str, Tensor]

    def describe(self) -> dict[str, Any]:
        """Return what JSON can carry of it."""
        return {
            "losses": self.model.losses,
            "lrs": self.model.lrs,
            "stages": self.model.stages,
            "moves": [[move.from_stage, move.to_stage, move.at_step] for move in self.strategy.moves],
            "global_step": self.trainer.global_step,
            "commit": stage_of(self.strategy),
        }


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copy every parameter and buffer, gathered where stage 3 shards it. A collective."""
    from deepspeed import zero

    copies: dict[str, Tensor] = {}
    for name, param in module.named_parameters():
        with zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            copies[name] = param.detach().float().clone()
    copies.update({name: buffer.detach().clone() for name, buffer in module.named_buffers()})
    return copies


def gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of any element."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    gaps = [float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours if ours[name].numel()]
    return max(gaps, default=0.0)


def make_trainer(stages: Sequence[int], folder: Path, **options: Any) -> pl.Trainer:
    """Return a Trainer on CPU that walks the stages, or trains at the only one."""
    settings = options.pop("settings", {})
    settings = {"steps_per_rung": STEPS_PER_RUNG, "warmup_steps": 1, "exhaustive": True, **settings}
    strategy = ZeroAutoStrategy(
        stages=tuple(stages), run_dir=folder / "ladder", config=copy.deepcopy(CONFIG), **settings
    )
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": _place()[1],
        "strategy": strategy,
        "max_steps": MAX_STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**defaults, **options})


def fit(
    make: Callable[[], Any],
    stages: Sequence[int],
    folder: Path,
    *,
    train: Callable[[], Any] = loader,
    val: Callable[[], Any] | None = None,
    seed: int = 3,
    **options: Any,
) -> Run:
    """Train a fresh model from the same seed."""
    pl.seed_everything(seed, verbose=False)
    model = make()
    place = folder / ("walk" if len(stages) > 1 else f"stage{stages[0]}")
    options = {key: value(place) if key == "callbacks" else value for key, value in options.items()}
    trainer = make_trainer(stages, place, **options)
    trainer.fit(model, train(), val() if val is not None else None)
    return Run(model, trainer, trainer.strategy, whole_weights(model))


def twins(
    make: Callable[[], Any],
    folder: Path,
    *,
    fixed: Sequence[int] = (1,),
    stages: Sequence[int] = (0, 1, 2, 3),
    extra: Callable[[Run], dict[str, Any]] = lambda run: {},
    **options: Any,
) -> dict[str, Any]:
    """Train by a walk and at fixed stages; return both and how far the final weights and buffers are apart."""
    references = []
    for stage in fixed:
        run = fit(make, (stage,), folder, **options)
        references.append((run.weights, {**run.describe(), **extra(run)}))
    walk = fit(make, stages, folder, **options)
    return {
        "walk": {**walk.describe(), **extra(walk)},
        "fixed": [data for _, data in references],
        "weight_gaps": [gap(walk.weights, weights) for weights, _ in references],
    }
