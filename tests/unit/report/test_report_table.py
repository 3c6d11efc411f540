from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_zeroladder.ladder.types import Measurement, Rung, RungResult, TrialResult, Verdict
from lightning_zeroladder.report import RunReport, build_table, print_report

Measure = Callable[..., Measurement]


def render(report: RunReport, width: int, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    print_report(report, Console(file=stream, width=width))
    stream.flush()
    return [line.rstrip() for line in raw.getvalue().decode(encoding).splitlines()]


def cells(report: RunReport) -> list[list[str]]:
    table = build_table(report)
    return [[str(cell) for cell in column.cells] for column in table.columns]


def with_results(report: RunReport, *results: RungResult) -> RunReport:
    return replace(report, decision=replace(report.decision, results=results))


def test_rung_column_marks_the_committed_one(run_report: RunReport) -> None:
    assert cells(run_report)[0] == ["  stage 0", "▶ stage 1", "  stage 2 [a]", "  stage 3"]


def test_figures(run_report: RunReport) -> None:
    columns = cells(run_report)
    # 4096 tokens in 0.256 s and 0.25 s; spread 1 % of that; limit 80 GiB.
    assert columns[1] == ["16,000 ± 160", "16,384 ± 164", "-", "-"]
    assert columns[2] == ["75.00", "40.25", "-", "-"]
    assert columns[3] == ["6.2", "49.6", "-", "-"]
    assert [column[1] for column in columns[4:9]] == ["34.5", "78.9", "10.1", "1,234", "1.20"]
    assert columns[9][2] == "out of memory [backward]"


def test_headers(run_report: RunReport) -> None:
    headers = [str(column.header).replace("\n", " ") for column in build_table(run_report).columns]
    assert headers == [
        "rung",
        "tokens/s/GPU",
        "peak GiB",
        "margin %",
        "forward ms",
        "backward ms",
        "comm. ms",
        "optimizer ms",
        "data ms",
        "verdict",
    ]


def test_unit_and_device_in_the_header(run_report: RunReport, measure: Measure) -> None:
    samples = RungResult(TrialResult(Rung(0), measurement=measure(0.5, 1.0, unit="samples")), Verdict.FITS, "fits")
    on_cpu = replace(with_results(run_report, samples), context=replace(run_report.context, device="cpu"))
    assert build_table(on_cpu).columns[1].header == "samples/s/rank"
    assert build_table(with_results(run_report)).columns[1].header == "tokens/s/GPU"


def test_margin_is_rounded_down(run_report: RunReport, measure: Measure) -> None:
    def margin(peak_gib: float) -> str:
        result = RungResult(TrialResult(Rung(0), measurement=measure(1.0, peak_gib)), Verdict.FITS, "")
        return cells(with_results(run_report, result))[3][0]

    assert margin(72.0) == "10.0"  # 0.1 is not exact in binary: rounding down must not make it 9.9
    assert margin(72.01) == "9.9"
    assert margin(84.0) == "-5.0"


def test_margin_without_a_limit_is_a_dash(run_report: RunReport) -> None:
    report = replace(run_report, settings=replace(run_report.settings, memory_limit_bytes=0))
    assert cells(report)[3] == ["-"] * 4


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [(0.001, "4,096,000 ± 40,960"), (100.0, "41.0 ± 0.4"), (1000.0, "4.10 ± 0.04")],
)
def test_throughput_keeps_three_figures(run_report: RunReport, measure: Measure, step_s: float, expected: str) -> None:
    result = RungResult(TrialResult(Rung(0), measurement=measure(step_s, 1.0)), Verdict.FITS, "")
    assert cells(with_results(run_report, result))[1] == [expected]


def test_failed_rung_keeps_what_it_measured(run_report: RunReport, measure: Measure) -> None:
    failed = run_report.decision.results[2]
    trial = replace(failed.trial, measurement=measure(0.256, 75.0))
    assert cells(with_results(run_report, replace(failed, trial=trial)))[1] == ["16,000 ± 160"]


def test_title_and_caption(run_report: RunReport) -> None:
    table = build_table(run_report)
    assert str(table.title) == "ZeRO ladder (N=8 on 2 nodes, k=4, bf16-mixed, 1.23B parameters)"
    assert str(table.caption) == "[a] overlap_comm=False\nstage 1 is the fastest rung that keeps 10 % free."


def test_title_of_an_incomplete_report_and_frozen_parameters(run_report: RunReport) -> None:
    context = replace(run_report.context, nodes=1, parameters=124_400_000, trainable_parameters=589_824)
    table = build_table(replace(run_report, complete=False, context=context))
    assert str(table.title) == (
        "ZeRO ladder, incomplete: the run ended in mid-ladder (N=8, k=4, bf16-mixed, 124M parameters, 590k trainable)"
    )


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_no_line_is_wider_than_the_console_and_no_number_breaks(run_report: RunReport, width: int) -> None:
    lines = render(run_report, width)
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if "▶" in line)
    for figure in ("16,384 ± 164", "40.25", "49.6", "34.5", "78.9", "10.1", "1,234", "1.20"):
        assert figure in row


def test_large_numbers_fit_into_80_columns(run_report: RunReport, measure: Measure) -> None:
    fast = RungResult(TrialResult(Rung(1), measurement=measure(0.001, 1.0)), Verdict.COMMITTED, "fastest that fits")
    row = next(line for line in render(with_results(run_report, fast), 80) if "▶" in line)
    expected = "▶ stage 1 4,096,000 ± 40,960 1.00 98.7 34.5 78.9 10.1 1,234 1.20 fastest"
    assert " ".join(row.split()).startswith(expected)


def test_verdict_wraps_at_80_columns(run_report: RunReport) -> None:
    lines = render(run_report, 80)
    start = next(index for index, line in enumerate(lines) if "stage 3" in line)
    words = " ".join(line.replace("stage 3", "", 1).lstrip(" -") for line in lines[start:])
    assert words.startswith("skipped: at best 0.4 % faster than stage 1")


def test_console_without_unicode(run_report: RunReport) -> None:
    lines = render(run_report, 120, encoding="ascii")
    row = next(line for line in lines if "stage 1 " in line and "16,384" in line)
    assert row.startswith("> stage 1")
    assert "16,384 +/- 164" in row


def test_log_is_120_columns_wide(
    run_report: RunReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_report(run_report)
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    print_report(run_report)
    narrow = capsys.readouterr().out
    longest: Callable[[str], int] = lambda text: max(len(line.rstrip()) for line in text.splitlines())  # noqa: E731
    assert 80 < longest(wide) <= 120
    assert longest(narrow) <= 80


def test_equal_settings_share_a_letter(run_report: RunReport) -> None:
    small, large = (("reduce_bucket_size", 1000),), (("contiguous_gradients", True), ("reduce_bucket_size", 2000))
    rungs = (Rung(1, small), Rung(2, large), Rung(3, small))
    report = with_results(run_report, *(RungResult(TrialResult(rung), Verdict.SKIPPED, "") for rung in rungs))
    assert cells(report)[0] == ["  stage 1 [a]", "  stage 2 [b]", "  stage 3 [a]"]
    assert str(build_table(report).caption).splitlines()[:2] == [
        "[a] reduce_bucket_size=1000",
        "[b] contiguous_gradients=True, reduce_bucket_size=2000",
    ]
