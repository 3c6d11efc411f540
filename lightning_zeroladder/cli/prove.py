"""``zeroladder prove``. The command itself does not load torch; the processes that it starts do."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_zeroladder.proving import OnStep, Proof, proof_to_json, prove

__all__ = ["run_prove"]

_LOG_WIDTH = 120
_ROWS = 30
"""Steps shown; of more than that, some in the middle are left out."""

_DESCRIPTION = """\
Do the round trip that one should do before the first long run, with your own job: train some steps, save, resume on
another number of devices at another ZeRO stage, and compare state and losses with those of an uninterrupted run.
Arguments that are not listed here go to LightningCLI, such as --model.init_args.width=64."""


def run_prove(args: list[str]) -> int:
    """Run ``zeroladder prove``; returns 0 when the round trip passed, 1 when it failed."""
    options, arguments = _parser().parse_known_args(args)
    with _ending_on_sigterm(), _shown() as progress:
        proof = prove(
            options.config,
            devices=options.devices,
            to_devices=options.to_devices,
            stage=options.stage,
            to_stage=options.to_stage,
            steps=options.steps,
            tolerance=options.tolerance,
            arguments=arguments,
            work_dir=options.work_dir,
            timeout_s=options.timeout,
            progress=progress,
        )
    if options.json:
        print(json.dumps(proof_to_json(proof), indent=2))
    else:
        _print(proof)
    return 0 if proof.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zeroladder prove", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("--config", type=Path, action="append", required=True, metavar="X.yaml", help="LightningCLI config of the job")
    add("--devices", type=int, default=2, metavar="N", help="devices that train and save (default: 2)")
    add("--to-devices", type=int, metavar="M", help="devices that resume (default: fewer, such as 1)")
    add("--stage", type=int, default=2, metavar="S", help="ZeRO stage at first (default: 2)")
    add("--to-stage", type=int, default=3, metavar="S", help="ZeRO stage after the resume (default: 3)")
    add("--steps", type=int, default=50, metavar="N", help="optimizer steps of the uninterrupted run (default: 50)")
    add("--tolerance", type=float, metavar="X", help="largest relative difference of a loss (1e-5, in bf16 2e-2)")
    add("--timeout", type=float, default=1800.0, metavar="SECONDS", help="longest time of one run (default: 1800)")
    add("--work-dir", type=Path, metavar="DIR", help="where the temporary folder is made (default: the system's)")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let a request to end be followed by taking the runs down and deleting the folder."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _shown() -> Iterator[OnStep]:
    """Show a bar for each run on a terminal, elsewhere a line."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    tasks = {}

    def update(title: str, done: int, total: int) -> None:
        if title not in tasks:
            if not console.is_terminal:
                print(f"prove: {title}, {total} steps", file=sys.stderr, flush=True)
            tasks[title] = bar.add_task(title, total=total)
        bar.update(tasks[title], completed=done)

    with bar:
        yield update


def _print(proof: Proof) -> None:
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_LOG_WIDTH)
    plan = proof.plan
    heading = f"{plan.before}, saved after step {plan.saved_after} of {plan.steps}, resumed on {plan.after}"
    console.print(heading, markup=False, highlight=False)
    console.print(_table(proof))
    for line in _lines(proof):
        console.print(line, markup=False, highlight=False)


def _lines(proof: Proof) -> Iterator[str]:
    plan = proof.plan
    if proof.strategy is not None:
        yield f"strategy: zero_auto, in the place of {proof.strategy}"
    before, after = plan.before.accumulate, plan.after.accumulate
    if before != after:
        yield (
            f"accumulation: {before} before, {after} after, for the same global batch. Lightning and DeepSpeed both "
            f"divide by it, so gradients would be {before / after:.3g} times as large after; here they are kept as "
            "they were. In a run of your own that matters to SGD and to gradient clipping."
        )
    same = proof.state_tensors - len(proof.state_differs)
    yield f"state: {same} of {proof.state_tensors} tensors equal after loading, bit for bit"
    yield (
        f"losses: largest difference {proof.difference:.1e} of the largest loss, {proof.tolerance:.0e} allowed "
        f"({proof.precision}: {proof.tolerance_reason})"
    )
    if proof.repeat_difference is not None:
        yield f"        the uninterrupted run once more: {proof.repeat_difference:.1e}"
    if proof.control_difference is not None:
        yield f"        resumed on {plan.before}: {proof.control_difference:.1e}"
    yield f"{'passed' if proof.passed else 'FAILED'}: {proof.reason.rstrip('.')}."


def _table(proof: Proof) -> Table:
    table = Table(box=None, pad_edge=False)
    for header in ("step", "uninterrupted", "resumed", "difference"):
        table.add_column(header, justify="right")
    rows = list(zip(proof.steps, proof.uninterrupted, proof.resumed, strict=True))
    cut = len(rows) > _ROWS
    for place, (step, loss, resumed) in enumerate(rows):
        if cut and place == _ROWS // 2:
            table.add_row("...", "...", "...", "...")
        if not cut or place < _ROWS // 2 or place >= len(rows) - _ROWS // 2:
            table.add_row(str(step), f"{loss:.7g}", f"{resumed:.7g}", f"{resumed - loss:+.1e}")
    return table
