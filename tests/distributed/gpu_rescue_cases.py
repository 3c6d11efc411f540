"""Real out-of-memory on real GPUs, on one rank, at each stage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import run_cases
from torch import Tensor
from toys import Toy, loader, stage_of

from lightning_zeroladder import ZeroAutoStrategy
from lightning_zeroladder.report.data import read_report

STEPS_PER_RUNG = 4
STEPS = 4 * STEPS_PER_RUNG + 4
LIMIT_BYTES = 4 << 30


class TooLarge(Toy):
    """At one stage the last rank's activations outgrow the memory that the process may use."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.at_stage, self.failed = stage, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if last and stage_of(self.trainer.strategy) == self.at_stage and not self.failed:
            self.failed += 1
            wide = loss.expand(LIMIT_BYTES // 8).clone()
            for _ in range(8):
                wide = wide * torch.rand_like(wide)  # each keeps its operands for backward
            loss = loss + 0.0 * wide.sum()
        return loss


def run(payload: dict[str, Any]) -> dict[str, Any]:
    cases = {f"stage_{stage}": lambda folder, stage=stage: _out_of_memory(folder, stage) for stage in (0, 1, 2, 3)}
    return run_cases(cases, payload["folder"])


def _fit(stage: int, stages: tuple[int, ...], folder: Path) -> tuple[TooLarge, Path]:
    pl.seed_everything(3, verbose=False)
    model = TooLarge(stage)
    strategy = ZeroAutoStrategy(
        stages=stages,
        steps_per_rung=STEPS_PER_RUNG,
        warmup_steps=1,
        exhaustive=True,
        run_dir=folder / "ladder",
        tokens_per_batch=lambda batch: 1000 ** (4 - stage_of(strategy)),
    )
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_steps=STEPS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT_BYTES / total))
    trainer.fit(model, loader())
    return model, folder / "ladder"


def _out_of_memory(folder: Path, stage: int) -> dict[str, Any]:
    ours, ladder = _fit(stage, (0, 1, 2, 3), folder / "with")
    theirs, _ = _fit(-1, tuple(other for other in (0, 1, 2, 3) if other != stage), folder / "without")
    torch.cuda.empty_cache()
    failures = []
    if int(os.environ["RANK"]) == 0:
        trials = [row.trial for row in read_report(ladder).decision.results]
        failures = [[trial.rung.stage, str(trial.failure.kind)] for trial in trials if trial.failure is not None]
    return {
        "gap": max(abs(a - b) for a, b in zip(ours.losses[-STEPS:], theirs.losses, strict=True)),
        "failed": ours.failed,
        "failures": failures,
        "allocated_mib": torch.cuda.memory_allocated() >> 20,
    }
