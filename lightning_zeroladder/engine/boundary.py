"""Where a run stands within an accumulation window."""

from __future__ import annotations

from typing import Any

__all__ = ["at_boundary"]


def at_boundary(engine: Any) -> bool:
    """Whether the last micro-batch completed an optimizer step, so that no gradients are waiting."""
    if not engine.managed_gradient_accumulation():
        return bool(engine._unmanaged_backward_count == 0)
    return bool(engine.micro_steps % engine.gradient_accumulation_steps() == 0)
