"""torchrun elastic, as a cluster uses it: 4 processes, one of them killed, 3 go on, a fourth comes back.

One agent of torchrun per process stands for a host. Case C26: an example that is a test.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import _tail, free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(560)]

ROOT = Path(__file__).parents[2]
STEPS = 40
STEP_SAMPLES = 24
SEQ_LEN = 16
FIRST_PAUSE, SECOND_PAUSE = 9, 20
TOLERANCE = 1e-4
"""Of losses near 5 that an Adam of 30 steps led to, with gradients summed over other ranks."""


@dataclass
class Cluster:
    """Agents of torchrun on this host, and what their workers note."""

    folder: Path
    port: int
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see docs/resume.md
            "ELASTIC_NOTES": str(self.folder),
            "ELASTIC_PAUSES": f"{FIRST_PAUSE},{SECOND_PAUSE}",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:4", "--nproc-per-node", "1"]
        command += ["--max-restarts", "10", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        command += ["--rdzv-id", "job", "--local-addr", "127.0.0.1"]
        command += ["--rdzv-conf", "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=5"]
        command += [str(ROOT / "tests" / "distributed" / "elastic_job.py"), "--folder", str(self.folder / "run")]
        command += ["--stages", "2", "--every", "3", "--batch-size", "2", "--width", "16", "--layers", "1"]
        command += ["--seq-len", str(SEQ_LEN), "--limit-bytes", str(limit_bytes())]
        with (self.folder / f"agent{len(self.agents)}.txt").open("wb") as output:
            agent = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=self.folder)
        self.agents.append(agent)
        return agent

    def wait(self, what: str, done: Callable[[], bool], timeout_s: float = 150) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline or self.agents[0].poll() not in (None, 0):
                outputs = "\n".join(f"---- {path.name} ----\n{_tail(path)}" for path in self.folder.glob("agent*.txt"))
                pytest.fail(
                    f"not there within {timeout_s:.0f} s, or the first agent failed: {what}\n{outputs}", pytrace=False
                )
            time.sleep(0.1)

    def listening(self) -> bool:
        """Whether an agent keeps the rendezvous by now."""
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", self.port)) == 0

    def waiting(self, step: int, ranks: int) -> Callable[[], bool]:
        return lambda: all((self.folder / f"waiting-{step}-{rank}").exists() for rank in range(ranks))

    def go(self, step: int) -> None:
        (self.folder / f"go-{step}").touch()

    def workers(self) -> list[tuple[int, int]]:
        """Process ids of every worker so far, each with its agent's."""
        pairs = [path.read_text().split() for path in self.folder.glob("pid-*")]
        return [(int(worker), int(agent)) for worker, agent in pairs]

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """What the loss of a host looks like: agent and worker gone at once."""
        agent.kill()
        agent.wait()
        for worker, parent in self.workers():
            if parent == agent.pid:
                _kill(worker)

    def end(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        for worker, _ in self.workers():
            _kill(worker)

    def notes(self) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob("notes-*.jsonl"))
        return [json.loads(line) for path in files for line in path.read_text().splitlines() if line.endswith("}")]


def _kill(pid: int) -> None:
    """End a worker of ours, unless its number belongs to another process by now."""
    try:
        if b"elastic_job.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return


def limit_bytes() -> int:
    """Bytes of text of which the 95 % for training are as many windows as the steps take."""
    return int(STEPS * STEP_SAMPLES * SEQ_LEN / 0.95) + SEQ_LEN


def windows() -> Counter[str]:
    sys.path.insert(0, str(ROOT / "examples"))
    from byte_gpt import StdlibText

    data = StdlibText(batch_size=2, seq_len=SEQ_LEN, limit_bytes=limit_bytes())
    data.setup("fit")
    train = data.train_set
    return Counter(bytes(train[index]["input_ids"].tolist()).hex() for index in range(len(train)))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, free_port())
    yield cluster
    cluster.end()


def test_four_three_and_four_again(cluster: Cluster) -> None:
    host = cluster.start()  # the first agent keeps the rendezvous: it has to stay
    cluster.wait("the rendezvous", cluster.listening)
    others = [cluster.start() for _ in range(3)]
    cluster.wait("4 ranks at the first pause", cluster.waiting(FIRST_PAUSE, 4))
    cluster.kill(others[-1])
    cluster.go(FIRST_PAUSE)  # the others run into a collective without it
    cluster.wait("3 ranks at the second pause", cluster.waiting(SECOND_PAUSE, 3))
    fourth = cluster.start()
    cluster.wait("4 ranks once more", lambda: len(list(cluster.folder.glob("pid-*-4-*"))) == 8)
    cluster.go(SECOND_PAUSE)
    cluster.wait("the end", lambda: host.poll() is not None, timeout_s=200)
    assert host.returncode == 0, _tail(cluster.folder / "agent0.txt")
    fourth.wait(30)

    notes = cluster.notes()
    began = {note["generation"]: note["at"] for note in sorted(notes, key=lambda note: -note["at"])}
    generations = sorted(began, key=lambda name: began[name])
    by_generation = [[note for note in notes if note["generation"] == name] for name in generations]
    ranks = [entries[0]["ranks"] for entries in by_generation]
    assert ranks == [4, 3, 4]
    assert [{note["accumulate"] for note in entries} for entries in by_generation] == [{3}, {4}, {3}]

    kept: list[dict[str, Any]] = []
    firsts = [min(note["step"] for note in entries) for entries in by_generation]
    assert firsts[0] == 0
    for entries, until in zip(by_generation, [*firsts[1:], STEPS], strict=True):
        kept += [note for note in entries if note["step"] < until]  # steps after the last checkpoint were lost
    by_step: dict[int, Counter[str]] = {}
    for note in kept:
        by_step.setdefault(note["step"], Counter()).update(note["samples"])
    assert sorted(by_step) == list(range(STEPS))
    assert {sum(samples.values()) for samples in by_step.values()} == {STEP_SAMPLES}
    assert sum(by_step.values(), Counter()) == windows()

    lost = [note for note in notes if note not in kept]
    assert lost  # and done again on other ranks, with the same samples and the same loss
    complete = {step for step in {note["step"] for note in lost} if _samples(lost, step) == by_step[step]}
    assert complete
    for step in complete:
        assert _mean_loss(lost, step) == pytest.approx(_mean_loss(kept, step), abs=TOLERANCE)


def _samples(notes: list[dict[str, Any]], step: int) -> Counter[str]:
    return sum((Counter(note["samples"]) for note in notes if note["step"] == step), Counter())


def _mean_loss(notes: list[dict[str, Any]], step: int) -> float:
    losses = [note["loss"] for note in notes if note["step"] == step]
    return sum(losses) / len(losses)
