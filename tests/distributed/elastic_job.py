"""A process of test_torchrun_elastic: the example with a note of each batch, and pauses for the test to act in."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import elastic


class Noting(Callback):
    """Writes a line for each batch: which optimizer step, on how many processes, which samples, what loss.

    At the optimizer steps in the environment it waits until the test has done its part.
    """

    def __init__(self) -> None:
        folder = Path(os.environ["ELASTIC_NOTES"])
        world_size, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
        self.generation = f"{os.environ['MASTER_PORT']}-{world_size}"
        self.pauses = {int(step): folder / f"go-{step}" for step in os.environ["ELASTIC_PAUSES"].split(",")}
        self.notes = (folder / f"notes-{self.generation}-{rank}.jsonl").open("a")
        (folder / f"pid-{self.generation}-{rank}").write_text(f"{os.getpid()} {os.getppid()}")
        self.step = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.step = trainer.global_step
        go = self.pauses.get(self.step)
        while go is not None and not go.exists() and not trainer.received_sigterm:
            (go.parent / f"waiting-{self.step}-{trainer.global_rank}").touch()
            time.sleep(0.05)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        note = {
            "generation": self.generation,
            "at": time.time(),
            "ranks": trainer.world_size,
            "step": self.step,
            "accumulate": trainer.accumulate_grad_batches,
            "samples": [bytes(row.to(torch.uint8).tolist()).hex() for row in batch["input_ids"]],
            "loss": float(outputs["loss"]) * trainer.accumulate_grad_batches,  # Lightning has divided it
        }
        self.notes.write(json.dumps(note) + "\n")
        self.notes.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    elastic.main([Noting()])
