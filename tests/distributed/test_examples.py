"""The demo and its config, shortened, as a user starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import free_port

from lightning_zeroladder.report.data import read_report

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]


def start(command: list[str], *, cwd: Path, timeout_s: float = 180) -> str:
    """Run a command that starts its own ranks; return what it printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        pytest.fail(f"not done after {timeout_s:.0f} s:\n{printed[-3000:]}")
    assert process.returncode == 0, printed[-3000:]
    return printed


def assert_table(printed: str) -> None:
    for stage in range(4):
        assert f"  stage {stage} " in printed or f"▶ stage {stage} " in printed
    assert printed.count("committed") == 1
    assert "tokens/s/rank" in printed


def test_the_demo_walks_commits_and_learns(tmp_path: Path) -> None:
    sizes = ["--steps-per-rung", "12", "--warmup-steps", "2", "--max-steps", "120", "--width", "64", "--layers", "1"]
    printed = start([str(ROOT / "examples" / "demo.py"), *sizes, "--run-dir", "run"], cwd=tmp_path)
    for stage in range(4):
        assert f"ladder: trying stage {stage}" in printed
    assert_table(printed)
    losses = re.search(
        r"^loss: ([\d.]+) over the first \d+ batches, ([\d.]+) over the last \d+$", printed, re.MULTILINE
    )
    assert losses, printed[-3000:]
    first, last = map(float, losses.groups())
    assert last < first - 0.5
    report = read_report(tmp_path / "run")
    assert report.complete
    assert [row.trial.rung.stage for row in report.decision.results] == [0, 1, 2, 3]
    assert {row.trial.measurement.units_per_step for row in report.decision.results} == {8 * 128.0}


def test_the_config_runs_and_its_report_prints_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    own_config = tmp_path / "config.yaml"
    own_config.write_text("# a config of the user's own\n")
    arguments = {
        "trainer.max_steps": 20,
        "trainer.default_root_dir": tmp_path,
        "trainer.strategy.init_args.steps_per_rung": 4,
        "trainer.strategy.init_args.warmup_steps": 1,
        "trainer.strategy.init_args.run_dir": run_dir,
        "model.init_args.width": 32,
        "model.init_args.layers": 1,
        "data.init_args.limit_bytes": 100000,
    }
    options = [f"--{name}={value}" for name, value in arguments.items()]
    command = ["-m", "lightning_zeroladder", "fit", "--config", "configs/demo.yaml", *options]
    printed = start(command, cwd=ROOT)
    assert_table(printed)
    # `default_root_dir` is where LightningCLI would save a copy of the config.
    assert own_config.read_text() == "# a config of the user's own\n"
    again = start(["-m", "lightning_zeroladder", "report", str(run_dir)], cwd=ROOT)
    assert_table(again)
    shown = {line.rstrip() for line in printed.splitlines()}
    assert [line for line in again.splitlines() if line.rstrip() not in shown] == []
