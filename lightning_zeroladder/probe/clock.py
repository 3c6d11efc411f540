"""Split the time of each optimizer step into phases, on the host clock or with device events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import torch

__all__ = ["Phase", "StepClock", "StepTimes"]

Stamp = float | torch.cuda.Event


class Phase(StrEnum):
    """What a training process is doing. Time in OUTSIDE (validation) belongs to no step."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One optimizer step of one rank, in seconds.

    Attributes:
        total_s: Whole step.
        phase_s: Time per phase, communication taken out.
        communication_s: Time in or waiting for collectives.
    """

    total_s: float
    phase_s: dict[Phase, float]
    communication_s: float


@dataclass(slots=True)
class _Record:
    """Stamps of one step: phase changes in order, and the collectives inside."""

    changes: list[tuple[Phase, Stamp]] = field(default_factory=list)
    collectives: list[tuple[Phase, Stamp, Stamp]] = field(default_factory=list)
    end: Stamp | None = None


class StepClock:
    """Stamps phase changes cheaply and works out the durations later.

    On CUDA a stamp is an event recorded on the current stream: nothing is synchronised until `drain`, so steps run as
    they would without the clock.

    Args:
        cuda: Whether to time with CUDA events.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._depth = 0
        self._phase = Phase.OUTSIDE
        self._record = _Record()
        self._closed: list[_Record] = []

    def _stamp(self) -> Stamp:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @property
    def phase(self) -> Phase:
        """The phase that began last."""
        return self._phase

    def restart(self) -> None:
        """Forget everything; time starts to count at the next phase."""
        self._record = _Record()
        self._closed.clear()
        self._phase = Phase.OUTSIDE

    def switch(self, phase: Phase) -> None:
        """Note that ``phase`` begins now."""
        self._phase = phase
        self._record.changes.append((phase, self._stamp()))

    def close_step(self) -> None:
        """Note that an optimizer step ends now; the next begins, waiting for data."""
        end = self._stamp()
        self._record.end = end
        self._closed.append(self._record)
        self._record = _Record(changes=[(Phase.DATA, end)])
        self._phase = Phase.DATA

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Time spent inside counts as communication of the current phase. Nested uses count once."""
        self._depth += 1
        start = self._stamp() if self._depth == 1 else None
        phase = self._phase
        try:
            yield
        finally:
            self._depth -= 1
            if start is not None:
                self._record.collectives.append((phase, start, self._stamp()))

    def drain(self) -> list[StepTimes]:
        """Return the steps closed since the last call, in order. Waits for the device."""
        closed, self._closed = self._closed, []
        if self._cuda and closed:
            torch.cuda.synchronize()
        return [self._resolve(record) for record in closed]

    def _elapsed(self, start: Stamp, end: Stamp) -> float:
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1e3

    def _resolve(self, record: _Record) -> StepTimes:
        assert record.end is not None
        phases = dict.fromkeys(Phase, 0.0)
        stamps = [stamp for _, stamp in record.changes] + [record.end]
        for (phase, start), end in zip(record.changes, stamps[1:], strict=True):
            phases[phase] += self._elapsed(start, end)
        communication = dict.fromkeys(Phase, 0.0)
        for phase, start, end in record.collectives:
            communication[phase] += self._elapsed(start, end)
        del phases[Phase.OUTSIDE], communication[Phase.OUTSIDE]
        compute = {phase: max(0.0, spent - communication[phase]) for phase, spent in phases.items()}
        return StepTimes(sum(phases.values()), compute, sum(communication.values()))
