"""Worker side of test_parity: the same run as a walk, at fixed stages, and as a plain DeepSpeed loop."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import run_cases
from toys import BATCH, CONFIG, MAX_STEPS, Run, Toy, fit, gap, loader, samples, whole_weights

STAGES = (0, 1, 2, 3)


def plain_loop(stage: int, accumulate: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train without Lightning and without the package: what the others have to reproduce."""
    import deepspeed

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pl.seed_everything(3, verbose=False)
    model = Toy()
    config = copy.deepcopy(CONFIG)
    config["zero_optimization"]["stage"] = stage
    config |= {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.0,  # what Lightning sets; DeepSpeed clips at 1 by itself
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(
        config=config,
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=optimizer,
        dist_init_required=False,
    )
    losses = []
    micro_batches = MAX_STEPS * accumulate
    mine = samples(1000 * BATCH * ranks)[rank::ranks]
    for index in range(micro_batches):
        loss = engine((mine[index * BATCH : (index + 1) * BATCH],))
        engine.backward(loss / accumulate)  # Lightning divides as well; DeepSpeed then divides once more
        engine.step()
        losses.append(loss.item())
    return losses, whole_weights(model)


def compare(folder: Path, *, accumulate: int, precision: str = "32-true", plain: tuple[int, ...] = ()) -> Any:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "precision": precision}
    runs: dict[str, Run] = {str(stage): fit(Toy, (stage,), folder, train=loader, **options) for stage in STAGES}
    walk = fit(Toy, STAGES, folder, **options)
    loops = {str(stage): plain_loop(stage, accumulate) for stage in plain}
    names = sorted(runs)
    return {
        "walk": walk.describe(),
        "fixed": {stage: run.model.losses for stage, run in runs.items()},
        "plain": {stage: losses for stage, (losses, _) in loops.items()},
        "weight_gaps": {stage: gap(walk.weights, run.weights) for stage, run in runs.items()},
        "plain_weight_gaps": {stage: gap(walk.weights, weights) for stage, (_, weights) in loops.items()},
        "weight_gaps_among_fixed": [gap(runs[a].weights, runs[b].weights) for a in names for b in names if a < b],
    }


def walk_of_1_and_2(folder: Path, *, accumulate: int) -> Any:
    fixed = fit(Toy, (1,), folder, accumulate_grad_batches=accumulate)
    other = fit(Toy, (2,), folder, accumulate_grad_batches=accumulate)
    walk = fit(Toy, (1, 2), folder, accumulate_grad_batches=accumulate)
    return {
        "walk": walk.describe(),
        "fixed": [fixed.model.losses, other.model.losses],
        "plain": [plain_loop(stage, accumulate)[0] for stage in (1, 2)],
        "weight_gaps": [gap(walk.weights, fixed.weights), gap(walk.weights, other.weights)],
    }


CASES = {
    "fp32-k1": functools.partial(compare, accumulate=1, plain=STAGES),
    "fp32-k4": functools.partial(compare, accumulate=4, plain=(0, 3)),
    "bf16-mixed-k1": functools.partial(compare, accumulate=1, precision="bf16-mixed"),
    "bf16-mixed-k4": functools.partial(compare, accumulate=4, precision="bf16-mixed"),
    "stages12-k1": functools.partial(walk_of_1_and_2, accumulate=1),
    "stages12-k4": functools.partial(walk_of_1_and_2, accumulate=4),
}


FOUR_RANKS = {
    "fp32-k1": functools.partial(compare, accumulate=1, plain=(3,)),
    "fp32-k4": functools.partial(compare, accumulate=4),
}


def run(payload: dict[str, Any]) -> dict[str, Any]:
    return run_cases(FOUR_RANKS if payload["ranks"] == 4 else CASES, payload["folder"])
