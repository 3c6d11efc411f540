"""The manifest beside a checkpoint's files: what it is, and a size and checksum of every file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_zeroladder.checkpoint.archive import Archive
from lightning_zeroladder.checkpoint.errors import BadCheckpoint

__all__ = [
    "MANIFEST",
    "FileEntry",
    "Manifest",
    "check_files",
    "check_sizes",
    "describe_file",
    "read_manifest",
    "write_manifest",
]

MANIFEST = "zeroladder.json"
"""Its name, in the folder with the files."""

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the checkpoint.

    Attributes:
        name: Path relative to the manifest.
        nbytes: Size.
        checksum: ``zip-crc32:...`` for an archive (over the CRC-32 of all its records), ``crc32:...`` for others.
    """

    name: str
    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        kind: ``native`` or ``universal``.
        stage: ZeRO stage; None for a universal one.
        world_size: Ranks that saved it.
        accumulate: Micro-batches per optimizer step; None if unknown.
        micro_batch: Samples per micro-batch and rank; None if unknown.
        global_samples: Samples seen by all ranks together.
        global_steps: Optimizer steps taken.
        precision: Lightning's precision, such as ``bf16-mixed``; None if unknown.
        optimizer: Class of the torch optimizer; None if unknown.
        groups: Names of the parameters in each group of the optimizer, in its order.
        parameters: Shape and dtype by name.
        aliases: Further names of tied parameters, each with the name it is another one of.
        versions: Versions of the packages.
        files: Every other file.
        batches: What the run holds on to when it resumes on other ranks, see `lightning_zeroladder.elastic.batch.Kept`.
    """

    kind: str
    stage: int | None
    world_size: int
    accumulate: int | None
    micro_batch: int | None
    global_samples: int
    global_steps: int
    precision: str | None
    optimizer: str | None
    groups: Sequence[Sequence[str]]
    parameters: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, str]
    versions: Mapping[str, str]
    files: Sequence[FileEntry] = field(default=())
    batches: Mapping[str, int] = field(default_factory=dict)


def describe_file(path: Path, folder: Path) -> FileEntry:
    """Return the entry of a file. Of an archive only its directory is read: it has the CRC-32 of each record."""
    name = path.relative_to(folder).as_posix()
    if path.suffix == ".pt":
        archive = Archive(path)
        return FileEntry(name, archive.nbytes, archive.fingerprint())
    data = path.read_bytes()
    return FileEntry(name, len(data), f"crc32:{zlib.crc32(data):08x}")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder with the files."""
    content = {"schema": SCHEMA, **asdict(manifest)}
    text = json.dumps(content, indent=1)
    sealed = {"crc32": f"{zlib.crc32(text.encode()):08x}", "manifest": content}
    (folder / MANIFEST).write_text(json.dumps(sealed, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if it has none.

    Raises:
        BadCheckpoint: If it is damaged or of a newer version.
    """
    path = folder / MANIFEST
    if not path.exists() and not path.is_symlink():
        return None
    if not path.is_file():
        raise BadCheckpoint(f"{path} is no file. Delete it to have the checkpoint's files taken as they are.")
    try:
        sealed = json.loads(path.read_text(encoding="utf-8"))
        content = dict(sealed["manifest"])
        if sealed["crc32"] != f"{zlib.crc32(json.dumps(content, indent=1).encode()):08x}":
            raise ValueError("its checksum is wrong")
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {schema}, this version knows {SCHEMA}")
        files = [FileEntry(**entry) for entry in content.pop("files")]
        return Manifest(**content, files=files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(
            f"{path} cannot be read ({error}): it is damaged or of another version. Without the manifest the files "
            "are taken as they are: delete it if you are sure of them."
        ) from error


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare the sizes of the files that are there with the manifest; quick, and names the right one.

    Raises:
        BadCheckpoint: If one is of another size.
    """
    for entry in manifest.files:
        path = folder / entry.name
        nbytes = path.stat().st_size if path.exists() else entry.nbytes
        if nbytes != entry.nbytes:
            raise BadCheckpoint(
                f"{path} has {nbytes} bytes, {entry.nbytes} were written: it is cut off, damaged, or another file."
            )


def check_files(folder: Path, manifest: Manifest, archives: Iterable[Archive]) -> None:
    """Compare the files with the manifest.

    Args:
        folder: The folder with the files.
        manifest: What they should be.
        archives: Those that were opened, which need not be opened again.

    Raises:
        BadCheckpoint: If one is missing, or is another file than was saved.
    """
    check_sizes(folder, manifest)
    opened = {archive.path: archive for archive in archives}
    for entry in manifest.files:
        path = folder / entry.name
        if not path.exists():
            raise BadCheckpoint(f"{path} is missing: the checkpoint has {len(manifest.files)} files.")
        archive = opened.get(path)
        found = archive.fingerprint() if archive else describe_file(path, folder).checksum
        if found != entry.checksum:
            raise BadCheckpoint(
                f"{path} is not the file that was saved (checksum {found}, expected {entry.checksum}): it is damaged, "
                "or belongs to another checkpoint."
            )
