"""Worker side of test_lightning_features: each case trains by a walk and at fixed stages and returns both."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from harness import run_cases
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
from toys import (
    BATCH,
    MAX_STEPS,
    WIDTH,
    Run,
    Toy,
    fit,
    gap,
    loader,
    make_trainer,
    network,
    samples,
    stage_of,
    target,
    twins,
    whole_weights,
)

TRAINING: dict[str, Callable[[Path], Any]] = {}
"""Cases of a fit, by name."""

LIFECYCLE: dict[str, Callable[[Path], Any]] = {}
"""Cases of what is around a fit, and of failing rungs, by name."""

SINGLE: dict[str, Callable[[Path], Any]] = {}
"""Cases of one process."""


def case(group: dict[str, Callable[[Path], Any]]) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def add(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        group[function.__name__] = function
        return function

    return add


def run(payload: dict[str, Any]) -> dict[str, Any]:
    cases = {"training": TRAINING, "lifecycle": LIFECYCLE, "single": SINGLE}[payload["group"]]
    only = payload.get("only") or list(cases)
    return run_cases({name: cases[name] for name in only}, payload["folder"])


# Accumulation, clipping, schedulers ------------------------------------------------------------------------------


@case(TRAINING)
def accumulation(folder: Path) -> Any:
    return twins(Toy, folder, fixed=(0, 3), accumulate_grad_batches=3)


@case(TRAINING)
def accumulation_across_epochs(folder: Path) -> Any:
    """Ten micro-batches an epoch, three a step: windows span epochs."""
    train = functools.partial(loader, 10)
    return twins(Toy, folder, fixed=(0, 3), train=train, accumulate_grad_batches=3)


@case(TRAINING)
def clip_by_norm(folder: Path) -> Any:
    free = fit(Toy, (1,), folder / "free")
    data = twins(Toy, folder, fixed=(0, 3), gradient_clip_val=0.02)
    return {**data, "unclipped": free.model.losses}


class Scheduled(Toy):
    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        step_size = 3 if self.interval == "step" else 1
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


@case(TRAINING)
def step_lr_per_step(folder: Path) -> Any:
    return twins(functools.partial(Scheduled, "step"), folder, accumulate_grad_batches=2)


@case(TRAINING)
def step_lr_per_epoch(folder: Path) -> Any:
    return twins(functools.partial(Scheduled, "epoch"), folder, train=functools.partial(loader, 7))


class Validated(Toy):
    """Logs a validation loss and remembers each."""

    def __init__(self) -> None:
        super().__init__()
        self.val_losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.val_losses.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


def val_losses(run: Run) -> dict[str, Any]:
    return {"val_losses": run.model.val_losses}


val_loader = functools.partial(loader, 3, seed=11)


class Plateau(Validated):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs"
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@case(TRAINING)
def reduce_lr_on_plateau(folder: Path) -> Any:
    return twins(Plateau, folder, train=functools.partial(loader, 6), val=val_loader)


# Validation, callbacks, logging -----------------------------------------------------------------------------------


@case(TRAINING)
def validation_in_mid_fit(folder: Path) -> Any:
    return twins(Validated, folder, extra=val_losses, val=val_loader, val_check_interval=3)


@case(TRAINING)
def validation_while_accumulating(folder: Path) -> Any:
    """Validation in the middle of accumulation windows."""
    options: dict[str, Any] = {"val_check_interval": 5, "accumulate_grad_batches": 2}
    return twins(Validated, folder, extra=val_losses, val=val_loader, **options)


@case(TRAINING)
def model_checkpoint(folder: Path) -> Any:
    def callbacks(place: Path) -> list[Any]:
        return [ModelCheckpoint(place / "ckpt", monitor="val_loss", save_top_k=2)]

    def saved(run: Run) -> dict[str, Any]:
        callback = run.trainer.checkpoint_callback
        assert isinstance(callback, ModelCheckpoint)
        run.trainer.strategy.barrier()  # rank 0 may still be deleting an older one
        kept = {Path(path).name: float(score) for path, score in callback.best_k_models.items()}
        files = sorted(path.name for path in Path(callback.dirpath or "").iterdir())
        parts = {path.name: any(path.rglob("*model_states.pt")) for path in Path(callback.dirpath or "").iterdir()}
        return {"kept": kept, "files": files, "has_model": all(parts.values()), **val_losses(run)}

    options: dict[str, Any] = {"enable_checkpointing": True, "val_check_interval": 4}
    return twins(Validated, folder, extra=saved, val=val_loader, callbacks=callbacks, **options)


@case(TRAINING)
def early_stopping(folder: Path) -> Any:
    def callbacks(place: Path) -> list[Any]:
        return [EarlyStopping("val_loss", patience=3, min_delta=100.0)]

    return twins(Validated, folder, val=val_loader, val_check_interval=4, callbacks=callbacks)


class Logged(Toy):
    """Logs a value that differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[float] = []
        self.epochs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.logged.append(float(self.trainer.callback_metrics["loss_step"]))

    def on_train_epoch_end(self) -> None:
        self.epochs.append(float(self.trainer.callback_metrics.get("loss_epoch", -1.0)))


