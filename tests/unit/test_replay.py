"""A window of micro-batches leaves, when it is run again, what it would have left the first time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.classification import BinaryAccuracy

from lightning_zeroladder.replay import RandomState, Window


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.mean = MeanMetric()
        self.accuracy = BinaryAccuracy()
        self.register_buffer("table", torch.arange(1 << 19).float())  # 2 MiB
        self.drawn: list[float] = []
        self.logged: dict[str, Metric] = {}

    def batch(self, number: int) -> float:
        noise = torch.rand(4, 3) + random.random() + float(np.random.rand())
        loss = float(self.norm(noise).mean().detach()) + float(noise.sum()) * number
        self.mean.update(loss)
        self.accuracy.update(noise[:, 0] / 4, torch.tensor([0, 1, 0, 1]))
        self.logged.setdefault("loss", SumMetric()).update(loss)
        self.drawn.append(loss)
        return loss


def left_behind(model: Model) -> dict[str, Any]:
    return {
        **{name: buffer.tolist() for name, buffer in model.norm.named_buffers()},
        "mean": float(model.mean.compute()),
        "accuracy": float(model.accuracy.compute()),
        "loss": float(model.logged["loss"].compute()) if "loss" in model.logged else None,
        "next": (float(torch.rand(1)), random.random(), float(np.random.rand())),
    }


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def trained(batches: int, failing: int | None = None) -> tuple[Model, Any]:
    """Run one window, and again from the start when a micro-batch breaks off."""
    seed()
    model = Model()
    window = Window(model, lambda: model.logged)
    broken = False
    result: Any = None

    def closure(number: int) -> Any:
        def run() -> float:
            nonlocal broken
            loss = model.batch(number)
            if number == failing and not broken:
                broken = True
                raise MemoryError
            return loss

        return run

    for number in range(batches):
        window.add(closure(number))
        try:
            result = window._batches[-1][1]()
        except MemoryError:
            torch.rand(5)  # whatever else draws meanwhile
            result = window.replay(lambda run: run(), last_counts=True)
    return model, result


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_window_that_broke_off_leaves_what_an_unbroken_one_does(failing):
    ours, result = trained(4, failing)
    ended = left_behind(ours)
    theirs, expected = trained(4)
    assert ended == left_behind(theirs)
    assert result == expected
    assert ours.drawn == [*theirs.drawn[: failing + 1], *theirs.drawn]


def test_micro_batches_that_were_complete_do_not_count_again():
    seed()
    model = Model()
    window = Window(model, lambda: model.logged)
    for number in range(3):
        window.add(lambda number=number: model.batch(number))
        window._batches[-1][1]()
    model.logged["after"] = SumMetric()
    model.logged["after"].update(7.0)  # logged after the micro-batch, by a callback
    state = RandomState.read()
    expected = {**left_behind(model)}
    state.write()
    assert window.replay(lambda run: run(), last_counts=False) == model.drawn[2]
    assert left_behind(model) == expected
    assert float(model.logged["after"].compute()) == 7.0
    assert model.drawn[:3] == model.drawn[3:]


def test_a_closed_window_is_not_run_again():
    model = Model()
    window = Window(model, dict)
    window.add(lambda: model.batch(0))
    window.close()
    assert len(window) == 0
    assert window.replay(lambda run: run(), last_counts=True) is None
    assert model.drawn == []


def test_what_is_logged_for_the_first_time_by_a_broken_micro_batch_is_reset():
    model = Model()
    window = Window(model, lambda: model.logged)

    def run() -> None:
        first = "loss" not in model.logged
        model.batch(1)
        if first:
            raise MemoryError

    window.add(run)
    with pytest.raises(MemoryError):
        run()
    window.replay(lambda run: run(), last_counts=True)
    assert float(model.logged["loss"].compute()) == pytest.approx(model.drawn[1])


def test_large_buffers_are_copied_when_they_are_written_only():
    model = Model()
    window = Window(model, dict)
    window.add(lambda: None)
    kept = window._buffers["table"].copy
    window.close()
    window.add(lambda: None)
    assert window._buffers["table"].copy is kept
    window.close()
    model.table[3] = -1.0
    window.add(lambda: None)
    model.table[4] = -1.0
    window.replay(lambda run: run(), last_counts=True)
    assert model.table[:6].tolist() == [0.0, 1.0, 2.0, -1.0, 4.0, 5.0]


def test_small_buffers_are_restored_whatever_their_count_says():
    model = Model()
    window = Window(model, dict)
    window.add(lambda: None)
    model.norm.running_mean.data.fill_(5.0)  # does not count as a write
    window.replay(lambda run: run(), last_counts=True)
    assert model.norm.running_mean.tolist() == [0.0, 0.0, 0.0]
