"""`zeroladder prove`: jobs that resume pass, those that do not fail, with numbers and with whose doing it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lightning_zeroladder.cli import main
from lightning_zeroladder.proving import BadJob, RunFailed, prove

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SMALL = ["--model.init_args.width=32", "--model.init_args.layers=1", "--data.init_args.limit_bytes=100000"]
ONE = {"devices": 1, "stage": 1, "to_stage": 2, "steps": 4}
"""The least that is a resume: what these jobs do wrong does not need more ranks."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, from which the jobs of these tests can be imported."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(folder: Path, model: str = "Dropping", **trainer: object) -> Path:
    """Write a config with what a user's may have in it and the proof has to do without."""
    content = {
        "seed_everything": True,
        "trainer": {
            "accelerator": "cpu",
            "devices": 7,
            "max_epochs": 3,
            "limit_train_batches": 2,
            "gradient_clip_val": 5.0,
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"every_n_train_steps": 1}},
                {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
                {"class_path": "lightning.pytorch.callbacks.RichProgressBar"},
            ],
            **trainer,
        },
        "model": {"class_path": f"prove_jobs.{model}"},
        "data": {"class_path": "prove_jobs.Numbers"},
        "ckpt_path": "last",
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def nothing_left(place: Path) -> bool:
    return {entry.name for entry in place.iterdir()} <= {"job.yaml", "work"} and not list((place / "work").iterdir())


def test_the_demo_passes_on_fewer_devices_at_another_stage(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(ROOT / "configs" / "demo.yaml"), *SMALL, "--steps", "10", "--work-dir", "work"]
    assert main(["prove", *arguments]) == 0
    shown, progress = capfd.readouterr()
    assert "2 devices, stage 2, saved after step 4 of 10, resumed on 1 device, stage 3" in shown
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] and line.split()[0].isdigit()][1:]
    assert [int(row[0]) for row in rows] == [5, 6, 7, 8, 9, 10]
    losses = [(float(row[1]), float(row[2])) for row in rows]
    assert all(5.0 < loss < 6.0 and abs(loss - other) < 1e-4 for loss, other in losses)
    assert len(set(losses)) == 6
    assert "state: 72 of 72 tensors equal after loading, bit for bit" in shown
    assert "1e-05 allowed (32-true: in fp32 sums are added in another order" in shown
    assert "passed: the state came back bit for bit and the losses go on" in shown
    assert progress.splitlines() == [
        "prove: uninterrupted, 10 steps",
        "prove: resumed (1 device, stage 3), 6 steps",
    ]
    assert nothing_left(place)


def test_dropout_clipping_and_accumulation_pass(place: Path) -> None:
    """Random numbers go with the micro-batch and gradients keep their size, so this too is the same on other ranks."""
    strategy = {"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy", "init_args": {"stage": 1}}
    config = job(place, accumulate_grad_batches=2, strategy=strategy)
    seen: list[tuple[str, int, int]] = []
    proof = prove(
        config,
        steps=8,
        stage=3,
        to_stage=0,
        work_dir="work",
        progress=lambda title, *count: seen.append((title, *count)),
    )
    assert proof.passed is True
    assert proof.state_differs == ()
    assert 0 <= proof.difference <= proof.tolerance == 1e-5
    assert (proof.plan.before.accumulate, proof.plan.after.accumulate) == (2, 4)
    assert list(proof.steps) == [5, 6, 7, 8]
    assert len(set(proof.uninterrupted)) == 4
    assert max(proof.uninterrupted) > 0.1
    assert proof.repeat_difference is proof.control_difference is None
    assert proof.strategy == "lightning.pytorch.strategies.deepspeed.DeepSpeedStrategy"
    assert (seen[0], seen[-1]) == (("uninterrupted", 0, 8), ("resumed (1 device, stage 0)", 4, 4))
    assert nothing_left(place)


def test_a_weight_that_is_changed_in_loading_fails(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = job(place, "Perturbed")
    options = ["--devices", "1", "--stage", "1", "--to-stage", "2", "--steps", "4", "--json"]
    assert main(["prove", "--config", str(config), *options]) == 1
    proof = json.loads(capfd.readouterr().out)
    assert proof["passed"] is False
    assert proof["state_differs"] == ["net.4.bias/weights"]
    assert proof["difference"] > 0.01
    assert proof["control_difference"] is None  # there is nothing left to find out
    assert "1 of 21 tensors of the training state are not, after loading, what they were" in proof["reason"]


def test_a_job_that_keeps_state_to_itself_fails(place: Path) -> None:
    proof = prove(job(place, "Forgetful"), **ONE)
    assert proof.passed is False
    assert proof.state_differs == ()
    assert proof.difference > 0.05
    assert proof.repeat_difference == 0.0
    assert proof.control_difference == pytest.approx(proof.difference, rel=1e-4)
    assert "the job depends on something that its checkpoints do not hold" in proof.reason


def test_what_cannot_be_compared_is_said_before_training(place: Path) -> None:
    with pytest.raises(BadJob, match=r"to_devices=2: an optimizer step has 3 micro-batches \(3 on each of 1 devices"):
        prove(job(place, accumulate_grad_batches=3), to_devices=2, **ONE)


def test_a_run_that_fails_shows_its_end(place: Path) -> None:
    with pytest.raises(RunFailed, match="the third shelf is empty") as failure:
        prove(job(place, "Failing"), work_dir="work", **ONE)
    assert str(failure.value).startswith("the uninterrupted run failed. The end of what rank 0 printed:\n")
    assert nothing_left(place)


def test_a_wrong_config_is_said_in_words(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--config", str(job(place, "Nowhere")), "--devices", "1"]) == 1
    said = capfd.readouterr().err.splitlines()[1:]
    assert said[0].startswith("zeroladder: the config cannot be used: ")
    assert any("prove_jobs.Nowhere" in line for line in said)
    assert not any(line.startswith(("usage:", "Traceback")) for line in said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--config", "JOB", "--devices", "0"], "devices=0: must be at least 1"),
        (["--config", "JOB", "--steps", "1"], "steps=1: must be at least 2"),
        (["--config", "JOB", "--to-stage", "4"], "to_stage=4: ZeRO has the stages"),
        (["--config", "JOB", "--tolerance", "nan"], "tolerance=nan: must be a number"),
        (["--config", "JOB", "--work-dir", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_mistakes_are_found_before_a_run(
    place: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(job(place))
    assert main(["prove", *[path if word == "JOB" else word for word in arguments]]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("zeroladder: ")
    assert says in shown


def _ranks(folder: Path) -> list[int]:
    """Return the processes that were told of a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words and b"proof.worker" in words:
            found.append(int(entry.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_proof_that_is_ended_takes_its_ranks_with_it(place: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "lightning_zeroladder", "prove", "--config", str(job(place)), "--work-dir", "work"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as proving:
        while len(_ranks(Path("work"))) < 2:
            assert proving.poll() is None
            time.sleep(0.05)
        proving.send_signal(how)
    assert proving.returncode == (128 + how if how == signal.SIGTERM else -how)
    while _ranks(Path("work")):  # the limit of the test is the limit of this
        time.sleep(0.05)
    if how == signal.SIGTERM:  # nobody can tidy up after the other
        assert nothing_left(place)
