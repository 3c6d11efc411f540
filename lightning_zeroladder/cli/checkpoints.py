"""``zeroladder inspect``, ``convert`` and ``export``. None of them loads torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_zeroladder.checkpoint.output import size_text

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from lightning_zeroladder.checkpoint.inspecting import Inspection

__all__ = ["run_convert", "run_export", "run_inspect"]

_SHORT_S = 1.0
"""Work that takes less shows no progress."""

_LOG_WIDTH = 120


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show work that takes longer than a second: by a bar on a terminal, elsewhere by one line at the end."""
    began_s, total = time.monotonic(), 0
    bar: Progress | None = None

    def update(done: int, expected: int) -> None:
        nonlocal bar, total
        total = max(done, expected)
        if bar is None and time.monotonic() - began_s > _SHORT_S:
            bar = _bar(what)
            if bar.console.is_terminal:
                bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield update
    finally:
        if bar is not None and bar.live.is_started:  # stopping one that was not started prints an empty line
            bar.stop()
    took_s = time.monotonic() - began_s
    if took_s > _SHORT_S and not (bar or _bar(what)).console.is_terminal:
        print(f"{what} {size_text(total)} took {took_s:.1f} s", file=sys.stderr)


def _bar(what: str) -> Progress:
    """Return a bar; rich is imported when there is something to show: it takes as long as converting a small model."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what)
    return bar


def run_inspect(args: list[str]) -> int:
    """Run ``zeroladder inspect``; returns 1 when the checkpoint is not whole."""
    parser = argparse.ArgumentParser(
        prog="zeroladder inspect", description="Say what a checkpoint is, what it loads into, and whether it is whole."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="folder of the checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="do not read every byte to compare it with its checksum")
    options = parser.parse_args(args)
    from lightning_zeroladder.checkpoint.inspecting import inspect, inspection_to_json

    with _progress("reading") as progress:
        found = inspect(options.checkpoint, full=not options.quick, progress=progress)
    if options.json:
        print(json.dumps(inspection_to_json(found), indent=2))
    else:
        from rich.console import Console

        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console = Console(width=_LOG_WIDTH)
        console.print(_table(found))
    return 1 if found.whole is False else 0


def _table(found: Inspection) -> Table:
    from rich.table import Table
    from rich.text import Text

    # As Text: a path or a name may have brackets in it, which would be taken for markup.
    table = Table(title=Text(found.path), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if found.kind is not None:
        for name, value in _rows(found):
            table.add_row(name, Text(value))
    words = {True: "yes: every byte has its checksum", False: f"no: {found.problem}", None: "not checked (--quick)"}
    table.add_row("whole", Text(words[found.whole]))
    return table


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    where = "universal" if found.stage is None else f"ZeRO stage {found.stage}"
    yield "saved", f"{where}, {_plural(found.world_size, 'rank')}, {found.precision}"
    yield "loads into", found.loads_into
    yield "parameters", f"{_counts(found)}, in {_plural(found.tensors, 'tensor')}"
    for name, shape in found.largest:
        yield "", f"{name}  {' x '.join(map(str, shape)) or '1'}"
    yield "size", f"{size_text(found.nbytes)} on disk, {size_text(found.state_bytes)} of it state"
    yield "optimizer", f"{found.optimizer} ({', '.join(found.state_keys) or 'no element-wise state'})"
    rates = ", ".join("-" if rate is None else f"{rate:g}" for rate in found.learning_rates)
    if rates:
        yield "groups", f"{found.groups}, learning rate {rates}"
    counters = found.counters or {}
    yield "progress", f"{counters.get('global_steps', 0):,} steps, {counters.get('global_samples', 0):,} samples"
    if found.micro_batch is not None and found.accumulate is not None:
        micro_batch = f"{_plural(found.micro_batch, 'sample')} per micro-batch and rank"
        yield "batch", f"{micro_batch}, {_plural(found.accumulate, 'micro-batch', 'micro-batches')} per step"
    yield "versions", ", ".join(f"{name} {version}" for name, version in (found.versions or {}).items())
    yield "manifest", "yes" if found.manifest else "no (not saved by zero_auto)"


def _counts(found: Inspection) -> str:
    if found.trained is None:
        return f"{found.parameters:,}, of which trained ones are not known"
    return f"{found.trained:,} trained" + (f" and {found.frozen:,} frozen" if found.frozen else "")


def _plural(count: int, one: str, more: str = "") -> str:
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def run_convert(args: list[str]) -> int:
    """Run ``zeroladder convert``."""
    parser = argparse.ArgumentParser(
        prog="zeroladder convert",
        description="Convert a checkpoint to DeepSpeed's universal format, or to another stage and number of ranks.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="folder of the checkpoint; it is only read")
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder")
    parser.add_argument("--to-stage", type=int, metavar="S", help="write a native checkpoint of ZeRO stage 0 to 3")
    parser.add_argument("--to-world-size", type=int, metavar="N", help="of N ranks (default: as many as saved it)")
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: one per core, at most 8)")
    options = parser.parse_args(args)
    from lightning_zeroladder.checkpoint.converting import convert

    with _progress("converting") as progress:
        done = convert(
            options.checkpoint,
            options.out,
            to_stage=options.to_stage,
            to_world_size=options.to_world_size,
            workers=options.workers,
            progress=progress,
        )
    print(f"{done.path}: {done.kind}, {done.files} files, {size_text(done.nbytes)}")
    return 0


def run_export(args: list[str]) -> int:
    """Run ``zeroladder export``."""
    parser = argparse.ArgumentParser(
        prog="zeroladder export", description="Write the whole weights of a checkpoint as safetensors."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="folder of the checkpoint; it is only read")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors", help="new file")
    parser.add_argument("--dtype", metavar="TYPE", help="fp32, bf16, fp16 or fp64 (default: fp32 for what was trained)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file (default: 5GB)")
    options = parser.parse_args(args)
    from lightning_zeroladder.checkpoint.exporting import export

    with _progress("exporting") as progress:
        done = export(
            options.checkpoint,
            options.out,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            progress=progress,
        )
    for file in done.files:
        print(file)
    print(f"{done.tensors} tensors, {size_text(done.nbytes)}")
    if done.tied:
        print(f"left out, being another name of one that is there: {', '.join(sorted(done.tied))}")
    return 0
