"""Start the ranks of a run as processes on this machine, and see to it that they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from lightning_zeroladder.proof.job import Job, Outcome
from lightning_zeroladder.proof.plan import BadJob

__all__ = ["RunFailed", "launch"]

_WORKER = "lightning_zeroladder.proof.worker"
_TAIL_LINES = 25
_TAIL_BYTES = 1 << 16
_GRACE_S = 20.0
"""How long the other ranks get after one has failed: time to say themselves what is wrong."""
_POLL_S = 0.05


class RunFailed(RuntimeError):
    """A run did not come to its end; the message has the end of what a rank printed."""


def launch(job: Job, *, timeout_s: float, on_step: Callable[[int], None]) -> list[Outcome]:
    """Run a job on its ranks.

    Args:
        job: What to run.
        timeout_s: After this the run is given up.
        on_step: Called now and then with the optimizer steps taken so far.

    Returns:
        What each rank found, in the order of ranks.

    Raises:
        BadJob: If the ranks say that the job cannot be proven as it is.
        RunFailed: If a rank fails, or the time is over.
    """
    path, port = job.write(), _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(job.devices):
            with job.output(rank).open("wb") as stream:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", _WORKER, str(path)],
                        env=_environment(rank, job.devices, port),
                        stdin=subprocess.PIPE,  # closes when this process is gone, by which a rank knows
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # with its data loading processes it can be ended as a whole
                    )
                )
        problem = _wait(processes, job, timeout_s, on_step)
    finally:
        for process in processes:
            _end(process)
    if problem is not None:
        raise _failure(job, processes, problem)
    return [Outcome.read(job.outcome(rank)) for rank in range(job.devices)]


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], job: Job, timeout_s: float, on_step: Callable[[int], None]
) -> str | None:
    """Wait for all to end; returns what went wrong, None if nothing did."""
    deadline, problem = time.monotonic() + timeout_s, None
    while any(process.poll() is None for process in processes):
        if problem is None and any(process.returncode for process in processes):
            problem = "failed"
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            return problem or f"was not done after {timeout_s:.0f} s"
        with contextlib.suppress(OSError, ValueError):
            on_step(int(job.progress.read_text(encoding="utf-8")))
        time.sleep(_POLL_S)
    return "failed" if any(process.returncode for process in processes) else None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _failure(job: Job, processes: Sequence[subprocess.Popen[bytes]], problem: str) -> Exception:
    for rank in range(job.devices):
        if job.problem(rank).exists():
            return BadJob(job.problem(rank).read_text(encoding="utf-8"))
    # A rank that was killed waited for one that failed by itself.
    codes = [process.returncode for process in processes]
    rank = next((rank for rank, code in enumerate(codes) if code > 0), 0)
    output = job.output(rank).read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    refused = output.rfind("\nerror: ")  # how LightningCLI says what is wrong with a config, below its whole usage
    if codes[rank] == 2 and refused >= 0:
        return BadJob(f"the config cannot be used: {output[refused + len('error: ') + 1 :].strip()}")
    lines = "\n".join(output.strip().splitlines()[-_TAIL_LINES:])
    return RunFailed(f"the {job.role} run {problem}. The end of what rank {rank} printed:\n{lines}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",  # as torchrun does: ranks share the cores
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # what can be imported here can be imported there
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "zeroladder-prove",  # Lightning then takes ranks and address from the environment
    }
