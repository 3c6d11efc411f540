"""Checkpoints of a GPT-like model, trained one step with DeepSpeed, and how the benchmarks of checkpoints time things.

``python benchmarks/gpt.py --stage 3 --out FOLDER`` is one rank of such a training; the benchmarks start it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from common import leave_group, quiet, rank_command, read_json, spawn_ranks, wait_for_ranks
from rig import start
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from lightning_zeroladder.engine.groups import use_cpu_accelerator, without_compiled_shm_op

__all__ = [
    "Gpt",
    "Process",
    "Quiet",
    "Shape",
    "ds_config",
    "files_below",
    "find_in_memory",
    "fresh",
    "room",
    "size_of",
    "start_gloo",
    "timed_process",
    "trained_checkpoint",
    "verdict",
]

_T = TypeVar("_T")
_TIMEOUT_S = 900.0
_TRAINING_RANKS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model: ``Shape()`` has 117.6 M parameters."""

    layers: int = 8
    width: int = 1024
    vocabulary: int = 8192

    @property
    def arguments(self) -> list[str]:
        """Command line of a script that uses :meth:`add_arguments`."""
        return ["--layers", str(self.layers), "--width", str(self.width), "--vocabulary", str(self.vocabulary)]

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add options for the shape."""
        shape = Shape()
        parser.add_argument("--layers", type=int, default=shape.layers)
        parser.add_argument("--width", type=int, default=shape.width)
        parser.add_argument("--vocabulary", type=int, default=shape.vocabulary)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Shape:
        """Return the shape that was asked for."""
        return cls(arguments.layers, arguments.width, arguments.vocabulary)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Embedding, pre-norm blocks, head; 117.6 M parameters in 100 tensors at the default shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape.width) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ds_config(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's config: bf16 at a stage."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }


def trained_checkpoint(folder: Path, stage: int, shape: Shape) -> Path:
    """Return a checkpoint of 4 ranks, bf16, AdamW, after one step; trains it unless the folder has it already."""
    target = folder / f"trained_stage_{stage}_{shape.layers}x{shape.width}x{shape.vocabulary}"
    if not (target / "latest").exists():
        partial = folder / f"{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        log = folder / "training.log"
        command = rank_command(__file__, "--stage", str(stage), "--out", str(partial), *shape.arguments)
        wait_for_ranks(spawn_ranks(command, _TRAINING_RANKS, log=log), _TIMEOUT_S, log)
        log.unlink()
        partial.rename(target)
    return target


def start_gloo() -> None:
    """Join the process group of this rank's job, on CPU."""
    import deepspeed

    use_cpu_accelerator()
    with without_compiled_shm_op():
        deepspeed.init_distributed("gloo")


def _train(stage: int, out: str, shape: Shape) -> None:
    import deepspeed

    quiet()
    start_gloo()
    model = Gpt(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(stage))
    tokens = torch.randint(0, shape.vocabulary, (1, 8))
    loss = cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(out, tag="step_1")
    leave_group()


# Folders --------------------------------------------------------------------------------------------------------


@contextmanager
def room(folder: Path | None, nbytes: int) -> Iterator[Path]:
    """Give a folder with some free space; one that was not asked for by name is removed at the end.

    Raises:
        SystemExit: If there is less space.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        free = shutil.disk_usage(place).free
        if free < nbytes:
            sys.exit(f"{place}: {free / 1e9:.1f} GB are free, {nbytes / 1e9:.1f} GB are needed. Give another --folder.")
        yield place


@contextmanager
def fresh(folder: Path) -> Iterator[Path]:
    """Give the name of a folder that does not exist, with nothing left to write to disk; removed at the end.

    Args:
        folder: Where it is to be; other runs can use the same.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        os.sync()
        yield Path(place, "converted")


def files_below(folder: Path) -> list[Path]:
    """Return all files."""
    return [path for path in folder.rglob("*") if path.is_file()]


def size_of(folder: Path) -> int:
    """Return the bytes of all files."""
    return sum(path.stat().st_size for path in files_below(folder))


def find_in_memory(folder: Path) -> None:
    """Read everything once, so that whoever reads it next finds it in the page cache."""
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


# Other programs -------------------------------------------------------------------------------------------------


