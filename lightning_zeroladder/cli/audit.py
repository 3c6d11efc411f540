"""``zeroladder audit``: count what a stage sends with the installed release, and compare it with the formulas."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_zeroladder.cli.numbers import size
from lightning_zeroladder.cli.ranks import joined, on_own_ranks, started_by_launcher
from lightning_zeroladder.costmodel.audit import Audit
from lightning_zeroladder.costmodel.traffic import StageSettings

__all__ = ["audit_table", "audit_to_json", "run_audit"]

_LOG_WIDTH = 120
_DESCRIPTION = """\
Train a model of 1.6 million parameters for a few steps at one ZeRO stage, count every collective that DeepSpeed calls,
and set it beside what zeroladder plan predicts. Started by torchrun or SLURM it uses their ranks; by itself it starts
some."""


def run_audit(args: list[str]) -> int:
    """Run ``zeroladder audit``; returns 1 if the installed release does not send what is predicted."""
    options = _parser().parse_args(args)
    settings = _settings(options)  # a mistake in it is found before ranks are started
    if not started_by_launcher():
        return on_own_ranks("audit", args, options.ranks)

    # DeepSpeed logs to standard output, where JSON may be read from.
    with redirect_stdout(sys.stderr), joined() as place:
        from lightning_zeroladder.engine.auditing import count_traffic, ready_deepspeed

        if place.world_size < 2:
            raise ValueError("ranks=1: traffic is between ranks, start two at least.")
        ready_deepspeed(place.device)
        audit = count_traffic(settings, accumulate=options.accumulate, device=place.device)
    if place.rank == 0:
        _show(audit, as_json=options.json)
        if not audit.confirmed:
            print("zeroladder: the formulas do not hold for the installed release.", file=sys.stderr)
    return 0 if audit.confirmed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zeroladder audit", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("--stage", type=int, choices=(0, 1, 2, 3), required=True, help="ZeRO stage")
    add("--accumulate", type=int, default=1, metavar="K", help="micro-batches per optimizer step (default: 1)")
    add("--ranks", type=int, default=2, metavar="N", help="ranks to start on this machine (default: 2)")
    add("--owners", action="store_true", help="stages 1, 2: use_multi_rank_bucket_allreduce: false")
    add("--persistence-threshold", type=size, metavar="N", help="stage 3: stage3_param_persistence_threshold")
    add("--refetch", action="store_true", help="stage 3: no weight of forward is kept for backward")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _settings(options: argparse.Namespace) -> StageSettings:
    if options.accumulate < 1:
        raise ValueError(f"accumulate={options.accumulate}: must be at least 1.")
    if options.ranks < 2:
        raise ValueError(f"ranks={options.ranks}: traffic is between ranks, two are needed at least.")
    threshold = options.persistence_threshold
    if options.owners and options.stage not in (1, 2):
        raise ValueError(f"--owners changes stages 1 and 2, not stage {options.stage}: leave it out.")
    if (options.refetch or threshold is not None) and options.stage != 3:
        raise ValueError(
            f"--refetch and --persistence-threshold change stage 3, not stage {options.stage}: leave it out."
        )
    if threshold is not None and threshold < 0:
        raise ValueError(f"persistence_threshold={threshold}: must be 0 or more.")
    plain = StageSettings(options.stage)
    return StageSettings(
        options.stage,
        multi_rank_buckets=not options.owners,
        persistence_threshold=plain.persistence_threshold if threshold is None else threshold,
        refetch=options.refetch,
    )


def _show(audit: Audit, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(audit_to_json(audit), indent=2))
        return
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_LOG_WIDTH)
    console.print(audit_table(audit))
    for sentence in audit.words():
        console.print(sentence, markup=False, highlight=False)


def audit_to_json(audit: Audit) -> dict[str, Any]:
    """Return an audit as what JSON can carry, with its sums and sentences."""
    return {
        **asdict(audit),
        "lines": [{**asdict(line), "error": line.error} for line in audit.lines],
        "predicted_elements": audit.predicted_elements,
        "counted_elements": audit.counted_elements,
        "multiple": audit.multiple,
        "error": audit.error if audit.counted_elements else None,
        "confirmed": audit.confirmed,
        "words": list(audit.words()),
    }


def audit_table(audit: Audit) -> Table:
    """Lay an audit out as a table, a row per collective and place."""
    table = Table(
        title=(
            f"Sent per rank and optimizer step: deepspeed {audit.release}, stage {audit.settings.stage}, "
            f"N={audit.world_size}, k={audit.accumulate}, {audit.model.trainable:,} parameters in bf16"
        ),
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for header in ("collective", "where", "of"):
        table.add_column(header)
    for header in ("predicted\nelements", "counted\nelements", "predicted\nMB", "counted\nMB", "calls", "error"):
        table.add_column(header, justify="right")
    for line in audit.lines:
        table.add_row(
            line.collective,
            str(line.place),
            line.what or "not predicted",
            f"{line.predicted_elements:,.0f}",
            f"{line.counted.elements:,.0f}",
            f"{line.predicted_bytes / 1e6:.2f}",
            f"{line.counted.nbytes / 1e6:.2f}",
            f"{line.counted.calls:g}",
            "-" if line.error is None else f"{100 * line.error:+.2f} %",
        )
    table.add_section()
    table.add_row(
        "all",
        "",
        "",
        f"{audit.predicted_elements:,.0f}",
        f"{audit.counted_elements:,.0f}",
        f"{sum(line.predicted_bytes for line in audit.lines) / 1e6:.2f}",
        f"{sum(line.counted.nbytes for line in audit.lines) / 1e6:.2f}",
        f"{sum(line.counted.calls for line in audit.lines):g}",
        f"{100 * audit.error:+.2f} %",
    )
    return table