@case(TRAINING)
def log_sync_dist(folder: Path) -> Any:
    def logged(run: Run) -> dict[str, Any]:
        final = float(run.trainer.callback_metrics["loss_epoch"])
        return {"logged": run.model.logged, "final_epoch": final}

    return twins(Logged, folder, extra=logged, train=functools.partial(loader, 8))


class Metered(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.read: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        self.error(self.net(x).detach(), target(x))
        self.log("mse", self.error, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.read.append(float(self.error.compute()))


@case(TRAINING)
def torchmetrics_in_module(folder: Path) -> Any:
    def read(run: Run) -> dict[str, Any]:
        return {"mse": run.model.read, "logged": float(run.trainer.callback_metrics["mse"])}

    return twins(Metered, folder, extra=read, train=functools.partial(loader, 8))


# Models ------------------------------------------------------------------------------------------------------------


class Configured(Toy):
    """Created in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.born_sharded: bool | None = None

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = network()
            self.born_sharded = all(hasattr(param, "ds_tensor") for param in self.net.parameters())


def born(run: Run) -> dict[str, Any]:
    return {"born_sharded": run.model.born_sharded}


@case(TRAINING)
def configure_model(folder: Path) -> Any:
    return twins(Configured, folder, fixed=(1,), extra=born)


@case(TRAINING)
def configure_model_sharded_at_birth(folder: Path) -> Any:
    """With stage 3 alone the model is created in shards; it trains like one created whole."""
    return twins(Configured, folder, fixed=(3,), stages=(0, 1, 2, 3), extra=born)


class Grouped(Toy):
    def configure_optimizers(self) -> Any:
        first, rest = list(self.net[0].parameters()), list(self.net[1:].parameters())
        biases = [param for param in rest if param.dim() == 1]
        groups = [
            {"params": first, "lr": 3e-3, "weight_decay": 0.1},
            {"params": [param for param in rest if param.dim() > 1], "lr": 1e-3, "weight_decay": 0.0},
            {"params": biases, "lr": 5e-4, "weight_decay": 0.5, "betas": (0.8, 0.9)},
        ]
        optimizer = torch.optim.AdamW(groups)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.8), "interval": "step"}
        ]


@case(TRAINING)
def parameter_groups(folder: Path) -> Any:
    return twins(Grouped, folder, fixed=(0, 3))


class Frozen(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.at_birth = {name: value.clone() for name, value in self.net[0].state_dict().items()}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=1e-3)


class FrozenAllGiven(Frozen):
    """Gives the optimizer the frozen parameters as well, as `self.parameters()` does."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def frozen_bits(run: Run) -> dict[str, Any]:
    same = [torch.equal(run.weights[f"net.0.{name}"], value) for name, value in run.model.at_birth.items()]
    still = not any(param.requires_grad for param in run.model.net[0].parameters())
    return {"unchanged": all(same) and len(same) == 2, "still_frozen": still}


@case(TRAINING)
def frozen_parameters(folder: Path) -> Any:
    return twins(Frozen, folder, extra=frozen_bits, fixed=(1, 3))


@case(TRAINING)
def frozen_parameters_in_optimizer(folder: Path) -> Any:
    return twins(FrozenAllGiven, folder, extra=frozen_bits, fixed=(1, 3))


class Tied(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self.net[2].weight = self.net[0].weight


@case(TRAINING)
def tied_weights(folder: Path) -> Any:
    def tied(run: Run) -> dict[str, Any]:
        return {"tied": run.model.net[2].weight is run.model.net[0].weight}

    return twins(Tied, folder, extra=tied, fixed=(0, 1, 2, 3))


class Normalized(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 13), nn.BatchNorm1d(13), nn.GELU(), nn.Linear(13, 1))


@case(TRAINING)
def batch_norm_buffers(folder: Path) -> Any:
    def buffers(run: Run) -> dict[str, Any]:
        return {
            "mean": run.weights["net.1.running_mean"].tolist(),
            "batches": int(run.weights["net.1.num_batches_tracked"]),
            "buffer_dtype": str(run.weights["net.1.running_var"].dtype),
        }

    return twins(Normalized, folder, extra=buffers, fixed=(1, 3))


class Idle(Toy):
    """Has a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(5, 3)


@case(TRAINING)
def parameter_without_gradient(folder: Path) -> Any:
    return twins(Idle, folder, fixed=(0, 1, 2, 3))


class Manual(Toy):
    """Two backward calls, on the two halves of the batch, then a step."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        (x,) = batch
        optimizer.zero_grad()
        for half in x.chunk(2):
            loss = self.loss((half,))
            self.manual_backward(loss)
        self.note(loss)
        optimizer.step()


class ManualOnce(Toy):
    """What `Manual` has to equal: one backward on the sum of both losses."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        (x,) = batch
        optimizer.zero_grad()
        losses = [self.loss((half,)) for half in x.chunk(2)]
        self.note(losses[-1])
        self.manual_backward(losses[0] + losses[1])
        optimizer.step()


@case(TRAINING)
def manual_optimization(folder: Path) -> Any:
    once = fit(ManualOnce, (0,), folder / "once")
    data = twins(Manual, folder, fixed=(0, 1, 2, 3))
    return {**data, "once": once.model.losses}


def precision(kind: str) -> Callable[[Path], Any]:
    def compare(folder: Path) -> Any:
        runs = [fit(Toy, (stage,), folder, precision=kind) for stage in (0, 1, 2, 3)]
        walk = fit(Toy, (0, 1, 2, 3), folder, precision=kind)
        return {
            "walk": {**walk.describe(), "dtype": str(next(walk.model.parameters()).dtype)},
            "fixed": [run.describe() for run in runs],
            "weight_gaps": [gap(walk.weights, run.weights) for run in runs],
        }

    return compare


TRAINING["precision_bf16-true"] = precision("bf16-true")  # test_parity has bf16-mixed and 32-true


# Data ------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Endless, without a length, other samples on each rank."""

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        for x in samples(4000, seed=20 + rank):
            yield (x,)


@case(TRAINING)
def iterable_dataset(folder: Path) -> Any:
    def train() -> Any:
        return DataLoader(Stream(), batch_size=3)

    return twins(Toy, folder, train=train, extra=config_batch_size)


def config_batch_size(run: Run) -> dict[str, Any]:
    return {"micro_batch": run.strategy.config["train_micro_batch_size_per_gpu"]}


class Twice(BatchSampler):
    """A batch sampler of the user's own, with another signature than torch's."""

    def __init__(self, sampler: Any, size: int, drop_last: bool = False) -> None:
        super().__init__(sampler, size, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        for indices in super().__iter__():
            yield [*indices, indices[0]]


@case(TRAINING)
def custom_batch_sampler(folder: Path) -> Any:
    def train() -> Any:
        data = TensorDataset(samples(1000))
        return DataLoader(data, batch_sampler=Twice(SequentialSampler(data), 5))

    return twins(Toy, folder, train=train, use_distributed_sampler=False)


class Bare:
    """A batch sampler that is no torch class and knows no batch size."""

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, 900, 6):
            yield list(range(start, start + 6))

    def __len__(self) -> int:
        return 150


@case(TRAINING)
def batch_sampler_without_size(folder: Path) -> Any:
    def train() -> Any:
        return DataLoader(TensorDataset(samples(1000)), batch_sampler=Bare())  # type: ignore[arg-type]

    return twins(Toy, folder, train=train, use_distributed_sampler=False)


@case(TRAINING)
def lightnings_own_sampler(folder: Path) -> Any:
    """The sampler that Lightning puts in: shuffled, reseeded each epoch."""

    def train() -> Any:
        return DataLoader(TensorDataset(samples(56)), batch_size=BATCH)

    return twins(Toy, folder, train=train)


# Around a fit ----------------------------------------------------------------------------------------------------


def _report(run_folder: Path) -> Any:
    """Rank 0 writes it."""
    path = run_folder / "ladder" / "report.json"
    return json.loads(path.read_text()) if int(os.environ["RANK"]) == 0 else None


@case(LIFECYCLE)
def run_shorter_than_ladder(folder: Path) -> Any:
    data = twins(Toy, folder, max_steps=13, fixed=(1,))
    return {**data, "report": _report(folder / "walk")}


@case(LIFECYCLE)
def run_ends_after_one_counted_step(folder: Path) -> Any:
    """Two steps into the third trial: one of warm-up, one that counts."""
    data = twins(Toy, folder, max_steps=12, fixed=(1,))
    return {**data, "report": _report(folder / "walk")}


@case(LIFECYCLE)
def run_shorter_than_first_trial(folder: Path) -> Any:
    data = twins(Toy, folder, max_steps=3, fixed=(0,))
    return {**data, "report": _report(folder / "walk")}


def _fit_twice(stages: tuple[int, ...], folder: Path, *, same_model: bool) -> list[Run]:
    pl.seed_everything(3, verbose=False)
    trainer = make_trainer(stages, folder)
    runs: list[Run] = []
    model = Toy()
    for index in range(2):
        if index and not same_model:
            model = Toy()
        trainer.fit_loop.epoch_loop.max_steps = (index + 1) * MAX_STEPS
        trainer.fit(model, loader(seed=7 + index))
        runs.append(Run(model, trainer, trainer.strategy, whole_weights(model)))
        runs[-1].moves_then = [[move.from_stage, move.to_stage] for move in trainer.strategy.moves]  # type: ignore[attr-defined]
    return runs


def _two_fits(folder: Path, *, same_model: bool) -> Any:
    walks = _fit_twice((0, 1, 2, 3), folder / "walk", same_model=same_model)
    fixed = _fit_twice((1,), folder / "fixed", same_model=same_model)
    return {
        "losses": [run.model.losses for run in walks],
        "fixed_losses": [run.model.losses for run in fixed],
        "moves": [run.moves_then for run in walks],  # type: ignore[attr-defined]
        "weight_gaps": [gap(a.weights, b.weights) for a, b in zip(walks, fixed, strict=True)],
    }


LIFECYCLE["two_fits_of_two_models"] = functools.partial(_two_fits, same_model=False)
LIFECYCLE["two_fits_of_one_model"] = functools.partial(_two_fits, same_model=True)


def _use(trainer: pl.Trainer, model: Validated) -> dict[str, Any]:
    (validated,) = trainer.validate(model, val_loader(), verbose=False)
    (tested,) = trainer.test(model, val_loader(), verbose=False)
    predicted = trainer.predict(model, val_loader())
    assert predicted is not None
    return {
        "validated": validated["val_loss"],
        "tested": tested["val_loss"],
        "predicted": [value for batch in predicted for value in batch.flatten().tolist()],
    }


@case(LIFECYCLE)
def evaluation_without_fit(folder: Path) -> Any:
    pl.seed_everything(3, verbose=False)
    model = Validated()
    with torch.no_grad():
        expected = [value for batch in val_loader() for value in model.net(batch[0]).flatten().tolist()]
        losses = [model.loss(batch).item() for batch in val_loader()]
    return {**_use(make_trainer((0, 1, 2, 3), folder), model), "expected": expected, "losses": losses}


@case(LIFECYCLE)
def evaluation_without_fit_sharded(folder: Path) -> Any:
    pl.seed_everything(3, verbose=False)
    model = Validated()
    with torch.no_grad():
        expected = [value for batch in val_loader() for value in model.net(batch[0]).flatten().tolist()]
        losses = [model.loss(batch).item() for batch in val_loader()]
    return {**_use(make_trainer((3,), folder), model), "expected": expected, "losses": losses}


@case(LIFECYCLE)
def evaluation_after_fit(folder: Path) -> Any:
    after: dict[str, Any] = {}
    for stages in ((0, 1, 2, 3), (1,), (3,), (0, 3)):
        run = fit(Validated, stages, folder / str(len(after)))
        after[str(stages)] = {**run.describe(), **_use(run.trainer, run.model)}
    return after


@case(LIFECYCLE)
def fit_after_evaluation(folder: Path) -> Any:
    """Validate, then fit on the same Trainer."""
    data: dict[str, Any] = {}
    for stages in ((0, 1, 2, 3), (3,)):
        pl.seed_everything(3, verbose=False)
        model = Validated()
        trainer = make_trainer(stages, folder / str(len(data)))
        (validated,) = trainer.validate(model, val_loader(), verbose=False)
        trainer.fit(model, loader())
        run = Run(model, trainer, trainer.strategy, whole_weights(model))
        data[str(stages)] = {**run.describe(), "validated": validated["val_loss"]}
    return data


@case(LIFECYCLE)
def save_checkpoint_after_fit(folder: Path) -> Any:
    data: dict[str, Any] = {}
    for stages in ((0, 1, 2, 3), (2, 3)):
        run = fit(Toy, stages, folder / str(len(data)))
        place = folder / str(len(data)) / "saved.ckpt"
        run.trainer.save_checkpoint(place)
        distance = gap(run.weights, _saved_weights(place, run))
        data[str(stages)] = {**run.describe(), "gap": distance, "of": len(run.weights)}
    return data


def _saved_weights(place: Path, run: Run) -> dict[str, Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if stage_of(run.strategy) == 0:
        return torch.load(place / "checkpoint" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    saved = get_fp32_state_dict_from_zero_checkpoint(str(place), tag="checkpoint")
    return {name: saved[name].clone() for name in saved}


# Failing rungs ---------------------------------------------------------------------------------------------------


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise torch.OutOfMemoryError("injected")


class OutOfMemory(Toy):
    """Runs out of memory on every rank the first time that a stage reaches a given micro-batch."""

    def __init__(self, stage: int, micro_batch: int, phase: str) -> None:
        super().__init__()
        self.at_stage, self.at_micro_batch, self.phase = stage, micro_batch, phase
        self.seen = 0
        self.raised: list[list[int]] = []
        self.by_batch: dict[int, float] = {}

    def _due(self, phase: str) -> bool:
        if phase != self.phase or stage_of(self.trainer.strategy) != self.at_stage or self.raised:
            return False
        if self.seen != self.at_micro_batch:
            return False
        self.raised.append([self.at_stage, self.seen])
        return True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if stage_of(self.trainer.strategy) == self.at_stage:
            self.seen += 1
        if self._due("forward"):
            raise torch.OutOfMemoryError("injected")
        loss = super().training_step(batch, batch_idx)
        self.by_batch[batch_idx] = loss.item()
        return _FailInBackward.apply(loss) if self._due("backward") else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self._due("optimizer"):
            raise torch.OutOfMemoryError("injected")


@functools.cache
def _not_offered(left: tuple[int, ...], accumulate: int, folder: Path) -> Run:
    return fit(Toy, left, folder / f"without-{left}-{accumulate}", accumulate_grad_batches=accumulate)


def _out_of_memory(folder: Path, *, stage: int, micro_batch: int, phase: str, accumulate: int) -> Any:

    def make() -> OutOfMemory:
        return OutOfMemory(stage, micro_batch, phase)

    def batches(run: Run) -> dict[str, Any]:
        return {"raised": run.model.raised, "by_batch": [run.model.by_batch[i] for i in sorted(run.model.by_batch)]}

    left = tuple(other for other in (0, 1, 2, 3) if other != stage)
    with_it = fit(make, (0, 1, 2, 3), folder / "with", accumulate_grad_batches=accumulate)
    without = _not_offered(left, accumulate, folder.parent)
    path = folder / "with" / "walk" / "ladder" / "journal.jsonl"
    journal = path.read_text().splitlines() if int(os.environ["RANK"]) == 0 else []
    return {
        "walk": {**with_it.describe(), **batches(with_it)},
        "without": without.describe(),
        "weight_gaps": [gap(with_it.weights, without.weights)],
        "failures": [json.loads(line)["failure"] for line in journal if json.loads(line)["event"] == "failed"],
    }


OUT_OF_MEMORY: dict[str, dict[str, Any]] = {
    "forward_k1": {"stage": 2, "micro_batch": 3, "phase": "forward", "accumulate": 1},
    "forward_k2_first_of_window": {"stage": 2, "micro_batch": 5, "phase": "forward", "accumulate": 2},
    "forward_k2_second_of_window": {"stage": 2, "micro_batch": 6, "phase": "forward", "accumulate": 2},
    "forward_k2_second_of_window_stage0": {"stage": 0, "micro_batch": 4, "phase": "forward", "accumulate": 2},
    "forward_k2_second_of_window_stage1": {"stage": 1, "micro_batch": 2, "phase": "forward", "accumulate": 2},
    "forward_k2_stage3": {"stage": 3, "micro_batch": 4, "phase": "forward", "accumulate": 2},
    "forward_first_step": {"stage": 1, "micro_batch": 1, "phase": "forward", "accumulate": 1},
    "backward_k1": {"stage": 2, "micro_batch": 3, "phase": "backward", "accumulate": 1},
    "backward_k1_stage0": {"stage": 0, "micro_batch": 2, "phase": "backward", "accumulate": 1},
    "backward_k2": {"stage": 1, "micro_batch": 4, "phase": "backward", "accumulate": 2},
    "backward_k2_stage3": {"stage": 3, "micro_batch": 4, "phase": "backward", "accumulate": 2},
    "optimizer_first_step": {"stage": 2, "micro_batch": 1, "phase": "optimizer", "accumulate": 1},
}
for _name, _settings in OUT_OF_MEMORY.items():
    LIFECYCLE[f"out_of_memory_{_name}"] = functools.partial(_out_of_memory, **_settings)


# One process -----------------------------------------------------------------------------------------------------


@case(SINGLE)
def single_device(folder: Path) -> Any:
    walk = fit(Toy, (0, 1, 2, 3), folder / "walk")
    fixed = fit(Toy, (0,), folder / "fixed")
    return {
        "walk": walk.describe(),
        "fixed": [fixed.describe()],
        "weight_gaps": [gap(walk.weights, fixed.weights)],
        "report": _report(folder / "walk" / "walk"),
    }
