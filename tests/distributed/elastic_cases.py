"""Worker side of test_elastic: one leg of a run that changes its number of ranks in the middle of an epoch."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import run_cases
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_utilities.core import rank_zero
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from toys import Toy, make_trainer, samples

MICRO = 2


class Numbered(Dataset[Any]):
    """Samples that know their number."""

    def __init__(self, count: int) -> None:
        self.data = samples(count)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.data[index]


class Counting(IterableDataset[Any]):
    """A stream of one rank that can say where it is."""

    def __init__(self, count: int) -> None:
        self.rank, self.count, self.next = int(os.environ["RANK"]), count, 0

    def __len__(self) -> int:  # without it Lightning fetches a batch ahead, which a state then counts as seen
        return self.count

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        while self.next < self.count:
            number = 1000 * self.rank + self.next
            self.next += 1
            yield number, samples(1, number)[0]
        self.next = 0


class CountingLoader(DataLoader[Any]):
    """A loader that keeps its own state, as torchdata's does."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.dataset.next, "rank": self.dataset.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.dataset.rank  # each rank gets its own back
        self.dataset.next = state["next"]


class OwnBatches(BatchSampler):
    """A batch sampler of the user's own."""


class Noted(Toy):
    """Remembers the samples of each micro-batch with their losses, and what Lightning counted then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []
        self.stepping: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        second = batch[1][0].tolist() if isinstance(batch[0], list) else []
        numbers, x = batch[0] if second else batch
        out = self.net(x)
        each = ((out - torch.sin(x[:, :1]) - 0.5 * x[:, 1:2]) ** 2).squeeze(1)
        self.seen.append(
            {
                "numbers": numbers.tolist(),
                "second": second,
                "losses": each.detach().tolist(),
                "epoch": self.trainer.current_epoch,
                "batch": batch_idx,
                "step": self.trainer.global_step,
                "lr": self.trainer.optimizers[0].param_groups[0]["lr"],
            }
        )
        return each.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        if self.asks:
            self.stepping = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)  # feels the size of its gradients
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    asks = False


class Validations(Callback):
    """Notes after how many samples of the epoch a validation came."""

    def __init__(self) -> None:
        self.at: list[list[int]] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at.append([trainer.current_epoch, len(pl_module.seen)])


class SaveInWindow(Callback):
    """Saves and stops after a batch that completes no optimizer step."""

    def __init__(self, path: Path, batches: int) -> None:
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if len(pl_module.seen) == self.batches:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class Said(logging.Handler):
    """What the user is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @classmethod
    @contextmanager
    def listening(cls) -> Iterator[list[str]]:
        """Collect what is logged or warned of."""
        said, logger = cls(), rank_zero.log
        logger.addHandler(said)
        logger.setLevel(logging.INFO)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said.lines
        logger.removeHandler(said)
        said.lines += [str(warning.message) for warning in caught]


@dataclass(frozen=True)
class Job:
    """A run, the same on every leg."""

    count: int = 144
    accumulate: int = 3
    epochs: int = 2
    workers: int = 0
    drop_last: bool = False
    kind: str = "injected"
    asks: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


JOBS = {
    "shuffled": Job(),
    "uneven": Job(count=131, accumulate=1),
    "drop-last": Job(count=131, accumulate=1, drop_last=True),
    "workers": Job(workers=2),
    "ordered": Job(kind="ordered"),
    "limited": Job(trainer={"limit_train_batches": 15, "val_check_interval": 6, "limit_val_batches": 1}),
    "part": Job(asks=True, trainer={"limit_train_batches": 0.5, "val_check_interval": 0.5, "limit_val_batches": 1}),
    "scale": Job(settings={"global_batch": "scale"}),
    "number": Job(accumulate=1, settings={"global_batch": 24}),
    "own batch sampler": Job(kind="batch sampler"),
    "own sampler": Job(kind="own sampler"),
    "stateful": Job(count=60, accumulate=1, kind="stateful"),
    "two loaders": Job(kind="two"),
}


