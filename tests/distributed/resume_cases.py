"""Worker side of test_checkpoint_resume: checkpoints as users of a Trainer meet them."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import torch
from harness import run_cases
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from toys import BATCH, CONFIG, Toy, loader, make_trainer, samples, whole_weights

from lightning_zeroladder.checkpoint.converting import convert
from lightning_zeroladder.engine.groups import without_compiled_shm_op

STEPS = 6


class Rich(Toy):
    """A module with a scheduler, buffers, a frozen weight and data of its own in the checkpoint."""

    def __init__(self, width: int = 31) -> None:
        super().__init__()
        if width != 31:
            self.net[0] = nn.Linear(24, width)
            self.net[1] = nn.LayerNorm(width)
            self.net[3] = nn.Linear(width, 17)
        self.save_hyperparameters()
        self.norm = nn.BatchNorm1d(1, affine=False)
        self.fixed = nn.Parameter(torch.randn(5), requires_grad=False)
        self.found: Any = None
        self.outputs: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        self.norm(batch[0][:, :1].float())
        return super().loss(batch) + 0 * self.fixed.sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"words": ["a", "b"], "tensor": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["mine"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", Toy.loss(self, batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0].to(next(self.parameters()).dtype)).float()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Data(pl.LightningDataModule):
    """A datamodule with state, whose training batches begin where a run left off."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.counter = 0
        self.first = first

    def train_dataloader(self) -> Any:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        data = TensorDataset(samples(1000 * BATCH * ranks)[self.first * BATCH * ranks :])
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, ranks, rank, shuffle=False))

    def val_dataloader(self) -> Any:
        return loader(batches=3, seed=11)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"counter": self.counter + 41}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counter = state_dict["counter"]


class Tally(Callback):
    """A callback with state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class StockOnCpu(DeepSpeedStrategy):
    """Lightning's own strategy, with only its refusals of CPU lifted."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        with without_compiled_shm_op():
            self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        engine, wrapped, *_ = deepspeed.initialize(
            config=self.config,
            model=model,
            model_parameters=[param for param in model.parameters() if param.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, wrapped


def keeper(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="{step}", **{"every_n_train_steps": STEPS, **options})


def train(
    folder: Path, stage: int, *, steps: int, callbacks: list[Any], seed: int = 3, ckpt: Any = None, **options: Any
) -> tuple[Rich, pl.Trainer, Data]:
    pl.seed_everything(seed, verbose=False)
    model, data = Rich(), Data(STEPS if ckpt else 0)
    options = {"enable_checkpointing": True, "limit_val_batches": 0, **options}
    trainer = make_trainer((stage,), folder, max_steps=steps, callbacks=callbacks, **options)
    trainer.fit(model, data, ckpt_path=ckpt)
    return model, trainer, data


def fit_resumes(folder: Path, *, source: int, stage: int, ckpt: str | None = None, universal: bool = False) -> Any:
    """Train without interruption, and in two runs with another stage in the second."""
    whole, _, _ = train(folder, source, steps=2 * STEPS, callbacks=[keeper(folder / "whole")])
    options = {"settings": {"save_universal": universal}}
    first, _, _ = train(
        folder, source, steps=STEPS, callbacks=[keeper(folder / "ckpt", save_last=True), Tally()], **options
    )
    path = ckpt or str(folder / "ckpt" / f"step={STEPS}.ckpt")
    inside = sorted(entry.name for entry in (folder / "ckpt" / f"step={STEPS}.ckpt").iterdir())
    tally = Tally()
    second, trainer, data = train(
        folder, stage, steps=2 * STEPS, callbacks=[keeper(folder / "ckpt", save_last=True), tally], seed=8, ckpt=path
    )
    return {
        "whole": whole.losses,
        "parts": first.losses + second.losses,
        "lrs": [whole.lrs, first.lrs + second.lrs],
        "stages": [set_of(first.stages), set_of(second.stages)],
        "found": [second.found["words"], second.found["tensor"].tolist()],
        "tally": tally.batches,
        "counter": data.counter,
        "global_step": trainer.global_step,
        "buffers": [float(second.norm.num_batches_tracked), float(whole.norm.num_batches_tracked)],
        "frozen": [whole.fixed.tolist() if source < 3 else None, second.fixed.tolist() if stage < 3 else None],
        "inside": inside,
    }


def set_of(values: list[int]) -> list[int]:
    return sorted(set(values))


def slurm_path(folder: Path) -> Any:
    """``hpc``: what Lightning saves when SLURM takes the job off its nodes."""
    _, trainer, _ = train(folder, 2, steps=STEPS, callbacks=[])
    trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(str(folder)))
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("hpc"))
    model, again, _ = train(folder, 0, steps=2 * STEPS, callbacks=[], seed=8, ckpt="hpc")
    return {"names": names, "losses": len(model.losses), "global_step": again.global_step}


