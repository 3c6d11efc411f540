"""Worker side of test_links: measure the links of these processes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import run_cases

from lightning_zeroladder.costmodel.links_file import links_to_json
from lightning_zeroladder.costmodel.traffic import Collective
from lightning_zeroladder.probe import links as probe
from lightning_zeroladder.probe.links import Effort, measure_links, quick_links

CPU = torch.device("cpu")
SMALL = Effort(smallest_bytes=1024, largest_bytes=2**20, growth=8, seconds=2.0, most_calls=5)


def measured(folder: Path, *, per_node: int, precision: str) -> Any:
    seen: list[Any] = []
    links = measure_links(CPU, per_node=per_node, precision=precision, effort=SMALL, on_sample=seen.append)
    return {"links": links_to_json(links), "told": len(seen), "groups": len(dist.distributed_c10d._world.pg_map)}


def quick(folder: Path) -> Any:
    started_s = time.perf_counter()
    links = quick_links(CPU, per_node=dist.get_world_size(), precision="bf16")
    return {"links": links_to_json(links), "took_s": time.perf_counter() - started_s}


def wrong(folder: Path, *, collective: str) -> Any:
    """The result of one collective is damaged: that has to be noticed."""
    kept = probe._Bench.call

    def damaged(self: Any) -> None:
        kept(self)
        everywhere = self.collective is Collective.REDUCE  # only its root looks, another one in each call
        if self.collective is Collective(collective) and (everywhere or dist.get_rank() == 1):
            (self._part if self.collective is Collective.REDUCE_SCATTER else self._whole)[-1] += 1

    probe._Bench.call = damaged  # type: ignore[method-assign]
    try:
        links = measure_links(CPU, per_node=dist.get_world_size(), precision="fp32", effort=SMALL)
    finally:
        probe._Bench.call = kept  # type: ignore[method-assign]
    return sorted({str(sample.collective) for sample in links.wrong()})


def run(payload: dict[str, Any]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    cases: dict[str, Callable[[Path], Any]] = {
        f"{precision}-{per_node}": functools.partial(measured, per_node=per_node, precision=precision)
        for precision in ("fp32", "bf16")
        for per_node in sorted({1, world // 2, world})
    }
    cases["quick"] = quick
    for collective in Collective:
        cases[f"wrong {collective}"] = functools.partial(wrong, collective=str(collective))
    return run_cases(cases, payload["folder"])
