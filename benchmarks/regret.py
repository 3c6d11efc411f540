"""How much speed the ladder's choice gives away, and what it gains over Lightning's default stage, on two hosts.

What is measured, on the rig of ``rig.py`` (two hosts, one rank each) with links of 100 and 800 Mbit/s and without
limit, and with k = 1 and 8 micro-batches per step (4.2 M parameters, fp32):

- every stage 0, 1, 2, 3 one by one, as a run of that stage alone, in rounds of alternating direction (0 1 2 3, 3 2 1 0,
  ...) before and after the ladder, so that slow drift of the machine meets all stages alike;
- one run with ``zero_auto`` as a user has it (it skips and stops early as it sees fit), for the stage it commits to.

Regret is the rate (samples/s of all ranks) of the committed stage in those long runs over the rate of the best stage in
them: 1 where the ladder chose the best. Goal 0.995 in each setting, floor 0.98. The speed-up is the rate of the
committed stage over that of stage 2, Lightning's default. For information: the rate of the ladder's own run after its
commit over the rate of that stage in the long runs.

A stage counts the steps it is asked for (``--steps``), fewer where a step is so slow that they would take longer than
``--budget-s``, but never fewer than ``--min-steps``; the table shows how many. Behind a slow link most of a step is
waiting for the link, and few steps tell its length.

How: ``python benchmarks/regret.py [--rates 100 800 0] [--accumulate 1 8]`` (0: no limit). Needs: root, iproute2, two
idle cores. Duration: 2 to 15 minutes per setting, about 45 for all six; the slow ones are those of 100 Mbit/s.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
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
    trainer_for,
    write_json,
)
from rig import clean_up_on_sigterm, missing_requirement, probe_mbit, run_on, two_hosts
from typing_extensions import override

from lightning_zeroladder import ZeroAutoStrategy

_STAGES = (0, 1, 2, 3)
_DEFAULT_STAGE = 2
_GOAL, _FLOOR = 0.995, 0.98
_TIMEOUT_S = 7200.0
_HOSTS = 2


@dataclass(frozen=True, slots=True)
class Result:
    """What one setting gave.

    Attributes:
        rate: Mbit/s of the link, 0 for no limit.
        accumulate: Micro-batches per step.
        chosen: Stage that the ladder committed to.
        walk_s: Wall time of its walk.
        live_s: Median step of the ladder's run after its commit.
        step_s: Median step of each stage in its long runs.
        counts: Steps counted for each stage.
    """

    rate: float
    accumulate: int
    chosen: int
    walk_s: float
    live_s: float
    step_s: Mapping[int, float]
    counts: Mapping[int, int]

    @property
    def best(self) -> int:
        """The fastest stage of the long runs."""
        return min(self.step_s, key=lambda stage: self.step_s[stage])

    @property
    def regret(self) -> float:
        """Rate of the committed stage over the best one's."""
        return self.step_s[self.best] / self.step_s[self.chosen]

    @property
    def speed_up(self) -> float:
        """Rate of the committed stage over stage 2's."""
        return self.step_s[_DEFAULT_STAGE] / self.step_s[self.chosen]


class _Until(StepTimes):
    """Ends a run after enough steps, decided by rank 0 for both.

    Args:
        accumulate: Micro-batches per step.
        steps: Steps to count.
        min_steps: Never fewer than these.
        budget_s: Count no longer than this.
        dropped: Steps at the start that are not counted.
    """

    def __init__(self, accumulate: int, *, steps: int, min_steps: int, budget_s: float, dropped: int) -> None:
        super().__init__(accumulate)
        self.walk_s = 0.0
        self._steps, self._min_steps, self._budget_s, self._dropped = steps, min_steps, budget_s, dropped
        self._since_s = time.perf_counter()

    @property
    def counted(self) -> list[float]:
        """Seconds of the counted steps."""
        return self.seconds[self._dropped :]

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not ladder_is_over(trainer):
            self.walk_s = time.perf_counter() - self._since_s
            return
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if (batch_idx + 1) % self._accumulate == 0:
            trainer.should_stop = trainer.strategy.broadcast(self._is_enough())

    def _is_enough(self) -> bool:
        enough = len(self.counted) >= self._min_steps and sum(self.counted) >= self._budget_s
        return enough or len(self.counted) >= self._steps


def measure_worker(arguments: argparse.Namespace) -> None:
    """One rank: rounds of single stages, the ladder's run between them; rank 0 writes the steps."""
    quiet()
    folder = Path(arguments.worker)
    (accumulate,) = arguments.accumulate
    before = arguments.rounds // 2
    stages: dict[int, list[float]] = {stage: [] for stage in _STAGES}
    for index in range(before):
        _measure_stages(arguments, folder, stages, index, accumulate)
    auto = ZeroAutoStrategy(
        steps_per_rung=arguments.steps_per_rung,
        warmup_steps=arguments.warmup_steps,
        logging_batch_size_per_gpu=arguments.rows,
        run_dir=folder / "ladder",
    )
    live = _fit(auto, arguments, folder, accumulate, arguments.rounds)
    assert auto.rung is not None
    chosen = auto.rung.stage
    for index in range(before, arguments.rounds):
        _measure_stages(arguments, folder, stages, index, accumulate)
    if torch.distributed.get_rank() == 0:
        write_json(
            folder / "stages.json",
            {"chosen": chosen, "walk_s": live.walk_s, "live": live.counted, "stages": stages},
        )
    leave_group()


