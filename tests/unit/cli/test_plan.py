from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lightning_zeroladder.cli import main

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
