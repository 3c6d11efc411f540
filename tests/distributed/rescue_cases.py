"""Faults injected into rungs: every place where a rank can fail, on one rank or on all."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from harness import run_cases
from torch import Tensor, nn
from torchmetrics import MeanMetric
from toys import BATCH, CONFIG, WIDTH, loader, stage_of, whole_weights

from lightning_zeroladder import ZeroAutoStrategy, rescue
from lightning_zeroladder.engine import lifecycle

STAGES = (0, 1, 2, 3)
STEPS_PER_RUNG = 3
STEPS = 4 * STEPS_PER_RUNG + 2
PLACES = ("construction", "taking", "pouring", "forward", "backward", "optimizer", "accumulation")


def possible(where: str, stage: int, k: int) -> bool:
    """Whether a fault can happen: nothing moves to the first stage, and one micro-batch has no middle."""
    return not (where in ("taking", "pouring") and stage == 0) and not (where == "accumulation" and k == 1)


def matrix() -> dict[str, dict[str, Any]]:
    """Name every combination that makes sense."""
    named: dict[str, dict[str, Any]] = {}
    for who, where, stage, k in itertools.product(("one", "all"), PLACES, STAGES, (1, 4)):
        if possible(where, stage, k):
            named[f"{who}-{where}-stage_{stage}-k{k}"] = {"who": who, "where": where, "stage": stage, "k": k}
    return named


def run(payload: dict[str, Any]) -> dict[str, Any]:
    cases: dict[str, Callable[[Path], Any]] = {
        name: functools.partial(_fault, **settings) for name, settings in matrix().items()
    }
    cases.update(OTHERS)
    # On four ranks the first fit of a process differs from later ones in the last bits, with or without a fault.
    fit(Fault("nowhere", -1, 1, ()), STAGES, Path(payload["folder"]) / "first")
    return run_cases({name: cases[name] for name in payload["only"]}, payload["folder"])


class Broken(torch.OutOfMemoryError):
    """What is injected."""


@dataclass
class Fault:
    """Raises once, where and when it is asked to.

    Attributes:
        where: One of ``PLACES``.
        stage: While this stage is tried.
        k: Micro-batches per step.
        ranks: On which ranks.
    """

    where: str
    stage: int
    k: int
    ranks: tuple[int, ...]
    error: type[Exception] = Broken
    raised: int = 0
    seen: int = 0
    raised_at_s: float = 0.0

    def due(self, where: str, stage: int) -> bool:
        return where == self.where and stage == self.stage and not self.raised and _rank() in self.ranks

    def strike(self, stage: int) -> None:
        self.raised += 1
        self.raised_at_s = time.monotonic()
        raise self.error("injected")


def _rank() -> int:
    return int(os.environ["RANK"])


class Strategy(ZeroAutoStrategy):
    """Fails while it builds an engine or moves."""

    fault: Fault

    def move_to(self, rung: Any) -> None:
        self.towards = rung.stage
        super().move_to(rung)

    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        stage = int(self.config["zero_optimization"]["stage"])
        if self.fault.due("construction", stage):
            self.fault.strike(stage)
        return super()._setup_model_and_optimizer(*args, **kwargs)


class Fragile(torch.optim.AdamW):
    """Breaks off in the middle of an update."""

    fault: Fault
    strategy: Any

    def step(self, closure: Any = None) -> Any:
        stage = stage_of(self.strategy)
        if self.fault.due("optimizer", stage):
            with torch.no_grad():
                for group in self.param_groups:
                    for param in group["params"]:
                        param.add_(1.0)
                        break
            self.fault.strike(stage)
        return super().step(closure)


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, fault: Fault, stage: int) -> Tensor:
        ctx.fault, ctx.stage = fault, stage
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.fault.strike(ctx.stage)


class Model(pl.LightningModule):
    """Has all that a micro-batch leaves traces in: dropout, running statistics, a metric, logged values."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 31), nn.BatchNorm1d(31), nn.GELU(), nn.Dropout(0.3), nn.Linear(31, 17), nn.Linear(17, 1)
        )
        self.frozen = nn.Linear(WIDTH, 3)
        self.frozen.requires_grad_(False)
        self.mean = MeanMetric(sync_on_compute=False)
        self.losses: dict[int, float] = {}
        self.stages: dict[int, int] = {}
        self.micro_batches: Counter[int] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        stage, fault = stage_of(self.trainer.strategy), self.fault
        self.micro_batches[stage] += 1
        in_the_middle = self.micro_batches[stage] == min(3, fault.k)
        if fault.due("forward", stage) or (in_the_middle and fault.due("accumulation", stage)):
            fault.strike(stage)
        out = self.net(x) + self.frozen(x).mean(1, keepdim=True)
        loss = ((out - torch.sin(x[:, :1])) ** 2).mean()
        self.losses[batch_idx], self.stages[batch_idx] = loss.item(), stage
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=BATCH)
        return _FailInBackward.apply(loss, fault, stage) if fault.due("backward", stage) else loss

    def configure_optimizers(self) -> Any:
        optimizer = Fragile([param for param in self.parameters() if param.requires_grad], lr=1e-2)
        optimizer.fault, optimizer.strategy = self.fault, self.trainer.strategy
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Seen(pl.Callback):
    """Counts what callbacks see, and when training goes on after a failure."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.started: list[int] = []
        self.ended: list[int] = []
        self.learning_rates: list[float] = []
        self.back_s: float | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.started.append(batch_idx)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended.append(batch_idx)
        self.learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if self.fault.raised and self.back_s is None:
            self.back_s = time.monotonic() - self.fault.raised_at_s


def fit(
    fault: Fault,
    stages: tuple[int, ...],
    folder: Path,
    steps: int = STEPS,
    model: Callable[[Fault], Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Walk the stages, commit to the lowest, and return what the run left behind."""
    pl.seed_everything(3, verbose=False)
    module = (model or Model)(fault)
    settings = {"steps_per_rung": STEPS_PER_RUNG, "warmup_steps": 1, "exhaustive": True, **settings}
    strategy = Strategy(
        stages=stages,
        config={**CONFIG, "zero_optimization": dict(CONFIG["zero_optimization"])},
        run_dir=folder / "ladder",
        # Makes the lowest stage the fastest on any machine.
        tokens_per_batch=lambda batch: 1000 ** (4 - stage_of(strategy)),
        **settings,
    )
    strategy.fault = fault
    seen = Seen(fault)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_steps=steps,
        accumulate_grad_batches=fault.k,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[seen],
    )
    with FailingMoves(fault, strategy):
        trainer.fit(module, loader())
    path = folder / "ladder" / "journal.jsonl"
    lines = path.read_text().splitlines() if _rank() == 0 else []
    drawn = torch.rand(4)
    weights = whole_weights(module)
    engine_steps = int(strategy.deepspeed_engine.global_steps)
    # DeepSpeed's engines of stages 1 to 3 are never collected unless they are taken down.
    strategy.release_engine()
    strategy.slot.take_down()
    return {
        "weights": {name: value.tolist() for name, value in weights.items()},
        "losses": [module.losses[index] for index in sorted(module.losses)],
        "stages": [module.stages[index] for index in sorted(module.stages)],
        "started": seen.started,
        "ended": seen.ended,
        "lrs": seen.learning_rates,
        "global_step": trainer.global_step,
        "engine_steps": engine_steps,
        "mean": float(module.mean.compute()),
        "random": drawn.tolist(),
        "logged": {name: float(value) for name, value in sorted(trainer.logged_metrics.items())},
        "failures": [json.loads(line)["failure"] for line in lines if json.loads(line)["event"] == "failed"],
        "back_s": seen.back_s,
        "raised": fault.raised,
        "commit": stage_of(strategy),
    }


