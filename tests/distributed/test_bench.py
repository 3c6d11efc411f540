"""``zeroladder bench`` as a person types it: by itself, and as ranks that SLURM has started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import free_port

from lightning_zeroladder.costmodel.links import Where
from lightning_zeroladder.costmodel.links_file import links_from_json, read_links
from lightning_zeroladder.costmodel.traffic import Collective

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "lightning_zeroladder", "bench", "--largest", "65536", "--seconds", "3"]
PACKAGE = str(Path(__file__).parents[2])


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    return {**kept, "PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def test_by_itself_it_starts_its_ranks(tmp_path: Path) -> None:
    command = [*COMMAND, "--plot", "links.svg", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    links = read_links(tmp_path / "links.json")
    assert links_from_json(json.loads(done.stdout)) == links
    assert (links.machine.nodes, links.machine.per_node) == (1, 2)
    assert {sample.collective for sample in links.samples} == set(Collective)
    assert links.wrong() == ()
    assert (tmp_path / "links.svg").read_bytes().startswith(b"<?xml")


def test_under_slurm_it_uses_the_ranks_of_the_job(tmp_path: Path) -> None:
    """Two tasks on two nodes, as srun would start them."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            COMMAND,
            cwd=tmp_path,
            env=environment(
                SLURM_JOB_ID="4711",
                SLURM_JOB_NAME="train",
                SLURM_NTASKS="2",
                SLURM_NTASKS_PER_NODE="1",
                SLURM_NNODES="2",
                SLURM_PROCID=str(rank),
                SLURM_LOCALID="0",
                SLURM_NODEID=str(rank),
                SLURM_NODELIST="localhost",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    links = read_links(tmp_path / "links.json")
    assert (links.machine.nodes, links.machine.per_node) == (2, 1)
    assert {sample.where for sample in links.samples} == {Where.ACROSS}
    assert "all-reduce" in outputs[0][0]
    assert outputs[1][0] == ""  # one rank speaks


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    command = [*COMMAND[:4], "--smallest", "4096", "--largest", "1024"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [  # nothing was started
        "zeroladder: smallest_bytes=4096, largest_bytes=1024: the first must be above 0 and below the second."
    ]
    assert list(tmp_path.iterdir()) == []
