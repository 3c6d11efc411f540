"""How figures and outcomes read."""

from __future__ import annotations

from lightning_zeroladder.ladder.types import (
    Failure,
    FailureKind,
    LadderSettings,
    Measurement,
    Rung,
    Skip,
    SkipKind,
)

__all__ = [
    "failure_words",
    "gib",
    "over_margin_words",
    "percent",
    "rate_words",
    "skip_words",
    "speed_words",
    "title",
]

GIB = 2**30


def percent(share: float) -> str:
    """``0.123`` as ``12 %``, with one decimal below 1 %."""
    value = 100.0 * share
    return f"{value:.1f} %" if abs(round(value, 1)) < 1 else f"{value:.0f} %"


def gib(size_bytes: float) -> str:
    """Bytes as GiB with one decimal, for instance ``75.1 GiB``."""
    return f"{size_bytes / GIB:.1f} GiB"


def title(label: str) -> str:
    """A rung's label at the start of a sentence; what follows the first letter keeps its case."""
    return label[:1].upper() + label[1:]


def speed_words(gain: float) -> str:
    """A relative difference in speed: ``12 % faster``, ``0.4 % slower`` or ``as fast``."""
    if gain == 0:
        return "as fast"
    return f"{percent(abs(gain))} {'faster' if gain > 0 else 'slower'}"


def over_margin_words(peak_bytes: int, settings: LadderSettings) -> str:
    """Says what a peak leaves of the limit and what was wanted."""
    limit, wanted = settings.memory_limit_bytes, percent(settings.headroom)
    if peak_bytes > limit:
        return f"peak {gib(peak_bytes)} is beyond the limit of {gib(limit)}, {wanted} wanted free"
    free = (limit - peak_bytes) / limit
    left = percent(free)
    if left == wanted:  # "leaves 10 %, 10 % wanted" would read as a mistake
        left, wanted = f"{100 * free:.3f} %", f"{100 * settings.headroom:.3f} %"
    return f"peak {gib(peak_bytes)} leaves {left} of {gib(limit)}, {wanted} wanted"


def failure_words(failure: Failure) -> str:
    """Where a rung failed, with the first line of the exception unless memory explains it."""
    where = f"in {failure.phase} at step {failure.step}"
    if failure.kind is FailureKind.OUT_OF_MEMORY:
        return f"out of memory {where}"
    if failure.kind is FailureKind.HANG:
        return f"hung {where}"
    lines = failure.message.strip().splitlines()
    return f"failed {where}: {lines[0]}" if lines else f"failed {where}"


def skip_words(skip: Skip, settings: LadderSettings, committed: Rung | None) -> str:
    """Why a rung was not tried; ``committed`` stands in for a skip that does not name its rival."""
    match skip.kind:
        case SkipKind.CANNOT_FIT:
            limit = gib(settings.memory_limit_bytes)
            if skip.needed_bytes is None:
                return f"needs more than {limit}, not tried"
            return f"needs {gib(skip.needed_bytes)} of {limit}, not tried"
        case SkipKind.CANNOT_WIN:
            rival = skip.rival or committed
            name = rival.label if rival else "the best rung"
            best = "" if skip.best_case_gain is None else f": at best {speed_words(skip.best_case_gain)}"
            return f"cannot beat {name}{best}, not tried"
        case SkipKind.CANNOT_RUN:
            return f"not tried: {skip.reason}" if skip.reason else "cannot run here, not tried"
        case SkipKind.RUN_ENDED:
            return "not tried: the run ended first"


def rate_words(measurement: Measurement, settings: LadderSettings) -> str:
    """Throughput and peak memory of a measurement."""
    return (
        f"{measurement.throughput:,.0f} {measurement.unit}/s per rank, "
        f"peak {gib(measurement.peak_bytes)} of {gib(settings.memory_limit_bytes)}"
    )
