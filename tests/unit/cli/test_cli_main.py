from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_zeroladder.cli import main
from lightning_zeroladder.ladder.types import (
    Decision,
    LadderSettings,
    Rung,
    RungResult,
    Skip,
    SkipKind,
    TrialResult,
    Verdict,
)
from lightning_zeroladder.report import RunContext, RunReport, report_to_json, write_report


@pytest.fixture
def report() -> RunReport:
    context = RunContext(2, 1, 1, "32-true", 1000, 1000, "cpu", "SGD", {}, {})
    results = (
        RungResult(TrialResult(Rung(0)), Verdict.COMMITTED, "the only one"),
        RungResult(TrialResult(Rung(3), skip=Skip(SkipKind.RUN_ENDED)), Verdict.SKIPPED, "the run ended first"),
    )
    decision = Decision(Rung(0), True, "stage 0 was all there was time for.", results)
    return RunReport(1, False, context, LadderSettings(stages=(0, 3)), decision, (), {"zero_optimization": {}})


@pytest.fixture
def run_dir(tmp_path: Path, report: RunReport) -> Path:
    write_report(tmp_path, report)
    return tmp_path


def test_report_prints_the_table(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir)]) == 0
    captured = capsys.readouterr()
    assert "incomplete: the run ended in mid-ladder (N=2, k=1, 32-true, 1k parameters)" in captured.out
    assert "▶ stage 0" in captured.out
    assert "stage 0 was all there was time for." in captured.out
    assert captured.err == ""


def test_report_as_json(run_dir: Path, report: RunReport, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir / "report.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report_to_json(report)))


def test_missing_report_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"zeroladder: no report at {tmp_path / 'report.json'}: expected")
    assert captured.err.count("\n") == 1


def test_other_schema_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text('{"schema": 99}')
    assert main(["report", str(tmp_path)]) == 1
    assert "has schema 99, expected 1" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["report"], ["report", "a", "b"], ["report", "a", "--xml"]])
def test_wrong_arguments_of_report(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert "usage: zeroladder report" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in ("fit", "validate", "test", "predict", "report"):
        assert f"\n  {name} " in out


def test_no_command_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: zeroladder COMMAND" in captured.err


def test_unknown_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 2
    assert capsys.readouterr().err == (
        "zeroladder: unknown command 'tune'; choose from fit, validate, test, predict, plan, bench, audit, report, "
        "inspect, convert, export, prove, doctor\n"
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("zeroladder ")


def test_report_loads_neither_torch_nor_deepspeed_nor_lightning(run_dir: Path) -> None:
    code = (
        "import sys; sys.argv[0] = 'zeroladder'; from lightning_zeroladder.cli import main; "
        "status = main(sys.argv[1:]); "
        "heavy = {'torch', 'deepspeed', 'lightning', 'jsonargparse'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(run_dir)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "▶ stage 0" in done.stdout


def test_module_as_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_zeroladder", "report", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("zeroladder: no report at ")


MODULE = """
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


class Model(BoringModel):
    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = scale

    def on_train_end(self):
        print(f"steps {self.trainer.global_step} scale {self.scale}")
"""


@pytest.mark.timeout(180)
def test_fit_trains_a_class_of_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "users_model.py").write_text(MODULE)
    root = str(Path(__file__).parents[3])
    # The script form: the folder of the program, not the user's, is first on the path.
    program = tmp_path / "bin" / "zeroladder"
    program.parent.mkdir()
    program.write_text(
        f"import sys; sys.path.append({root!r})\nfrom lightning_zeroladder.cli import main\nsys.exit(main())"
    )
    command = [sys.executable, str(program), "fit", "--model.class_path", "users_model.Model"]
    command += ["--model.scale=2.5", "--data", "lightning.pytorch.demos.boring_classes.BoringDataModule"]
    command += ["--trainer.max_steps=3", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    command += ["--trainer.enable_checkpointing=false", "--trainer.limit_val_batches=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "steps 3 scale 2.5" in done.stdout
    assert "not recommended to provide both args" not in done.stderr


@pytest.mark.timeout(180)
def test_wrong_option_of_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["zeroladder"])
    assert main(["fit", "--trainer.max_stepps=3"]) == 2
    assert "max_stepps" in capsys.readouterr().err


@pytest.mark.timeout(180)
def test_misconfiguration_in_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zeroladder"])
    model = "lightning.pytorch.demos.boring_classes.BoringModel"
    args = [
        "fit",
        f"--model={model}",
        "--trainer.accelerator=cpu",
        "--trainer.val_check_interval=0.5",
        "--seed_everything=false",
    ]
    assert main([*args, "--trainer.check_val_every_n_epoch=null"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("zeroladder: ")
    assert "check_val_every_n_epoch" in last
