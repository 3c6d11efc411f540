"""Where a run stands within an accumulation window."""

from __future__ import annotations

from typing import Any

__all__ = ["at_boundary", "begin_manual_backward", "enter_window"]


def at_boundary(engine: Any) -> bool:
    """Whether the last micro-batch completed an optimizer step, so that no gradients are waiting."""
    if not engine.managed_gradient_accumulation():
        return bool(engine._unmanaged_backward_count == 0)
    return bool(engine.micro_steps % engine.gradient_accumulation_steps() == 0)


def begin_manual_backward(engine: Any) -> None:
    """Make stage 3 add the gradients of the backward that begins to those of earlier ones in the same window.

    It counts backward passes by the forward of the engine, which Lightning calls once per batch: without this, a second
    backward in a batch would overwrite the gradients of the first.
    """
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.clear_backward_seen_flag()


def enter_window(engine: Any, micro_batches: int) -> None:
    """Have the window that begins count so many micro-batches as done, so that it ends that much earlier."""
    engine.micro_steps = micro_batches
