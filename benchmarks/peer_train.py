"""A plain DeepSpeed training script, without Lightning: what the relaunched processes and DeepSpeed's autotuner run.

``--stage`` builds the config here; ``--deepspeed_config`` takes one from a file, which is how the autotuner hands it
over. Prints the median step on rank 0 with ``--steps`` of 2 or more. Needs the environment of a launcher (RANK,
WORLD_SIZE, ...); ``walk_cost.py`` starts it.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import torch


def main() -> None:
    """Train for some steps on noise."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--rows", type=int, default=16, help="rows of one sample")
    parser.add_argument("--samples", type=int, default=4, help="samples per micro-batch where no config says it")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--stage", type=int, default=None)
    parser.add_argument("--result", type=Path, default=None, help="file for the median step in seconds")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = (
        torch.nn.Sequential(torch.nn.Linear(arguments.width, arguments.width), torch.nn.GELU())
        for _ in range(arguments.depth)
    )
    model = torch.nn.Sequential(*layers)
    config: dict[str, Any] | None = None
    if arguments.stage is not None:
        config = {
            "train_micro_batch_size_per_gpu": arguments.samples,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": arguments.stage},
        }
    engine, *_ = deepspeed.initialize(
        args=arguments,
        config=config,
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
    )
    batch = torch.randn(engine.train_micro_batch_size_per_gpu() * arguments.rows, arguments.width)
    seconds = []
    for _ in range(arguments.steps):
        started_s = time.perf_counter()
        loss = torch.nn.functional.mse_loss(engine(batch), batch)
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - started_s)
    if arguments.result is not None and int(os.environ.get("RANK", "0")) == 0:
        warm = seconds[min(len(seconds) // 4, 20) :]
        arguments.result.write_text(repr(median(warm)), encoding="utf-8")
    # gloo's threads abort a process that ends while its peer is still talking to it.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
