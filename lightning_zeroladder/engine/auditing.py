"""Train a small model with DeepSpeed for some steps and count the collectives that it calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from lightning_zeroladder.costmodel.audit import Audit, Counted, Place, compare, merge_backward
from lightning_zeroladder.costmodel.traffic import Collective, Moment, StageSettings, TrafficModel, flows
from lightning_zeroladder.engine import groups
from lightning_zeroladder.engine.observe import BackendObserver
from lightning_zeroladder.probe.wire import WireCounter
from lightning_zeroladder.versions import collect_versions

__all__ = ["count_traffic", "ready_deepspeed"]

_WIDTH = 256
_LAYERS = 6
_SAMPLES = 2
_WARMUP_STEPS = 2
"""The first forward of stage 3 finds out in which order weights are used; the first step makes buffers."""
_STEPS = 2
_BYTES = 2  # bf16

_NAMES = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_reduce_coalesced": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "all_gather_base": Collective.ALL_GATHER,
    "all_gather_coalesced": Collective.ALL_GATHER,
    "all_gather_function": Collective.ALL_GATHER,
    "reduce": Collective.REDUCE,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "reduce_scatter_function": Collective.REDUCE_SCATTER,
}

_Counts = dict[str, Counted]


class _Stack(nn.Module):
    """Large weights and small biases, so that stage 3's threshold tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        wide = 2 * _WIDTH
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(_WIDTH, wide), nn.GELU(), nn.Linear(wide, _WIDTH)) for _ in range(_LAYERS))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).float().pow(2).mean()
        return loss


def ready_deepspeed(device: torch.device) -> None:
    """Let DeepSpeed communicate over the process group that there is."""
    if device.type != "cpu":
        deepspeed.init_distributed(verbose=False)
        return
    groups.use_cpu_accelerator()
    with groups.without_compiled_shm_op():
        deepspeed.init_distributed("gloo", verbose=False)


def count_traffic(settings: StageSettings, *, accumulate: int, device: torch.device) -> Audit:
    """Train a model of 1.6 M parameters in bf16 and set what it sends beside what is predicted.

    Every rank calls it; DeepSpeed has to be ready (`ready_deepspeed`).

    Args:
        settings: Stage and what changes its traffic.
        accumulate: Micro-batches per optimizer step k.
        device: Of this rank.
    """
    torch.manual_seed(0)
    module = _Stack().bfloat16().to(device)
    engine, *_ = deepspeed.initialize(
        config=_config(settings, accumulate),
        model=module,
        model_parameters=list(module.parameters()),
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-4),
        dist_init_required=False,
    )
    try:
        counts = _count(engine, accumulate, device)
        sizes = [getattr(param, "ds_numel", param.numel()) for param in module.parameters()]
    finally:
        engine.destroy()
    threshold = settings.persistence_threshold if settings.stage == 3 else 0
    model = TrafficModel(trainable=sum(sizes), persistent=sum(size for size in sizes if size <= threshold))
    forward, backward, boundary = counts
    at_boundary = frozenset(str(flow.collective) for flow in flows(settings, model) if flow.moment is Moment.BOUNDARY)
    counted = merge_backward(backward, at_boundary)
    for name, count in forward.items():
        counted[name, Place.FORWARD] = count
    for name, count in boundary.items():
        before = counted.get((name, Place.BOUNDARY), Counted(0, 0, 0))
        counted[name, Place.BOUNDARY] = _sum(before, count)
    return compare(
        settings,
        model,
        counted,
        world_size=dist.get_world_size(),
        accumulate=accumulate,
        element_bytes=_BYTES,
        release=collect_versions()["deepspeed"],
    )


def _config(settings: StageSettings, accumulate: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": settings.stage}
    if settings.stage in (1, 2):
        zero["use_multi_rank_bucket_allreduce"] = settings.multi_rank_buckets
    if settings.stage == 3:
        zero["stage3_param_persistence_threshold"] = settings.persistence_threshold
        if settings.refetch:
            zero |= {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
    return {
        "train_micro_batch_size_per_gpu": _SAMPLES,
        "gradient_accumulation_steps": accumulate,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


def _count(engine: Any, accumulate: int, device: torch.device) -> tuple[_Counts, list[_Counts], _Counts]:
    """Return what a step calls in forward, in each backward, and in the engine's step."""
    ranks = dist.get_world_size()
    forward, boundary = WireCounter(ranks), WireCounter(ranks)
    backward = [WireCounter(ranks) for _ in range(accumulate)]
    now = forward

    def note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        now.note(name, args, kwargs)

    def step() -> None:
        nonlocal now
        for counter in backward:
            now = forward
            loss = engine(torch.randn(_SAMPLES, _WIDTH, device=device).bfloat16())
            now = counter
            engine.backward(loss)
            now = boundary
            engine.step()

    _repeat(step, _WARMUP_STEPS)
    observer = BackendObserver(contextlib.nullcontext, note)
    observer.start()
    try:
        _repeat(step, _STEPS)
    finally:
        observer.stop()
    return _per_step(forward), [_per_step(counter) for counter in backward], _per_step(boundary)


def _repeat(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def _per_step(counter: WireCounter) -> _Counts:
    found: _Counts = {}
    for called, calls in counter.calls.items():
        name = str(_NAMES.get(called, called))
        count = Counted(counter.elements[called] / _STEPS, counter.nbytes[called] / _STEPS, calls / _STEPS)
        found[name] = _sum(found.get(name, Counted(0, 0, 0)), count)
    return found


def _sum(one: Counted, other: Counted) -> Counted:
    return Counted(one.elements + other.elements, one.nbytes + other.nbytes, one.calls + other.calls)
