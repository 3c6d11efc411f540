"""Many faults in one pair of processes: does anything stay behind?

What is measured: runs of a small model (2 ranks, k = 1, 2 or 4) that walk the ladder, with one to three of their four
stages made to fail, each in a place of its own (construction, taking or pouring state, forward, backward, in the middle
of the optimizer step, in mid-accumulation), on one rank or on all. Printed: how many faults came, how many runs lost a
batch, and threads, file descriptors, process groups and resident memory of each rank over time. There is no peer:
nothing else in this field recovers.

How: ``python benchmarks/soak.py [--faults 1000]``. Needs: the tests, beside this folder. Duration: 12 minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from common import heading

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "distributed")]

from harness import run_ranks  # noqa: E402

_SHOWN = 10


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(heading("Faults in one pair of processes"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        payload = {"seed": arguments.seed, "faults": arguments.faults, "folder": str(Path(folder) / "runs")}
        timeout_s = 600 + 5 * arguments.faults
        ranks = run_ranks("rescue_cases:soak", payload, ranks=2, timeout_s=timeout_s, tmp_path=Path(folder) / "launch")
    print(f"{ranks[0]['faults']} faults in {len(ranks[0]['footprints'])} runs")
    print(f"runs that lost or repeated a batch: {max(len(data['wrong']) for data in ranks)}; goal 0")
    for rank, data in enumerate(ranks):
        footprints = data["footprints"]
        step = max(1, len(footprints) // _SHOWN)
        for number in [*range(0, len(footprints) - 1, step), len(footprints) - 1]:
            told = ", ".join(f"{name} {value}" for name, value in footprints[number].items())
            print(f"rank {rank} after run {number + 1}: {told}")


if __name__ == "__main__":
    main()
