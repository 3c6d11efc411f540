"""What loading a checkpoint at another number of ranks costs, against torch's distributed checkpoint (DCP) with FSDP2.

What is measured (117.6 M parameters with AdamW, saved by 4 ranks, loaded by 2 on CPU over gloo):

- ours: seconds of ``restore()``, from a native checkpoint of ZeRO stage 2 or 3 in bf16 into a live DeepSpeed engine of
  stage 1, 2 or 3. It ends with the fp32 weights, the optimizer state and the bf16 weights of every rank in place.
- the peer: seconds of ``dcp.load`` and ``set_state_dict`` into a model of FSDP2 (``fully_shard`` of each block) in fp32
  with the same optimizer: the same 1.4 GB. ``get_state_dict``, which DCP needs before, is not counted, but printed.

Both start at a barrier with everything built, and the time is that of the slower rank. Every load runs in fresh
processes, again if other programs disturb it. Loads take turns; a ratio is that of a load to the peer's next to it.
Everybody finds the files in memory.
DCP compares nothing with checksums; ours compares every byte that it reads.

Printed beside it: bytes that a rank reads over the bytes of fp32 weights and optimizer state that it owns.

Goals: ratio 1 (no slower), 1.1 times the bytes owned. How: ``python benchmarks/resume.py [--repeats 5]
[--folder DIR]``. Needs: two idle cores, 6 GB of disk, 8 GB of memory. Duration: 2 minutes, and 1 to 2 per repeat.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import (
    heading,
    leave_group,
    quiet,
    rank_command,
    read_json,
    spawn_ranks,
    wait_for_ranks,
    write_json,
)
from gpt import Gpt, Quiet, Shape, ds_config, find_in_memory, room, size_of, start_gloo, trained_checkpoint, verdict
from rig import clean_up_on_sigterm

from lightning_zeroladder.engine.lifecycle import EngineSlot
from lightning_zeroladder.engine.restore import restore
from lightning_zeroladder.engine.shards import live_shards

_SOURCES = (2, 3)
_TARGETS = (1, 2, 3)
_SAVING_RANKS, _LOADING_RANKS = 4, 2
_GOAL, _GOAL_BYTES = 1.0, 1.1
_TIMEOUT_S = 600.0
_STATES = 3
"""fp32 tensors per parameter that AdamW steps: the weights and two moments."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load by all ranks.

    Attributes:
        wall_s: Of the slower rank.
        before_s: What had to be done before, not counted.
        read: Bytes read over bytes owned, of the rank that reads most for its share; 0 if unknown.
    """

    wall_s: float
    before_s: float = 0.0
    read: float = 0.0


# Ranks ----------------------------------------------------------------------------------------------------------


def _slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def load_ours(checkpoint: str, stage: int, shape: Shape) -> dict[str, float]:
    """Load into an engine of this process's rank."""
    import deepspeed

    module = Gpt(shape)
    slot = EngineSlot(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    engine = slot.build(
        lambda optimizer: deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config(stage))[0]
    )
    dist.barrier()
    started_s = time.perf_counter()
    restored = restore(engine, slot.client, checkpoint)
    wall_s = time.perf_counter() - started_s
    owned = sum(shard.master.numel() for shard in live_shards(engine)) * _STATES * torch.float32.itemsize
    return {"wall_s": _slowest(wall_s), "read": _slowest(restored.nbytes / owned)}


def _fsdp(shape: Shape) -> tuple[Gpt, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = Gpt(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (module.embedding, *module.blocks, module.head, module):
        fully_shard(part, mesh=mesh)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-3)


def save_dcp(checkpoint: str, shape: Shape) -> dict[str, float]:
    """Train one step with FSDP2 and save, as a rank."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    module, optimizer = _fsdp(shape)
    module(torch.randint(0, shape.vocabulary, (1, 8))).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, state = get_state_dict(module, optimizer)
    dcp.save({"weights": weights, "optimizer": state}, checkpoint_id=checkpoint)
    return {}


def load_dcp(checkpoint: str, shape: Shape) -> dict[str, float]:
    """Load with FSDP2, as a rank."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    module, optimizer = _fsdp(shape)
    started_s = time.perf_counter()
    weights, state = get_state_dict(module, optimizer)
    before_s = time.perf_counter() - started_s
    dist.barrier()
    started_s = time.perf_counter()
    dcp.load({"weights": weights, "optimizer": state}, checkpoint_id=checkpoint)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state)
    wall_s = time.perf_counter() - started_s
    return {"wall_s": _slowest(wall_s), "before_s": _slowest(before_s)}


