"""What walking the ladder costs, against one process relaunch per stage, and against DeepSpeed's autotuner.

What is measured (10.5 M parameters, 2 ranks):

- ours: wall time from the first step of the run to the commit (all trials, moves and the report), minus the same number
  of steps at the committed stage. It is what the run would have saved had it known the stage from the start.
- peer: wall time of one fresh job per stage 0, 1, 2, 3 that trains a single step. It is what anyone pays at least who
  finds the stage by starting jobs, as DeepSpeed's autotuner does. The peer is a script without Lightning, started
  without a launcher, after one start that is not counted (DeepSpeed compiles an op on its first).

The ratio ours / peer is printed per repeat and as a median. Goal: 0.1.

With ``--autotuner`` each repeat also runs DeepSpeed's autotuner itself on the same model (about 90 s each), and the
truly fastest stage is found by long runs of every stage before and after the repeats. Printed: wall times, and how
often the ladder and the autotuner chose that stage.

How: ``python benchmarks/walk_cost.py [--repeats 10] [--autotuner]``. Needs: two idle cores; for ``--autotuner`` the
package tabulate. Duration: 1 to 4 minutes per repeat (noisy steps make longer trials), 2 more with the autotuner, plus
3 for the long runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
from common import (
    Blocks,
    StepTimes,
    heading,
    ladder_is_over,
    leave_group,
    noise,
    quiet,
    rank_command,
    read_json,
    spawn_ranks,
    trainer_for,
    wait_for_ranks,
    write_json,
)
from rig import clean_up_on_sigterm
from typing_extensions import override

from lightning_zeroladder import ZeroAutoStrategy

_STAGES = (0, 1, 2, 3)
_GOAL = 0.1
_PEER = str(Path(__file__).with_name("peer_train.py"))
_TIMEOUT_S = 900.0
_AUTOTUNING = {
    "train_micro_batch_size_per_gpu": [4],
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": "all"},
    "autotuning": {"enabled": True},
}


@dataclass(frozen=True, slots=True)
class Walk:
    """One run of the ladder.

    Attributes:
        stage: Committed stage.
        steps: Optimizer steps until the commit.
        wall_s: Wall time until the commit.
        committed_step_s: Median step after it.
        moves_s: The part of ``wall_s`` that moving the state took.
    """

    stage: int
    steps: int
    wall_s: float
    committed_step_s: float
    moves_s: float

    @property
    def cost_s(self) -> float:
        """What the run would have saved had it known the stage."""
        return self.wall_s - self.steps * self.committed_step_s


class _WalkClock(pl.Callback):
    """Times the walk from outside: from the first batch to the batch that starts without a ladder."""

    def __init__(self, committed_steps: int) -> None:
        self.committed = StepTimes()
        self.steps = 0
        self.wall_s: float | None = None
        self._started_s: float | None = None
        self._committed_steps = committed_steps

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._started_s is None:
            self._started_s = time.perf_counter()
        if self.wall_s is None and ladder_is_over(trainer):
            self.wall_s = time.perf_counter() - self._started_s
            self.steps = batch_idx

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.wall_s is None:
            return
        self.committed.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        trainer.should_stop = len(self.committed.seconds) >= self._committed_steps


def walk_worker(arguments: argparse.Namespace) -> None:
    """One rank of a run of the ladder; rank 0 writes what it took."""
    quiet()
    folder = Path(arguments.worker)
    strategy = ZeroAutoStrategy(
        steps_per_rung=arguments.steps_per_rung,
        warmup_steps=arguments.warmup_steps,
        logging_batch_size_per_gpu=arguments.samples,
        run_dir=folder / "ladder",
    )
    clock = _WalkClock(arguments.committed_steps)
    trainer = trainer_for(strategy, folder, nodes=1, devices=2, callbacks=[clock])
    trainer.fit(Blocks(arguments.width, arguments.depth), noise(arguments.samples * arguments.rows, arguments.width))
    assert clock.wall_s is not None
    assert strategy.rung is not None
    if trainer.is_global_zero:
        moves_s = sum(move.seconds for move in strategy.moves)
        median_s = median(clock.committed.seconds)
        write_json(folder / "walk.json", [strategy.rung.stage, clock.steps, clock.wall_s, median_s, moves_s])
    leave_group()


def walk(arguments: argparse.Namespace) -> Walk:
    """Run the ladder once in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = rank_command(__file__, "--worker", folder, *_shape(arguments))
        command += ["--steps-per-rung", str(arguments.steps_per_rung), "--warmup-steps", str(arguments.warmup_steps)]
        command += ["--committed-steps", str(arguments.committed_steps)]
        log = None if arguments.verbose else Path(folder, "log")
        wait_for_ranks(spawn_ranks(command, 2, log=log), _TIMEOUT_S, log)
        return Walk(*read_json(Path(folder, "walk.json")))


def relaunch_s(stage: int, arguments: argparse.Namespace) -> float:
    """Wall time of a fresh job that trains one step."""
    started_s = time.perf_counter()
    _peer(stage, 1, arguments)
    return time.perf_counter() - started_s


def long_run_s(stage: int, arguments: argparse.Namespace) -> float:
    """Median step of a long plain DeepSpeed run at one stage."""
    return _peer(stage, arguments.long_steps, arguments)


