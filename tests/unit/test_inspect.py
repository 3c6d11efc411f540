"""`inspect`: what it says of a checkpoint, and of a damaged one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MODEL, TAG, adam, add_manifest, flip_a_bit, in_every_layout, save_stage_0, values
from torch import Tensor

from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.inspecting import inspect, inspection_to_json

WEIGHTS = {"a.weight": values(5, 7), "a.bias": values(5), "b.weight": values(3, 5)}
GROUPS = (("a.weight", "b.weight"), ("a.bias",))
FROZEN = {"f.weight": values(3, 3)}
TRAINED, LEFT = 35 + 5 + 15, 9


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layouts")
    source = save_stage_0(root / "stage 0", {**WEIGHTS, **FROZEN}, optimizer=adam(WEIGHTS, GROUPS))
    add_manifest(source, groups=GROUPS, parameters={**WEIGHTS, **FROZEN})
    return in_every_layout(source, root)


def copied(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    return out


def plain(root: Path, weights: dict[str, Tensor], state: dict[int, Any], **group: Any) -> Path:
    """A checkpoint of one group, whose optimizer keeps the given state."""
    numbers = list(range(len(weights)))
    return save_stage_0(root, weights, optimizer={"state": state, "param_groups": [{**group, "params": numbers}]})


@pytest.mark.parametrize(("layout", "stage"), [("stage 0", 0), ("stage 1", 1), ("stage 3", 3), ("universal", None)])
def test_what_it_is(layouts: dict[str, Path], layout: str, stage: int | None) -> None:
    found = inspect(layouts[layout])
    assert (found.kind, found.stage) == ("universal" if stage is None else "native", stage)
    assert found.world_size == (3 if stage else 2)
    assert (found.parameters, found.trained, found.frozen, found.tensors) == (TRAINED + LEFT, TRAINED, LEFT, 4)
    assert (found.optimizer, found.state_keys) == ("AdamW", ("exp_avg", "exp_avg_sq"))
    assert (found.groups, found.learning_rates) == (2, (0.1, 0.2))
    assert found.counters == {"global_steps": 3, "global_samples": 24, "skipped_steps": 0}
    assert (found.accumulate, found.micro_batch) == (1, 8)  # by the manifest: DeepSpeed's config says otherwise
    assert found.loads_into == "any stage, any world size"
    assert (found.manifest, found.whole, found.problem) == (True, True, "")
    assert Path(found.path).parent == layouts[layout]
    files = [path for path in Path(found.path).rglob("*") if path.is_file()]
    assert found.nbytes == sum(path.stat().st_size for path in files)
    as_json = json.loads(json.dumps(inspection_to_json(found)))
    assert as_json["learning_rates"] == [0.1, 0.2]
    assert as_json["counters"]["global_steps"] == 3


def test_without_a_manifest_the_files_tell(tmp_path: Path) -> None:
    found = inspect(save_stage_0(tmp_path / "c", WEIGHTS, optimizer=adam(WEIGHTS, [list(WEIGHTS)])))
    assert (found.manifest, found.optimizer) == (False, "Adam-like")
    assert found.versions == {"deepspeed": "0.19.8"}
    assert (found.accumulate, found.micro_batch) == (2, 4)


@pytest.mark.parametrize(
    ("keys", "family"),
    [
        (("exp_avg",), "Lion-like"),
        (("momentum_buffer",), "SGD-like, with momentum"),
        (("square_avg", "momentum_buffer"), "RMSprop-like"),
        (("sum",), "Adagrad-like"),
        (("z",), "unknown"),
    ],
)
def test_the_optimizer_is_guessed_by_its_state(keys: tuple[str, ...], family: str, tmp_path: Path) -> None:
    root = plain(tmp_path / "c", {"w": values(3)}, {0: {key: values(3) for key in keys}}, lr=0.1)
    assert inspect(root).optimizer == family


def test_a_learning_rate_may_be_a_tensor_or_missing(tmp_path: Path) -> None:
    root = plain(tmp_path / "c", {"w": values(3)}, {}, lr=torch.tensor(0.25))
    assert inspect(root).learning_rates == (0.25,)
    found = inspect(plain(tmp_path / "d", {"w": values(3)}, {}))
    assert (found.groups, found.learning_rates) == (1, (None,))


def test_state_without_names_is_described_all_the_same(tmp_path: Path) -> None:
    alike = {"a": values(4, 4), "b": values(4, 4, seed=1)}
    found = inspect(save_stage_0(tmp_path / "c", alike, optimizer=adam(alike, [["b"], ["a"]])))
    assert (found.parameters, found.trained, found.frozen) == (32, None, None)
    assert (found.optimizer, found.state_keys) == ("Adam-like", ("exp_avg", "exp_avg_sq"))
    assert found.learning_rates == (0.1, 0.2)
    assert found.loads_into.startswith("any stage, any world size, in a run")
    assert found.whole is True


# What it loads into ---------------------------------------------------------------------------------------------


def test_state_of_another_shape_stays_at_stage_0(tmp_path: Path) -> None:
    rows = {"exp_avg_sq_row": values(5), "exp_avg_sq_col": values(7)}
    found = inspect(plain(tmp_path / "c", {"w": values(5, 7)}, {0: rows}, lr=0.1))
    assert found.loads_into.startswith("stage 0 only, any world size: ")
    assert "keeps 'exp_avg_sq_row' of shape (5,) for parameter 'w' of shape (5, 7)" in found.loads_into
    assert (found.optimizer, found.whole) == ("Adafactor-like", True)


def test_steps_that_differ_stay_at_stage_0(tmp_path: Path) -> None:
    optimizer = adam(WEIGHTS, [list(WEIGHTS)])
    optimizer["state"][1]["step"] = torch.tensor(2.0)
    found = inspect(save_stage_0(tmp_path / "c", WEIGHTS, optimizer=optimizer))
    assert found.loads_into.startswith("stage 0 only, any world size: ")
    assert "step is 2.0 for parameter 'a.bias' and 3.0 for 'a.weight'" in found.loads_into


def test_weights_alone_are_for_evaluation(tmp_path: Path) -> None:
    found = inspect(save_stage_0(tmp_path / "c", WEIGHTS, optimizer=None))
    assert found.loads_into == "evaluation: it holds weights but no optimizer state"
    assert (found.optimizer, found.trained, found.frozen) == ("none", 0, TRAINED)


# Damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["stage 0", "stage 2", "stage 3"])
def test_every_file_is_read(layouts: dict[str, Path], layout: str, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(layouts[layout].rglob("*.pt"))):
        broken = copied(layouts[layout], tmp_path / str(number))
        damaged = broken / path.relative_to(layouts[layout])
        flip_a_bit(damaged)
        found = inspect(broken)
        assert found.whole is False
        assert str(damaged) in found.problem
        assert (found.trained, found.kind) == (TRAINED, "native")  # what it is can be said all the same


def test_a_second_copy_that_opening_leaves_alone_is_read_as_well(layouts: dict[str, Path], tmp_path: Path) -> None:
    broken = copied(layouts["universal"], tmp_path / "broken")
    second = next(broken.rglob("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    flip_a_bit(second)
    found = inspect(broken)
    assert found.whole is False
    assert f"{second}: the bytes of its record" in found.problem


def test_quick_reads_no_tensor(layouts: dict[str, Path], tmp_path: Path) -> None:
    broken = copied(layouts["stage 1"], tmp_path / "broken")
    flip_a_bit(next(broken.rglob("*rank_2_*optim_states.pt")))
    found = inspect(broken, full=False)
    assert (found.whole, found.problem) == (None, "")
    next(broken.rglob("*rank_2_*optim_states.pt")).unlink()
    found = inspect(broken, full=False)
    assert (found.whole, found.kind) == (False, None)
    assert "those behind zero_pp_rank_1_mp_rank_00_optim_states.pt are missing" in found.problem


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / MODEL).unlink(), "no *_model_states.pt in it"),
        (lambda folder: (folder / MODEL).write_bytes(b""), f"{MODEL} has 0 bytes"),
        (lambda folder: (folder / "zeroladder.json").write_text("{}"), "zeroladder.json cannot be read"),
        (lambda folder: add_manifest(folder.parent, groups=[["a.weight", "x"], ["a.bias"]]), "holds no parameter 'x'"),
    ],
)
def test_what_cannot_be_opened_is_not_whole(layouts: dict[str, Path], change: Any, says: str, tmp_path: Path) -> None:
    broken = copied(layouts["stage 0"], tmp_path / "broken")
    change(broken / TAG)
    for path in (broken, broken / TAG):
        found = inspect(path)
        assert (found.whole, found.kind) == (False, None)
        assert says in found.problem


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("some", r"some is no DeepSpeed checkpoint: .* \(there is notes\.txt\)"),
        ("empty", "empty is no DeepSpeed checkpoint"),
        ("some/notes.txt", r"notes\.txt is a file"),
        ("nowhere", "nowhere does not exist"),
    ):
        with pytest.raises(BadCheckpoint, match=says):
            inspect(tmp_path / name)


def test_progress_ends_with_everything_read(layouts: dict[str, Path]) -> None:
    seen: list[tuple[int, int]] = []
    inspect(layouts["stage 3"], progress=lambda *at: seen.append(at))
    total = sum(path.stat().st_size for path in layouts["stage 3"].rglob("*.pt"))
    assert seen == sorted(seen)
    assert {expected for _, expected in seen} == {total}
    assert total - 4096 < seen[-1][0] <= total  # behind its last record a file has only its directory
