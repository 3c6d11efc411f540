"""Worker side of test_outputs: what a run leaves behind, and how limits and earlier decisions steer it."""

from __future__ import annotations

import copy
import csv
import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import run_cases
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from toys import CONFIG, Toy, loader, make_trainer, network, whole_weights

from lightning_zeroladder import LadderCallback
from lightning_zeroladder.ladder import LadderSettings, read_journal
from lightning_zeroladder.report.data import read_report


def walk(folder: Path, **settings: Any) -> Any:
    pl.seed_everything(3, verbose=False)
    model = settings.pop("model", Toy)()
    trainer = make_trainer(settings.pop("stages", (0, 1, 2, 3)), folder, settings=settings)
    trainer.fit(model, loader())
    return trainer


def files(folder: Path) -> Any:
    loggers = [CSVLogger(folder, "csv"), TensorBoardLogger(folder, "board")]
    model = Toy()
    trainer = make_trainer((0, 1, 2, 3), folder, logger=loggers)
    trainer.fit(model, loader())
    trainer.strategy.barrier()
    with next((folder / "csv").rglob("metrics.csv")).open() as stream:
        columns = set(next(csv.reader(stream)))
    run_dir = folder / "ladder"
    report = read_report(run_dir)
    return {
        "files": sorted(path.name for path in run_dir.iterdir()),
        "events": [entry["event"] for entry in read_journal(run_dir / "journal.jsonl")],
        "columns": sorted(name for name in columns if name.startswith("zero_ladder/")),
        "board": len(list((folder / "board").rglob("events.out.tfevents.*"))),
        "complete": report.complete,
        "context": [report.context.world_size, report.context.accumulate, report.context.precision],
        "parameters": report.context.parameters,
        "expected_parameters": sum(param.numel() for param in network().parameters()),
        "optimizer": report.context.optimizer,
        "counted": [row.trial.measurement.step_s.count for row in report.decision.results],
        "peaks": [row.trial.measurement.peak_bytes for row in report.decision.results],
        "units": [row.trial.measurement.units_per_step for row in report.decision.results],
        "ds_stage": report.ds_config["zero_optimization"]["stage"],
        "committed": report.decision.rung.stage,
        "moves": len(report.moves),
        "ladder_left": any(isinstance(callback, LadderCallback) for callback in trainer.callbacks),
    }


def earlier_decision(folder: Path) -> Any:
    first = walk(folder / "first", stages=(2, 3))
    first.strategy.barrier()
    path = folder / "first" / "ladder" / "report.json"
    second = walk(folder / "second", decision=path)
    return {
        "decided": read_report(path).decision.rung.stage,
        "stage": second.strategy.rung.stage,
        "moves": len(second.strategy.moves),
        "journal": (folder / "second" / "ladder").exists(),
    }


def fixed_stage_profile(folder: Path) -> Any:
    settings = LadderSettings(steps_per_rung=8, warmup_steps=2)
    callback = LadderCallback(settings, run_dir=folder / "profile")
    trainer = make_trainer((2,), folder, callbacks=[callback])
    trainer.fit(Toy(), loader())
    trainer.strategy.barrier()
    report = read_report(folder / "profile")
    (row,) = report.decision.results
    return {
        "stage": row.trial.rung.stage,
        "counted": row.trial.measurement.step_s.count,
        "left": callback in trainer.callbacks,
    }


def tight_memory(folder: Path) -> Any:
    """Every stage breaks the margin on CPU, where the process itself is larger than the limit."""
    trainer = walk(folder, memory_limit_bytes=64 << 20)
    trainer.strategy.barrier()
    report = read_report(folder / "ladder")
    return {
        "fits": report.decision.fits,
        "verdicts": [row.verdict.value for row in report.decision.results],
        "words": [row.words for row in report.decision.results],
        "smallest": min(
            (row.trial for row in report.decision.results if row.trial.measurement),
            key=lambda trial: trial.measurement.peak_bytes,
        ).rung.stage,
        "committed": trainer.strategy.rung.stage,
        "reason": report.decision.reason,
    }


