"""Worker side of test_digest: state that is damaged on purpose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import run_cases
from optimizer_cases import OPTIMIZERS, Walker, init_distributed

from lightning_zeroladder.engine.fragments import DamagedState, take


def _message(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except DamagedState as error:
        return str(error)
    return None


def _trained(stage: int, dtype: str) -> Walker:
    walker = Walker(OPTIMIZERS["adamw"], dtype)
    walker.slot.build(walker.builder(stage))
    walker.train(2)
    return walker


def flip_one_bit(folder: Path, *, stages: tuple[int, int], key: str, dtype: str, rank: int) -> Any:
    """Flip the lowest bit of one element of a held piece on one rank, then resume."""
    walker = _trained(stages[0], dtype)
    held = walker.slot.hold()
    if torch.distributed.get_rank() == rank:
        pieces = [
            held.state.parameters["model.body.0.weight"].tensors[key],
            held.state.parameters["model.body.2.weight"].tensors[key],
        ]
        piece = next(piece for piece in pieces if piece.numel())
        piece.view(torch.int32)[-1] ^= 1
    message = _message(lambda: walker.slot.resume(held, walker.builder(stages[1])))
    walker.slot.take_down()
    return {"message": message}


def untouched(folder: Path) -> Any:
    walker = _trained(0, "fp32")
    held = walker.slot.hold()
    message = _message(lambda: walker.slot.resume(held, walker.builder(3)))
    return {"message": message}


def weights_changed_while_held(folder: Path, *, frozen: bool) -> Any:
    """The module's own weights, which a move does not write, change between hold and resume.

    On rank 0: a new engine broadcasts its weights, so those of other ranks are put right.
    """
    walker = _trained(1, "bf16")
    held = walker.slot.hold()
    if torch.distributed.get_rank() == 0:
        with torch.no_grad():
            name = "model.fixed" if frozen else "model.scale"
            walker.module.get_parameter(name).view(torch.int16)[0] ^= 1
    message = _message(lambda: walker.slot.resume(held, walker.builder(2)))
    walker.slot.take_down()
    return {"message": message}


def replicas_differ(folder: Path, *, stage: int, name: str, dtype: str) -> Any:
    """One rank writes a weight that every rank holds."""
    walker = _trained(stage, dtype)
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            walker.module.get_parameter(name).view(-1)[0] += 1
    message = _message(lambda: take(walker.slot.engine))
    walker.slot.take_down()
    return {"message": message}


def optimizer_state_differs(folder: Path) -> Any:
    """One rank's moments differ at stage 0, where every rank holds them all."""
    walker = _trained(0, "fp32")
    if torch.distributed.get_rank() == 0:
        walker.optimizer.state[walker.module.get_parameter("model.body.2.weight")]["exp_avg"].view(-1)[3] += 1
    message = _message(lambda: take(walker.slot.engine))
    walker.slot.take_down()
    return {"message": message}


CASES: dict[str, Callable[[Path], Any]] = {
    "untouched": untouched,
    "flip-02-fp32": functools.partial(flip_one_bit, stages=(0, 2), key="fp32", dtype="bf16", rank=1),
    "flip-13-exp_avg": functools.partial(flip_one_bit, stages=(1, 3), key="exp_avg", dtype="fp32", rank=0),
    "flip-30-exp_avg_sq": functools.partial(flip_one_bit, stages=(3, 0), key="exp_avg_sq", dtype="fp32", rank=1),
    "held-weights": functools.partial(weights_changed_while_held, frozen=False),
    "held-frozen": functools.partial(weights_changed_while_held, frozen=True),
    "replica-0": functools.partial(replicas_differ, stage=0, name="model.body.0.bias", dtype="fp32"),
    "replica-1": functools.partial(replicas_differ, stage=1, name="model.body.0.bias", dtype="bf16"),
    "replica-2-frozen": functools.partial(replicas_differ, stage=2, name="model.fixed", dtype="fp32"),
    "replica-state": optimizer_state_differs,
}


def run(payload: dict[str, Any]) -> dict[str, Any]:
    init_distributed()
    return run_cases(CASES, payload["folder"])
