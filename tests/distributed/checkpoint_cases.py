"""Worker side of test_checkpoint_matrix: save at some ranks, load at others, without Lightning."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import run_cases
from optimizer_cases import config, init_distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zeroladder.engine.digest import checksum
from lightning_zeroladder.engine.fragments import global_checksums
from lightning_zeroladder.engine.lifecycle import EngineSlot
from lightning_zeroladder.engine.restore import restore
from lightning_zeroladder.engine.save import SaveContext, save
from lightning_zeroladder.engine.shards import live_shards

STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16")
PAIRS = ((2, 1), (2, 4), (4, 2), (2, 3), (1, 4), (2, 2))
GLOBAL_BATCH = 12
"""Divides among 1, 2, 3 and 4 ranks, so that runs at any of them see the same global batch."""

STEPS = 3
TAG = "checkpoint"


class Varied(nn.Module):
    """Everything that makes dividing hard, in one model whose forward returns the loss.

    Sizes that no number of ranks divides, one element, tied, frozen and unused weights, large and small ones (stage 3
    keeps the small ones whole), buffers of two dtypes that training changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 31)
        self.norm = nn.BatchNorm1d(31)
        self.body = nn.Sequential(nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 31))
        self.again = self.body[2]
        self.head = nn.Linear(31, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(3, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.full((6,), 0.3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        self.seen += 1
        hidden = self.embed(x)
        # Normalized with what earlier batches left, so that a rank's result does not depend on its share of the batch.
        mean, variance = self.norm.running_mean, self.norm.running_var
        with torch.no_grad():
            # As a model that synchronizes its statistics: every rank has the same buffers.
            self.norm.running_mean.mul_(0.9).add_(0.01)
            self.norm.running_var.mul_(0.99)
            self.norm.num_batches_tracked += 1
        hidden = (hidden - mean.to(hidden)) / (variance.to(hidden) + 1e-5).sqrt() * self.norm.weight + self.norm.bias
        hidden = self.body(hidden) + self.again(torch.relu(self.body[0](hidden)))
        out = self.head(hidden).float() * self.scale + self.frozen.weight.sum().float()
        return ((out - target.float()) ** 2).mean()


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in module.parameters() if param.requires_grad]
    large = [param for param in trained if param.dim() > 1]
    small = [param for param in trained if param.dim() < 2]
    return [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 2e-3, "weight_decay": 0.0}]


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(groups_of(module), lr=3e-3, eps=1e-4)


def batch_of(step: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Return this rank's share of a global batch that depends on the step alone."""
    x = torch.randn(GLOBAL_BATCH, 7, generator=torch.Generator().manual_seed(900 + step))
    mine = x[dist.get_rank() :: dist.get_world_size()]
    target = torch.sin(mine[:, :1])
    return (mine.bfloat16() if dtype == "bf16" else mine), target


class Job:
    """A module in training."""

    def __init__(
        self,
        stage: int,
        dtype: str,
        *,
        seed: int,
        make: Callable[[nn.Module], Optimizer] = adamw,
        model: Callable[[], nn.Module] = Varied,
        **zero: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.dtype = dtype
        self.module = model()
        if dtype == "bf16":
            self.module.bfloat16()
        self.slot = EngineSlot(self.module, make(self.module))
        self.engine = self.slot.build(functools.partial(self._build, stage, zero))

    def _build(self, stage: int, zero: dict[str, Any], optimizer: Optimizer | None) -> Any:
        import deepspeed

        made = config(stage, self.dtype)
        made["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, **zero}
        engine, *_ = deepspeed.initialize(
            config=made,
            model=self.module,
            model_parameters=[param for param in self.module.parameters() if param.requires_grad],
            optimizer=optimizer,
            dist_init_required=False,
        )
        return engine

    def train(self, first: int, steps: int) -> list[float]:
        """Take steps; return the loss of each over the global batch."""
        losses = []
        for step in range(first, first + steps):
            loss = self.engine(batch_of(step, self.dtype))
            self.engine.backward(loss)
            self.engine.step()
            mean = loss.detach().double()
            dist.all_reduce(mean)
            losses.append(float(mean / dist.get_world_size()))
        return losses

    def save(self, folder: Path, *, universal: bool = False, client_state: dict[str, Any] | None = None) -> None:
        def write(target: Path) -> None:
            self.engine.save_checkpoint(str(target), tag=TAG, client_state=client_state or {"note": [1, 2.5, "three"]})

        context = SaveContext("32-true" if self.dtype == "fp32" else "bf16-true", dist.get_rank())
        save(self.engine, self.slot.client, folder, write, context, tag=TAG, universal=universal)

    def load(self, folder: Path, **options: Any) -> Any:
        return restore(self.engine, self.slot.client, folder, **options)

    def digest(self) -> dict[str, Any]:
        """Return what the whole state is, the same on every rank and at every stage."""
        sums: dict[str, Any] = dict(global_checksums(self.engine))
        for name, buffer in self.module.named_buffers():
            sums[f"{name}/buffer"] = int(checksum(buffer.view(-1), 0))
        for shard in live_shards(self.engine):
            for key, value in self.engine.basic_optimizer.state.get(shard.owner, {}).items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    sums[f"{shard.name}/{key}"] = float(value) if value is not None else None
        for index, group in enumerate(self.slot.client.groups):
            sums[f"group {index}"] = [group["lr"], group.get("weight_decay")]
        for name in ("global_steps", "global_samples", "skipped_steps"):
            sums[name] = getattr(self.engine, name)
        return sums

    def close(self) -> None:
        self.engine = None
        self.slot.take_down()


def _name(dtype: str, stage: int) -> str:
    return f"{dtype}-{stage}"


def save_one(folder: Path, *, stage: int, dtype: str, root: str) -> Any:
    """Train, save, note the digest, and go on as if nothing had happened."""
    job = Job(stage, dtype, seed=1)
    before = job.train(0, STEPS)
    digest = job.digest()
    place = Path(root) / f"n{dist.get_world_size()}" / _name(dtype, stage)
    job.save(place, universal=stage in (0, 3))
    data = {"digest": digest, "before": before, "after": job.train(STEPS, STEPS), "digest_after_saving": digest}
    if dist.get_rank() == 0:
        (place.parent / f"{place.name}.json").write_text(json.dumps(data))
    job.close()
    return data


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return sorted(key for key in ours.keys() | theirs.keys() if ours.get(key, ()) != theirs.get(key, ()))


def load_one(folder: Path, *, ranks: int, source: int, stage: int, dtype: str, root: str) -> Any:
    """Load into a job that began with other weights; return both digests and both futures."""
    place = Path(root) / f"n{ranks}" / _name(dtype, source)
    saved = json.loads((place.parent / f"{place.name}.json").read_text())
    job = Job(stage, dtype, seed=2)
    restored = job.load(place)
    digest = job.digest()
    data = {
        "differs": sorted(
            key for key in digest.keys() | saved["digest"].keys() if digest.get(key) != saved["digest"].get(key)
        ),
        "keys": len(digest),
        "expected": saved["after"],
        "losses": job.train(STEPS, STEPS),
        "client": restored.client["note"],
    }
    job.close()
    return data


def save_cases(root: str) -> dict[str, Callable[[Path], Any]]:
    return {
        _name(dtype, stage): functools.partial(save_one, stage=stage, dtype=dtype, root=root)
        for dtype in DTYPES
        for stage in STAGES
    }


def load_cases(root: str, ranks: int) -> dict[str, Callable[[Path], Any]]:
    return {
        f"{origin}-{dtype}-{source}-{stage}": functools.partial(
            load_one, ranks=origin, source=source, stage=stage, dtype=dtype, root=root
        )
        for origin, now in PAIRS
        if now == ranks
        for dtype in DTYPES
        for source in STAGES
        for stage in STAGES
    }


def run(payload: dict[str, Any]) -> dict[str, Any]:
    init_distributed()
    root, ranks = payload["root"], dist.get_world_size()
    cases = save_cases(root) if payload["phase"] == "save" else load_cases(root, ranks)
    only = payload.get("only") or list(cases)
    return run_cases({name: cases[name] for name in only}, payload["folder"])
