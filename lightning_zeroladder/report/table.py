"""The table of the ladder: one row per rung, the one the run settled on marked."""

from __future__ import annotations

import math
import os

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_zeroladder.ladder.types import Measurement, RungResult, Verdict
from lightning_zeroladder.report.data import RunContext, RunReport

__all__ = ["build_table", "print_report"]

_GIB = 2**30
_DASH = "-"
_LOG_WIDTH = 120
_WIDE = 110
_STYLES = {
    Verdict.COMMITTED: "bold green",
    Verdict.FITS: "",
    Verdict.OVER_MARGIN: "yellow",
    Verdict.FAILED: "red",
    Verdict.SKIPPED: "dim",
}
_PHASES = (("forward", "fwd"), ("backward", "bwd"), ("comm.", "comm"), ("optimizer", "opt"), ("data", "data"))


def build_table(report: RunReport, *, width: int = _LOG_WIDTH, ascii_only: bool = False) -> Table:
    """Lay the ladder out as a table.

    Throughput is per rank with its robust standard deviation, peak memory in GiB with the share of the limit that
    stays free in percent, and the parts of an optimizer step in milliseconds. What was not measured is a dash. Settings
    of a rung are lettered, and spelled out in the caption above the reason for the decision.

    Args:
        report: The report.
        width: Columns of the terminal; below 110 the headers are abbreviated and the gaps narrowed.
        ascii_only: Draw the marker of the chosen rung, and the plus-minus sign, with ASCII characters.
    """
    wide = width >= _WIDE
    notes = _notes(report)
    table = Table(
        title=Text(_title(report)),
        caption=Text("\n".join([*(f"[{letter}] {words}" for words, letter in notes.items()), report.decision.reason])),
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1 if wide else 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
        safe_box=ascii_only,
    )
    table.add_column("rung", no_wrap=True)
    headers = [_throughput_header(report), "peak\nGiB", "margin\n%"]
    headers += [f"{long if wide else short}\nms" for long, short in _PHASES]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold", min_width=8)
    for result in report.decision.results:
        figures = _figures(result.trial.measurement, report.settings.memory_limit_bytes, ascii_only=ascii_only)
        cells = [_rung(result, notes, ascii_only=ascii_only), *figures, result.words]
        table.add_row(*map(Text, cells), style=_STYLES[result.verdict])
    return table


def print_report(report: RunReport, console: Console | None = None) -> None:
    """Print the table, on standard output unless another console is given.

    Where the output is not a terminal, as in a job's log, it is 120 columns wide unless ``COLUMNS`` says otherwise.
    """
    if console is None:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console = Console(width=_LOG_WIDTH)
    console.print(build_table(report, width=console.width, ascii_only=console.options.ascii_only))


def _title(report: RunReport) -> str:
    context = report.context
    nodes = f" on {context.nodes} nodes" if context.nodes > 1 else ""
    name = "ZeRO ladder" if report.complete else "ZeRO ladder, incomplete: the run ended in mid-ladder"
    return (
        f"{name} (N={context.world_size}{nodes}, k={context.accumulate}, {context.precision}, {_parameters(context)})"
    )


def _parameters(context: RunContext) -> str:
    total = _count(context.parameters)
    if context.trainable_parameters == context.parameters:
        return f"{total} parameters"
    return f"{total} parameters, {_count(context.trainable_parameters)} trainable"


def _count(elements: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if elements >= size:
            return f"{elements / size:.3g}{letter}" if elements < 1000 * size else f"{elements / size:,.0f}{letter}"
    return str(elements)


def _throughput_header(report: RunReport) -> str:
    measured = [result.trial.measurement for result in report.decision.results if result.trial.measurement]
    unit = measured[0].unit if measured else "tokens"
    return f"{unit}/s/{'GPU' if report.context.device.startswith('cuda') else 'rank'}"


def _notes(report: RunReport) -> dict[str, str]:
    """Letter the settings that rungs differ in: spelled out in the table they would take half its width."""
    rungs = [result.trial.rung for result in report.decision.results]
    distinct = dict.fromkeys(rung.extras for rung in rungs if rung.extras)
    return {words: chr(ord("a") + index) for index, words in enumerate(distinct)}


def _rung(result: RungResult, notes: dict[str, str], *, ascii_only: bool) -> str:
    rung = result.trial.rung
    marker = (">" if ascii_only else "▶") if result.verdict is Verdict.COMMITTED else " "
    note = f" [{notes[rung.extras]}]" if rung.extras else ""
    return f"{marker} stage {rung.stage}{note}"


def _figures(measurement: Measurement | None, limit_bytes: int, *, ascii_only: bool) -> list[str]:
    if measurement is None:
        return [_DASH] * 8
    step, parts = measurement.step_s, measurement.breakdown
    rate = measurement.throughput
    # To first order a rate spreads, relative to itself, as much as the time that it is the inverse of.
    spread = rate * step.spread / step.median
    phases = (parts.forward_s, parts.backward_s, parts.communication_s, parts.optimizer_s, parts.data_s)
    return [
        f"{_number(rate)} {'+/-' if ascii_only else '±'} {_number(spread, like=rate)}",
        f"{measurement.peak_bytes / _GIB:.2f}",
        _margin(measurement.peak_bytes, limit_bytes),
        *(_number(1000 * seconds) for seconds in phases),
    ]


def _margin(peak_bytes: int, limit_bytes: int) -> str:
    if limit_bytes <= 0:
        return _DASH
    # Rounded down: a rung just short of the headroom must not look as if it kept it.
    return f"{math.floor(1000 * (1 - peak_bytes / limit_bytes) + 1e-6) / 10:.1f}"


def _number(value: float, *, like: float | None = None) -> str:
    """Format with three figures or all digits before the point, with as many decimals as ``like`` would get."""
    size = abs(value if like is None else like)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{value:,.{decimals}f}"
