"""Write a folder that appears only when it is whole."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["appearing", "check_parent", "check_space", "check_target", "remove_tree", "replace_folder", "size_text"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class NoSpace(OSError):
    """The disk does not have the room that the result needs."""


def check_space(folder: Path, nbytes: int) -> None:
    """Compare the free space with what is going to be written.

    Args:
        folder: An existing folder on the disk that is written to.
        nbytes: Bytes that will be written.

    Raises:
        NoSpace: If there is less.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise NoSpace(
            f"{folder}: {size_text(nbytes)} are needed, {size_text(free)} are free. Free some space or choose another "
            "disk; nothing was written."
        )


def size_text(nbytes: int) -> str:
    """Return a number of bytes as people write it, such as ``1.4 GB``."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes / 1e3:.1f} kB"


def remove_tree(folder: Path) -> None:
    """Delete a folder where it exists."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Give a folder to write into that becomes ``target`` at the end, or goes away.

    What a killed process left is removed by the next one with the same target.

    Raises:
        FileExistsError: If ``target`` exists and is not an empty folder.
        FileNotFoundError: If the folder above it does not exist.
    """
    check_target(target)
    partial = target.with_name(f".{target.name}.partial")
    remove_tree(partial)
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_target(target: Path) -> None:
    """Check that a new folder can be made.

    Raises:
        FileExistsError: If it exists and is not an empty folder.
        FileNotFoundError: If the folder above it does not exist.
        PermissionError: If nothing can be written there.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists already. Give the name of a new folder, or remove it first.")
    check_parent(target)


def check_parent(target: Path) -> None:
    """Check that something can be made at a path.

    Raises:
        FileNotFoundError: If the folder above it does not exist.
        PermissionError: If nothing can be written there.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} does not exist: make the folder first, or write elsewhere.")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{target.parent} cannot be written to: ask for permission, or write elsewhere.")


def replace_folder(new: Path, target: Path) -> None:
    """Let a folder take the place of another, which is deleted afterwards; at no time is there none.

    On Linux both names are exchanged in one step. Elsewhere the old one is set aside for a moment under the name
    ``.<name>.previous``, where `find_checkpoint` looks as well.
    """
    if not target.exists() and not target.is_symlink():
        new.rename(target)
        remove_tree(target.with_name(f".{target.name}.previous"))
        return
    if not target.is_symlink() and _exchange(new, target):
        remove_tree(new)
        return
    previous = target.with_name(f".{target.name}.previous")
    remove_tree(previous)
    target.rename(previous)
    new.rename(target)
    remove_tree(previous)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names; returns False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    done = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return bool(done == 0)
