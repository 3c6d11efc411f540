"""Ranks that do not answer are named; those that do are found to answer."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import free_port

from lightning_zeroladder.cli import main
from lightning_zeroladder.cli.doctor import environment_lines
from lightning_zeroladder.engine.preflight import RanksSilent, run_preflight


def test_ranks_that_never_come_are_named() -> None:
    store = dist.HashStore()
    store.set("zeroladder/preflight/here/2", "1")
    with pytest.raises(RanksSilent, match=r"ranks 1, 3 of 4 did not answer within 0\.2 s") as caught:
        run_preflight(store, rank=0, world_size=4, backend="gloo", timeout_s=0.2)
    assert caught.value.ranks == (1, 3)


def test_a_rank_that_comes_and_then_hangs_is_named() -> None:
    store = dist.HashStore()
    store.set("zeroladder/preflight/here/1", "1")
    store.set("zeroladder/preflight/done/0", "1")
    with pytest.raises(RanksSilent, match="a small gloo collective failed on rank 0; not finished on rank 1") as caught:
        run_preflight(store, rank=0, world_size=2, backend="gloo", timeout_s=1.0)
    assert caught.value.ranks == (1,)


def test_doctor_says_what_is_set(tmp_path: Path) -> None:
    lines = environment_lines(tmp_path, {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "HOME": "x"})
    assert lines[-2:] == ["GLOO_SOCKET_IFNAME=lo", "NCCL_DEBUG=INFO"]
    assert f"python {sys.version.split()[0]}" in lines


def test_doctor_fails_on_a_folder_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["doctor", "--run-dir", str(tmp_path / "gone")]) == 1
    assert "gone is not a folder that rank 0 can write to" in capsys.readouterr().out
    assert main(["doctor", "--run-dir", str(tmp_path)]) == 0


def test_doctor_fails_on_versions_that_are_not_supported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch<2"])
    assert main(["doctor"]) == 1
    assert "python -m pip install 'torch<2'" in capsys.readouterr().out


def test_a_rank_that_was_never_started_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--timeout", "0.5"]) == 1
    assert "rank 1 of 2 did not answer within 0.5 s" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_two_ranks_answer_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "lightning_zeroladder", "doctor", "--timeout", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 2 ranks answer with " in done.stdout
