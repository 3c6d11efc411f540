"""What converting a checkpoint to the universal format costs, against DeepSpeed's converter and against ``cp -r``.

What is measured (117.6 M parameters, 4 ranks, bf16, AdamW; the checkpoints come from one step of real training):

- ours: wall time of ``zeroladder convert CKPT OUT``, the whole process, and of ``convert()`` in a process that has it
  imported.
- peers: ``deepspeed.checkpoint.ds_to_universal`` with its defaults, the whole process, once as a shell would start it
  and once with ``OMP_NUM_THREADS=1``, which is faster where its four workers outnumber the cores (stages 1 and 2 need
  ``--inject_missing_state``); and ``cp -r`` of the same folder. Converting reads less than ``cp`` where the files hold
  bf16 weights, which the universal format leaves out, and computes checksums of what it reads and of what it writes.
- importing what each converter needs, in a process of its own. Times are also printed without it.
- the most resident memory of the largest process, above that of such an import.
- temporary files, in a run that is not timed: names seen in and beside the output, and in the folder for temporary
  files, that are not there afterwards (except ours of the folder that is renamed into the output).

Everybody finds the source in memory, which a reading before the repeats brings there, and nothing waiting to be written
to disk. The contenders take turns, the order is reversed in every second repeat, and outputs are removed at once.
Medians are printed; the ratios are medians of the ratios within a repeat. A measurement that other programs disturb is
done again.

Stage 0 is not against DeepSpeed's converter, which finds no optimizer states there and fails.
``--large`` adds 508 M parameters (stage 3, 4 ranks) by writing the state of the smaller model several times over.

Goals at stage 3: 20 times faster than DeepSpeed's converter (floor 8); at stages 2 and 3: 1.5 times the time of ``cp``
(floor 3), at most 400 MB of memory, no temporary files.

How: ``python benchmarks/convert.py [--repeats 5] [--large] [--folder DIR]``. Needs: two idle cores, 10 GB of disk
(22 GB with ``--large``); checkpoints in a ``--folder`` are used again. Duration: 3 minutes, and 1 per repeat.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from common import heading, quiet
from gpt import (
    Process,
    Quiet,
    Shape,
    files_below,
    find_in_memory,
    fresh,
    room,
    size_of,
    timed_process,
    trained_checkpoint,
    verdict,
)
from rig import clean_up_on_sigterm

from lightning_zeroladder.checkpoint.converting import convert, run_jobs
from lightning_zeroladder.checkpoint.layout import native_files
from lightning_zeroladder.checkpoint.opening import open_checkpoint
from lightning_zeroladder.checkpoint.reader import Reader
from lightning_zeroladder.checkpoint.state import SavedState

_STAGES = (3, 2, 1, 0)
_THEIR_STAGES = (1, 2, 3)
_GOAL_SPEEDUP, _GOAL_COPY, _GOAL_MEMORY_MB = 20.0, 1.5, 400.0
_LARGE_LAYERS = 39
_RANKS = 4
_THEIRS, _THEIRS_SLIM = _BOTH = ("ds_to_universal", "with one thread")
_GOAL_STAGE = 3
_THEIR_IMPORTS = "import deepspeed.checkpoint.ds_to_universal"
_OUR_IMPORTS = """
import sys
sys.argv = ["zeroladder"]
import lightning_zeroladder.cli.checkpoints
import lightning_zeroladder.checkpoint.converting
"""
_POLL_S = 0.002

Contender = Callable[[Path], Process]
"""Writes a new folder."""


def ours(checkpoint: Path, out: Path) -> list[str]:
    """Command line of our converter."""
    return [sys.executable, "-m", "lightning_zeroladder", "convert", str(checkpoint), str(out)]


def theirs(checkpoint: Path, out: Path) -> list[str]:
    """Command line of DeepSpeed's converter, which wants the folder with the files."""
    folder = open_checkpoint(checkpoint).found.folder
    names = ["--input_folder", str(folder), "--output_folder", str(out)]
    flags = [] if any(folder.glob("zero_pp_rank_*_model_states.pt")) else ["--inject_missing_state"]
    return [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *names, *flags]


def _warm(checkpoint: Path, out: Path) -> Process:
    started_s = time.perf_counter()
    convert(checkpoint, out)
    return Process(time.perf_counter() - started_s, 0)


def contenders(checkpoint: Path, *, peer: bool) -> dict[str, Contender]:
    """Return who takes part."""
    named: dict[str, Contender] = {
        "convert": lambda out: timed_process(ours(checkpoint, out)),
        "convert()": lambda out: _warm(checkpoint, out),
        "cp -r": lambda out: timed_process(["cp", "-r", str(checkpoint), str(out)]),
    }
    if peer:
        named[_THEIRS] = lambda out: timed_process(theirs(checkpoint, out))
        named[_THEIRS_SLIM] = lambda out: timed_process(theirs(checkpoint, out), env={"OMP_NUM_THREADS": "1"})
    return named


