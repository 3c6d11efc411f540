"""Start ranks on this machine, run a function on each, and bring back what it returned."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

__all__ = ["ERROR", "NOT_RUN", "free_port", "outcome", "rank_environment", "run_cases", "run_ranks"]

ERROR = "error: "
NOT_RUN = ERROR + "not run: ranks disagreed about an earlier case, "

_HERE = Path(__file__).parent
_TAIL_BYTES = 6000
_GRACE_S = 20.0
"""How long the other ranks get after one has failed: time to notice the closed connection."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _tail(path: Path) -> str:
    return path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if path.exists() else ""


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    paths = [str(_HERE), str(_HERE.parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",  # Lightning then takes ranks and address from the environment
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run_ranks(
    target: str,
    payload: Any,
    *,
    ranks: int,
    timeout_s: float,
    tmp_path: Path,
    extra_env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``module:function`` with the payload on every rank and return what each returned, by rank.

    The test fails with the end of the output of the ranks concerned if one fails or the time is over.

    Args:
        target: Importable from this folder.
        payload: Anything that JSON can carry.
        ranks: Processes to start.
        timeout_s: After this the processes are killed.
        tmp_path: Folder for output and results; used once.
        extra_env: Environment variables of the ranks on top of the usual ones.
    """
    tmp_path.mkdir(parents=True, exist_ok=True)
    job = {"payload": payload, "timeout_s": timeout_s}
    (tmp_path / "job.json").write_text(json.dumps(job))
    port = free_port()
    outputs = [tmp_path / f"output.{rank}.txt" for rank in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, output in enumerate(outputs):
            with output.open("wb") as stream:
                command = [sys.executable, str(_HERE / "worker.py"), target, str(tmp_path)]
                env = {**rank_environment(rank, ranks, port), **(extra_env or {})}
                processes.append(subprocess.Popen(command, env=env, stdout=stream, stderr=subprocess.STDOUT))
        problem = _wait(processes, timeout_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if problem is not None:
        failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
        tails = "\n".join(f"---- rank {rank} ----\n{_tail(outputs[rank])}" for rank in failed)
        pytest.fail(f"{target} on {ranks} ranks: {problem}\n{tails}", pytrace=False)
    return [json.loads((tmp_path / f"result.{rank}.json").read_text()) for rank in range(ranks)]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> str | None:
    """Wait for all to end; return what went wrong, None if nothing did."""
    deadline, problem = time.monotonic() + timeout_s, None
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed and problem is None:
            problem = f"rank {failed[0]} exited with {processes[failed[0]].returncode}"
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            return problem or f"not done after {timeout_s:.0f} s, killed"
        time.sleep(0.05)
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    return f"rank {failed[0]} exited with {processes[failed[0]].returncode}" if failed else None


# Many cases in one launch ---------------------------------------------------------------------------------------


def run_cases(cases: Mapping[str, Callable[[Path], Any]], folder: str) -> dict[str, Any]:
    """Run named cases one after the other on this rank; called inside a worker, on every rank alike.

    An exception becomes the case's result. If ranks disagree about it their collectives are out of step, and the
    cases after it are not run.

    Args:
        cases: Each gets an empty folder, the same one on every rank.
        folder: Shared by the ranks of this launch.

    Returns:
        By case, what it returned or a text that starts with ``error: ``.
    """
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(folder).mkdir(parents=True, exist_ok=True)
    store = dist.FileStore(str(Path(folder) / "words"), ranks)
    results: dict[str, Any] = {}
    for name, case in cases.items():
        place = Path(folder) / name
        place.mkdir(parents=True, exist_ok=True)
        started_s = time.perf_counter()
        word = "ok"
        try:
            results[name] = case(place)
        except Exception as error:
            results[name] = ERROR + traceback.format_exc()
            word = f"{type(error).__name__}: {error}"[:200]
            traceback.print_exc()
        print(f"case {name}: {time.perf_counter() - started_s:.1f} s, {word}", flush=True)
        if not _agreed(store, name, word, rank, ranks):
            results.update({left: NOT_RUN + name for left in cases if left not in results})
            break
    return results


def _agreed(store: Any, name: str, word: str, rank: int, ranks: int) -> bool:
    store.set(f"{name}/{rank}", word)
    keys = [f"{name}/{other}" for other in range(ranks)]
    try:
        store.wait(keys, timedelta(seconds=_GRACE_S if word != "ok" else 120))
    except Exception:  # a rank that is stuck: leaving closes its connections
        return False
    return len({store.get(key) for key in keys}) == 1


def outcome(results: list[dict[str, Any]], case: str) -> list[Any]:
    """Return what a case returned, by rank; the test fails if it raised on any."""
    by_rank = [result[case] for result in results]
    wrong = {rank: data for rank, data in enumerate(by_rank) if isinstance(data, str) and data.startswith(ERROR)}
    if wrong:
        texts = list(wrong.values()) if len(set(wrong.values())) > 1 else [next(iter(wrong.values()))]
        pytest.fail(f"{case} failed on ranks {list(wrong)}:\n" + "\n".join(texts), pytrace=False)
    return by_rank
