"""Memory, traffic and time formulas: pure arithmetic on dataclasses."""

from __future__ import annotations

from lightning_zeroladder.costmodel.memory import ModelCount, state_bytes

__all__ = ["ModelCount", "state_bytes"]