def cannot_fit(folder: Path) -> Any:
    """Stage 0 needs 16 bytes per parameter, stage 3 half of it on two ranks."""
    count = sum(param.numel() for param in network().parameters())
    trainer = walk(folder, memory_limit_bytes=12 * count)
    trainer.strategy.barrier()
    report = read_report(folder / "ladder")
    return {"words": [row.words for row in report.decision.results], "stages": trainer.lightning_module.stages}


def nothing_fits(folder: Path) -> Any:
    try:
        walk(folder, memory_limit_bytes=1000)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "it ran"


class BornInConfigureModel(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.net = None
        self.born_sharded: bool | None = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(11)
            self.net = network()
            if self.net[0].weight.device.type != "meta":
                self.born_sharded = hasattr(self.net[0].weight, "ds_id")


def born(folder: Path, *, limit_per_parameter: float, stages: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    count = sum(param.numel() for param in network().parameters())
    trainer = walk(
        folder, model=BornInConfigureModel, stages=stages, memory_limit_bytes=int(limit_per_parameter * count)
    )
    weights = whole_weights(trainer.lightning_module)
    return {
        "sharded": trainer.lightning_module.born_sharded,
        "stages": sorted(set(trainer.lightning_module.stages)),
        "first": trainer.lightning_module.stages[0],
        "losses": trainer.lightning_module.losses,
        "sum": float(sum(value.double().sum() for value in weights.values())),
    }


class LoadsInConfigureModel(Toy):
    """What ``from_pretrained`` does inside ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained = network().state_dict()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = network()
            self.net.load_state_dict(self.pretrained)


def loads_whole(folder: Path) -> Any:
    trainer = walk(folder, model=LoadsInConfigureModel)
    return sorted(set(trainer.lightning_module.stages))


def loads_in_shards(folder: Path) -> Any:
    try:
        walk(folder, model=LoadsInConfigureModel, stages=(3,))
    except MisconfigurationException as error:
        return str(error)
    return "it ran"


def callers_config(folder: Path) -> Any:
    given = copy.deepcopy(CONFIG) | {"gradient_accumulation_steps": 2}
    before = copy.deepcopy(given)
    trainer = make_trainer((0, 1), folder, accumulate_grad_batches=2)
    trainer.strategy._given_config = given
    trainer.fit(Toy(), loader())
    return {"unchanged": given == before, "accumulate": trainer.strategy.deepspeed_engine.gradient_accumulation_steps()}


class FailsAtStage2(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.strategy.rung.stage == 2:
            raise torch.OutOfMemoryError("17 GiB more than there is")
        return super().training_step(batch, batch_idx)


def shows_the_real_exception(folder: Path) -> Any:
    trainer = walk(folder, model=FailsAtStage2)
    trainer.strategy.barrier()
    report = read_report(folder / "ladder")
    failed = report.decision.results[2]
    return {"words": failed.words, "message": failed.trial.failure.message, "stage": failed.trial.rung.stage}


CASES = {
    "files": files,
    "earlier_decision": earlier_decision,
    "fixed_stage_profile": fixed_stage_profile,
    "tight_memory": tight_memory,
    "cannot_fit": cannot_fit,
    "nothing_fits": nothing_fits,
    "born_whole": functools.partial(born, limit_per_parameter=1e6, stages=(0, 1)),
    "born_sharded": functools.partial(born, limit_per_parameter=8.5),
    "loads_whole": loads_whole,
    "callers_config": callers_config,
    "shows_the_real_exception": shows_the_real_exception,
    "loads_in_shards": loads_in_shards,
}


def run(payload: dict[str, Any]) -> dict[str, Any]:
    return run_cases(CASES, payload["folder"])
