"""Run the micro-batches of an open accumulation window again as if for the first time.

A micro-batch leaves traces beside gradients: it draws random numbers, updates buffers (BatchNorm) and adds to metrics
and logged values. All of it is put back before the window is run again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

__all__ = ["RandomState", "Window"]


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of every generator that a training step may draw from."""

    host: Tensor
    device: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def read(cls) -> RandomState:
        """Read the state as it is now."""
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            torch.random.get_rng_state(),
            torch.cuda.get_rng_state() if cuda else None,
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
        )

    def write(self) -> None:
        """Put the generators back to this state."""
        torch.random.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if self.numpy is not None and numpy is not None:
            numpy.random.set_state(self.numpy)


_LARGE_BYTES = 1 << 20
"""Buffers from this size on (masks, tables of positions) count as changed only when torch says that they were written.

It does not say so of all: batch norm writes its running statistics past the count.
"""


@dataclass(slots=True)
class _Kept:
    """A copy of a buffer, and how often that had been written when it was made."""

    buffer: Tensor
    version: int
    copy: Tensor

    @classmethod
    def of(cls, buffer: Tensor) -> _Kept:
        return cls(buffer, buffer._version, buffer.detach().clone())

    def is_current(self, buffer: Tensor) -> bool:
        large = buffer.numel() * buffer.element_size() >= _LARGE_BYTES
        return large and self.buffer is buffer and self.version == buffer._version


@dataclass(frozen=True, slots=True)
class _MetricState:
    states: dict[str, Any]
    others: dict[str, Any]


_METRIC_ATTRIBUTES = ("_update_count", "_computed", "_forward_cache", "has_reset")
"""What changes in a metric beside its states; the last one is that of Lightning's logged values."""


class Window:
    """The micro-batches since the last optimizer step, and what they started from.

    Args:
        module: The module that is trained.
        logged: Returns the metrics that collect logged values, by name; they come and go as values are logged.
    """

    def __init__(self, module: Module, logged: Callable[[], Mapping[str, Metric]]) -> None:
        self._module = module
        self._logged = logged
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._buffers: dict[str, _Kept] = {}
        self._counted: _Counted = {}
        self._batches: list[tuple[RandomState, Callable[[], Any]]] = []

    def __len__(self) -> int:
        """Number of micro-batches, the one that runs included."""
        return len(self._batches)

    def add(self, closure: Callable[[], Any]) -> None:
        """Begin a micro-batch."""
        if not self._batches:
            self._keep_buffers()
        self._counted = self._read_metrics()
        self._batches.append((RandomState.read(), closure))

    def close(self) -> None:
        """Forget the micro-batches: their optimizer step is done."""
        self._batches.clear()

    def replay(self, run: Callable[[Callable[[], Any]], Any], *, last_counts: bool) -> Any:
        """Run the micro-batches again from where they started.

        What they add to metrics counts once: that of those which were complete is there already.

        Args:
            run: Runs one of them.
            last_counts: The last one had not been completed, so it counts this time.

        Returns:
            What the last one returned.
        """
        self._rewind_buffers()
        before, random_before = self._read_metrics(), RandomState.read()
        if last_counts:
            before = self._counted
        result = None
        for number, (state, closure) in enumerate(list(self._batches), start=1):
            if last_counts and number == len(self._batches):
                self._write_metrics(before)
            state.write()
            result = run(closure)
        if not last_counts:
            self._write_metrics(before)
            random_before.write()
        return result

    def _keep_buffers(self) -> None:
        buffers = dict(self._module.named_buffers())
        stale = {name: buffer for name, buffer in buffers.items() if name not in self._buffers}
        again: list[tuple[_Kept, Tensor]] = []
        for name, kept in self._buffers.items():
            buffer = buffers.get(name)
            if buffer is None or kept.is_current(buffer):
                continue
            if kept.copy.shape == buffer.shape and kept.copy.dtype == buffer.dtype:
                again.append((kept, buffer))
            else:
                stale[name] = buffer
        if again:
            torch._foreach_copy_([kept.copy for kept, _ in again], [buffer.detach() for _, buffer in again])
        for kept, buffer in again:
            kept.buffer, kept.version = buffer, buffer._version
        self._buffers.update({name: _Kept.of(buffer) for name, buffer in stale.items()})

    def _rewind_buffers(self) -> None:
        if not self._batches:
            return
        for name, buffer in self._module.named_buffers():
            kept = self._buffers.get(name)
            if kept is not None and not kept.is_current(buffer):
                with torch.no_grad():
                    buffer.copy_(kept.copy)
                kept.buffer, kept.version = buffer, buffer._version

    def _read_metrics(self) -> _Counted:
        every = {**{str(number): metric for number, metric in enumerate(self._metrics)}, **self._logged()}
        return {name: (metric, _read(metric)) for name, metric in every.items()}

    def _write_metrics(self, counted: _Counted) -> None:
        for metric, state in counted.values():
            _write(metric, state)
        for name, metric in self._logged().items():
            if name not in counted:  # logged for the first time by what is about to run again
                metric.reset()


_Counted = dict[str, tuple[Metric, _MetricState]]


def _read(metric: Metric) -> _MetricState:
    states = {name: _copied(getattr(metric, name)) for name in metric._defaults}
    others = {name: getattr(metric, name) for name in _METRIC_ATTRIBUTES if hasattr(metric, name)}
    return _MetricState(states, others)


def _write(metric: Metric, state: _MetricState) -> None:
    for name, value in state.states.items():
        setattr(metric, name, _copied(value))
    for name, value in state.others.items():
        setattr(metric, name, value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
