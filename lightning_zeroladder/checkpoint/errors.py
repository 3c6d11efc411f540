"""What can be wrong with a checkpoint."""

from __future__ import annotations

__all__ = ["BadCheckpoint", "CheckpointMismatch", "UnnamedGroups", "UntrustedCheckpoint"]


class BadCheckpoint(RuntimeError):
    """A checkpoint is incomplete, damaged, mixed up, or no checkpoint at all."""


class UnnamedGroups(BadCheckpoint):
    """The optimizer state of a sound stage 0 checkpoint has no names, and nothing tells whose it is."""


class UntrustedCheckpoint(BadCheckpoint):
    """A checkpoint names code that would run if it was opened the usual way."""


class CheckpointMismatch(RuntimeError):
    """A sound checkpoint does not belong to this model or optimizer."""
