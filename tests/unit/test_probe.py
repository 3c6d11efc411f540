from __future__ import annotations

import pytest
import torch

from lightning_zeroladder.ladder import LadderSettings, Rung
from lightning_zeroladder.probe.across_ranks import across_ranks
from lightning_zeroladder.probe.batch import samples_in, units_in
from lightning_zeroladder.probe.clock import Phase, StepClock
from lightning_zeroladder.probe.memory import default_memory_limit, read_peak, reset_peak
from lightning_zeroladder.probe.trial import Trial

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"attention_mask": torch.ones(2, 3), "input_ids": torch.ones(4, 7, dtype=torch.long)}, (28, "tokens")),
        (torch.ones(4, 7, dtype=torch.int32), (28, "tokens")),
        ((torch.ones(4, 7, dtype=torch.long), torch.ones(4)), (28, "tokens")),
        ((torch.ones(5, 3, 8, 8), torch.ones(5, dtype=torch.long)), (5, "samples")),
        ([torch.ones(6, 2)], (6, "samples")),
        (torch.ones(3, 2, dtype=torch.uint8), (3, "samples")),
        ("no tensor", (1, "samples")),
        ({}, (1, "samples")),
    ],
)
def test_units_are_tokens_where_there_are_tokens(batch, expected):
    assert units_in(batch) == expected


def test_samples_are_the_first_dimension():
    assert samples_in({"x": torch.ones(9, 2)}) == 9
    assert samples_in(None) is None


class HandClock:
    """A clock that only moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("lightning_zeroladder.probe.clock.time.perf_counter", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_the_clock_splits_a_step_and_takes_communication_out_of_its_phase(monkeypatch):
    hands, clock = HandClock(monkeypatch), StepClock(cuda=False)
    clock.switch(Phase.DATA)
    hands.pass_by(1)
    clock.switch(Phase.FORWARD)
    hands.pass_by(20)
    clock.switch(Phase.BACKWARD)
    hands.pass_by(5)
    with clock.collective():
        hands.pass_by(30)
        with clock.collective():
            hands.pass_by(10)
    clock.switch(Phase.OUTSIDE)
    hands.pass_by(500)
    clock.switch(Phase.OPTIMIZER)
    hands.pass_by(3)
    clock.close_step()
    (step,) = clock.drain()
    assert step.phase_s == {Phase.DATA: 1, Phase.FORWARD: 20, Phase.BACKWARD: 5, Phase.OPTIMIZER: 3}
    assert step.communication_s == 40
    assert step.total_s == 69
    assert clock.drain() == []


def test_the_next_step_begins_where_the_last_ended(monkeypatch):
    hands, clock = HandClock(monkeypatch), StepClock(cuda=False)
    clock.switch(Phase.FORWARD)
    hands.pass_by(1)
    clock.close_step()
    hands.pass_by(7)
    clock.switch(Phase.FORWARD)
    hands.pass_by(2)
    clock.close_step()
    first, second = clock.drain()
    assert (first.total_s, second.total_s) == (1, 9)
    assert second.phase_s[Phase.DATA] == 7


def test_the_peak_is_of_the_time_since_the_reset():
    block = torch.ones(40 << 20, dtype=torch.uint8)
    del block
    reset_peak(CPU)
    before = read_peak(CPU).peak_bytes
    block = torch.ones(60 << 20, dtype=torch.uint8)
    grown = read_peak(CPU).peak_bytes - before
    del block
    assert (55 << 20) < grown < (70 << 20)
    assert read_peak(CPU).reserved_bytes is None
    reset_peak(CPU)
    assert read_peak(CPU).peak_bytes - before < (20 << 20)


def test_the_host_is_shared_among_its_ranks():
    assert default_memory_limit(CPU, 4) == pytest.approx(default_memory_limit(CPU, 1) / 4, rel=0.05)


def test_one_rank_alone_reduces_to_itself():
    assert across_ranks([1.5, 2.5], "max", CPU) == [1.5, 2.5]
    assert across_ranks([1.5, 2.5], "mean", CPU) == [1.5, 2.5]


def run_steps(trial: Trial, clock: StepClock, steps: int, units: int) -> None:
    for _ in range(steps):
        clock.switch(Phase.FORWARD)
        trial.add_batch(units, "tokens")
        trial.add_batch(units, "tokens")
        trial.close_step()


def test_a_trial_counts_after_its_warm_up_and_ends_with_its_budget():
    clock = StepClock(cuda=False)
    settings = LadderSettings(steps_per_rung=8, warmup_steps=3, memory_limit_bytes=1)
    trial = Trial(Rung(1), settings, clock, CPU, None)
    run_steps(trial, clock, 3, 100)
    assert trial.counted_steps == 0
    assert trial.measurement() is None
    run_steps(trial, clock, 4, 10)
    assert not trial.is_over()
    run_steps(trial, clock, 1, 10)
    assert trial.is_over()
    measured = trial.measurement()
    assert measured is not None
    assert measured.step_s.count == 5
    assert measured.units_per_step == 20
    assert measured.unit == "tokens"
    assert measured.warmup_steps == 3