def _measure_stages(
    arguments: argparse.Namespace, folder: Path, into: dict[int, list[float]], index: int, accumulate: int
) -> None:
    for stage in _STAGES if index % 2 == 0 else _STAGES[::-1]:
        strategy = ZeroAutoStrategy(stages=(stage,), logging_batch_size_per_gpu=arguments.rows)
        into[stage] += _fit(strategy, arguments, folder, accumulate, arguments.rounds).counted


def _fit(
    strategy: ZeroAutoStrategy, arguments: argparse.Namespace, folder: Path, accumulate: int, rounds: int
) -> _Until:
    times = _Until(
        accumulate,
        steps=-(-arguments.steps // rounds),
        min_steps=-(-arguments.min_steps // rounds),
        budget_s=arguments.budget_s / rounds,
        dropped=arguments.dropped_steps,
    )
    trainer = trainer_for(
        strategy, folder, nodes=_HOSTS, devices=1, accumulate_grad_batches=accumulate, callbacks=[times]
    )
    trainer.fit(Blocks(arguments.width, arguments.depth), noise(arguments.rows, arguments.width))
    return times


def measure(rate: float, accumulate: int, arguments: argparse.Namespace) -> Result:
    """Measure one setting in fresh processes on a fresh rig."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(rate or None) as hosts:
        print(f"{_link(rate)}, k = {accumulate}: sockets see {probe_mbit(hosts):.0f} Mbit/s", flush=True)
        command = rank_command(__file__, "--worker", folder, "--accumulate", str(accumulate), *_passed_on(arguments))
        log = None if arguments.verbose else Path(folder, "log")
        code = run_on(hosts, command, timeout_s=_TIMEOUT_S, log=log)
        if code:
            tail = log.read_text(encoding="utf-8", errors="replace")[-3000:] if log is not None else ""
            raise RuntimeError(f"a rank ended with status {code}\n{tail}")
        measured = read_json(Path(folder, "stages.json"))
    steps = {int(stage): seconds for stage, seconds in measured["stages"].items()}
    return Result(
        rate,
        accumulate,
        measured["chosen"],
        measured["walk_s"],
        median(measured["live"]),
        {stage: median(seconds) for stage, seconds in steps.items()},
        {stage: len(seconds) for stage, seconds in steps.items()},
    )


def _link(rate: float) -> str:
    return f"{rate:g} Mbit/s" if rate else "no limit"


def _passed_on(arguments: argparse.Namespace) -> list[str]:
    names = ["steps", "min_steps", "budget_s", "dropped_steps", "rounds", "steps_per_rung", "warmup_steps"]
    names += ["width", "depth", "rows"]
    return [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]


def _row(result: Result) -> str:
    steps = " | ".join(f"{1e3 * result.step_s[stage]:.0f} ({result.counts[stage]})" for stage in _STAGES)
    verdict = "goal met" if result.regret >= _GOAL else "floor met" if result.regret >= _FLOOR else "floor missed"
    live = result.step_s[result.chosen] / result.live_s
    return (
        f"| {_link(result.rate)} | {result.accumulate} | {steps} | {result.best} | {result.chosen} | "
        f"{result.regret:.4f} | {verdict} | {result.speed_up:.2f} | {live:.3f} | {result.walk_s:.0f} |"
    )


_TABLE_HEAD = (
    "| link | k | stage 0 ms (steps) | stage 1 | stage 2 | stage 3 | best | committed | committed / best | "
    f"goal {_GOAL}, floor {_FLOOR} | speed-up over stage {_DEFAULT_STAGE} | live / long run | walk s |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def compare(arguments: argparse.Namespace) -> None:
    """Measure every setting and print the table."""
    print(heading("Regret of the ladder's choice, and its gain over the default stage, on two hosts"), flush=True)
    results = []
    for accumulate in arguments.accumulate:
        for rate in arguments.rates:
            results.append(measure(rate, accumulate, arguments))
            print(_row(results[-1]), flush=True)
    print("\n".join(["", _TABLE_HEAD, *(_row(result) for result in results), ""]))
    rows = arguments.rows
    print(f"samples/s of the committed stage: {', '.join(_rate_of(result, rows) for result in results)}")
    print(f"worst committed / best: {min(result.regret for result in results):.4f}; goal {_GOAL}, floor {_FLOOR}")


def _rate_of(result: Result, rows: int) -> str:
    rate = _HOSTS * rows * result.accumulate / result.step_s[result.chosen]
    return f"{rate:.0f} ({_link(result.rate)}, k = {result.accumulate})"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Committed rung over the best of all stages, on two hosts.")
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 800.0, 0.0], help="Mbit/s; 0: no limit")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=4, help="in which each stage is measured once")
    parser.add_argument("--steps", type=int, default=60, help="counted per stage, over all rounds")
    parser.add_argument("--min-steps", type=int, default=8, help="counted per stage however slow they are")
    parser.add_argument("--budget-s", type=float, default=60.0, help="seconds per stage, over all rounds")
    parser.add_argument("--dropped-steps", type=int, default=2, help="steps at the start of a run not counted")
    parser.add_argument("--steps-per-rung", type=int, default=200, help="of the ladder")
    parser.add_argument("--warmup-steps", type=int, default=20, help="of the ladder")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64, help="rows per micro-batch and rank")
    parser.add_argument("--verbose", action="store_true", help="let through what the ladder prints")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure_worker(arguments)
        return 0
    lacking = missing_requirement()
    if lacking:
        parser.error(lacking)
    clean_up_on_sigterm()
    compare(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