def evaluate(folder: Path, *, source: int, stage: int) -> Any:
    """``validate``, ``test`` and ``predict`` from a checkpoint of any stage."""
    model, _, _ = train(folder, source, steps=STEPS, callbacks=[keeper(folder / "ckpt")])
    weights = whole_weights(model)
    path = str(folder / "ckpt" / f"step={STEPS}.ckpt")
    data: dict[str, Any] = {}
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batch = samples(3 * 4 * ranks, 11)[rank::ranks]
    with torch.no_grad():
        plain = Rich()
        plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
        expected = plain.net(batch)
    for name in ("validate", "test"):
        fresh = Rich()
        evaluator = make_trainer((stage,), folder, enable_checkpointing=False)
        data[name] = getattr(evaluator, name)(fresh, Data(), ckpt_path=path, verbose=False)[0]["val"]
        data[f"{name}-differs"] = _different(whole_weights(fresh), weights)
    fresh = Rich()
    predictor = make_trainer((stage,), folder)
    predictions = torch.cat(predictor.predict(fresh, Data(), ckpt_path=path))
    data["apart"] = float((predictions - expected).abs().max())
    mine = float(Toy.loss(plain, (batch,)))
    reduced = torch.tensor(mine, dtype=torch.float64)
    torch.distributed.all_reduce(reduced)
    data["expected"] = float(reduced) / ranks
    return data


