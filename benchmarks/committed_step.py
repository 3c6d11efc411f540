"""What a committed ``zero_auto`` step costs, against a step of Lightning's ``DeepSpeedStrategy(stage=N)``.

What is measured: seconds per optimizer step of two runs that live in the same processes and take turns. One is a
``zero_auto`` run that has walked its ladder, has no ladder callback left and trains at stage N (where the ladder chose
another stage, its state is moved to N first). The peer is ``DeepSpeedStrategy(stage=N)``, on CPU with its refusals of
CPU lifted and nothing else changed. Both have the same model, data and Trainer, and a callback outside of both
strategies takes the times.

How: each run has a thread, and a turnstile lets exactly one of them on, for a block of steps in the order A B B A,
B A A B, ...; the other is blocked and computes nothing. The first steps of a block are dropped. Half of the rounds run
in processes that built the zero_auto run first, half in processes that built the plain one first, because the place in
memory alone can make a difference.

A round's ratio is the median step of its zero_auto blocks over that of its plain blocks, so slow drift of the machine
cancels. The result is the median over rounds with a 95 % bootstrap interval, beside the ratios of the medians and of
the 10th percentiles of all steps (the least disturbed ones). ``--null`` puts a second plain run in zero_auto's place:
its ratio is what this benchmark shows where there is no difference.

Goal: 1.003, floor 1.01. How: ``python benchmarks/committed_step.py [--stages 1 2 3] [--null]``. Needs: two idle cores
(or two GPUs). Duration: about 4 minutes per stage.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import lightning.pytorch as pl
import torch
from common import (
    Blocks,
    PlainDeepSpeed,
    bootstrap_interval,
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
from lightning.pytorch.strategies import DeepSpeedStrategy
from rig import clean_up_on_sigterm
from typing_extensions import override

from lightning_zeroladder import ZeroAutoStrategy
from lightning_zeroladder.ladder import Rung

_AUTO, _PLAIN = "zero_auto", "plain"
_GOAL, _FLOOR = 1.003, 1.01
_TIMEOUT_S = 1800.0


class Turnstile:
    """Lets one run on at a time, in a given order of turns."""

    def __init__(self, order: Sequence[str]) -> None:
        self._order = deque(order)
        self._changed = threading.Condition()
        self._broken = False

    def wait(self, name: str) -> None:
        """Block until it is this run's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._order[0] == name)
            if self._broken:
                raise RuntimeError("the other run failed")

    def pass_on(self) -> None:
        """End the current turn."""
        with self._changed:
            self._order.popleft()
            self._changed.notify_all()

    def break_off(self) -> None:
        """Let everybody go because a run failed."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class Turns(pl.Callback):
    """Runs a Trainer turn by turn and keeps the seconds of each block's steps.

    Args:
        name: Name of the run at the turnstile.
        turnstile: Shared by the runs of this process.
        blocks: Number of measured turns.
        steps: Counted steps per block.
        dropped: Steps at the start of each block that are not counted.
        is_ready: Whether the run is in the state that is to be measured; asked after each step of its first turn.
    """

    def __init__(
        self,
        name: str,
        turnstile: Turnstile,
        *,
        blocks: int,
        steps: int,
        dropped: int,
        is_ready: Callable[[pl.Trainer], bool],
    ) -> None:
        self.blocks: list[list[float]] = []
        self._name, self._turnstile, self._is_ready = name, turnstile, is_ready
        self._total_blocks, self._steps, self._dropped = blocks, steps, dropped
        self._marks: list[Any] | None = None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._marks is None:
            if batch_idx >= self._dropped and self._is_ready(trainer):
                self._next_turn(trainer)
            return
        self._marks.append(_mark())
        if len(self._marks) <= self._dropped + self._steps:
            return
        self.blocks.append(_seconds_between(self._marks)[self._dropped :])
        self._next_turn(trainer)

    def _next_turn(self, trainer: pl.Trainer) -> None:
        self._turnstile.pass_on()
        self._turnstile.wait(self._name)
        self._marks = [_mark()]
        trainer.should_stop = len(self.blocks) == self._total_blocks


class MoveTo(pl.Callback):
    """Moves a committed run to a stage once its ladder is over."""

    def __init__(self, stage: int) -> None:
        self._rung = Rung(stage)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ZeroAutoStrategy)
        if ladder_is_over(trainer) and strategy.rung != self._rung:
            strategy.move_to(self._rung)


def _mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds_between(marks: Sequence[Any]) -> list[float]:
    pairs = list(pairwise(marks))
    if isinstance(marks[0], float):
        return [end - start for start, end in pairs]
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def turn_order(rounds: int, first: str) -> list[str]:
    """One turn each to get ready, then A B B A, B A A B, ... for ``rounds``, then one turn each to end."""
    ends = [first, _PLAIN if first == _AUTO else _AUTO]
    order = list(ends)
    for index in range(rounds):
        one, other = ends if index % 2 == 0 else ends[::-1]
        order += [one, other, other, one]
    return [*order, *ends]


def measure_worker(arguments: argparse.Namespace) -> None:
    """One rank: both runs, by turns; rank 0 writes the seconds of every block."""
    quiet()
    folder = Path(arguments.worker)
    turnstile = Turnstile(turn_order(arguments.rounds, arguments.first))
    common = {"logging_batch_size_per_gpu": arguments.rows}
    (stage,) = arguments.stages

    def is_committed(trainer: pl.Trainer) -> bool:
        strategy = trainer.strategy
        if isinstance(strategy, ZeroAutoStrategy):
            return ladder_is_over(trainer) and strategy.rung == Rung(stage)
        return True

    def turns(name: str) -> Turns:
        return Turns(
            name,
            turnstile,
            blocks=2 * arguments.rounds,
            steps=arguments.block_steps,
            dropped=arguments.dropped_steps,
            is_ready=is_committed,
        )

    def fit(strategy: DeepSpeedStrategy, callbacks: list[pl.Callback], name: str) -> None:
        try:
            turnstile.wait(name)
            trainer = trainer_for(strategy, folder, nodes=1, devices=2, callbacks=callbacks)
            trainer.fit(Blocks(arguments.width, arguments.depth), noise(arguments.rows, arguments.width))
            turnstile.pass_on()
        except BaseException:
            traceback.print_exc()
            turnstile.break_off()
            failed.append(name)

    failed: list[str] = []
    timed = {name: turns(name) for name in (_AUTO, _PLAIN)}
    if arguments.null:
        auto: tuple[DeepSpeedStrategy, list[pl.Callback]] = (PlainDeepSpeed(stage=stage, **common), [])
    else:
        ladder = ZeroAutoStrategy(
            steps_per_rung=arguments.steps_per_rung, warmup_steps=3, run_dir=folder / "ladder", **common
        )
        auto = (ladder, [MoveTo(stage)])
    runs = {_AUTO: auto, _PLAIN: (PlainDeepSpeed(stage=stage, **common), [])}
    threads = [
        threading.Thread(target=fit, args=(strategy, [*callbacks, timed[name]], name), name=name)
        for name, (strategy, callbacks) in runs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        os._exit(1)  # an orderly exit would wait for peers that are not coming
    if os.environ["RANK"] == "0":
        write_json(folder / "blocks.json", {name: turns.blocks for name, turns in timed.items()})
    leave_group()


def compare(arguments: argparse.Namespace) -> None:
    """Measure each stage and print the ratios."""
    kind = "a second plain run (null)" if arguments.null else "committed zero_auto"
    print(heading(f"A step of {kind} over a step of DeepSpeedStrategy(stage=N)"), flush=True)
    for stage in arguments.stages:
        halves = [_measure(stage, first, arguments) for first in (_AUTO, _PLAIN)]
        auto, plain = (halves[0][name] + halves[1][name] for name in (_AUTO, _PLAIN))
        _print_stage(stage, auto, plain)


def _measure(stage: int, first: str, arguments: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Seconds of every block of both runs, in fresh processes that build the run ``first`` first."""
    with tempfile.TemporaryDirectory() as folder:
        command = rank_command(__file__, "--worker", folder, "--stages", str(stage), "--first", first)
        log = None if arguments.verbose else Path(folder, "log")
        wait_for_ranks(spawn_ranks([*command, *_passed_on(arguments)], 2, log=log), _TIMEOUT_S, log)
        blocks: dict[str, list[list[float]]] = read_json(Path(folder, "blocks.json"))
    return blocks


