"""Commands that need ranks: find those that a launcher started, or start some on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Place", "joined", "on_own_ranks", "started_by_launcher"]

_TIMEOUT_S = 120.0
"""How long ranks wait for each other before one that is missing ends the command."""


@dataclass(frozen=True, slots=True)
class Place:
    """This rank among all.

    Attributes:
        rank: Global rank.
        world_size: Ranks N.
        per_node: Ranks on each node.
        device: Of this rank's tensors.
    """

    rank: int
    world_size: int
    per_node: int
    device: torch.device


def started_by_launcher() -> bool:
    """Whether torchrun or SLURM has started this process as one of several ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    # In an interactive allocation SLURM's variables are there, but it has not started the ranks.
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ and not interactive


def on_own_ranks(command: str, args: Sequence[str], ranks: int) -> int:
    """Run a command again on ranks of this machine, by torchrun; returns its exit status.

    Args:
        command: Of ``zeroladder``.
        args: Its arguments.
        ranks: Processes to start.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launcher += ["--local-addr=127.0.0.1", "-m", "lightning_zeroladder", command, *args]
    env = {
        "OMP_NUM_THREADS": "1",  # ranks share the cores
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # what can be imported here can be imported there
    }
    process = subprocess.Popen(launcher, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = list(process.stderr)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    # Every rank says what is wrong; a rank that found its peers gone says so after the one that knows why.
    own = [line for line in lines if line.startswith("zeroladder: ")][:1]
    if status:
        sys.stderr.write("".join(own or lines))  # what is not ours may help as a whole
    return 0 if status == 0 else 1


@contextmanager
def joined() -> Iterator[Place]:
    """Join the ranks that a launcher started, and leave them at the end.

    Raises:
        ValueError: If nodes have different numbers of ranks.
    """
    import torch
    import torch.distributed as dist
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    slurm = "TORCHELASTIC_RUN_ID" not in os.environ
    environment = SLURMEnvironment() if slurm else TorchElasticEnvironment()
    rank, world, local = environment.global_rank(), environment.world_size(), environment.local_rank()
    per_node = _slurm_per_node(world) if slurm else int(os.environ["LOCAL_WORLD_SIZE"])
    if world % per_node:
        raise ValueError(f"{world} ranks, {per_node} of them on this node: start equally many on each node.")
    os.environ.setdefault("MASTER_ADDR", environment.main_address)
    os.environ.setdefault("MASTER_PORT", str(environment.main_port))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", rank=rank, world_size=world, timeout=timedelta(seconds=_TIMEOUT_S)
    )
    try:
        yield Place(rank, world, per_node, device)
    finally:
        dist.destroy_process_group()


def _slurm_per_node(world: int) -> int:
    nodes = int(os.environ.get("SLURM_NNODES") or os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    if world % nodes:
        raise ValueError(f"{world} ranks on {nodes} nodes: start equally many on each, with --ntasks-per-node.")
    return world // nodes
