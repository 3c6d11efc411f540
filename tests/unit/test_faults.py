from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from faults import LAYOUTS, TAG, Campaign, Fault, Job, Kind, Verdict, make_layouts, read_whole

from lightning_zeroladder.checkpoint import archive, converting
from lightning_zeroladder.checkpoint.archive import Archive
from lightning_zeroladder.checkpoint.errors import BadCheckpoint

TESTS = Path(__file__).parents[1]

CORRUPTIONS = 440
KILLS = 70  # some fall on the same operation

JOBS = {"2 ranks, bf16, frozen weights": Job(), "1 rank, fp32": Job(ranks=1, precision=torch.float32, frozen=False)}


@pytest.fixture(scope="module", params=JOBS)
def campaign(request, tmp_path_factory):
    return Campaign(tmp_path_factory.mktemp("campaign"), JOBS[request.param])


def bad(outcomes: Any) -> list[str]:
    return [str(outcome) for outcome in outcomes if outcome.verdict is Verdict.BAD]


def test_every_corruption_is_a_clear_error_or_changes_nothing(campaign, tmp_path):
    outcomes: list[Any] = []
    kinds: Counter[Kind] = Counter()
    for fault in campaign.faults(CORRUPTIONS // len(JOBS)):
        work = tmp_path / "work"
        work.mkdir()
        outcomes += campaign.judge(fault, work)
        kinds[fault.kind] += 1
        shutil.rmtree(work)
    assert bad(outcomes) == []
    assert len({outcome.what for outcome in outcomes}) == CORRUPTIONS // len(JOBS)
    assert set(kinds) | {Kind.UNREADABLE} == set(Kind)


def test_every_file_is_missed_but_for_copies_of_what_is_elsewhere(campaign, tmp_path):
    unnoticed = set()
    for layout, manifest in campaign.variants:
        source = campaign.source(layout, manifest)
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            work = tmp_path / "work"
            work.mkdir()
            fault = Fault(Kind.MISSING, layout, manifest, path.relative_to(source).as_posix())
            outcomes = campaign.judge(fault, work)
            shutil.rmtree(work)
            assert bad(outcomes) == []
            if any(outcome.verdict is Verdict.WHOLE for outcome in outcomes):
                unnoticed.add((layout if not manifest else f"{layout} with manifest", path.name))
    expected = {(f"{layout} with manifest", "zeroladder.json") for layout in LAYOUTS if not layout.startswith("Deep")}
    for layout in ("universal", "DeepSpeed's universal"):
        expected.add((layout, "step.pt"))  # also in optimizer_state.pt
    expected.add(("universal", "zero_pp_rank_0_mp_rank_00_model_states.pt"))  # under its two names for DeepSpeed
    if campaign.job.ranks == 1:
        expected.add(("universal", "mp_rank_00_model_states.pt"))
    assert unnoticed == expected


def test_faults_are_the_same_for_the_same_seed(campaign):
    assert list(campaign.faults(50, seed=3)) == list(campaign.faults(50, seed=3))
    assert list(campaign.faults(50, seed=3)) != list(campaign.faults(50, seed=4))


def tensor_fault(campaign: Campaign, layout: str, file: str, record: str) -> Fault:
    """A flipped bit in the first byte of a record."""
    path = campaign.source(layout, False) / file
    return Fault(Kind.BIT_TENSOR, layout, False, file, 8 * Archive(path).records[record].start + 5)


def test_the_campaign_sees_what_is_not_verified(tmp_path_factory, tmp_path, monkeypatch):
    """That a silent difference would be found: without verification there is one."""
    campaign = Campaign(tmp_path_factory.mktemp("campaign"), Job())
    fault = tensor_fault(campaign, "universal", f"{TAG}_universal/zero/embed.weight/exp_avg.pt", "data/0")
    (tmp_path / "a").mkdir()
    assert {outcome.verdict for outcome in campaign.judge(fault, tmp_path / "a")} == {Verdict.FILE}
    for module in (faults, converting):
        monkeypatch.setattr(module, "verify", lambda *_, **__: None)
    (tmp_path / "b").mkdir()
    outcomes = campaign.judge(fault, tmp_path / "b")
    assert len(bad(outcomes)) == 3
    assert all("a silent difference in" in outcome.detail for outcome in outcomes)


def test_the_campaign_sees_errors_that_are_not_clear(tmp_path_factory, tmp_path, monkeypatch):
    campaign = Campaign(tmp_path_factory.mktemp("campaign"), Job())
    fault = Fault(Kind.CUT, "stage 1", False, f"{TAG}/mp_rank_00_model_states.pt", 100)
    campaign.expected(fault.layout, fault.manifest)
    monkeypatch.setattr(Archive, "_damaged", lambda *_: BadCheckpoint("something is wrong"))
    (tmp_path / "a").mkdir()
    assert all("names neither" in outcome.detail for outcome in campaign.judge(fault, tmp_path / "a"))
    monkeypatch.setattr(archive.zipfile, "ZipFile", lambda *_: 1 / 0)
    monkeypatch.setattr(Archive, "_damaged", lambda *_: RuntimeError("PytorchStreamReader failed"))
    (tmp_path / "b").mkdir()
    assert {outcome.detail for outcome in campaign.judge(fault, tmp_path / "b")} == {
        "RuntimeError: PytorchStreamReader failed"
    }


def test_weights_that_look_alike_in_two_groups_are_not_told_apart_by_guessing(tmp_path):
    """Scales of norms are all 1 in bf16 early in training: which optimizer state is whose, only names can tell."""
    root = make_layouts(tmp_path / "layouts", 1, Job())["stage 0"]
    path = root / TAG / "mp_rank_00_model_states.pt"
    before = read_whole(root)
    (root / TAG / "zeroladder.json").unlink()
    assert read_whole(root)["parameters"] == before["parameters"]
    tree = torch.load(path, weights_only=False)
    tree["module"]["norm.weight"].fill_(1)
    tree["optimizer"]["fp32_groups"][1][0].fill_(1.0001)
    tree["module"]["frozen.weight"] = torch.ones(6, dtype=torch.bfloat16)
    torch.save(tree, path)
    with pytest.raises(BadCheckpoint, match="shapes do not tell them apart"):
        read_whole(root)


# Kill points ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kill points are forked processes")
@pytest.mark.parametrize("action", ["convert", "save"])
def test_a_process_killed_at_any_moment_leaves_nothing_or_something_whole(tmp_path, action):
    folder, result = tmp_path / "kills", tmp_path / "result.json"
    folder.mkdir()
    command = [sys.executable, str(TESTS / "kill_points.py"), action, str(folder), str(KILLS // 2), "0", str(result)]
    paths = [str(TESTS.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=250)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-3000:]
    outcomes = json.loads(result.read_text())
    assert [outcome for outcome in outcomes if outcome["verdict"] == Verdict.BAD] == []
    killed = [
        outcome for outcome in outcomes if outcome["action"] == {"convert": "converting", "save": "saving"}[action]
    ]
    assert len({outcome["what"] for outcome in killed}) >= 25
    assert {outcome["verdict"] for outcome in killed} == {Verdict.WHOLE, Verdict.NOTHING}
    assert {outcome["verdict"] for outcome in outcomes if outcome["action"] == "again"} == {Verdict.WHOLE}