def _once(contender: Contender, folder: Path) -> Process:
    with fresh(folder) as out:
        return contender(out)


def take_turns(named: dict[str, Contender], repeats: int, folder: Path, quietly: Quiet) -> dict[str, list[Process]]:
    """Run all of them in turns, after one of each that is not counted."""
    measured: dict[str, list[Process]] = {name: [] for name in named}
    for repeat in range(repeats + 1):
        order = list(named) if repeat % 2 else list(named)[::-1]
        for name in order:
            if repeat == 0 and name in _BOTH:
                continue  # what its first start costs is gone: its imports have been measured
            measured[name].append(quietly(lambda name=name: _once(named[name], folder)))
    return {name: results[-repeats:] for name, results in measured.items()}


@dataclass(slots=True)
class Seen:
    """Names of files that were there at some time."""

    names: set[Path] = field(default_factory=set)


@contextmanager
def watching(places: Sequence[Path]) -> Iterator[Seen]:
    """Collect the names of all files that appear in some folders."""
    seen, over = Seen(), threading.Event()

    def watch() -> None:
        while not over.wait(_POLL_S):
            for place in places:
                for parent, _, names in os.walk(place):
                    seen.names.update(Path(parent, name) for name in names)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def temporary_files(command: Callable[[Path], list[str]], folder: Path) -> int:
    """Run a converter and count the files that were there meanwhile and are not afterwards."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for_temporary, out = Path(place, "tmp"), Path(place, "beside", "converted")
        for_temporary.mkdir()
        out.parent.mkdir()
        with watching([for_temporary, out.parent]) as seen:
            timed_process(command(out), env={"TMPDIR": str(for_temporary)})
        partial = out.with_name(f".{out.name}.partial")
        renamed = {out / name.relative_to(partial) if name.is_relative_to(partial) else name for name in seen.names}
        return len(renamed - set(files_below(out)))


@dataclass(frozen=True, slots=True)
class Imports:
    """What importing takes, in a process that does nothing else."""

    ours: Process
    theirs: Process

    @classmethod
    def measured(cls) -> Imports:
        """Measure both, after one of each that is not counted."""
        found = []
        for code in (_OUR_IMPORTS, _THEIR_IMPORTS):
            quietly, command = Quiet(), [sys.executable, "-c", code]
            runs = [quietly(lambda command=command: timed_process(command)) for _ in range(4)][1:]
            found.append(Process(median(run.wall_s for run in runs), max(run.peak_bytes for run in runs)))
        return cls(*found)


def _line(name: str, results: Sequence[Process], imports: Process | None = None) -> None:
    walls_s = [result.wall_s for result in results]
    text = f"  {name:<16} {median(walls_s):7.3f} s ({min(walls_s):.3f} to {max(walls_s):.3f})"
    if imports is not None:
        text += f", without imports {median(walls_s) - imports.wall_s:.3f} s; "
        text += f"{_memory_mb(results, imports):.0f} MB above the imports"
    print(text, flush=True)


def _memory_mb(results: Sequence[Process], imports: Process) -> float:
    return max(result.peak_bytes - imports.peak_bytes for result in results) / 1e6


def _ratio(results: Sequence[Process], peers: Sequence[Process]) -> float:
    return median(mine.wall_s / peer.wall_s for mine, peer in zip(results, peers, strict=True))


def compare(
    stage: int, checkpoint: Path, arguments: argparse.Namespace, place: Path, imports: Imports, *, peer: bool
) -> None:
    """Measure one checkpoint and print the ratios."""
    find_in_memory(checkpoint)
    title = f"stage {stage}, {_RANKS} ranks, {millions(checkpoint):.1f} M parameters"
    size = f"{len(files_below(checkpoint))} files, {size_of(checkpoint) / 1e9:.2f} GB"
    print(f"{title}: {size}{'' if peer else '; without ds_to_universal'}", flush=True)
    quietly = Quiet()
    results = take_turns(contenders(checkpoint, peer=peer), arguments.repeats, place, quietly)
    _line("convert", results["convert"], imports.ours)
    _line("convert()", results["convert()"])
    _line("cp -r", results["cp -r"])
    if peer:
        _print_peer(stage, results, imports)
        _print_temporary_files(checkpoint, place)
    for name in ("convert", "convert()"):
        copying = _ratio(results[name], results["cp -r"])
        print(f"  {name} / cp -r: {copying:.2f}; {verdict(copying, _GOAL_COPY)}")
    memory_mb = _memory_mb(results["convert"], imports.ours)
    print(f"  memory of convert: {memory_mb:.0f} MB; {verdict(memory_mb, _GOAL_MEMORY_MB)}")
    print(f"  {quietly}\n", flush=True)


def _print_peer(stage: int, results: dict[str, list[Process]], imports: Imports) -> None:
    for name in _BOTH:
        _line(name, results[name], imports.theirs)
    speedup, slim = (_ratio(results[name], results["convert"]) for name in _BOTH)
    words = f"; {verdict(speedup, _GOAL_SPEEDUP, at_least=True)}" if stage == _GOAL_STAGE else ""
    print(f"  ds_to_universal / convert: {speedup:.1f}, {slim:.1f} with one thread{words}")
    warm_s = median(result.wall_s for result in results["convert()"])
    bare_s = [median(result.wall_s for result in results[name]) - imports.theirs.wall_s for name in _BOTH]
    print(f"  both without imports: {bare_s[0] / warm_s:.1f}, {bare_s[1] / warm_s:.1f} with one thread")


def _print_temporary_files(checkpoint: Path, place: Path) -> None:
    count = temporary_files(lambda out: ours(checkpoint, out), place)
    peers = temporary_files(lambda out: theirs(checkpoint, out), place)
    print(f"  temporary files seen: convert {count}, ds_to_universal {peers}; {verdict(count, 0)}")


# The large checkpoint -------------------------------------------------------------------------------------------


def widened(state: SavedState, layers: int) -> SavedState:
    """Return the state of a model with more layers, each of which is one of those that there are."""
    present = sorted({int(name.split(".")[1]) for name in state.parameters if name.startswith("blocks.")})
    first, last = {}, {}
    blocks: dict[int, dict[str, object]] = {}
    for name, item in state.parameters.items():
        if name.startswith("blocks."):
            blocks.setdefault(int(name.split(".")[1]), {})[name.split(".", 2)[2]] = item
        else:
            (last if blocks else first)[name] = item
    more = {
        f"blocks.{layer}.{rest}": replace(item, name=f"blocks.{layer}.{rest}")
        for layer in range(layers)
        for rest, item in blocks[present[layer % len(present)]].items()
    }
    wider = copy(state)
    wider.parameters = {**first, **more, **last}
    wider.extras = {}
    return wider


def large_checkpoint(folder: Path, source: Path, layers: int) -> Path:
    """Return a checkpoint of stage 3 with more layers; writes it unless the folder has it already."""
    target = folder / f"written_stage_3_{layers}"
    if not (target / "latest").exists():
        state = widened(open_checkpoint(source).state, layers)
        (target / "step_1").mkdir(parents=True, exist_ok=True)
        with Reader() as reader:
            files = native_files(state, 3, _RANKS)
            run_jobs([lambda n=name, w=write: w(target / "step_1" / n, reader) for name, write in files], 0, 1, None)
        (target / "latest").write_text("step_1", encoding="utf-8")
    return target


def millions(checkpoint: Path) -> float:
    """Return the millions of parameters of a checkpoint."""
    return sum(item.numel for item in open_checkpoint(checkpoint).state.trained) / 1e6


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Converting against DeepSpeed's converter and cp -r.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="*", default=list(_STAGES))
    parser.add_argument("--large", action="store_true", help="also 508 M parameters, at stage 3")
    parser.add_argument("--large-layers", type=int, default=_LARGE_LAYERS)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where checkpoints are kept; default: a temporary one"
    )
    Shape.add_arguments(parser)
    arguments = parser.parse_args()
    clean_up_on_sigterm()
    quiet()
    shape = Shape.of(arguments)
    print(heading("Converting to the universal format, against DeepSpeed's converter and cp -r"), flush=True)
    with room(arguments.folder, int(22e9 if arguments.large else 10e9)) as place:
        imports = Imports.measured()
        for name, process in (("convert", imports.ours), ("ds_to_universal", imports.theirs)):
            print(f"imports of {name}: {process.wall_s:.2f} s, {process.peak_bytes / 1e6:.0f} MB")
        print()
        for stage in arguments.stages:
            checkpoint = trained_checkpoint(place, stage, shape)
            compare(stage, checkpoint, arguments, place, imports, peer=stage in _THEIR_STAGES)
        if arguments.large:
            checkpoint = large_checkpoint(place, trained_checkpoint(place, 3, shape), arguments.large_layers)
            compare(3, checkpoint, arguments, place, imports, peer=False)


if __name__ == "__main__":
    main()
