"""Open a checkpoint of any kind."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_zeroladder.checkpoint.folders import Found, find_checkpoint
from lightning_zeroladder.checkpoint.manifest import Manifest, check_files, check_sizes, read_manifest
from lightning_zeroladder.checkpoint.native import read_native
from lightning_zeroladder.checkpoint.state import SavedState
from lightning_zeroladder.checkpoint.universal import read_universal

__all__ = ["Opened", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint with what is known about it.

    Attributes:
        found: Where it is.
        state: What it holds.
        manifest: What its manifest says; None where it has none, as those that others saved.
    """

    found: Found
    state: SavedState
    manifest: Manifest | None


def open_checkpoint(
    path: str | Path, groups: Sequence[Sequence[str]] | None = None, *, weights_only: bool = False
) -> Opened:
    """Open a native checkpoint of any ZeRO stage or a universal one. Reads no tensor, runs no code of the files.

    Args:
        path: What Lightning or ``engine.save_checkpoint`` was given, or the folder with the files.
        groups: Parameter names of each group of the optimizer, which a stage 0 checkpoint without manifest lacks.
        weights_only: Leave out the optimizer state of a stage 0 checkpoint, so that those names are not needed.

    Raises:
        BadCheckpoint: If there is no whole checkpoint; the message names the file.
        OSError: If a file cannot be read.
    """
    with _collecting_no_garbage():
        return _open(path, groups, weights_only)


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Pause Python's collector of cycles.

    A table of many small objects, all of which stay, makes it look through everything that a training process has
    imported, for longer than the table takes to build.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _open(path: str | Path, groups: Sequence[Sequence[str]] | None, weights_only: bool) -> Opened:
    found = find_checkpoint(path)
    manifest = read_manifest(found.folder)
    if manifest is not None:
        check_sizes(found.folder, manifest)
    if found.universal:
        state = read_universal(found.folder)
    else:
        names = groups or (manifest.groups if manifest and manifest.groups else None)
        state = read_native(found.folder, names, weights_only=weights_only)
    if manifest is not None:
        state.aliases = {**manifest.aliases, **state.aliases}
        check_files(found.folder, manifest, state.archives)
    return Opened(found, state, manifest)
