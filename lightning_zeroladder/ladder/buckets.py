"""Near misses: a rung that fails by less than its communication buffers hold is tried again with smaller ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_zeroladder.ladder.fitting import usable_bytes
from lightning_zeroladder.ladder.types import FailureKind, LadderSettings, Rung, TrialResult

__all__ = ["HALVINGS", "Buckets", "near_miss", "shortfall_bytes"]

HALVINGS = 2
"""How often buckets are halved: after two, three quarters of them are gone and messages become short."""

_FLOOR_ELEMENTS = 1 << 16
"""Buckets are not made smaller than this: a shorter message costs its latency rather than its bytes."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Communication buffers as a run's config has them, sizes in elements.

    Attributes:
        reduce: ``reduce_bucket_size``.
        allgather: ``allgather_bucket_size`` (stages 1 and 2).
        prefetch: ``stage3_prefetch_bucket_size``.
        live: ``stage3_max_live_parameters``: weights that stage 3 may keep gathered.
        trainable: Elements of the model that have a gradient.
        parameters: All elements of the model.
        element_bytes: Bytes of an element of a weight or gradient.
        overlap: Whether stages 1 and 2 fill a second bucket while the first is sent.
        allocated_whole: Whether the device sets the whole bucket aside. The host takes what is written to only.
    """

    reduce: int
    allgather: int
    prefetch: int
    live: int
    trainable: int
    parameters: int
    element_bytes: int
    overlap: bool = False
    allocated_whole: bool = False

    def held_bytes(self, rung: Rung) -> int:
        """Bytes per rank that the buffers of a rung hold at most: the reduce buckets, at stage 3 gathered weights too.

        Stages 1 and 2 gather straight into the weights, so their all-gather bucket holds nothing by itself.
        """
        if rung.stage == 0:
            return 0
        reduce = self._size(rung, "reduce_bucket_size", self.reduce)
        elements = reduce if self.allocated_whole else min(reduce, self.trainable)
        if rung.stage == 3:
            live = self._size(rung, "stage3_max_live_parameters", self.live)
            return self.element_bytes * (elements + min(live, self.parameters))
        return self.element_bytes * elements * (2 if self.overlap else 1)

    def halved(self, rung: Rung) -> Rung | None:
        """The rung with buffers half as large; None if it has none or they are as small as they should get."""
        if rung.stage == 0:
            return None
        sizes = {"reduce_bucket_size": self.reduce}
        if rung.stage == 3:
            sizes |= {"stage3_prefetch_bucket_size": self.prefetch, "stage3_max_live_parameters": self.live}
        else:
            sizes["allgather_bucket_size"] = self.allgather
        # A bucket larger than the model is never full: half of the model is what makes a difference.
        filled = {name: min(self._size(rung, name, size), self.parameters) for name, size in sizes.items()}
        smaller = {name: _half(size) for name, size in filled.items() if _half(size) >= _FLOOR_ELEMENTS}
        if not smaller:
            return None
        settings = {**dict(rung.settings), **smaller}
        return replace(rung, settings=tuple(sorted(settings.items(), key=lambda item: item[0])))

    @staticmethod
    def _size(rung: Rung, name: str, configured: int) -> int:
        value = rung.setting(name)
        return configured if value is None else int(value)


def shortfall_bytes(trial: TrialResult, settings: LadderSettings) -> float | None:
    """Bytes per rank by which a rung misses the headroom; 0 or less if it keeps it, None if nothing tells.

    A rung that ran out of memory is short by the headroom at least: it had taken all the rest.
    """
    if trial.failure is not None:
        out_of_memory = trial.failure.kind is FailureKind.OUT_OF_MEMORY
        return settings.memory_limit_bytes - usable_bytes(settings) if out_of_memory else None
    if trial.measurement is not None:
        return trial.measurement.peak_bytes - usable_bytes(settings)
    return None


def near_miss(trial: TrialResult, settings: LadderSettings, buckets: Buckets) -> bool:
    """Whether a rung is short of memory by less than its communication buffers hold."""
    shortfall = shortfall_bytes(trial, settings)
    return shortfall is not None and 0 < shortfall < buckets.held_bytes(trial.rung)


def _half(elements: int) -> int:
    """Half, rounded down to an even number: DeepSpeed refuses odd bucket sizes."""
    return elements // 4 * 2
