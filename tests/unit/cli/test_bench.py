from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_links import LINKS
from rich.console import Console

from lightning_zeroladder.cli import main
from lightning_zeroladder.cli import ranks as cli_ranks
from lightning_zeroladder.cli.bench import links_table
from lightning_zeroladder.cli.numbers import decimal, size
from lightning_zeroladder.probe.links import Effort, default_effort
from lightning_zeroladder.report import plots
from lightning_zeroladder.report.plots import check_plot, plot_links

LAUNCHER = ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NAME")


def test_numbers_as_one_says_them() -> None:
    assert (size("13e9"), size("1024"), decimal("0.5")) == (13_000_000_000, 1024, 0.5)
    for text in ("many", "nan", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            decimal(text)
    with pytest.raises(argparse.ArgumentTypeError, match="not a whole number"):
        size("0.5")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "1"], "ranks=1: links are between ranks"),
        (["--seconds", "0"], "seconds=0: must be above 0"),
        (["--plot", "links.pdf"], "plot links.pdf: the name has to end in .png or .svg"),
        (["--plot", "nowhere/links.png"], "there is no folder nowhere"),
    ],
)
def test_mistakes_are_found_before_ranks_start(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("lightning_zeroladder.cli.bench.on_own_ranks", lambda *args: pytest.fail("started"))
    assert main(["bench", *arguments]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"TORCHELASTIC_RUN_ID": "7"}, True),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "interactive"}, False),
    ],
)
def test_launchers_are_recognized(environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli_ranks.started_by_launcher() is expected


def test_sizes() -> None:
    assert default_effort(torch.device("cuda")).sizes()[-1] == 2**30
    assert default_effort(torch.device("cpu")).sizes() == [2**exponent for exponent in range(10, 27, 2)]
    assert Effort(smallest_bytes=1000, largest_bytes=5000).sizes() == [1000, 4000, 5000]
    with pytest.raises(ValueError, match="smallest_bytes=8, largest_bytes=8"):
        Effort(smallest_bytes=8, largest_bytes=8)
    with pytest.raises(ValueError, match="growth=1 must be at least 2"):
        Effort(growth=1)


def test_the_table() -> None:
    bad = replace(LINKS, samples=(replace(LINKS.samples[0], correct=False), *LINKS.samples[1:]))
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(links_table(bad))
    shown = console.export_text()
    assert "NVIDIA H100 80GB HBM3, 2 x 8 ranks, nccl, bf16" in shown
    assert shown.count("WRONG") == 1
    assert "1 KiB" in shown
    assert "256 MiB" in shown
    assert "198." in shown  # GB/s inside, at the largest size


@pytest.mark.parametrize("name", ["links.png", "links.svg"])
def test_plots_are_pictures_of_their_kind(name: str, tmp_path: Path) -> None:
    check_plot(tmp_path / name)
    plot_links(LINKS, tmp_path / name)
    start = (tmp_path / name).read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in start


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"lightning-zeroladder\[plot\]"):
        check_plot(tmp_path / "a.png")
