"""Worker side of test_moves_memory: twenty moves in a row of a model of about ten million parameters."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from harness import run_cases
from optimizer_cases import Walker, init_distributed
from torch import nn

from lightning_zeroladder.engine.lifecycle import return_freed_memory
from lightning_zeroladder.probe.memory import resident_bytes

MOVES = 20
WIDTH = 1000


class Wide(nn.Module):
    """Ten layers of a million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, WIDTH)
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(10)])
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.leave(self.body(self.enter(x))).float() - 1) ** 2).mean()


def live_tensor_bytes() -> int:
    """Bytes of the storages of all tensors that Python can reach, each counted once."""
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def twenty_moves(folder: Path) -> Any:
    walker = Walker(lambda params: torch.optim.AdamW(params, lr=1e-4), "fp32", Wide)
    stages = [(3, 1, 0, 2)[index % 4] for index in range(MOVES + 1)]
    walker.slot.build(walker.builder(stages[0]))
    walker.train(1)
    resident: list[int] = []
    live: list[int] = []
    held_bytes: list[int] = []
    for stage in stages[1:]:
        held = walker.slot.hold()
        return_freed_memory()
        resident.append(resident_bytes())
        live.append(live_tensor_bytes())
        held_bytes.append(held.state.nbytes)
        walker.slot.resume(held, walker.builder(stage))
        del held
        walker.train(1)
    return {"resident": resident, "live": live, "held": held_bytes, "losses": walker.losses}


def run(payload: dict[str, Any]) -> dict[str, Any]:
    init_distributed()
    return run_cases({"twenty_moves": twenty_moves}, payload["folder"])
