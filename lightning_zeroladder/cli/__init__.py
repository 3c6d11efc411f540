"""The ``zeroladder`` command."""

from __future__ import annotations

from lightning_zeroladder.cli.main import main

__all__ = ["main"]
