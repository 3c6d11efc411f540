"""A rung that fails, anywhere and on any rank, costs the run nothing but the seconds it took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import free_port, outcome, rank_environment, run_ranks
from rescue_cases import OTHERS, matrix

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

FOUR_RANKS = sorted(name for name in matrix() if name.startswith("one-"))[::4]
"""A part of the matrix that has every place and every stage in it."""


class Launches:
    """Starts the cases of each number of ranks once, when the first of them is asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._done: dict[int, list[dict[str, Any]] | str] = {}

    def __call__(self, ranks: int, case: str) -> list[Any]:
        if ranks not in self._done:
            folder = self._factory.mktemp(f"ranks_{ranks}")
            names = [*matrix(), *OTHERS] if ranks == 2 else FOUR_RANKS
            self._done[ranks] = f"the launch of the cases on {ranks} ranks failed in an earlier test"
            payload = {"only": names, "folder": str(folder / "cases")}
            self._done[ranks] = run_ranks("rescue_cases:run", payload, ranks=ranks, timeout_s=550, tmp_path=folder)
        results = self._done[ranks]
        if isinstance(results, str):
            pytest.fail(results, pytrace=False)
        return outcome(results, case)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory)


PHASES = {
    "construction": "construction",
    "taking": "moving state",
    "pouring": "construction",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer step",
    "accumulation": "forward",
}


def assert_nothing_lost(case: str, by_rank: list[dict[str, Any]]) -> None:
    who, where, _, k = case.split("-")
    striking = [data["raised"] for data in by_rank]
    # Ranks that were to fail as well can be called away before they do.
    assert striking[-1] == 1 if who == "one" else sum(striking) >= 1
    for data in by_rank:
        assert data["different"] == {}
        assert data["batches"] == 14 * int(k[1:])
    (failure,) = by_rank[0]["failures"]
    assert failure["kind"] == "out of memory"
    assert failure["phase"] == PHASES[where]
    assert failure["message"] == "Broken: injected"
    assert failure["step"] == 1


@pytest.mark.parametrize("case", matrix())
def test_a_failed_rung_changes_nothing(launch: Launches, case: str) -> None:
    assert_nothing_lost(case, launch(2, case))


@pytest.mark.parametrize("case", FOUR_RANKS)
def test_a_failed_rung_changes_nothing_on_four_ranks(launch: Launches, case: str) -> None:
    assert_nothing_lost(case, launch(4, case))


def test_an_error_that_one_stage_gives_is_a_failed_rung(launch: Launches) -> None:
    by_rank = launch(2, "an_error_that_only_stage_3_gives")
    assert [data["different"] for data in by_rank] == [[], []]
    (failure,) = by_rank[0]["failures"]
    assert (failure["kind"], failure["phase"], failure["message"]) == ("error", "forward", "Odd: injected")
    assert by_rank[0]["stages"] == [0] * 6 + [1] * 6 + [2] * 6 + [0] * 10  # stage 0 is where it was tried again


@pytest.mark.parametrize("case", ["an_error_in_the_users_code_from_the_start", "an_error_in_the_users_code_later"])
def test_an_error_in_the_users_code_is_raised_as_itself_on_all_ranks(launch: Launches, case: str) -> None:
    other, failing = launch(2, case)
    assert (failing["type"], failing["message"], failing["raised"]) == ("Odd", "injected", 2)
    assert "in training_step" in failing["traceback"]
    assert other["type"] == "OtherRankFailed"
    assert other["message"].startswith("rank 1 on ")
    assert "failed in forward: Odd: injected" in other["message"]
    assert "in training_step" in other["message"]
    assert failing["since_s"] < 30


def test_an_error_on_all_ranks_is_raised_as_itself_where_it_was_first(launch: Launches) -> None:
    by_rank = launch(2, "an_error_in_the_users_code_on_all_ranks")
    kinds = sorted(data["type"] for data in by_rank)
    assert kinds == ["Odd", "OtherRankFailed"]


def test_out_of_memory_after_the_commit_climbs(launch: Launches) -> None:
    for rank, data in enumerate(launch(2, "out_of_memory_after_the_commit")):
        assert data["gap"] <= 1e-6
        assert data["same"] == ["started", "ended", "lrs", "global_step", "random"]
        assert data["stages"][24:] == [0] * 6 + [1] * 6
        assert data["commit"] == 1
        assert data["raised"] == rank


