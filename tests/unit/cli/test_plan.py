from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_links import LINKS

from lightning_zeroladder.cli import main
from lightning_zeroladder.costmodel.hardware import is_gpu
from lightning_zeroladder.costmodel.links import Links, Where
from lightning_zeroladder.costmodel.links_file import write_links

NUMBERS = ["--params", "13e9", "--gpus", "16", "--micro-batch", "4", "--seq-len", "4096", "--accumulate", "8"]
CLUSTER = ["--hbm", "80e9", "--flops", "400e12", "--bandwidth", "40e9"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *NUMBERS, *CLUSTER, "--textbook", "--terms"]) == 0
    shown = capsys.readouterr().out
    for text in ("208.0", "61.8", "37.4", "13.0", "1.30", "5.85", "15.60", "25.56", "SHARD_GRAD_OP", "FULL_SHARD"):
        assert text in shown
    assert "activations not counted" in shown
    assert "fp32" in shown


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *NUMBERS, "--gpu", "h100", "--layers", "40", "--hidden", "5120", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [row["rung"]["traffic"]["stage"] for row in plan["rows"]][:6] == [0, 1, 1, 2, 2, 3]
    chosen = plan["rows"][plan["choice"]]
    assert chosen["fits"] is True
    assert chosen["peak_bytes"] == sum(term["nbytes"] for term in chosen["terms"]) <= plan["limit_bytes"]
    assert chosen["tokens_per_s_expected"] <= chosen["tokens_per_s_best"]


H100S = ["--gpus", "16", "--gpu", "h100", "--params", "1e9", "--seq-len", "1024"]


def test_measured_links_take_the_place_of_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The measured links follow 20 us and 40 GB/s: numbers that say the same give the same plan."""
    write_links(tmp_path / "links.json", LINKS)
    assert main(["plan", *H100S, "--json", "--links", str(tmp_path / "links.json")]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert main(["plan", *H100S, "--json", "--bandwidth", "40e9", "--latency", "20e-6"]) == 0
    given = json.loads(capsys.readouterr().out)
    assert measured["choice"] == given["choice"]
    for one, other in zip(measured["rows"], given["rows"], strict=True):
        assert one["time"]["communication_s"] == pytest.approx(other["time"]["communication_s"], rel=0.005)
    assert measured["rows"][0]["time"]["communication_s"] == pytest.approx(2 * 15 / 16 * 2e9 / 40e9, rel=0.01)


def test_what_was_measured_elsewhere_is_said_under_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_links(tmp_path / "links.json", replace(LINKS, machine=replace(LINKS.machine, torch="2.1.0")))
    links = ["--links", str(tmp_path / "links.json")]
    arguments = ["plan", *H100S, "--gpus", "24", "--precision", "fp32", *links]
    assert main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "measured with 2 nodes, the plan has 3; bf16, the plan is for fp32; torch 2.1.0, installed is" in said


def test_links_that_cannot_be_those_of_the_plan_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "links.json"

    def refused(links: Links, *more: str) -> str:
        write_links(path, links)
        assert main(["plan", *H100S, "--links", str(path), *more]) == 1
        return " ".join(capsys.readouterr().err.split())

    assert "measured on NVIDIA H100 80GB HBM3, --gpu is a100: measure on such GPUs" in refused(LINKS, "--gpu", "a100")
    assert "--links and --bandwidth both say" in refused(LINKS, "--bandwidth", "1e9")
    assert "--links and --textbook both say" in refused(LINKS, "--textbook")
    bad = replace(LINKS, samples=(replace(LINKS.samples[0], correct=False), *LINKS.samples[1:]))
    assert "gave a wrong result" in refused(bad)
    inside = tuple(sample for sample in LINKS.samples if sample.where is Where.INSIDE)
    assert "across nodes was not measured" in refused(replace(LINKS, samples=inside))


@pytest.mark.parametrize(
    ("name", "device", "same"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("rtx4090", "NVIDIA GeForce RTX 4090", True),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB", True),
        ("l4", "NVIDIA L40S", False),
        ("h100", "cpu", False),
    ],
)
def test_a_device_is_known_by_its_name(name: str, device: str, same: bool) -> None:
    assert is_gpu(name, device) is same


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*NUMBERS], "give --gpu (one of v100"),
        ([*NUMBERS, "--gpu", "h900"], "gpu='h900' is not known"),
        ([*NUMBERS, *CLUSTER, "--layers", "4"], "--layers and --hidden go together"),
        ([*NUMBERS, *CLUSTER, "--headroom", "1.5"], "headroom=1.5"),
        (["--params", "-3", "--gpus", "8", *CLUSTER], "params=-3: must be above 0"),
        (["--params", "1e9", "--gpus", "12", *CLUSTER], "gpus=12 is not a multiple of gpus_per_node=8"),
    ],
)
def test_mistakes(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 1
    assert says in capsys.readouterr().err


def test_a_job_that_does_not_fit_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "900e9", "--gpus", "8", "--gpu", "a100"]) == 1
    assert "No rung fits" in capsys.readouterr().out


def test_neither_torch_nor_deepspeed_is_loaded() -> None:
    code = (
        "import sys; sys.argv = ['zeroladder']; from lightning_zeroladder.cli import main; "
        f"main(['plan', *{NUMBERS!r}, *{CLUSTER!r}]); "
        "print([name for name in ('torch', 'deepspeed', 'lightning') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
