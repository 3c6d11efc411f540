"""``zeroladder bench``: measure the links between ranks and write ``links.json``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_zeroladder.cli.numbers import decimal, size
from lightning_zeroladder.cli.ranks import joined, on_own_ranks, started_by_launcher
from lightning_zeroladder.costmodel.links import Links
from lightning_zeroladder.costmodel.links_file import links_to_json, write_links
from lightning_zeroladder.report.plots import check_plot, plot_links

if TYPE_CHECKING:
    from lightning_zeroladder.probe.links import Effort

__all__ = ["links_table", "run_bench"]

_LOG_WIDTH = 120
_WRONG = "results were wrong: these links change what they carry, so nothing trained on them can be trusted."
_DESCRIPTION = """\
Time all-reduce, all-gather, reduce-scatter and reduce between ranks, inside a node and across nodes, check their
results, and see how much they slow a matrix product down. Started by torchrun or SLURM it uses their ranks; by itself
it starts one for each GPU of this machine, or two on CPU."""


def run_bench(args: list[str]) -> int:
    """Run ``zeroladder bench``; returns 1 if the result of a collective was wrong."""
    options = _parser().parse_args(args)
    if options.plot is not None:
        check_plot(options.plot)
    if options.seconds <= 0:
        raise ValueError(f"seconds={options.seconds:g}: must be above 0.")
    effort = _effort(options)  # a mistake in it is found before ranks are started
    if started_by_launcher():
        return _measure(options, effort)
    ranks = options.ranks if options.ranks is not None else _default_ranks()
    if ranks < 2:
        raise ValueError(
            f"ranks={ranks}: links are between ranks, two are needed at least; a machine with one GPU has none inside."
        )
    print(f"bench: {ranks} ranks on this machine, about {options.seconds:.0f} s", file=sys.stderr, flush=True)
    return on_own_ranks("bench", args, ranks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zeroladder bench", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("--output", type=Path, default=Path("links.json"), metavar="FILE", help="what plan reads (default: links.json)")
    add("--plot", type=Path, metavar="FILE", help="bandwidth over size, as .png or .svg (needs matplotlib)")
    add("--ranks", type=int, metavar="N", help="ranks to start on this machine (default: its GPUs, or 2 on CPU)")
    add("--smallest", type=size, metavar="BYTES", help="first size (default: 1 KiB)")
    add("--largest", type=size, metavar="BYTES", help="last size, such as 1e9 (default: 1 GiB, on CPU 64 MiB)")
    add("--seconds", type=decimal, default=60.0, metavar="S", help="about how long it may take (default: 60)")
    add("--precision", choices=("bf16", "fp16", "fp32"), help="what travels (default: bf16 on GPUs, fp32 on CPU)")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _default_ranks() -> int:
    import torch

    return torch.cuda.device_count() or 2


def _effort(options: argparse.Namespace) -> Effort:
    import torch

    from lightning_zeroladder.probe.links import default_effort

    effort = default_effort(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    given = {"smallest_bytes": options.smallest, "largest_bytes": options.largest, "seconds": options.seconds}
    return replace(effort, **{name: value for name, value in given.items() if value is not None})


def _measure(options: argparse.Namespace, effort: Effort) -> int:
    from lightning_zeroladder.probe.links import measure_links

    with joined() as place:
        precision = options.precision or ("bf16" if place.device.type == "cuda" else "fp32")
        links = measure_links(place.device, per_node=place.per_node, precision=precision, effort=effort)
    if place.rank == 0:
        _give(links, options, effort.largest_bytes)
        if links.wrong():
            print(f"zeroladder: {_WRONG}", file=sys.stderr)
    return 1 if links.wrong() else 0


def _give(links: Links, options: argparse.Namespace, largest: int) -> None:
    write_links(options.output, links)
    if options.plot is not None:
        plot_links(links, options.plot)
    if options.json:
        print(json.dumps(links_to_json(links), indent=2))
        return
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_LOG_WIDTH)
    console.print(links_table(links))
    for line in _lines(links, options, largest):
        console.print(line, markup=False, highlight=False)


def links_table(links: Links) -> Table:
    """Lay measured links out as a table, a row per collective and size."""
    machine = links.machine
    table = Table(
        title=f"{machine.device}, {machine.nodes} x {machine.per_node} ranks, {machine.backend}, {machine.precision}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("collective")
    table.add_column("links")
    for header in ("ranks", "size", "time\nms", "spread\nms", "algorithm\nGB/s", "bus\nGB/s", "calls"):
        table.add_column(header, justify="right")
    table.add_column("result")
    last = ("", "")
    for sample in links.samples:
        kind = (str(sample.collective), str(sample.where))
        table.add_row(
            *(kind if kind != last else ("", "")),
            str(sample.ranks),
            _bytes(sample.nbytes),
            f"{1e3 * sample.median_s:.3f}",
            f"{1e3 * sample.spread_s:.3f}",
            f"{sample.algorithm_bytes_per_s / 1e9:.3f}",
            f"{sample.bus_bytes_per_s / 1e9:.3f}",
            str(sample.calls),
            "right" if sample.correct else "WRONG",
            style="" if sample.correct else "bold red",
        )
        last = kind
    return table


def _lines(links: Links, options: argparse.Namespace, largest: int) -> list[str]:
    lines = [
        f"Beside an all-reduce of {_bytes(overlap.nbytes)} {overlap.where} a matrix product takes "
        f"{100 * overlap.slow_down:.0f} % longer; {100 * overlap.hidden:.0f} % of the shorter of the two is hidden."
        for overlap in links.overlaps
    ]
    ends = dict.fromkeys((sample.collective, sample.where) for sample in links.samples)
    short = [
        f"{collective} {where} ({_bytes(links.of(collective, where)[-1].nbytes)})"
        for collective, where in ends
        if links.of(collective, where)[-1].nbytes < largest
    ]
    if short:
        lines.append(f"Ended before {_bytes(largest)} to be done in time (--seconds): {', '.join(short)}.")
    lines.append(f"Written to {options.output}; zeroladder plan --links {options.output} reads it.")
    return lines


def _bytes(nbytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
