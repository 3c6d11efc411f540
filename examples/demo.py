"""Train a byte-level GPT on the standard library's text and let the ladder choose the ZeRO stage.

Two CPU processes, or every GPU there is. With the defaults it takes about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch

from lightning_zeroladder import ZeroAutoStrategy

sys.path.insert(0, str(Path(__file__).parent))
from byte_gpt import ByteGPT, StdlibText


class LossHistory(pl.Callback):
    """Keeps the training loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="CPU processes; ignored where there are GPUs")
    parser.add_argument("--max-steps", type=int, default=280)
    parser.add_argument("--steps-per-rung", type=int, default=40)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--run-dir", default=None, help="where the journal and the report go")
    return parser.parse_args()


def main() -> None:
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*torch.distributed.* is deprecated.*")  # said of calls inside DeepSpeed
    args = arguments()
    pl.seed_everything(1)
    gpus = torch.cuda.device_count()
    history = LossHistory()
    trainer = pl.Trainer(
        accelerator="gpu" if gpus else "cpu",
        devices=gpus or args.devices,
        strategy=ZeroAutoStrategy(
            steps_per_rung=args.steps_per_rung, warmup_steps=args.warmup_steps, run_dir=args.run_dir
        ),
        max_steps=args.max_steps,
        callbacks=[history],
        logger=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        use_distributed_sampler=True,
    )
    trainer.fit(ByteGPT(width=args.width, layers=args.layers), StdlibText(batch_size=args.batch_size))
    if trainer.is_global_zero:
        tenth = max(1, len(history.losses) // 10)
        first, last = (sum(part) / len(part) for part in (history.losses[:tenth], history.losses[-tenth:]))
        print(f"loss: {first:.3f} over the first {tenth} batches, {last:.3f} over the last {tenth}")


if __name__ == "__main__":
    main()
