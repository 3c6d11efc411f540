"""Worker side of test_traffic: count the collectives of real steps, and compute what they should be."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from harness import run_cases
from optimizer_cases import init_distributed
from torch import nn

from lightning_zeroladder.costmodel.traffic import StageSettings, TrafficModel, sent_elements
from lightning_zeroladder.engine.observe import BackendObserver
from lightning_zeroladder.probe.wire import WireCounter

WIDTH = 256
LAYERS = 6
STEPS = 2
ACCUMULATE = (1, 4, 8)
VARIANTS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "1-owners": {"stage": 1, "use_multi_rank_bucket_allreduce": False},
    "2": {"stage": 2},
    "2-owners": {"stage": 2, "use_multi_rank_bucket_allreduce": False},
    "3": {"stage": 3},
    "3-all": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "3-refetch": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    },
}


class Stack(nn.Module):
    """Large weights and small biases, so that stage 3's threshold tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        wide = 2 * WIDTH
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for _ in range(LAYERS))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().pow(2).mean()


def count(folder: Path, *, variant: str, accumulate: int) -> Any:
    torch.manual_seed(0)
    module = Stack().bfloat16()
    engine, *_ = deepspeed.initialize(
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulate,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
            "zero_optimization": VARIANTS[variant],
        },
        model=module,
        model_parameters=list(module.parameters()),
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-4),
        dist_init_required=False,
    )

    def step() -> None:
        for _ in range(accumulate):
            engine.backward(engine(torch.randn(2, WIDTH).bfloat16()))
            engine.step()

    step()  # the first forward of stage 3 finds out in which order weights are used
    step()
    counter = WireCounter(dist.get_world_size())
    observer = BackendObserver(contextlib.nullcontext, counter.note)
    observer.start()
    for _ in range(STEPS):
        step()
    observer.stop()
    counted = counter.sent / STEPS
    settings = StageSettings(
        VARIANTS[variant]["stage"],
        multi_rank_buckets=VARIANTS[variant].get("use_multi_rank_bucket_allreduce", True),
        persistence_threshold=VARIANTS[variant].get("stage3_param_persistence_threshold", 100_000),
        refetch=variant == "3-refetch",
    )
    sizes = [getattr(param, "ds_numel", param.numel()) for param in module.parameters()]
    small = sum(size for size in sizes if size <= settings.persistence_threshold) if settings.stage == 3 else 0
    model = TrafficModel(trainable=sum(sizes), persistent=small)
    predicted = sent_elements(settings, model, world_size=dist.get_world_size(), accumulate=accumulate)
    engine.destroy()
    return {
        "counted": counted / model.trainable,
        "predicted": predicted / model.trainable,
        "by": {name: value / STEPS / model.trainable for name, value in counter.elements.items()},
        "calls": {name: value / STEPS for name, value in counter.calls.items()},
    }


def run(payload: dict[str, Any]) -> dict[str, Any]:
    init_distributed()
    cases: dict[str, Callable[[Path], Any]] = {
        f"{variant}-k{accumulate}": functools.partial(count, variant=variant, accumulate=accumulate)
        for variant in VARIANTS
        for accumulate in ACCUMULATE
    }
    only = payload.get("only") or list(cases)
    return run_cases({name: cases[name] for name in only}, payload["folder"])
