"""Notice memory that an engine did not give back."""

from __future__ import annotations

import torch

from lightning_zeroladder.probe.memory import resident_bytes

__all__ = ["LeftoverMemory"]


class LeftoverMemory:
    """Compares what is in use after a tear-down with what was in use before the first engine.

    Args:
        device: Device of this rank; on CPU the process's resident memory is compared.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._base_bytes = self._in_use_bytes()
        self._seen_first = self._cuda

    def _in_use_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device)) if self._cuda else resident_bytes()

    def after_teardown(self, held_on_host_bytes: int) -> int:
        """Return the bytes in use beyond the base, not counting what is held on the host on purpose.

        On CPU the first engine leaves libraries and thread pools in the process; what is in use after its tear-down
        becomes the base.
        """
        leftover = self._in_use_bytes() - self._base_bytes - (0 if self._cuda else held_on_host_bytes)
        if not self._seen_first:
            self._seen_first = True
            self._base_bytes += leftover
            return 0
        return max(0, leftover)