def _peer(stage: int, steps: int, arguments: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "step_s")
        command = [sys.executable, _PEER, "--stage", str(stage), "--steps", str(steps), "--result", str(result)]
        log = Path(folder, "log")
        processes = spawn_ranks([*command, *_shape(arguments)], 2, env={"DS_ACCELERATOR": "cpu"}, log=log)
        wait_for_ranks(processes, _TIMEOUT_S, log)
        return float(result.read_text(encoding="utf-8"))


def autotune(arguments: argparse.Namespace) -> tuple[int, float]:
    """Run DeepSpeed's autotuner; returns the stage it recommends and its wall time."""
    launcher = shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if launcher is None:
        raise RuntimeError("the deepspeed launcher is not on PATH")
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder, "ds.json"), _AUTOTUNING)
        model = ["--width", str(arguments.width), "--depth", str(arguments.depth), "--rows", str(arguments.rows)]
        command = [sys.executable, launcher, "--autotuning", "tune", "--num_gpus", "2", _PEER, *model]
        environment = {**os.environ, "LOCAL_SIZE": "2", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        started_s = time.perf_counter()
        with Path(folder, "log").open("wb") as log:
            subprocess.run(
                [*command, "--deepspeed", "--deepspeed_config", "ds.json"],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=_TIMEOUT_S,
            )
        wall_s = time.perf_counter() - started_s
        best = Path(folder, "autotuning_results", "ds_config_optimal.json")
        if not best.exists():
            tail = Path(folder, "log").read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"the autotuner found nothing:\n{tail}")
        return int(read_json(best)["zero_optimization"]["stage"]), wall_s


def _shape(arguments: argparse.Namespace) -> list[str]:
    names = ("width", "depth", "rows", "samples")
    return [part for name in names for part in (f"--{name}", str(getattr(arguments, name)))]


def _say(text: str) -> None:
    print(text, flush=True)


def _print_truth(arguments: argparse.Namespace, steps_s: dict[int, list[float]], order: tuple[int, ...]) -> None:
    for stage in order:
        steps_s[stage].append(long_run_s(stage, arguments))
        _say(f"long run stage {stage}: {1e3 * steps_s[stage][-1]:.1f} ms per step")


def compare(arguments: argparse.Namespace) -> None:
    """Run everything and print the ratios."""
    _say(heading("The cost of the walk against one relaunch per stage"))
    relaunch_s(0, arguments)  # not counted: DeepSpeed compiles an op on its first start
    long_s: dict[int, list[float]] = {stage: [] for stage in _STAGES}
    if arguments.autotuner:
        _print_truth(arguments, long_s, _STAGES)
    ratios: list[float] = []
    ours: list[int] = []
    tuned: list[tuple[int, float]] = []
    for repeat in range(1, arguments.repeats + 1):
        walked = walk(arguments)
        relaunched_s = [relaunch_s(stage, arguments) for stage in _STAGES]
        ours.append(walked.stage)
        ratios.append(walked.cost_s / sum(relaunched_s))
        _say(
            f"repeat {repeat}: walk {walked.wall_s:.2f} s in {walked.steps} steps (moves {walked.moves_s:.2f} s) - "
            f"{walked.steps} x {1e3 * walked.committed_step_s:.1f} ms at stage {walked.stage} = {walked.cost_s:.2f} s; "
            f"relaunches {' + '.join(f'{value:.2f}' for value in relaunched_s)} = {sum(relaunched_s):.2f} s; "
            f"ratio {ratios[-1]:.3f}"
        )
        if arguments.autotuner:
            tuned.append(autotune(arguments))
            _say(f"repeat {repeat}: autotuner {tuned[-1][1]:.1f} s, chose stage {tuned[-1][0]}")
            _say(f"repeat {repeat}: walk / autotuner {walked.cost_s / tuned[-1][1]:.3f}")
    verdict = "met" if median(ratios) <= _GOAL else "missed"
    _say(
        f"\nwalk / relaunches: median {median(ratios):.3f} (range {min(ratios):.3f} to {max(ratios):.3f}, "
        f"{len(ratios)} repeats); goal {_GOAL}: {verdict}"
    )
    if not arguments.autotuner:
        return
    _print_truth(arguments, long_s, _STAGES[::-1])
    medians = {stage: median(values) for stage, values in long_s.items()}
    fastest = min(medians, key=lambda stage: medians[stage])
    second = sorted(medians.values())[1]
    chosen = [stage for stage, _ in tuned]
    _say(f"truly fastest: stage {fastest}, by {100 * (second / medians[fastest] - 1):.1f} %")
    _say(f"chose it: ladder {ours.count(fastest)} of {len(ours)}, autotuner {chosen.count(fastest)} of {len(chosen)}")
    _say(f"autotuner: median {median(seconds for _, seconds in tuned):.1f} s")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Cost of the walk against one relaunch per stage.")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--autotuner", action="store_true", help="also run DeepSpeed's autotuner in each repeat")
    parser.add_argument("--steps-per-rung", type=int, default=200)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--committed-steps", type=int, default=60, help="steps timed after the commit")
    parser.add_argument("--long-steps", type=int, default=100, help="steps of a long run")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--rows", type=int, default=16, help="rows of one sample")
    parser.add_argument("--samples", type=int, default=4, help="samples per batch and rank")
    parser.add_argument("--verbose", action="store_true", help="let through what the ladder prints")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        walk_worker(arguments)
        return
    if arguments.autotuner and importlib.util.find_spec("tabulate") is None:
        parser.error("--autotuner needs the package tabulate: pip install tabulate")
    clean_up_on_sigterm()
    compare(arguments)


if __name__ == "__main__":
    main()
