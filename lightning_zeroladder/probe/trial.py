"""One trial: count steps, time them, and turn what all ranks saw into a measurement."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from lightning_zeroladder.ladder import LadderSettings, Measurement, Rung, StepBreakdown, enough, summarize
from lightning_zeroladder.probe.across_ranks import across_ranks
from lightning_zeroladder.probe.clock import Phase, StepClock, StepTimes
from lightning_zeroladder.probe.memory import read_peak, reset_peak

__all__ = ["Trial"]

_CHECK_EVERY_STEPS = 5
_PARTS = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def _median(values: Sequence[float]) -> float:
    return summarize(values).median


class Trial:
    """The running measurement of one rung.

    Args:
        rung: What is tried.
        settings: Budget and warm-up.
        clock: The clock that the hooks drive.
        device: Device of this rank.
        best: The best measurement so far, against which a trial may end early.
    """

    def __init__(
        self,
        rung: Rung,
        settings: LadderSettings,
        clock: StepClock,
        device: torch.device,
        best: Measurement | None,
    ) -> None:
        self.rung = rung
        self.steps = 0
        self.unit = "samples"
        self._settings, self._clock, self._device, self._best = settings, clock, device, best
        self._window_units = 0
        self._units: list[int] = []
        self._times: list[StepTimes] = []
        self._slowest_s: list[float] = []
        self._counting_since_s = time.perf_counter()
        clock.restart()
        reset_peak(device)

    def add_batch(self, units: int, unit: str) -> None:
        """Count the work of one micro-batch of the current step."""
        self._window_units += units
        self.unit = unit

    def close_step(self) -> None:
        """Count an optimizer step as done."""
        self._clock.close_step()
        self.steps += 1
        self._units.append(self._window_units)
        self._window_units = 0
        if self.steps == 1:
            # On CPU the copy of the state that the move held on the host would count; it goes after the first step.
            reset_peak(self._device)
        if self.steps == self._settings.warmup_steps:
            self._counting_since_s = time.perf_counter()

    @property
    def counted_steps(self) -> int:
        """Steps done beyond the warm-up."""
        return max(0, self.steps - self._settings.warmup_steps)

    def is_over(self) -> bool:
        """Whether the trial has run long enough. A collective every few steps: all ranks must ask after each step."""
        if self.steps >= self._settings.steps_per_rung:
            return True
        if not self.counted_steps or self.counted_steps % _CHECK_EVERY_STEPS:
            return False
        self._share_times()
        return enough(self._slowest_s, self._units_per_step(), self._best, self._settings)

    def throughput(self) -> float | None:
        """Units per second of this rank so far, by the host's clock; None during the warm-up. For display."""
        counted = self._units[self._settings.warmup_steps :]
        elapsed_s = time.perf_counter() - self._counting_since_s
        return sum(counted) / elapsed_s if counted and elapsed_s > 0 else None

    def measurement(self) -> Measurement | None:
        """Return what the ranks measured together, None if no step beyond the warm-up was done. A collective."""
        self._share_times()
        if not self._slowest_s:
            return None
        parts = [_median([times.phase_s[phase] for times in self._times]) for phase in _PARTS]
        parts.append(_median([times.communication_s for times in self._times]))
        parts.append(self._units_per_step())
        data, forward, backward, optimizer, communication, units = across_ranks(parts, "mean", self._device)
        peak = read_peak(self._device)
        peak_bytes, reserved_bytes = across_ranks([peak.peak_bytes, peak.reserved_bytes or 0], "max", self._device)
        return Measurement(
            step_s=summarize(self._slowest_s),
            breakdown=StepBreakdown(data, forward, backward, communication, optimizer),
            units_per_step=units,
            unit=self.unit,
            peak_bytes=int(peak_bytes),
            reserved_bytes=int(reserved_bytes) if peak.reserved_bytes is not None else None,
            warmup_steps=self._settings.warmup_steps,
        )

    def _units_per_step(self) -> float:
        counted = self._units[self._settings.warmup_steps :]
        return sum(counted) / len(counted) if counted else 0.0

    def _share_times(self) -> None:
        """Take the steps timed since the last call, warm-up excluded, and agree on the slowest rank's times."""
        fresh = self._clock.drain()
        seen = self.steps - len(fresh)
        fresh = fresh[max(0, self._settings.warmup_steps - seen) :]
        if not fresh:
            return
        self._times += fresh
        self._slowest_s += across_ranks([times.total_s for times in fresh], "max", self._device)
