"""What converting costs against the number of ranks that saved the checkpoint.

What is measured (117.6 M parameters, bf16, AdamW, ZeRO stages 2 and 3): seconds of ``convert()`` to the universal
format per byte written, from layouts of 4, 16 and 64 ranks of the same state. The layouts are written by ``convert()``
itself from a checkpoint of 4 ranks, without that many processes; what comes out is the same for all of them.

The peer is the layout of 4 ranks, in the same run. The layouts take turns, the order is reversed in every second
repeat, and the ratio is the median of the ratios within a repeat. Everybody finds the source in memory, and nothing
waiting to be written to disk. A measurement that other programs disturb is done again.

Goal: 1.2. How: ``python benchmarks/source_ranks.py [--repeats 7] [--folder DIR]``. Needs: two idle cores, 15 GB of
disk; what is in a ``--folder`` is used again. Duration: 3 minutes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from common import heading, quiet
from gpt import Quiet, Shape, files_below, find_in_memory, fresh, room, trained_checkpoint, verdict
from rig import clean_up_on_sigterm

from lightning_zeroladder.checkpoint.converting import convert
from lightning_zeroladder.checkpoint.opening import open_checkpoint

_STAGES = (2, 3)
_GOAL = 1.2
_SOURCE_RANKS = 4


def layout(folder: Path, source: Path, stage: int, ranks: int) -> Path:
    """Return the state in a layout of that many ranks; writes it unless the folder has it already."""
    target = folder / f"{source.name}_as_stage_{stage}_of_{ranks}"
    if not target.exists():
        convert(source, target, to_stage=stage, to_world_size=ranks)
    return target


def timed(source: Path, place: Path) -> tuple[float, float]:
    """Convert; returns nanoseconds per byte written, and the seconds of which that opening took."""
    started_s = time.perf_counter()
    open_checkpoint(source)
    opened_s = time.perf_counter() - started_s
    with fresh(place) as out:
        started_s = time.perf_counter()
        done = convert(source, out)
        return (time.perf_counter() - started_s) * 1e9 / done.nbytes, opened_s


def compare(stage: int, arguments: argparse.Namespace, place: Path) -> None:
    """Measure the layouts of one stage and print the ratios."""
    source = trained_checkpoint(place, _STAGES[0], Shape.of(arguments))
    layouts = {ranks: layout(place, source, stage, ranks) for ranks in arguments.ranks}
    for path in layouts.values():
        find_in_memory(path)
    per_byte_ns: dict[int, list[float]] = {ranks: [] for ranks in layouts}
    quietly = Quiet()
    opening_s: dict[int, list[float]] = {ranks: [] for ranks in layouts}
    for repeat in range(arguments.repeats + 1):
        for ranks in list(layouts)[:: 1 if repeat % 2 else -1]:
            nanoseconds, opened_s = quietly(lambda ranks=ranks: timed(layouts[ranks], place))
            if repeat > 0:  # the first is not counted
                per_byte_ns[ranks].append(nanoseconds)
                opening_s[ranks].append(opened_s)
    first = arguments.ranks[0]
    for ranks, times_ns in per_byte_ns.items():
        ratios = [mine / peer for mine, peer in zip(times_ns, per_byte_ns[first], strict=True)]
        words = f"; {verdict(median(ratios), _GOAL)}" if ranks != first else ""
        print(
            f"stage {stage}, {ranks:3} ranks in {len(files_below(layouts[ranks])):3} files: {median(times_ns):.3f} ns "
            f"per byte ({min(times_ns):.3f} to {max(times_ns):.3f}), opening {1e3 * median(opening_s[ranks]):.0f} ms; "
            f"{median(ratios):.2f} of {first} ranks ({min(ratios):.2f} to {max(ratios):.2f}){words}",
            flush=True,
        )
    print(f"stage {stage}: {quietly}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="The cost of converting against the number of source ranks.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[_SOURCE_RANKS, 16, 64], help="the first is the peer")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where checkpoints are kept; default: a temporary one"
    )
    Shape.add_arguments(parser)
    arguments = parser.parse_args()
    clean_up_on_sigterm()
    quiet()
    print(heading("Converting against the number of ranks that saved"), flush=True)
    with room(arguments.folder, int(15e9)) as place:
        for stage in _STAGES:
            compare(stage, arguments, place)


if __name__ == "__main__":
    main()
