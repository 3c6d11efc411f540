"""What a run leaves behind for people: the report file, the table and the progress of the ladder."""

from __future__ import annotations

from lightning_zeroladder.report.data import (
    SCHEMA,
    Move,
    RunContext,
    RunReport,
    collect_hardware,
    collect_versions,
    read_report,
    report_to_json,
    write_report,
)
from lightning_zeroladder.report.progress import LadderProgress
from lightning_zeroladder.report.table import build_table, print_report

__all__ = [
    "SCHEMA",
    "LadderProgress",
    "Move",
    "RunContext",
    "RunReport",
    "build_table",
    "collect_hardware",
    "collect_versions",
    "print_report",
    "read_report",
    "report_to_json",
    "write_report",
]