def worker(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    quiet()
    start_gloo()
    shape, path = Shape.of(arguments), str(arguments.path)
    actions = {
        "ours": lambda: load_ours(path, arguments.stage, shape),
        "save_dcp": lambda: save_dcp(path, shape),
        "load_dcp": lambda: load_dcp(path, shape),
    }
    measured = actions[arguments.worker]()
    if dist.get_rank() == 0:
        write_json(arguments.result, measured)
    leave_group()


# The comparison -------------------------------------------------------------------------------------------------


def on_ranks(what: str, path: Path, place: Path, ranks: int, shape: Shape, stage: int = 0) -> dict[str, Any]:
    """Run a worker on some ranks."""
    result, log = place / "result.json", place / "ranks.log"
    command = rank_command(
        __file__,
        *("--worker", what, "--path", str(path), "--stage", str(stage), "--result", str(result)),
        *shape.arguments,
    )
    wait_for_ranks(spawn_ranks(command, ranks, log=log), _TIMEOUT_S, log)
    measured: dict[str, Any] = read_json(result)
    result.unlink()
    log.unlink()
    return measured


def compare(arguments: argparse.Namespace, place: Path) -> None:
    """Run everything and print the ratios."""
    shape = Shape.of(arguments)
    sources = {stage: trained_checkpoint(place, stage, shape) for stage in _SOURCES}
    theirs = place / f"dcp_{shape.layers}x{shape.width}x{shape.vocabulary}"
    if not (theirs / ".metadata").exists():
        on_ranks("save_dcp", theirs, place, _SAVING_RANKS, shape)
    for path in (*sources.values(), theirs):
        find_in_memory(path)
    told = ", ".join(f"stage {stage} {size_of(path) / 1e9:.2f} GB" for stage, path in sources.items())
    print(f"saved by {_SAVING_RANKS} ranks: {told}, DCP {size_of(theirs) / 1e9:.2f} GB", flush=True)
    ours: dict[tuple[int, int], list[Load]] = {(source, target): [] for source in _SOURCES for target in _TARGETS}
    peers: dict[tuple[int, int], list[Load]] = {pair: [] for pair in ours}
    quietly = Quiet(tries=3)
    for repeat in range(1, arguments.repeats + 1):
        for number, (source, target) in enumerate(ours):
            pair = (source, target)
            if number % 2 == 0:  # one of DCP's loads between two of ours, each of which it is compared with
                peer = quietly(lambda: Load(**on_ranks("load_dcp", theirs, place, _LOADING_RANKS, shape)))
            peers[pair].append(peer)
            ours[pair].append(
                quietly(
                    lambda source=source, target=target: Load(
                        **on_ranks("ours", sources[source], place, _LOADING_RANKS, shape, target)
                    )
                )
            )
        told = ", ".join(f"{source}->{target} {ours[source, target][-1].wall_s:.2f}" for source, target in ours)
        print(f"repeat {repeat}: DCP {peers[_SOURCES[0], _TARGETS[0]][-1].wall_s:.2f} s; ours {told} s", flush=True)
    every = [load for loads in peers.values() for load in loads]
    print(
        f"\nDCP: {median(load.wall_s for load in every):.3f} s ({min(load.wall_s for load in every):.3f} to "
        f"{max(load.wall_s for load in every):.3f}), get_state_dict before it "
        f"{median(load.before_s for load in every):.3f} s"
    )
    for (source, target), loads in ours.items():
        ratios = [mine.wall_s / peer.wall_s for mine, peer in zip(loads, peers[source, target], strict=True)]
        walls_s = [load.wall_s for load in loads]
        read = max(load.read for load in loads)
        print(
            f"stage {source} of {_SAVING_RANKS} ranks into stage {target} of {_LOADING_RANKS}: {median(walls_s):.3f} s "
            f"({min(walls_s):.3f} to {max(walls_s):.3f}), of DCP {median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}); {verdict(median(ratios), _GOAL)}\n"
            f"  bytes read {read:.3f} of those owned; {verdict(read, _GOAL_BYTES)}"
        )
    print(quietly)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Loading at another number of ranks against DCP with FSDP2.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where checkpoints are kept; default: a temporary one"
    )
    Shape.add_arguments(parser)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    clean_up_on_sigterm()
    print(heading("Loading at another number of ranks, against DCP with FSDP2"), flush=True)
    with room(arguments.folder, int(6e9)) as place:
        compare(arguments, place)


if __name__ == "__main__":
    main()