def test_out_of_memory_after_the_commit_ends_the_run_on_all_ranks_if_asked(launch: Launches) -> None:
    other, failing = launch(2, "out_of_memory_after_the_commit_may_end_the_run")
    assert (failing["type"], failing["message"]) == ("Broken", "injected")
    assert other["type"] == "OtherRankFailed"
    assert "Broken: injected" in other["message"]


def test_a_hang_is_a_failed_rung(launch: Launches) -> None:
    by_rank = launch(2, "a_hang")
    assert [data["different"] for data in by_rank] == [[], []]
    (failure,) = by_rank[0]["failures"]
    assert failure["kind"] == "hang"
    assert "no rank completed a micro-batch for 2 s" in failure["message"]
    assert by_rank[1]["back_s"] < 30  # the rank itself would have stood still for 60 s


def test_a_rank_that_waits_for_others_between_micro_batches_is_called_away_too(launch: Launches) -> None:
    by_rank = launch(2, "a_rank_waits_between_micro_batches")
    assert [data["different"] for data in by_rank] == [[], []]
    assert len(by_rank[0]["failures"]) == 1


def test_a_step_that_cannot_be_taken_back_ends_the_run(launch: Launches) -> None:
    for data in launch(2, "a_step_that_cannot_be_taken_back"):
        assert data["type"] == "StepLost"
        assert "rank 1" in data["message"]
        assert "Resume from the last checkpoint" in data["message"]


def test_a_batch_of_manual_optimization_is_run_again(launch: Launches) -> None:
    by_rank = launch(2, "manual_optimization")
    assert [data["different"] for data in by_rank] == [[], []]
    assert len(by_rank[0]["failures"]) == 1


def test_saving_on_one_rank_only_ends_with_a_sentence_about_it(launch: Launches) -> None:
    saving, other = launch(2, "saving_on_one_rank_only")
    assert saving["type"] == "RuntimeError"
    assert "save_checkpoint was called on rank 0, but ranks 1 did not come to it within 2 s" in saving["message"]
    assert other["type"] == "OtherRankFailed"
    assert "is_global_zero" in other["message"]


def test_a_process_that_is_killed_ends_the_job_with_its_name(tmp_path: Path) -> None:
    ranks, port = 3, free_port()
    (tmp_path / "job.json").write_text(json.dumps({"payload": {"folder": str(tmp_path)}, "timeout_s": 120}))
    worker = Path(__file__).parent / "worker.py"
    processes = []
    try:
        for rank in range(ranks):
            with (tmp_path / f"output.{rank}.txt").open("wb") as stream:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(worker), "rescue_cases:die", str(tmp_path)],
                        env=rank_environment(rank, ranks, port),
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                    )
                )
        killed_s = None
        while any(process.poll() is None for process in processes):
            if killed_s is None and processes[-1].poll() is not None:
                killed_s = time.monotonic()
            assert killed_s is None or time.monotonic() - killed_s < 60, "the others are still there"
            time.sleep(0.1)
        assert killed_s is not None
        assert time.monotonic() - killed_s < 30
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert processes[-1].returncode == -signal.SIGKILL
    for rank in range(ranks - 1):
        raised = json.loads((tmp_path / f"raised.{rank}.json").read_text())
        assert raised["type"] == "RanksLost"
        assert f"rank {ranks - 1} does not answer any more" in raised["message"]


FAULTS = int(os.environ.get("ZEROLADDER_SOAK_FAULTS", "60"))


def test_many_faults_leave_nothing_behind(tmp_path: Path) -> None:
    payload = {"seed": 5, "faults": FAULTS, "folder": str(tmp_path / "runs")}
    results = run_ranks(
        "rescue_cases:soak", payload, ranks=2, timeout_s=max(300, 5 * FAULTS), tmp_path=tmp_path / "launch"
    )
    for data in results:
        assert data["faults"] >= FAULTS
        assert data["wrong"] == []
        # Threads and connections of a run that is just beginning or ending come and go: a leak shows in the least.
        third = len(data["footprints"]) // 3
        early, late = (
            {name: min(each[name] for each in part) for name in part[0]}
            for part in (data["footprints"][3:third], data["footprints"][-third:])
        )
        assert late["groups"] <= early["groups"]
        assert late["threads"] <= early["threads"] + 2
        assert late["fds"] <= early["fds"] + 4
        assert late["rss_mb"] <= early["rss_mb"] + 60
