"""``zeroladder doctor``: looks at this machine, and at whether all ranks answer each other."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from lightning_zeroladder.versions import check_versions, collect_versions

__all__ = ["environment_lines", "run_doctor"]

_COMPILERS = ("c++", "ninja", "nvcc")
_GIB = 2**30


def run_doctor(args: list[str]) -> int:
    """Print what there is and run the preflight when started by torchrun.

    Returns:
        0, or 1 when ranks do not answer, a version is not supported or the run's folder cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="zeroladder doctor", description="Look at this machine, and under torchrun at the ranks' connections."
    )
    parser.add_argument("--run-dir", type=Path, default=Path(), help="folder of the run (default: the current one)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for silent ranks")
    options = parser.parse_args(args)
    if options.timeout <= 0:
        parser.error(f"--timeout is {options.timeout:g}; give seconds above 0")
    rank = int(os.environ.get("RANK", "0"))
    writable = options.run_dir.is_dir() and os.access(options.run_dir, os.W_OK)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print("\n".join(environment_lines(options.run_dir, os.environ)), flush=True)
    if not writable:
        print(f"{options.run_dir} is not a folder that rank {rank} can write to; make it, or give another --run-dir")
    supported = _versions_work()
    answered = _ranks_answer(rank, options.timeout)
    return 0 if writable and supported and answered else 1


def environment_lines(run_dir: Path, environment: Mapping[str, str]) -> list[str]:
    """Say what there is on this host, one thing a line. Sizes are in GiB."""
    import psutil

    lines = [f"{name} {version}" for name, version in collect_versions().items()]
    for compiler in _COMPILERS:
        lines.append(f"{compiler} {shutil.which(compiler) or 'not found; DeepSpeed may need it to build its ops'}")
    for name, which in (("open files", resource.RLIMIT_NOFILE), ("locked memory", resource.RLIMIT_MEMLOCK)):
        limit = resource.getrlimit(which)[0]
        lines.append(f"limit of {name} {'none' if limit == resource.RLIM_INFINITY else limit}")
    lines.append(f"free memory {psutil.virtual_memory().available / _GIB:.1f} GiB")
    if run_dir.is_dir():
        lines.append(f"free disk {shutil.disk_usage(run_dir).free / _GIB:.1f} GiB at {run_dir.resolve()}")
    names = sorted(name for name in environment if name.startswith(("NCCL_", "GLOO_")))
    return lines + [f"{name}={environment[name]}" for name in names]


def _versions_work() -> bool:
    try:
        check_versions()
    except ImportError as error:
        print(error, flush=True)
        return False
    return True


def _ranks_answer(rank: int, timeout_s: float) -> bool:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in needed):
        print("ranks not checked: start it with torchrun, as the run itself, to check them")
        return True

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from lightning_zeroladder.engine.preflight import RanksSilent, run_preflight

    world_size = int(os.environ["WORLD_SIZE"])
    backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # torchrun's agent serves the store itself and says so.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        limit = timedelta(seconds=timeout_s)
        store = TCPStore(address, port, world_size, serves, timeout=limit, wait_for_workers=False)
        taken_s = run_preflight(store, rank=rank, world_size=world_size, backend=backend, timeout_s=timeout_s)
    except RanksSilent as error:
        print(error, flush=True)
        return False
    except RuntimeError as error:
        print(f"rank {rank} cannot reach {address}:{port} (MASTER_ADDR:MASTER_PORT): {error}", flush=True)
        return False
    if rank == 0:
        print(f"all {world_size} ranks answer with {backend}, in {taken_s:.2f} s", flush=True)
    return True
