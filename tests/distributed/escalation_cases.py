"""Worker side of test_escalations: memory that does not suffice is made up, everything else is real."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import toys
from harness import run_cases
from torch import Tensor, nn
from toys import WIDTH, Run, Toy, fit, gap

from lightning_zeroladder.ladder import Rung, ladder_position, read_journal
from lightning_zeroladder.probe import trial
from lightning_zeroladder.probe.memory import PeakMemory

LIMIT = 1 << 30
USABLE = int(0.9 * LIMIT)
FITS = LIMIT // 2
NEAR = USABLE + (100 << 10)
"""Misses the headroom by less than the buckets of the model hold."""
FAR = USABLE + 3_500_000
"""Misses it by more than that, and by less than an offload of its optimizer can free."""

STEPS_PER_RUNG = 3
EVERYTHING_ON_HOST = Rung(3, (("offload_optimizer", "cpu"), ("offload_param", "cpu")), True)
OPTIMIZER_ON_HOST = (("offload_optimizer", "cpu"),)

Peaks = Callable[[Rung], int]


class Block(nn.Module):
    """Has a weight of its own, batch statistics, and draws random numbers."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = norm(128)
        self.up, self.down = nn.Linear(128, 509), nn.Linear(509, 128)
        self.gain = nn.Parameter(torch.full((128,), 0.5))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.dropout(torch.tanh(self.up(self.norm(x))), 0.1, self.training)
        return x + self.gain * self.down(hidden)


class Deep(Toy):
    """A stack of three blocks, 395 thousand weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 128), nn.Sequential(*(Block() for _ in range(3))), nn.Linear(128, 1))
        self.rungs: list[str] = []

    def note(self, loss: Tensor) -> None:
        super().note(loss)
        self.rungs.append(self.trainer.strategy.rung.label)

    def configure_optimizers(self) -> Any:
        # eps far above fp32 rounding: Adam with 1e-8 would turn roundings of tiny gradients into whole steps
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Bf16(Deep):
    """DeepSpeed keeps buffers in fp32, with which batch norm does not run on CPU in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Sequential(*(Block(nn.LayerNorm) for _ in range(3)))


class OutOfMemory(Deep):
    """Runs out of memory on every rank, in its second micro-batch, on every rung before the one it is told."""

    until: Rung

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rung = self.trainer.strategy.rung
        if ladder_position(rung) < ladder_position(self.until) and rung.label in self.rungs:
            raise torch.OutOfMemoryError("17 GiB more than there is")
        return super().training_step(batch, batch_idx)


def below(target: Rung, missing: int = FAR) -> Peaks:
    """Every rung before the target misses the headroom."""
    return lambda rung: FITS if ladder_position(rung) >= ladder_position(target) else missing


def walk(folder: Path, peaks: Peaks, *, make: Callable[[], Deep] = Deep, steps: int, **options: Any) -> Run:
    model = make()
    settings = {"steps_per_rung": STEPS_PER_RUNG, "memory_limit_bytes": LIMIT, **options.pop("settings", {})}
    real = trial.read_peak
    trial.read_peak = lambda device: PeakMemory(peaks(model.trainer.strategy.rung), None)
    try:
        stages = options.pop("stages", (0, 1, 2, 3))
        return fit(lambda: _again(model), stages, folder, max_steps=steps, settings=settings, **options)
    finally:
        trial.read_peak = real


def _again(model: Deep) -> Deep:
    """Give the model the weights that it would have if it were made now, from the seed that `fit` has set."""
    fresh = type(model)()
    model.load_state_dict(fresh.state_dict())
    return model


def describe(run: Run, folder: Path, steps: int, **options: Any) -> dict[str, Any]:
    """Against the same number of steps at one stage, without a ladder."""
    fixed = fit(options.pop("reference", Deep), (1,), folder, max_steps=steps, **options)
    run.trainer.strategy.barrier()
    events = read_journal(folder / "walk" / "ladder" / "journal.jsonl")
    engine = run.strategy.deepspeed_engine
    return {
        **run.describe(),
        "rungs": run.model.rungs,
        "tried": list(dict.fromkeys(run.model.rungs)),
        "fixed": fixed.model.losses,
        "gap": gap(run.weights, fixed.weights),
        "committed": run.strategy.rung.label,
        "on_host": bool(engine.zero_offload_optimizer() and engine.zero_offload_optimizer().device == "cpu"),
        "weights_on_host": bool(engine.zero_offload_param() and engine.zero_offload_param().device == "cpu"),
        "reduce_bucket": int(engine.zero_reduce_bucket_size()),
        "calls": run.model.net[1][0].calls,
        "fixed_calls": fixed.model.net[1][0].calls,
        "skipped": [
            row["words"]
            for event in events
            if event["event"] == "decision"
            for row in event["decision"]["results"]
            if row["verdict"] == "skipped"
        ],
    }