class Quiet:
    """Measures while nothing else runs, as far as that can be had.

    A measurement waits for an idle machine, and is done again when other programs took more than a share of it
    meanwhile; the one with the least of them counts after some tries.

    Args:
        tries: Of each measurement.
        share: Of all cores, that others may take.
        patience_s: Longest time to wait for an idle machine.
    """

    def __init__(self, tries: int = 4, share: float = 0.1, patience_s: float = 60.0) -> None:
        self.measured = 0
        self.disturbed = 0
        self._tries, self._share, self._patience_s = tries, share, patience_s

    def __call__(self, measure: Callable[[], _T]) -> _T:
        """Return what ``measure`` returns."""
        found: list[tuple[float, _T]] = []
        while len(found) < self._tries:
            self._wait()
            before = _cpu()
            result = measure()
            found.append((_others(before, _cpu()), result))
            if found[-1][0] <= self._share:
                break
        others, result = min(found, key=lambda entry: entry[0])
        self.measured += 1
        self.disturbed += others > self._share
        return result

    def _wait(self) -> None:
        deadline_s = time.monotonic() + self._patience_s
        while time.monotonic() < deadline_s:
            before = _cpu()
            time.sleep(0.5)
            if _others(before, _cpu()) <= self._share:
                return

    def __str__(self) -> str:
        """Say how much of it was quiet."""
        return (
            f"{self.disturbed} of {self.measured} measurements were disturbed: other programs took more than "
            f"{100 * self._share:.0f} % of the cores in each of {self._tries} tries"
        )


def _cpu() -> tuple[float, float, float]:
    """Return seconds of all cores: in total, idle, and used by this process and those that it waited for."""
    every = psutil.cpu_times()
    own = os.times()
    total = sum(getattr(every, name) for name in every._fields if name not in ("guest", "guest_nice"))
    idle = every.idle + getattr(every, "iowait", 0.0)
    return total, idle, own.user + own.system + own.children_user + own.children_system


def _others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Return the share of the cores that others took between two moments."""
    total, idle, own = (late - early for early, late in zip(before, after, strict=True))
    return (total - idle - own) / total if total else 0.0


# Processes ------------------------------------------------------------------------------------------------------

# A program between: what a process is said to have used at most includes what its parent had when it started it.
_LAUNCHER = """
import json, os, subprocess, sys, time
started_s = time.perf_counter()
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
wall_s = time.perf_counter() - started_s
with open(sys.argv[1], "w") as file:
    json.dump({"wall_s": wall_s, "peak_bytes": usage.ru_maxrss * 1024, "code": os.waitstatus_to_exitcode(status)}, file)
"""


_NOT_INHERITED = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Process:
    """A process that ended.

    Attributes:
        wall_s: From its start to its end.
        peak_bytes: Most resident memory of the largest of it and its children.
    """

    wall_s: float
    peak_bytes: int


def timed_process(command: Sequence[str], *, env: dict[str, str] | None = None) -> Process:
    """Run a command and measure it.

    Python keeps the bytecode that it compiles, as it does for installed packages, and torch uses as many threads as it
    does in a shell, whatever this process's environment says.

    Raises:
        RuntimeError: If it failed, with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder, "log"), Path(folder, "result.json")
        launcher = [sys.executable, "-S", "-E", "-c", _LAUNCHER, str(result), *command]
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        wait_for_ranks([start(launcher, {**inherited, **(env or {})}, log)], _TIMEOUT_S, log)
        measured = read_json(result)
        if measured["code"]:
            tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise RuntimeError(f"{' '.join(command)} ended with {measured['code']}\n{tail}")
        return Process(measured["wall_s"], measured["peak_bytes"])


def verdict(value: float, goal: float, *, at_least: bool = False) -> str:
    """Say whether a goal is met."""
    met = value >= goal if at_least else value <= goal
    return f"goal {'at least' if at_least else 'at most'} {goal:g}: {'met' if met else 'missed'}"


def main() -> None:
    """Train one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--out", required=True)
    Shape.add_arguments(parser)
    arguments = parser.parse_args()
    _train(arguments.stage, arguments.out, Shape.of(arguments))


if __name__ == "__main__":
    main()
