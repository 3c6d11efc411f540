"""``zeroladder audit`` as a person types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

PACKAGE = str(Path(__file__).parents[2])
PARAMETERS = 6 * (256 * 512 + 512 + 512 * 256 + 256)


def test_it_counts_what_stage_2_sends(tmp_path: Path) -> None:
    """torchrun chooses a free port by itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_zeroladder", "audit", "--stage", "2", "--accumulate", "4", "--json"],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    audit = json.loads(done.stdout)
    assert [(line["collective"], line["place"]) for line in audit["lines"]] == [
        ("all-reduce", "backward"),
        ("all-gather", "boundary"),
    ]
    assert [line["counted"]["elements"] for line in audit["lines"]] == pytest.approx(
        [4 * PARAMETERS, PARAMETERS / 2],  # 2 (N - 1) / N in each of k = 4 micro-batches, (N - 1) / N once
        rel=0.01,
    )
    assert [line["counted"]["nbytes"] / line["counted"]["elements"] for line in audit["lines"]] == [2, 2]  # bf16
    assert [line["counted"]["calls"] for line in audit["lines"]] == [4, 1]
    assert audit["multiple"] == pytest.approx(9, rel=0.01)  # 2k + 1, not k + 1
    assert audit["confirmed"] is True
    assert "says 5 times the parameters (k + 1)" in audit["words"][1]