def reached(folder: Path, *, target: Rung, trials: int, **options: Any) -> Any:
    steps = STEPS_PER_RUNG * trials + 3
    make = options.pop("make", Deep)
    run = walk(folder, below(target), make=make, steps=steps, **options)
    options.pop("stages", None)
    return describe(run, folder, steps, reference=make, **options)


def near_miss(folder: Path, *, stage: int) -> Any:
    def peaks(rung: Rung) -> int:
        halved = rung.setting("reduce_bucket_size")
        return FITS if halved is not None and int(halved) < 150_000 else NEAR

    steps = STEPS_PER_RUNG * 4 + 2
    return describe(walk(folder, peaks, steps=steps, stages=(0, stage)), folder, steps)


def out_of_memory(folder: Path, *, target: Rung, **options: Any) -> Any:
    class Model(OutOfMemory):
        until = target

    steps = 30
    run = walk(folder, lambda rung: FITS, make=Model, steps=steps, **options)
    return describe(run, folder, steps, **options)


def too_large_for_any_stage(folder: Path) -> Any:
    """The first engine of the run is an offloaded one: five bytes per weight hold no optimizer state."""
    count = sum(param.numel() for param in Deep().parameters())
    steps = STEPS_PER_RUNG * 3 + 2
    settings = {"memory_limit_bytes": 5 * count}
    run = walk(folder, lambda rung: count, steps=steps, settings=settings)
    return describe(run, folder, steps)


def released_at_once(folder: Path) -> Any:
    """Stage 3 lets go of every weight right after its use, also while a block is recomputed in backward."""
    before = dict(toys.CONFIG["zero_optimization"])
    toys.CONFIG["zero_optimization"] |= {
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    try:
        return reached(folder, target=Rung(3, (), True), trials=3, stages=(2, 3))
    finally:
        toys.CONFIG["zero_optimization"] = before


def unavailable(folder: Path) -> Any:
    """What cannot be done is said: no CUDA, no NVMe operator or one, and a class that is not there."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    steps = STEPS_PER_RUNG * 5 + 2
    settings = {"allow_quantized": True}
    run = walk(folder, below(Rung(0, (), True)), steps=steps, settings=settings)
    data = describe(run, folder, steps)
    try:
        walk(folder / "named", below(Rung(1)), steps=1, settings={"checkpoint_blocks": ("Blok",)})
    except MisconfigurationException as error:
        data["refused"] = str(error)
    return data


CASES: dict[str, Callable[[Path], Any]] = {
    "everything": functools.partial(reached, target=EVERYTHING_ON_HOST, trials=16),
    "everything-k2": functools.partial(reached, target=EVERYTHING_ON_HOST, trials=16, accumulate_grad_batches=2),
    "everything-bf16": functools.partial(
        reached, target=EVERYTHING_ON_HOST, trials=16, make=Bf16, precision="bf16-mixed"
    ),
    "checkpointing": functools.partial(reached, target=Rung(0, (), True), trials=8),
    "released-at-once": released_at_once,
    "optimizer": functools.partial(reached, target=Rung(1, OPTIMIZER_ON_HOST), trials=11),
    "near-miss-1": functools.partial(near_miss, stage=1),
    "near-miss-3": functools.partial(near_miss, stage=3),
    "oom-checkpointing": functools.partial(out_of_memory, target=Rung(1, (), True)),
    "oom-offload": functools.partial(out_of_memory, target=Rung(2, OPTIMIZER_ON_HOST)),
    "too-large": too_large_for_any_stage,
    "unavailable": unavailable,
}


def run(payload: dict[str, Any]) -> dict[str, Any]:
    only = payload.get("only") or list(CASES)
    return run_cases({name: CASES[name] for name in only}, payload["folder"])