class FailingMoves:
    """Fails where the state is taken or poured during a move to the faulty stage."""

    def __init__(self, fault: Fault, strategy: Any) -> None:
        self.fault, self.strategy = fault, strategy

    def __enter__(self) -> None:
        self.take, self.pour = lifecycle.take, lifecycle.pour

        def take(engine: Any) -> Any:
            stage = getattr(self.strategy, "towards", -1)
            if self.fault.due("taking", stage):
                self.fault.strike(stage)
            return self.take(engine)

        def pour(held: Any, engine: Any, **options: Any) -> None:
            stage = engine.zero_optimization_stage()
            if self.fault.due("pouring", stage):
                self.fault.strike(stage)
            self.pour(held, engine, **options)

        lifecycle.take, lifecycle.pour = take, pour

    def __exit__(self, *_: object) -> None:
        lifecycle.take, lifecycle.pour = self.take, self.pour


@functools.cache
def _never_offered(stage: int, k: int, folder: Path) -> dict[str, Any]:
    left = tuple(other for other in STAGES if other != stage)
    return fit(Fault("nowhere", -1, k, ()), left, folder / f"without-{stage}-{k}")


SAME = ("weights", "losses", "stages", "started", "ended", "lrs", "global_step", "engine_steps", "mean", "random")


