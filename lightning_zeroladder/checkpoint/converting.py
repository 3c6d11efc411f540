"""Convert a checkpoint: to DeepSpeed's universal format, or to a native one for another stage and world size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from lightning_zeroladder.checkpoint.layout import native_bytes, native_files
from lightning_zeroladder.checkpoint.manifest import Manifest, describe_file, write_manifest
from lightning_zeroladder.checkpoint.opening import Opened, open_checkpoint
from lightning_zeroladder.checkpoint.output import appearing, check_space, check_target
from lightning_zeroladder.checkpoint.reader import Reader, verify
from lightning_zeroladder.checkpoint.state import SavedState
from lightning_zeroladder.checkpoint.universal import universal_bytes, write_common, write_parameter
from lightning_zeroladder.versions import collect_versions

__all__ = ["Converted", "convert", "manifest_of", "run_jobs", "write_universal"]

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes expected."""

Job = Callable[[], int]
"""Writes something and returns how many bytes."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did.

    Attributes:
        path: The new checkpoint.
        kind: ``universal`` or ``native``.
        nbytes: Bytes written.
        files: Files written.
    """

    path: Path
    kind: str
    nbytes: int
    files: int


def convert(
    checkpoint: str | Path,
    out: str | Path,
    *,
    to_stage: int | None = None,
    to_world_size: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Convert a checkpoint of any stage and world size, without a process group and without a GPU.

    The source is only read. ``out`` appears when it is complete and every byte read was compared with the checksums in
    the source's files; until then there is nothing that could be taken for a checkpoint.

    Args:
        checkpoint: A native or universal checkpoint.
        out: New folder. DeepSpeed is given the same one in ``load_checkpoint``.
        to_stage: ZeRO stage of a native checkpoint to write; the universal format when both are None.
        to_world_size: Its number of ranks; that of the source when only ``to_stage`` is given.
        workers: Threads. Default: one per core, at most 8.
        progress: Called now and then from the thread that called.

    Raises:
        ValueError: For a stage or a world size that does not exist.
        BadCheckpoint: If the source is damaged, or its state cannot be cut that way.
        FileExistsError: If ``out`` is there already.
        OSError: If there is no room, or a folder cannot be read or written.
    """
    _check_arguments(to_stage, to_world_size, workers)
    opened, target = open_checkpoint(checkpoint), Path(out)
    state = opened.state
    native = to_stage is not None or to_world_size is not None
    stage = to_stage if to_stage is not None else state.stage
    if native and stage is None:
        raise ValueError("--to-world-size alone says nothing for a universal checkpoint: give --to-stage as well.")
    check_target(target)
    expected = native_bytes(state, stage) if native and stage is not None else universal_bytes(state)
    check_space(target.parent, expected)
    with appearing(target) as partial, Reader() as reader:
        if native and stage is not None:
            folder = partial / "checkpoint"
            folder.mkdir()
            ranks = to_world_size or state.world_size
            jobs = [_file_job(folder, name, write, reader) for name, write in native_files(state, stage, ranks)]
            pointer = "latest"
        else:
            folder = partial / f"{opened.found.folder.name}_universal"
            folder.mkdir()
            jobs, stage, ranks, pointer = (
                universal_jobs(folder, state, reader),
                None,
                state.world_size,
                "latest_universal",
            )
        nbytes = run_jobs(jobs, expected, workers, progress)
        verify(reader.account, reader)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        manifest = manifest_of(opened, stage, ranks, folder, files)
        write_manifest(folder, manifest)
        (partial / pointer).write_text(folder.name, encoding="utf-8")
    return Converted(target, manifest.kind, nbytes, len(files))


def _check_arguments(stage: int | None, world_size: int | None, workers: int | None) -> None:
    if stage not in (None, 0, 1, 2, 3):
        raise ValueError(f"to_stage={stage}: ZeRO has the stages 0, 1, 2 and 3.")
    for name, value in (("to_world_size", world_size), ("workers", workers)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1.")


def _file_job(folder: Path, name: str, write: Callable[[Path, Reader], int], reader: Reader) -> Job:
    return lambda: write(folder / name, reader)


def universal_jobs(folder: Path, state: SavedState, reader: Reader, share: tuple[int, int] = (0, 1)) -> list[Job]:
    """Return what has to be done for the universal form of a checkpoint.

    Args:
        folder: Folder to write into.
        state: The checkpoint.
        reader: Reads it.
        share: (i, n): do the i-th of n parts, where several processes share the work.
    """
    parameters = sorted(state.trained, key=lambda item: -item.numel)[share[0] :: share[1]]
    jobs: list[Job] = [lambda item=item: write_parameter(folder, item, reader) for item in parameters]  # type: ignore[misc]
    if share[0] == 0:
        jobs.append(lambda: write_common(folder, state, reader))
    return jobs


def write_universal(folder: Path, state: SavedState, share: tuple[int, int] = (0, 1)) -> int:
    """Write the universal form of a checkpoint, or one part of it, and verify what was read."""
    with Reader() as reader:
        nbytes = run_jobs(universal_jobs(folder, state, reader, share), universal_bytes(state), 1, None)
        verify(reader.account, reader)
    return nbytes


def run_jobs(jobs: Iterable[Job], expected: int, workers: int | None, progress: Progress | None) -> int:
    """Run jobs on threads; returns the bytes that they wrote. The first error stops the rest."""
    done = 0
    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        running = [pool.submit(job) for job in jobs]
        try:
            for finished in as_completed(running):
                done += finished.result()
                if progress is not None:
                    progress(done, max(expected, done))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return done


def manifest_of(opened: Opened, stage: int | None, world_size: int, folder: Path, files: Iterable[Path]) -> Manifest:
    """Return the manifest of a converted checkpoint."""
    state, known = opened.state, opened.manifest

    return Manifest(
        kind="universal" if stage is None else "native",
        stage=stage,
        world_size=world_size,
        accumulate=known.accumulate if known else None,
        micro_batch=known.micro_batch if known else None,
        global_samples=state.counters.get("global_samples", 0),
        global_steps=state.counters.get("global_steps", 0),
        precision=known.precision if known else None,
        optimizer=known.optimizer if known else None,
        groups=[[item.name for item in state.trained if item.group == index] for index in range(len(state.groups))],
        parameters={
            item.name: {"shape": list(item.shape), "dtype": state.precision} for item in state.parameters.values()
        },
        aliases=state.aliases,
        versions=collect_versions(),
        files=[describe_file(path, folder) for path in files],
        batches=known.batches if known else {},
    )