def _print_stage(stage: int, auto: list[list[float]], plain: list[list[float]]) -> None:
    rounds = range(0, len(auto), 2)
    ratios = [median(auto[i] + auto[i + 1]) / median(plain[i] + plain[i + 1]) for i in rounds]
    low, high = bootstrap_interval(ratios)
    auto_all, plain_all = ([step for block in blocks for step in block] for blocks in (auto, plain))
    auto_s, plain_s = median(auto_all), median(plain_all)
    fast_ratio = quantiles(auto_all, n=10)[0] / quantiles(plain_all, n=10)[0]
    ratio = median(ratios)
    verdict = "goal met" if ratio <= _GOAL else "floor met, goal missed" if ratio <= _FLOOR else "floor missed"
    if low <= _FLOOR < high:
        verdict += " (but the interval reaches across the floor: run longer or on a quieter machine)"
    print(
        f"stage {stage}: {1e3 * auto_s:.2f} ms / {1e3 * plain_s:.2f} ms; ratio {ratio:.4f} "
        f"(95 % {low:.4f} to {high:.4f}, {len(ratios)} rounds), of all steps {auto_s / plain_s:.4f}, "
        f"of the 10th percentiles {fast_ratio:.4f}; "
        f"goal {_GOAL}, floor {_FLOOR}: {verdict}",
        flush=True,
    )


def _passed_on(arguments: argparse.Namespace) -> list[str]:
    names = ("rounds", "block_steps", "dropped_steps", "steps_per_rung", "width", "depth", "rows")
    passed = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
    return [*passed, "--null"] if arguments.null else passed


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="A committed zero_auto step over a DeepSpeedStrategy step.")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], choices=(1, 2, 3))
    parser.add_argument("--rounds", type=int, default=20, help="of four blocks each, in each half")
    parser.add_argument("--block-steps", type=int, default=8, help="counted steps per block")
    parser.add_argument("--dropped-steps", type=int, default=2, help="steps at the start of a block not counted")
    parser.add_argument("--steps-per-rung", type=int, default=20, help="of the ladder that runs first")
    parser.add_argument("--null", action="store_true", help="compare two plain runs: the noise of this benchmark")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64, help="rows per batch and rank")
    parser.add_argument("--verbose", action="store_true", help="let through what the ladder prints")
    parser.add_argument("--first", default=_AUTO, help=argparse.SUPPRESS)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure_worker(arguments)
    else:
        clean_up_on_sigterm()
        compare(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