def _fault(folder: Path, *, who: str, where: str, stage: int, k: int) -> Any:
    ranks = int(os.environ["WORLD_SIZE"])
    fault = Fault(where, stage, k, tuple(range(ranks)) if who == "all" else (ranks - 1,))
    ours = fit(fault, STAGES, folder)
    theirs = _never_offered(stage, k, folder.parent)
    different = [name for name in SAME if ours[name] != theirs[name]]
    return {
        "different": {name: [_short(ours[name]), _short(theirs[name])] for name in different},
        "failures": ours["failures"],
        "raised": ours["raised"],
        "back_s": ours["back_s"],
        "batches": len(ours["ended"]),
        "commit": ours["commit"],
    }


def _short(value: Any) -> str:
    return str(value)[:300]


OTHERS: dict[str, Callable[[Path], Any]] = {}


# What is not the rung's fault, and what comes after the ladder -----------------------------------------------------


def other(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    OTHERS[function.__name__] = function
    return function


class Odd(RuntimeError):
    """An error that is not about memory."""


def _raised(action: Callable[[], Any]) -> dict[str, Any]:
    """Return what an action raised, how soon after the fault, and whether the traceback reaches the test's own code."""
    import traceback

    try:
        action()
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return {"type": type(error).__name__, "message": str(error), "traceback": text}
    return {"type": None}


@other
def an_error_that_only_stage_3_gives(folder: Path) -> Any:
    """Counts as a failed rung; the micro-batch is run again on the lowest rung that worked."""
    ours = fit(Fault("forward", 3, 2, (1,), Odd), STAGES, folder / "with")
    theirs = _never_offered(3, 2, folder.parent)
    return {"different": [name for name in SAME if ours[name] != theirs[name]], **_about(ours)}


def _about(run: dict[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in ("failures", "raised", "commit", "stages", "ended")}


@dataclass
class Persistent(Fault):
    """The user's own mistake: it is there at every stage."""

    def due(self, where: str, stage: int) -> bool:
        return where == self.where and stage >= self.stage and _rank() in self.ranks


@other
def an_error_in_the_users_code_from_the_start(folder: Path) -> Any:
    fault = Persistent("forward", 0, 1, (1,), Odd)
    return {**_raised(lambda: fit(fault, STAGES, folder)), "raised": fault.raised, **_since(fault)}


@other
def an_error_in_the_users_code_on_all_ranks(folder: Path) -> Any:
    fault = Persistent("backward", 0, 1, (0, 1), Odd)
    return {**_raised(lambda: fit(fault, STAGES, folder)), "raised": fault.raised, **_since(fault)}


@other
def an_error_in_the_users_code_later(folder: Path) -> Any:
    """Rungs have worked before: the lowest of them gives the same error."""
    fault = Persistent("forward", 2, 1, (1,), Odd)
    fault.due = lambda where, stage: (  # type: ignore[method-assign]
        where == "forward" and _rank() == 1 and (stage == 2 or fault.raised > 0)
    )
    return {**_raised(lambda: fit(fault, STAGES, folder)), "raised": fault.raised, **_since(fault)}


def _since(fault: Fault) -> dict[str, float]:
    return {"since_s": time.monotonic() - fault.raised_at_s if fault.raised else 0.0}


@dataclass
class AfterCommit(Fault):
    """Strikes at a stage once it has been committed to."""

    from_batch: int = 0
    batch: int = 0

    def due(self, where: str, stage: int) -> bool:
        return self.batch >= self.from_batch and super().due(where, stage)


class CommittedModel(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fault.batch = batch_idx
        return super().training_step(batch, batch_idx)


@other
def out_of_memory_after_the_commit(folder: Path) -> Any:
    """The run goes on one stage higher, with nothing lost."""
    steps = 4 * STEPS_PER_RUNG + 6
    fault = AfterCommit("backward", 0, 2, (1,), from_batch=2 * (4 * STEPS_PER_RUNG + 3))
    ours = fit(fault, STAGES, folder / "with", steps, model=CommittedModel)
    theirs = fit(Fault("nowhere", -1, 2, ()), STAGES, folder / "without", steps)
    gaps = [abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    same = [name for name in ("started", "ended", "lrs", "global_step", "random") if ours[name] == theirs[name]]
    return {"gap": max(gaps), "same": same, **_about(ours)}


@other
def out_of_memory_after_the_commit_may_end_the_run(folder: Path) -> Any:
    fault = AfterCommit("backward", 0, 1, (1,), from_batch=4 * STEPS_PER_RUNG + 3)
    steps = 4 * STEPS_PER_RUNG + 6
    return _raised(lambda: fit(fault, STAGES, folder, steps, model=CommittedModel, on_oom="raise"))


@dataclass
class Hanging(Fault):
    def strike(self, stage: int) -> None:
        self.raised += 1
        self.raised_at_s = time.monotonic()
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            time.sleep(0.05)


@other
def a_hang(folder: Path) -> Any:
    """One rank stands still and the other waits for it in a collective."""
    fault = Hanging("forward", 2, 1, (1,))
    ours = fit(fault, STAGES, folder / "with", trial_timeout=2.0)
    theirs = _never_offered(2, 1, folder.parent)
    different = [name for name in SAME if ours[name] != theirs[name]]
    return {"different": different, "back_s": ours["back_s"], **_about(ours)}


class SyncedModel(Model):
    """Talks to the other ranks in every micro-batch, at every stage, between micro-batches too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("synced", self.losses[batch_idx], on_step=True, on_epoch=True, sync_dist=True, batch_size=BATCH)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("after", float(len(self.losses)), on_step=True, on_epoch=True, sync_dist=True, batch_size=BATCH)
        self.trainer.strategy.reduce_boolean_decision(True)


@other
def a_rank_waits_between_micro_batches(folder: Path) -> Any:
    fault = Fault("accumulation", 1, 4, (1,))
    ours = fit(fault, STAGES, folder / "with", model=SyncedModel)
    theirs = fit(Fault("nowhere", -1, 4, ()), (0, 2, 3), folder / "without", model=SyncedModel)
    names = (*SAME, "logged")
    return {"different": [name for name in names if ours[name] != theirs[name]], **_about(ours)}


@dataclass
class LateStep(Fault):
    """Breaks an optimizer step that no copy was made before."""

    steps: int = 0

    def due(self, where: str, stage: int) -> bool:
        if where == "optimizer" and stage == self.stage:
            self.steps += 1
        return self.steps > 6 and super().due(where, stage)


@other
def a_step_that_cannot_be_taken_back(folder: Path) -> Any:
    fault = LateStep("optimizer", 1, 1, (1,))
    return _raised(lambda: fit(fault, STAGES, folder, 40, steps_per_rung=9))


class Manual(Model):
    """Calls backward and step itself, twice in a batch."""

    automatic_optimization = False

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.halves = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        optimizer = self.optimizers()
        for half in x.chunk(2):
            stage = stage_of(self.trainer.strategy)
            self.halves += stage == self.fault.stage
            if self.halves == 2 and self.fault.due("forward", stage):
                self.fault.strike(stage)
            loss = (self.net(half) ** 2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses[batch_idx], self.stages[batch_idx] = loss.item(), stage
            self.mean.update(loss.detach())


@other
def manual_optimization(folder: Path) -> Any:
    """The second of two steps in a batch fails: both are run again."""
    ours = fit(Fault("forward", 2, 1, (1,)), STAGES, folder / "with", 2 * STEPS, model=Manual)
    theirs = fit(Fault("nowhere", -1, 1, ()), (0, 1, 3), folder / "without", 2 * STEPS, model=Manual)
    return {"different": [name for name in SAME if ours[name] != theirs[name]], **_about(ours)}


class SavesAlone(Model):
    """Saves on rank 0 only, a mistake that is often made."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.is_global_zero:
            self.trainer.save_checkpoint(str(self.folder / "alone.ckpt"))


@other
def saving_on_one_rank_only(folder: Path) -> Any:
    def model(fault: Fault) -> SavesAlone:
        made = SavesAlone(fault)
        made.folder = folder
        return made

    rescue.SAVE_PATIENCE_S = 2.0
    try:
        return _raised(lambda: fit(Fault("nowhere", -1, 1, ()), STAGES, folder, model=model))
    finally:
        rescue.SAVE_PATIENCE_S = 300.0


# A process that dies -----------------------------------------------------------------------------------------------


class Dying(Model):
    """The last rank's process is killed in a trial, as the system's out-of-memory killer does it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 4 and _rank() == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def die(payload: dict[str, Any]) -> None:
    """Train until a rank is killed, and write what the others make of it; this never returns normally."""
    folder = Path(payload["folder"])
    started_s = time.monotonic()
    raised = _raised(lambda: fit(Fault("nowhere", -1, 2, ()), STAGES, folder, model=Dying))
    raised["after_s"] = time.monotonic() - started_s
    (folder / f"raised.{_rank()}.json").write_text(json.dumps(raised))
    os._exit(3)


# Many faults in one process ----------------------------------------------------------------------------------------


def soak(payload: dict[str, Any]) -> dict[str, Any]:
    """Train again and again in one process group's lifetime, with faults of every kind, and look for what is left."""
    generator = random.Random(payload["seed"])
    ranks, done, wrong = int(os.environ["WORLD_SIZE"]), 0, []
    footprints: list[dict[str, int]] = []
    while done < payload["faults"]:
        k = generator.choice((1, 2, 4))
        fault = Several("anywhere", -1, k, (), plan=_random_plan(generator, k, ranks))
        run = fit(fault, STAGES, Path(payload["folder"]) / str(len(footprints)))
        done += len(fault.plan)
        if run["ended"] != list(range(STEPS * k)) or (run["failures"] and len(run["failures"]) != len(fault.plan)):
            wrong.append({"plan": str(fault.plan), "ended": len(run["ended"]), "failures": len(run["failures"])})
        footprints.append(_footprint())
        print(f"{done} faults, {footprints[-1]}", flush=True)
    return {"faults": done, "wrong": wrong, "footprints": footprints}


@dataclass
class Several(Fault):
    """Strikes once at each of several stages of one run, on ranks and in a place of its own for each."""

    plan: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    struck: set[int] = field(default_factory=set)

    def due(self, where: str, stage: int) -> bool:
        place, ranks = self.plan.get(stage, ("nowhere", ()))
        return place == where and _rank() in ranks and stage not in self.struck

    def strike(self, stage: int) -> None:
        self.struck.add(stage)
        super().strike(stage)


def _random_plan(generator: random.Random, k: int, ranks: int) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Choose one to three of the four stages to fail."""
    plan = {}
    for stage in generator.sample(STAGES, generator.randint(1, 3)):
        where = generator.choice([place for place in PLACES if possible(place, stage, k)])
        everybody = tuple(range(ranks))
        plan[stage] = where, generator.choice([everybody, (generator.choice(everybody),)])
    return plan


def _footprint() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    groups = len(dist.distributed_c10d._world.pg_map)
    return {
        "threads": process.num_threads(),
        "fds": process.num_fds(),
        "rss_mb": process.memory_info().rss >> 20,
        "groups": groups,
    }