def train_loader(job: Job) -> Any:
    data = Numbered(job.count)
    options: dict[str, Any] = {"num_workers": job.workers, "persistent_workers": job.workers > 0}
    if job.kind == "ordered":  # the user's own deterministic order: Lightning shuffles what it yields
        return DataLoader(data, batch_size=MICRO, sampler=list(range(len(data)))[::-1])
    if job.kind == "batch sampler":
        return DataLoader(data, batch_sampler=OwnBatches(RandomSampler(data), MICRO, False))
    if job.kind == "own sampler":
        return DataLoader(data, batch_size=MICRO, sampler=DistributedSampler(data))
    if job.kind == "stateful":
        return CountingLoader(Counting(job.count), batch_size=MICRO)
    loader = DataLoader(data, batch_size=MICRO, shuffle=True, drop_last=job.drop_last, **options)
    if job.kind == "two":  # the second one is shorter: it is cycled
        return [loader, DataLoader(Numbered(job.count // 3), batch_size=MICRO, shuffle=True)]
    return loader


def fit(
    place: Path, job: Job, stage: int, callbacks: list[Any], ckpt: str | None, **options: Any
) -> tuple[Noted, pl.Trainer, dict[str, Any]]:
    pl.seed_everything(options.pop("seed", 3), verbose=False)
    model, watch = Noted(), Validations()
    model.asks = job.asks
    defaults: dict[str, Any] = {
        "max_epochs": job.epochs,
        "max_steps": -1,
        "limit_val_batches": 0,
        "accumulate_grad_batches": job.accumulate,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    }
    with Said.listening() as said:
        trainer = make_trainer(
            (stage,),
            place,
            callbacks=[watch, *callbacks],
            settings=job.settings,
            **{**defaults, **job.trainer, **options},
        )
        trainer.fit(model, train_loader(job), DataLoader(Numbered(8), batch_size=MICRO), ckpt_path=ckpt)
    strategy: Any = trainer.strategy
    facts = {
        "seen": model.seen,
        "global_step": trainer.global_step,
        "engine_steps": int(strategy.deepspeed_engine.global_steps),
        "accumulate": [trainer.accumulate_grad_batches, int(strategy.deepspeed_engine.gradient_accumulation_steps())],
        "stepping": model.stepping,
        "validations": watch.at,
        "batches": trainer.num_training_batches if trainer.num_training_batches != float("inf") else None,
        "said": [line for line in said if line.startswith("zero_auto")],
    }
    return model, trainer, facts


def leg(
    place: Path, job: Job, stage: int, *, stop: int | None = None, ckpt: str | None = None, save: Path | None = None
) -> dict[str, Any]:
    """Train until an optimizer step, from a checkpoint if there is one."""
    keep = ModelCheckpoint(dirpath=save, filename="leg", every_n_train_steps=stop, enable_version_counter=False)
    _, _, facts = fit(place, job, stage, [keep] if save is not None else [], ckpt, max_steps=stop or -1)
    return facts


def run(payload: dict[str, Any]) -> dict[str, Any]:
    """Run one leg of each job.

    Args:
        payload: The number of the leg, the optimizer step at which each leg stops (the last goes to the end), the
            stage of each leg, the jobs, and a folder that the legs share.
    """
    folder, number, stops = Path(payload["folder"]), payload["leg"], payload["stops"]
    cases: dict[str, Any] = {}
    stage = payload["stages"][number]
    for name in payload["jobs"]:
        job = JOBS[name]
        if number == 0:
            cases[f"{name}-whole"] = functools.partial(leg, job=job, stage=stage)
        stop = stops[number] if number < len(stops) else None
        cases[name] = functools.partial(
            leg,
            job=job,
            stage=stage,
            stop=stop,
            ckpt=str(folder / name / str(number - 1) / "leg.ckpt") if number else None,
            save=folder / name / str(number) if stop is not None else None,
        )
    return run_cases(cases, str(folder / "cases" / str(number)))


# On the same number of ranks ------------------------------------------------------------------------------------


def inside_a_window(place: Path) -> Any:
    """A checkpoint whose last micro-batch waits for others of its optimizer step."""
    path = place / "window.ckpt"
    _, _, first = fit(place, Job(), 2, [SaveInWindow(path, 7)], None)
    second = leg(place, Job(), 1, ckpt=str(path))
    return {"whole": leg(place, Job(), 2), "first": first, "second": second}


def at_an_epochs_end(place: Path, *, workers: int, steps: int, when: str) -> Any:
    """Checkpoints that Lightning saves at the end of an epoch, and one in the middle of the second."""
    job = Job(workers=workers)
    keeps = {
        "validation": ModelCheckpoint(dirpath=place, filename="end", save_on_train_epoch_end=False),
        "epoch": ModelCheckpoint(dirpath=place, filename="end", save_on_train_epoch_end=True),
        "step": ModelCheckpoint(dirpath=place, filename="end", every_n_train_steps=steps),
    }
    options = {"max_steps": steps, "limit_val_batches": 1}
    if when != "step":
        options = {"max_epochs": 1, "limit_val_batches": 1}
    _, _, first = fit(place, job, 2, [keeps[when]], None, **options)
    _, _, second = fit(place, job, 3, [], str(place / "end.ckpt"), limit_val_batches=1)
    return {"whole": leg(place, job, 2), "first": first, "second": second}


def without_our_entries(place: Path) -> Any:
    """A checkpoint of an earlier version: no position among its entries, no manifest."""
    leg(place, Job(), 2, stop=2, save=place)
    (place / "again").mkdir(exist_ok=True)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (place / "leg.ckpt" / "checkpoint" / "zeroladder.json").unlink()
        states = place / "leg.ckpt" / "checkpoint" / "mp_rank_00_model_states.pt"
        saved = torch.load(states, weights_only=False)
        del saved["zero_auto"]
        torch.save(saved, states)
    torch.distributed.barrier()
    return {"whole": leg(place, Job(), 2), "second": leg(place, Job(), 2, ckpt=str(place / "leg.ckpt"))}


def by_hand(place: Path) -> Any:
    """The user has set another accumulation: it is followed, and the Trainer's value is given back afterwards."""
    leg(place, Job(accumulate=1, count=48), 2, stop=2, save=place)
    job = Job(accumulate=2, count=48)
    _, trainer, second = fit(place, job, 2, [], str(place / "leg.ckpt"))
    return {"second": second, "after": trainer.accumulate_grad_batches}


def other_seed_and_data(place: Path) -> Any:
    """A job that is started again with another seed, and with more data than before."""
    leg(place, Job(epochs=1), 2, stop=2, save=place)
    path = str(place / "leg.ckpt")
    _, _, second = fit(place, Job(epochs=1), 2, [], path, seed=8)
    _, _, more = fit(place, Job(epochs=1, count=150), 2, [], path)
    return {"whole": leg(place, Job(epochs=1), 2), "second": second, "more": more}


def own_state(place: Path) -> Any:
    """Loaders that keep their own state: each rank gets its own back, and goes on where it was."""
    job = Job(accumulate=1, count=60, epochs=1, kind="stateful")
    first = leg(place, job, 2, stop=4, save=place)
    return {"whole": leg(place, job, 2), "first": first, "second": leg(place, job, 2, ckpt=str(place / "leg.ckpt"))}


def twice(place: Path) -> Any:
    """A second fit of the same Trainer begins with the settings that the user gave it."""
    job = Job(accumulate=2, count=48, settings={"global_batch": 12})
    _, trainer, first = fit(place, job, 2, [], None, max_steps=1)
    given: list[int] = []
    trainer.fit_loop.epoch_loop.max_steps = 2
    model = Noted()
    model.configure_model = lambda: given.append(trainer.accumulate_grad_batches)  # type: ignore[method-assign]
    trainer.fit(model, train_loader(job))
    return {"first": first, "given": given, "second": trainer.accumulate_grad_batches}


def same(payload: dict[str, Any]) -> dict[str, Any]:
    """Cases on one number of ranks."""
    cases: dict[str, Any] = {
        "window": inside_a_window,
        "old": without_our_entries,
        "by-hand": by_hand,
        "own-state": own_state,
        "other-seed": other_seed_and_data,
        "twice": twice,
    }
    for when in ("validation", "epoch", "step"):
        cases[f"end-{when}"] = functools.partial(at_an_epochs_end, workers=0, steps=12, when=when)
    cases["second-epoch"] = functools.partial(at_an_epochs_end, workers=2, steps=14, when="step")
    return run_cases(cases, payload["folder"])
