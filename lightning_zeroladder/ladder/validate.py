"""Checks of what the user asked of the ladder."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_zeroladder.ladder.types import ZERO_STAGES, LadderSettings

__all__ = ["check_memory_limit", "check_settings", "normalize_stages"]


def normalize_stages(stages: Iterable[int]) -> tuple[int, ...]:
    """The stages in ascending order, duplicates kept for ``check_settings`` to refuse."""
    return tuple(sorted(stages))


def check_settings(settings: LadderSettings) -> None:
    """Refuse settings that cannot be followed.

    Raises:
        ValueError: Naming what was given, what is allowed and what to do.
    """
    _check_stages(settings.stages)
    _check_steps(settings.steps_per_rung, settings.warmup_steps)
    if not 0 <= settings.headroom < 1:
        raise ValueError(
            f"headroom={settings.headroom}: must be at least 0 and below 1. "
            "It is the share of memory that stays free: pass 0.1 for 10 %."
        )
    if not settings.tie >= 0:
        raise ValueError(
            f"tie={settings.tie}: must be 0 or more. It is a relative difference in throughput: pass 0.005 for 0.5 %."
        )
    check_memory_limit(settings)


def check_memory_limit(settings: LadderSettings) -> None:
    """Refuse a memory limit that is not positive.

    Raises:
        ValueError: If it is 0 or less.
    """
    if settings.memory_limit_bytes <= 0:
        raise ValueError(
            f"memory_limit_bytes={settings.memory_limit_bytes}: must be above 0. "
            "Pass the memory that one rank may use, in bytes, for instance 80 * 2**30."
        )


def _check_stages(stages: tuple[int, ...]) -> None:
    if not stages:
        raise ValueError("stages=(): must name at least one of the ZeRO stages 0, 1, 2, 3. Pass (0, 1, 2, 3) for all.")
    unknown = [stage for stage in stages if stage not in ZERO_STAGES]
    if unknown:
        raise ValueError(
            f"stages={stages}: must be from the ZeRO stages 0, 1, 2, 3. Remove {', '.join(map(str, unknown))}."
        )
    if len(set(stages)) != len(stages):
        raise ValueError(f"stages={stages}: each may be named once. Pass {tuple(sorted(set(stages)))}.")
    if stages != normalize_stages(stages):
        raise ValueError(f"stages={stages}: must be ascending. Pass {normalize_stages(stages)}.")


def _check_steps(steps_per_rung: int, warmup_steps: int) -> None:
    if steps_per_rung < 2:
        raise ValueError(
            f"steps_per_rung={steps_per_rung}: must be at least 2. Raise it; 50 to 200 make a steady measurement."
        )
    if not 0 <= warmup_steps < steps_per_rung:
        raise ValueError(
            f"warmup_steps={warmup_steps}: must be at least 0 and below steps_per_rung={steps_per_rung}, "
            "so that steps are left to count. Lower warmup_steps or raise steps_per_rung."
        )