def _different(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Buffers of a BatchNorm are each rank's own; below stage 3 a checkpoint has those of the first rank."""
    names = [name for name in ours if not name.startswith("norm.") or torch.distributed.get_rank() == 0]
    return [name for name in names if not torch.equal(ours[name], theirs[name])]


def best(folder: Path) -> Any:
    """``best`` and ``last``, with old checkpoints deleted on the way."""
    pl.seed_everything(3, verbose=False)
    model = Rich()
    keep = ModelCheckpoint(dirpath=folder / "ckpt", monitor="val", save_top_k=2, save_last=True, filename="{step}")
    stopping = EarlyStopping("val", patience=50)
    trainer = make_trainer(
        (1,), folder, max_steps=10, callbacks=[keep, stopping], enable_checkpointing=True, val_check_interval=2
    )
    trainer.fit(model, Data())
    score = float(keep.best_model_score)
    fresh = Rich()
    trainer_two = make_trainer((3,), folder)
    value = trainer_two.validate(fresh, Data(), ckpt_path=keep.best_model_path, verbose=False)[0]["val"]
    same = trainer.validate(ckpt_path="best", dataloaders=Data().val_dataloader(), verbose=False)[0]["val"]
    names = sorted(entry.name for entry in (folder / "ckpt").iterdir())
    return {"score": score, "value": value, "same": same, "names": names}


def stock_lightning(folder: Path, *, source: int, stage: int) -> Any:
    """A checkpoint that Lightning's own DeepSpeedStrategy saved."""
    import copy

    pl.seed_everything(3, verbose=False)
    model = Rich()
    config = copy.deepcopy(CONFIG)
    config["zero_optimization"]["stage"] = source
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=StockOnCpu(config=config),
        max_steps=2 * STEPS,
        callbacks=[keeper(folder / "ckpt", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=str(folder),
    )
    model.note = lambda loss: model.losses.append(loss.item())  # type: ignore[method-assign]
    trainer.fit(model, Data())
    path = str(folder / "ckpt" / f"step={STEPS}.ckpt")
    second, again, _ = train(folder, stage, steps=2 * STEPS, callbacks=[], seed=8, ckpt=path)
    if torch.distributed.get_rank() == 0 and source > 0:  # stage 0 of others has no names of its two kinds of weights
        convert(path, folder / "converted")
    torch.distributed.barrier()
    converted = path if source == 0 else str(folder / "converted")
    third, _, _ = train(folder / "third", stage, steps=2 * STEPS, callbacks=[], seed=9, ckpt=converted)
    return {
        "whole": model.losses,
        "second": second.losses,
        "third": third.losses,
        "global_step": again.global_step,
        "validated": make_trainer((0,), folder).validate(Rich(), Data(), ckpt_path=path, verbose=False)[0]["val"],
    }


def plain_deepspeed(folder: Path, *, stage: int) -> Any:
    """A checkpoint of a bare module that a plain DeepSpeed loop saved, under the name that the module has there."""
    import copy

    pl.seed_everything(3, verbose=False)
    model = Toy()
    config = copy.deepcopy(CONFIG)
    config["zero_optimization"]["stage"] = 2
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(
        config=config,
        model=model.net,
        model_parameters=list(model.net.parameters()),
        optimizer=torch.optim.AdamW(model.net.parameters(), lr=1e-3),
        dist_init_required=False,
    )
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = samples(1000 * 4 * ranks)[rank::ranks]

    def step(index: int) -> float:
        batch = mine[index * 4 : (index + 1) * 4]
        loss = ((engine(batch).float() - torch.sin(batch[:, :1]) - 0.5 * batch[:, 1:2]) ** 2).mean()
        engine.backward(loss)
        engine.step()
        return float(loss)

    for index in range(STEPS):
        step(index)
    engine.save_checkpoint(str(folder / "plain"))
    expected = [step(index) for index in range(STEPS, 2 * STEPS)]
    fresh = Toy()
    trainer = make_trainer((stage,), folder, max_steps=2 * STEPS)
    trainer.fit(fresh, Data(STEPS), ckpt_path=str(folder / "plain"))
    return {"losses": fresh.losses, "expected": expected, "global_step": trainer.global_step}


class OwnClass:
    """Something of the user's in a checkpoint."""

    def __init__(self, value: int) -> None:
        self.value = value


class Keeps(Callback):
    """A callback whose state is an object of the user's own class."""

    def __init__(self) -> None:
        self.kept = OwnClass(7)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]


def own_classes(folder: Path) -> Any:
    """An object of the user's own class is refused by name, and opened when trusted."""
    train(folder, 1, steps=STEPS, callbacks=[keeper(folder / "ckpt"), Keeps()])
    path = str(folder / "ckpt" / f"step={STEPS}.ckpt")
    try:
        train(folder, 1, steps=2 * STEPS, callbacks=[], ckpt=path)
        message = None
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    keeps = Keeps()
    keeps.kept = OwnClass(0)
    _, trainer, _ = train(
        folder, 2, steps=STEPS + 1, callbacks=[keeps], ckpt=path, settings={"trusted_checkpoints": True}
    )
    return {"message": message, "value": keeps.kept.value, "global_step": trainer.global_step}


def damaged(folder: Path, *, how: str) -> Any:
    """Whatever is wrong with a checkpoint, every rank says so, and the model is as it was."""
    train(folder, 3, steps=STEPS, callbacks=[keeper(folder / "ckpt")])
    path = folder / "ckpt" / f"step={STEPS}.ckpt"
    shards = sorted((path / "checkpoint").glob("*optim_states.pt"))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        _damage(path, shards, how)
    torch.distributed.barrier()
    pl.seed_everything(8, verbose=False)
    model = Rich(29) if how == "other model" else Rich()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = make_trainer((1,), folder, max_steps=2 * STEPS, limit_val_batches=0)
    try:
        trainer.fit(model, Data(), ckpt_path=str(path))
        message = None
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    after = whole_weights(model)
    return {
        "message": message,
        "losses": model.losses,
        "untouched": all(torch.equal(after[name].float(), before[name].float()) for name in before),
        "names": [shard.name for shard in shards],
    }


def without_frozen(folder: Path) -> Any:
    """``exclude_frozen_parameters``: frozen weights come from elsewhere, as with an adapter on a base model."""
    options = {"settings": {"exclude_frozen_parameters": True}}
    train(folder, 2, steps=STEPS, callbacks=[keeper(folder / "ckpt")], **options)
    path = str(folder / "ckpt" / f"step={STEPS}.ckpt")
    refused = None
    try:
        train(folder, 3, steps=STEPS + 1, callbacks=[], seed=8, ckpt=path)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    second, _, _ = train(folder, 3, steps=2 * STEPS, callbacks=[], seed=8, ckpt=path, **options)
    pl.seed_everything(8, verbose=False)
    own = Rich().fixed
    weights = whole_weights(second)
    return {"refused": refused, "kept": torch.equal(weights["fixed"], own), "losses": len(second.losses)}


class Lenient(Rich):
    """The model has grown a part that the checkpoint does not know, and lost one."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.grown = nn.Parameter(torch.full((7,), 0.5))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * (self.grown**2).sum()


def lenient(folder: Path, *, stage: int) -> Any:
    """``strict_loading = False`` loads what fits and says what it kept."""
    first, _, _ = train(folder, 1, steps=STEPS, callbacks=[keeper(folder / "ckpt")])
    weights = whole_weights(first)
    path = str(folder / "ckpt" / f"step={STEPS}.ckpt")
    pl.seed_everything(8, verbose=False)
    model = Lenient()
    trainer = make_trainer((stage,), folder, max_steps=STEPS + 1, limit_val_batches=0, enable_checkpointing=False)
    before: dict[str, Tensor] = {}

    class Look(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            before.update(whole_weights(pl_module))

    trainer.callbacks.append(Look())
    trainer.fit(model, Data(STEPS), ckpt_path=path)
    differs = [
        name for name in weights if not name.startswith("norm.") and not torch.equal(weights[name], before[name])
    ]
    return {"differs": differs, "grown": before["grown"].tolist(), "losses": len(model.losses)}


def _damage(path: Path, shards: list[Path], how: str) -> None:
    if how == "flipped":
        data = bytearray(shards[1].read_bytes())
        data[len(data) // 2] ^= 4
        shards[1].write_bytes(data)
    elif how == "cut off":
        data = bytearray(shards[1].read_bytes())
        shards[1].write_bytes(data[: len(data) // 3])
    elif how == "missing":
        shards[1].unlink()
    elif how == "left over":
        shutil.copy(shards[1], shards[1].with_name(shards[1].name.replace("rank_1", "rank_2")))
    elif how == "no checkpoint":
        shutil.rmtree(path)


def remote(folder: Path) -> Any:
    messages = {}
    keep = ModelCheckpoint(dirpath="memory://bucket/run")  # a remote file system that needs no package
    for name, options, ckpt in (
        ("save", {"callbacks": [keep], "enable_checkpointing": True}, None),
        ("load", {}, "s3://bucket/run/last.ckpt"),
    ):
        trainer = make_trainer((1,), folder, max_steps=2, limit_val_batches=0, **options)
        try:
            trainer.fit(Rich(), Data(), ckpt_path=ckpt)
            messages[name] = None
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def walk_resumes(folder: Path) -> Any:
    """A run that saves while its ladder walks, and one that walks again from there."""
    pl.seed_everything(3, verbose=False)
    whole = Rich()
    trainer = make_trainer((0, 1, 2, 3), folder / "a", max_steps=24, limit_val_batches=0)
    trainer.fit(whole, Data())
    pl.seed_everything(3, verbose=False)
    first = Rich()
    trainer = make_trainer(
        (0, 1, 2, 3),
        folder / "b",
        max_steps=12,
        limit_val_batches=0,
        callbacks=[keeper(folder / "ckpt")],
        enable_checkpointing=True,
    )
    trainer.fit(first, Data())
    pl.seed_everything(9, verbose=False)
    second = Rich()
    trainer = make_trainer((0, 1, 2, 3), folder / "c", max_steps=24, limit_val_batches=0)
    trainer.fit(second, Data(12), ckpt_path=str(folder / "ckpt" / "step=12.ckpt"))
    return {
        "whole": whole.losses,
        "parts": first.losses + second.losses,
        "stages": [first.stages, second.stages],
        "commit": trainer.strategy.rung.stage,
    }


def manifest(folder: Path) -> Any:
    train(folder, 3, steps=STEPS, callbacks=[keeper(folder / "ckpt")], accumulate_grad_batches=2)
    path = folder / "ckpt" / f"step={STEPS}.ckpt" / "checkpoint"
    return json.loads((path / "zeroladder.json").read_text())["manifest"]


CASES: dict[str, Callable[[Path], Any]] = {
    **{
        f"fit-{source}-{stage}": functools.partial(fit_resumes, source=source, stage=stage)
        for source, stage in ((0, 3), (3, 2), (1, 0), (2, 1))
    },
    "fit-last": functools.partial(fit_resumes, source=2, stage=3, ckpt="last"),
    "fit-universal": functools.partial(fit_resumes, source=3, stage=1, universal=True),
    "slurm": slurm_path,
    "evaluate-3-3": functools.partial(evaluate, source=3, stage=3),
    "evaluate-3-1": functools.partial(evaluate, source=3, stage=1),
    "evaluate-0-3": functools.partial(evaluate, source=0, stage=3),
    "best": best,
    **{
        f"stock-{source}-{stage}": functools.partial(stock_lightning, source=source, stage=stage)
        for source, stage in ((0, 1), (1, 3), (2, 0), (3, 2))
    },
    "plain-1": functools.partial(plain_deepspeed, stage=1),
    "plain-3": functools.partial(plain_deepspeed, stage=3),
    "own-classes": own_classes,
    **{
        f"damaged-{how}": functools.partial(damaged, how=how)
        for how in ("flipped", "cut off", "missing", "left over", "no checkpoint", "other model")
    },
    "without-frozen": without_frozen,
    "lenient-0": functools.partial(lenient, stage=0),
    "lenient-2": functools.partial(lenient, stage=2),
    "remote": remote,
    "walk": walk_resumes,
    "manifest": manifest,
}


def run(payload: dict[str, Any]) -> dict[str, Any]:
    only = payload.get("only") or list(CASES)
    return run_cases({name: CASES[name] for name in only}, payload["folder"])
