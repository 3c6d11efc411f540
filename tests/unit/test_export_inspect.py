"""`export`, `inspect` and `convert`, as functions and as commands."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FROZEN, GROUPS, LAYOUTS, TAG, TIED, Job, listing, make_layouts, read_whole
from safetensors import safe_open
from safetensors.torch import load_file

import lightning_zeroladder
from lightning_zeroladder.checkpoint.archive import Archive
from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.exporting import export, size_of
from lightning_zeroladder.checkpoint.inspecting import inspect, inspection_to_json
from lightning_zeroladder.cli import main

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "deepspeed", "lightning")
TRAINED = {name: shape for group in GROUPS for name, shape in group.items()}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_layouts(tmp_path_factory.mktemp("layouts"), 0, Job())


@pytest.fixture(scope="module")
def truth(layouts: dict[str, Path]) -> Any:
    """What torch itself reads from the checkpoint of stage 0."""
    return torch.load(layouts["stage 0"] / TAG / "mp_rank_00_model_states.pt", weights_only=False)


def flip_a_weight(path: Path) -> None:
    """Change a bit in the largest tensors of a file."""
    records = Archive(path).records
    data = bytearray(path.read_bytes())
    for name in records:
        if name.startswith("data/") and records[name].nbytes > 100:
            data[records[name].start] ^= 1
    path.write_bytes(data)


def expected_weights(truth: Any) -> dict[str, torch.Tensor]:
    masters = [tensor for group in truth["optimizer"]["fp32_groups"] for tensor in group]
    weights = dict(zip(TRAINED, masters, strict=True))
    others = ("frozen.weight", "norm.mean", "norm.batches")
    return {**weights, **{name: truth["module"][name] for name in others}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_exported_bit_for_bit(layouts: dict[str, Path], truth: Any, layout: str, tmp_path: Path) -> None:
    before = listing(layouts[layout])
    done = export(layouts[layout], tmp_path / "w.safetensors")
    found, expected = load_file(done.files[0]), expected_weights(truth)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert dict(done.tied) == TIED
    with safe_open(done.files[0], "pt") as file:
        assert json.loads(file.metadata()["tied"]) == TIED
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    assert listing(layouts[layout]) == before


@pytest.mark.parametrize(("dtype", "target"), [("bf16", torch.bfloat16), ("float16", torch.float16), ("fp32", None)])
def test_floating_point_tensors_are_cast(
    layouts: dict[str, Path], truth: Any, dtype: str, target: torch.dtype | None, tmp_path: Path
) -> None:
    export(layouts["stage 3"], tmp_path / "w.safetensors", dtype=dtype)
    for name, tensor in load_file(tmp_path / "w.safetensors").items():
        expected = expected_weights(truth)[name]
        cast = expected.to(target or torch.float32) if expected.is_floating_point() else expected
        assert tensor.dtype == cast.dtype
        assert torch.equal(tensor, cast), name


def test_shards_have_an_index(layouts: dict[str, Path], truth: Any, tmp_path: Path) -> None:
    done = export(layouts["stage 2"], tmp_path / "model.safetensors", max_shard_size=150)
    names = [path.name for path in done.files]
    count = len(names) - 1
    assert names[-1] == "model.safetensors.index.json"
    assert names[:-1] == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    index = json.loads(done.files[-1].read_text())
    expected = expected_weights(truth)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values()) == done.nbytes
    assert index["weight_map"].keys() == expected.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], expected[name])
    for path in done.files[:-1]:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 150


def test_an_export_that_was_killed_before_its_index_is_done_again(layouts: dict[str, Path], tmp_path: Path) -> None:
    done = export(layouts["stage 2"], tmp_path / "model.safetensors", max_shard_size=150)
    whole = {path.name: path.read_bytes() for path in done.files}
    done.files[-1].unlink()
    done.files[1].write_bytes(b"half")
    export(layouts["stage 2"], tmp_path / "model.safetensors", max_shard_size=150)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole


def test_a_damaged_checkpoint_leaves_no_file(layouts: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(layouts["stage 3"], broken)
    path = sorted((broken / TAG).glob("*optim_states.pt"))[1]
    flip_a_weight(path)
    with pytest.raises(BadCheckpoint, match=path.name):
        export(broken, tmp_path / "w.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken"]


def test_weights_that_were_not_saved_are_named(layouts: dict[str, Path], tmp_path: Path) -> None:
    truth = torch.load(layouts["stage 2"] / TAG / "mp_rank_00_model_states.pt", weights_only=False)
    del truth["module"]["frozen.weight"]
    truth["frozen_param_shapes"] = {"frozen.weight": torch.Size(FROZEN["frozen.weight"])}
    shutil.copytree(layouts["stage 2"], tmp_path / "without")
    torch.save(truth, tmp_path / "without" / TAG / "mp_rank_00_model_states.pt")
    (tmp_path / "without" / TAG / "zeroladder.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"'frozen\.weight': it was saved without frozen parameters"):
        export(tmp_path / "without", tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("1.5GiB", 3 * 2**29), ("500 MB", 500 * 10**6), (1000, 1000), ("10kb", 10**4)],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert size_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 apples", "0"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="give a size such as 5GB"):
        size_of(text)


def test_a_file_name_and_a_type_are_checked_first(layouts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.safetensors"):
        export(layouts["stage 0"], tmp_path / "w.bin")
    with pytest.raises(ValueError, match=r"dtype='int4'.*bf16"):
        export(layouts["stage 0"], tmp_path / "w.safetensors", dtype="int4")
    (tmp_path / "w.safetensors").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        export(layouts["stage 0"], tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        export(layouts["stage 0"], tmp_path / "nowhere" / "w.safetensors")


@pytest.mark.parametrize(("layout", "stage"), [("stage 0", 0), ("stage 2", 2), ("stage 3", 3), ("universal", None)])
def test_inspect(layouts: dict[str, Path], layout: str, stage: int | None) -> None:
    found = inspect(layouts[layout])
    assert (found.stage, found.world_size, found.precision) == (stage, 2, "bfloat16")
    assert found.kind == ("universal" if stage is None else "native")
    assert (found.trained, found.frozen, found.tensors) == (66 + 30 + 5 + 6 + 1, 12, 6)
    assert found.largest[0] == ("embed.weight", (11, 6))
    assert found.optimizer == "AdamW"
    assert found.state_keys == ("exp_avg", "exp_avg_sq")
    assert found.learning_rates == (0.1, 1.1)
    assert found.counters == {"global_steps": 7, "global_samples": 56, "skipped_steps": 0}
    assert (found.accumulate, found.micro_batch) == (1, 4)
    assert found.loads_into == "any stage, any world size"
    assert (found.manifest, found.whole, found.problem) == (True, True, "")
    assert json.loads(json.dumps(inspection_to_json(found)))["trained"] == found.trained


def test_inspect_says_what_is_wrong(layouts: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(layouts["stage 1"], broken)
    path = sorted((broken / TAG).glob("*optim_states.pt"))[0]
    flip_a_weight(path)
    found = inspect(broken)
    assert found.whole is False
    assert path.name in found.problem
    assert found.trained == 108
    assert inspect(broken, full=False).whole is None
    path.unlink()
    found = inspect(broken)
    assert (found.whole, found.kind) == (False, None)
    assert "missing" in found.problem
    with pytest.raises(BadCheckpoint, match="does not exist"):
        inspect(tmp_path / "nowhere")


def test_inspect_of_a_stage_0_without_names(layouts: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(layouts["stage 0"], tmp_path / "stock")
    (tmp_path / "stock" / TAG / "zeroladder.json").unlink()
    path = tmp_path / "stock" / TAG / "mp_rank_00_model_states.pt"
    tree = torch.load(path, weights_only=False)
    tree["module"] = {name: tensor.float() for name, tensor in tree["module"].items()}
    tree["module"]["norm.weight"] = torch.zeros(6)
    tree["module"]["norm.bias"] = torch.zeros(6)
    optimizer = tree["optimizer"]["optimizer_state_dict"]
    tree["optimizer"] = optimizer
    torch.save(tree, path)
    found = inspect(tmp_path / "stock")
    assert found.whole is True
    assert "in a run" in found.loads_into
    done = export(tmp_path / "stock", tmp_path / "w.safetensors")
    assert torch.equal(load_file(done.files[0])["fc.weight"], tree["module"]["fc.weight"])


# Commands -------------------------------------------------------------------------------------------------------


def test_commands(layouts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(layouts["stage 3"])
    assert main(["inspect", source]) == 0
    shown = capsys.readouterr().out
    for text in (
        "ZeRO stage 3, 2 ranks, bfloat16",
        "any stage, any world size",
        "108 trained and 12 frozen",
        "yes: every",
    ):
        assert text in shown
    assert main(["inspect", source, "--json", "--quick"]) == 0
    assert json.loads(capsys.readouterr().out)["whole"] is None
    assert main(["convert", source, str(tmp_path / "u")]) == 0
    assert "universal" in capsys.readouterr().out
    assert read_whole(tmp_path / "u")["parameters"].keys() == {*TRAINED, *FROZEN}
    assert (
        main(["convert", source, str(tmp_path / "n"), "--to-stage", "1", "--to-world-size", "3", "--workers", "1"]) == 0
    )
    assert "native" in capsys.readouterr().out
    assert len(list((tmp_path / "n" / TAG).glob("*optim_states.pt"))) == 3
    assert main(["export", source, str(tmp_path / "w.safetensors"), "--dtype", "bf16"]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path / "w.safetensors") in shown
    assert "head.weight" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect", "nowhere"], "nowhere does not exist on host"),
        (["convert", "SOURCE", "SOURCE"], "exists already"),
        (["convert", "SOURCE", "out", "--to-stage", "5"], "ZeRO has the stages 0, 1, 2 and 3"),
        (["convert", "SOURCE", "out", "--workers", "0"], "must be at least 1"),
        (["export", "SOURCE", "out.bin"], "ends in .safetensors"),
        (["export", "SOURCE", "out.safetensors", "--dtype", "fp3"], "weights are exported as"),
        (["inspect", "s3://bucket/x"], "is a remote path"),
    ],
)
def test_mistakes_are_said_in_a_line(
    layouts: dict[str, Path],
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(layouts["stage 0"]) if word == "SOURCE" else word for word in arguments]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("zeroladder: ")
    assert says in shown.err
    assert "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []


def test_a_broken_checkpoint_is_status_1(
    layouts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(layouts["stage 2"], tmp_path / "broken")
    next((tmp_path / "broken" / TAG).glob("*rank_1_*optim_states.pt")).unlink()
    assert main(["inspect", str(tmp_path / "broken")]) == 1
    assert "no: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["inspect SOURCE --json", "convert SOURCE OUT/u", "export SOURCE OUT/w.safetensors"][:]
)
def test_commands_load_neither_torch_nor_deepspeed(layouts: dict[str, Path], command: str, tmp_path: Path) -> None:
    words = [
        word.replace("SOURCE", str(layouts["stage 3"])).replace("OUT", str(tmp_path)) for word in command.split(" ")
    ]
    code = (
        "import sys; sys.argv = ['zeroladder']; from lightning_zeroladder.cli import main; "
        f"status = main({words!r}); print([name for name in {HEAVY!r} if name in sys.modules], status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_functions_are_there_under_the_packages_name(layouts: dict[str, Path]) -> None:
    assert lightning_zeroladder.inspect is inspect
    assert lightning_zeroladder.export is export
    assert lightning_zeroladder.inspect(layouts["stage 1"], full=False).stage == 1
