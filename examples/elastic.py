"""Train on however many processes there are at the moment, and go on when some of them are lost or come back.

Start it with torchrun, once on each host (or, to try it, several times on one):

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint localhost:29400 \
        --rdzv-id job examples/elastic.py
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zeroladder import ZeroAutoStrategy

sys.path.insert(0, str(Path(__file__).parent))
from byte_gpt import ByteGPT, StdlibText


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("elastic_run"), help="seen by all hosts")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=3, help="micro-batches per optimizer step on all processes")
    parser.add_argument("--every", type=int, default=50, help="optimizer steps from one checkpoint to the next")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--limit-bytes", type=int, default=4_000_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


def main(callbacks: Sequence[pl.Callback] = ()) -> None:
    args = arguments()
    pl.seed_everything(1)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    keep = ModelCheckpoint(dirpath=args.folder, every_n_train_steps=args.every, save_last=True)
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=local,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local,
        strategy=ZeroAutoStrategy(stages=args.stages, run_dir=args.folder / "zero_ladder"),
        accumulate_grad_batches=args.accumulate,
        max_epochs=args.epochs,
        callbacks=[keep, *callbacks],
        logger=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    model = ByteGPT(width=args.width, layers=args.layers, seq_len=args.seq_len)
    data = StdlibText(batch_size=args.batch_size, seq_len=args.seq_len, limit_bytes=args.limit_bytes)
    trainer.fit(model, data, ckpt_path="last")  # from the beginning where there is none yet
    if trainer.is_global_zero:
        print(f"done after {trainer.global_step} optimizer steps, the last on {trainer.world_size} processes")


if __name__ == "__main__":
    main()
