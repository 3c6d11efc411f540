"""What becomes of damaged checkpoints, and of processes that are killed while they convert or save one.

What is done:

- corruptions: one file of a checkpoint is taken away, cut off, emptied, changed by a bit (in every part of its format),
  exchanged for that of another run or world size, replaced by a folder or a dangling link, or added to, in all layouts:
  native of ZeRO stages 0 to 3, universal, and universal as DeepSpeed's own converter writes it, each with and without
  manifest. Then everything is read and verified, and the checkpoint is converted to two other layouts.
- kill points: ``convert`` and the save of a live engine are killed at operations on the file system over the whole
  course, writes half-way through, and some conversions from outside at any moment.

Every one has to be an error that names the file or its folder, or a result that equals the undamaged one bit for bit;
after a kill there is nothing or something whole, and doing it again succeeds. Anything else is bad, and so is taking
longer than a minute. The script prints a table by kind and what was bad, and ends with 1 if anything was. There is no
peer: torch and DeepSpeed check next to nothing of this.

How: ``python benchmarks/fault_campaign.py [--corruptions 1000] [--kills 200]``. Needs: one core; gloo for saving.
Duration: 2 minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import heading, quiet

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from faults import Campaign, Job, Outcome, Verdict  # noqa: E402

JOBS = (Job(), Job(ranks=1, precision=torch.float32, frozen=False))

_LIMIT_S = 60


class Hang(BaseException):
    """Something took too long. No ``Exception``: nothing on the way may take it for one of its own."""


def _too_long(*_: Any) -> None:
    raise Hang


def corruptions(count: int, seed: int, root: Path) -> Iterator[tuple[str, Outcome]]:
    """Yield what came of each corruption, with its kind."""
    signal.signal(signal.SIGALRM, _too_long)
    for index, job in enumerate(JOBS):
        campaign = Campaign(root / str(index), job)
        for fault in campaign.faults(count // len(JOBS), seed):
            work = root / "work"
            work.mkdir()
            signal.alarm(_LIMIT_S)
            try:
                yield from ((fault.kind, outcome) for outcome in campaign.judge(fault, work))
            except Hang:
                yield fault.kind, Outcome(str(fault), "any", Verdict.BAD, f"not done after {_LIMIT_S} s")
            finally:
                signal.alarm(0)
            shutil.rmtree(work)


def kills(action: str, count: int, seed: int, root: Path) -> Iterator[tuple[str, Outcome]]:
    """Yield what was left by each process that was killed."""
    folder, result, log = root / action, root / f"{action}.json", root / f"{action}.log"
    folder.mkdir()
    command = [sys.executable, str(TESTS / "kill_points.py"), action, str(folder), str(count), str(seed), str(result)]
    with log.open("wb") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=3600).returncode
    if status != 0:
        raise RuntimeError(f"the killer of {action} failed:\n{log.read_text(errors='replace')[-3000:]}")
    for values in json.loads(result.read_text()):
        outcome = Outcome(**{**values, "verdict": Verdict(values["verdict"])})
        yield f"{outcome.action}, killed" if outcome.action != "again" else f"{action} again after a kill", outcome


def table(found: Iterable[tuple[str, Outcome]]) -> str:
    """Return how often each kind ended in what way."""
    counts: dict[str, Counter[Verdict]] = defaultdict(Counter)
    for kind, outcome in found:
        counts[kind][outcome.verdict] += 1
    width = max(map(len, counts))
    lines = [" ".join([" " * width, *(f"{verdict:>24}" for verdict in Verdict)])]
    for kind, verdicts in counts.items():
        lines.append(" ".join([f"{kind:<{width}}", *(f"{verdicts[verdict] or '-':>24}" for verdict in Verdict)]))
    return "\n".join(lines)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Damage checkpoints and kill those who write them.")
    parser.add_argument("--corruptions", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200, help="kill points of convert and save together")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    quiet()
    print(heading("Damaged checkpoints and killed processes"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        started_s = time.perf_counter()
        found = list(corruptions(arguments.corruptions, arguments.seed, root))
        faults = len({outcome.what for _, outcome in found})
        took_s = time.perf_counter() - started_s
        print(f"{faults} different corruptions, each read and converted twice, in {took_s:.0f} s\n\n{table(found)}\n")
        started_s = time.perf_counter()
        killed = [
            entry
            for action in ("convert", "save")
            for entry in kills(action, arguments.kills // 2, arguments.seed, root)
        ]
        points = len({outcome.what for _, outcome in killed})
        took_s = time.perf_counter() - started_s
        print(f"{points} different kill points in {took_s:.0f} s\n\n{table(killed)}\n")
    bad = [outcome for _, outcome in [*found, *killed] if outcome.verdict is Verdict.BAD]
    for outcome in bad:
        print(outcome)
    print(f"bad: {len(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
