"""`export`: what is in the files, and that nothing is left of an export that did not end."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import TAG, adam, add_manifest, flip_a_bit, in_every_layout, save_stage_0, values
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lightning_zeroladder.checkpoint import output, reader
from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.exporting import export, size_of

ROOT = Path(__file__).parents[2]

TRAINED = {"a.weight": values(5, 7), "a.bias": values(5), "b.weight": values(3, 5), "empty": values(0, 4)}
GROUPS = (("a.weight", "b.weight", "empty"), ("a.bias",))
FROZEN = {"f.weight": values(3, 3, dtype=torch.bfloat16)}
# In an order in which every tensor but the first would begin at an odd place.
BUFFERS = {"mask": torch.tensor([True, False, True]), "mean": values(5), "count": torch.tensor(12)}
EXTRA = {"a._extra_state": torch.tensor([1, 2], dtype=torch.uint8)}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return {**TRAINED, **FROZEN, **EXTRA, **BUFFERS}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layouts")
    module = {**TRAINED, **FROZEN, **EXTRA, "tied.weight": TRAINED["a.weight"]}
    source = save_stage_0(root / "stage 0", module, optimizer=adam(TRAINED, GROUPS), buffers=BUFFERS)
    add_manifest(source, groups=GROUPS, parameters={**TRAINED, **FROZEN})
    return in_every_layout(source, root)


@pytest.fixture
def source(layouts: dict[str, Path]) -> Path:
    return layouts["stage 2"]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


LAYOUTS = ("stage 0", "stage 1", "stage 2", "stage 3", "universal")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_file(
    layouts: dict[str, Path], weights: dict[str, Tensor], layout: str, tmp_path: Path
) -> None:
    done = export(layouts[layout], tmp_path / "w.safetensors")
    assert done.files == (tmp_path / "w.safetensors",)
    assert_same(load_file(done.files[0]), weights)
    assert (done.tensors, done.nbytes) == (len(weights), sum(tensor.nbytes for tensor in weights.values()))
    assert done.tied == {"tied.weight": "a.weight"}
    with safe_open(done.files[0], "pt") as file:
        assert json.loads(file.metadata()["tied"]) == {"tied.weight": "a.weight"}
        assert file.metadata()["format"] == "pt"
    assert names_in(tmp_path) == ["w.safetensors"]


@pytest.mark.parametrize("size", ["5GB", 60])
def test_tensors_are_aligned_and_leave_no_hole(source: Path, size: str | int, tmp_path: Path) -> None:
    widths = {"F32": 4, "BF16": 2, "I64": 8, "U8": 1, "BOOL": 1}
    done = export(source, tmp_path / "w.safetensors", max_shard_size=size)
    for path in done.files:
        if path.suffix == ".json":
            continue
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        del header["__metadata__"]
        assert length % 8 == 0
        reached = 0
        for entry in header.values():
            first, last = entry["data_offsets"]
            assert first == reached
            assert first % widths[entry["dtype"]] == 0
            reached = last
        assert reached == len(data) - 8 - length


@pytest.mark.parametrize(("dtype", "target"), [("fp64", torch.float64), ("bfloat16", torch.bfloat16)])
def test_floating_point_is_cast_and_nothing_else(
    source: Path, weights: dict[str, Tensor], dtype: str, target: torch.dtype, tmp_path: Path
) -> None:
    export(source, tmp_path / "w.safetensors", dtype=dtype)
    expected = {name: tensor.to(target) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    assert_same(load_file(tmp_path / "w.safetensors"), expected)


def test_what_half_precision_has_no_room_for_is_infinite_as_in_torch(tmp_path: Path) -> None:
    weights = {"w": torch.tensor([1e5, -7e4, 65504.0, 1e-9, float("nan"), 0.1])}
    root = save_stage_0(tmp_path / "c", weights, optimizer=adam(weights, [["w"]]))
    export(root, tmp_path / "w.safetensors", dtype="fp16")
    found, expected = load_file(tmp_path / "w.safetensors")["w"], weights["w"].half()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))
    assert found[:2].tolist() == [float("inf"), float("-inf")]


def test_buffers_that_lie_scattered_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zeroladder.checkpoint.exporting.BLOCK_BYTES", 16)
    weights = {"w": values(3)}
    buffers = {
        "transposed": values(4, 5).t(),
        "expanded": torch.tensor([[True], [False]]).expand(2, 3),
        "strided": torch.arange(20)[3::4],
        "channels last": values(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
    }
    root = save_stage_0(tmp_path / "c", weights, optimizer=adam(weights, [["w"]]), buffers=buffers)
    export(root, tmp_path / "w.safetensors")
    assert_same(load_file(tmp_path / "w.safetensors"), {**weights, **buffers})
    export(root, tmp_path / "half.safetensors", dtype="fp16")
    assert torch.equal(load_file(tmp_path / "half.safetensors")["transposed"], buffers["transposed"].half())


def test_trained_weights_come_from_their_fp32_copy(tmp_path: Path) -> None:
    masters = {name: tensor for name, tensor in TRAINED.items() if tensor.numel()}
    rounded = {name: tensor.bfloat16() for name, tensor in masters.items()}
    root = save_stage_0(
        tmp_path / "c", rounded, optimizer=adam(masters, [list(masters)]), masters=[list(masters.values())]
    )
    for name, path in in_every_layout(root, tmp_path).items():
        export(path, tmp_path / f"{name}.safetensors")
        assert_same(load_file(tmp_path / f"{name}.safetensors"), masters)


def left_out(root: Path, weights: dict[str, Tensor], frozen: dict[str, Tensor]) -> Path:
    """A checkpoint as with ``exclude_frozen_parameters``: DeepSpeed then leaves no trace of them."""
    save_stage_0(root, weights, optimizer=adam(weights, [list(weights)]))
    add_manifest(root, groups=[list(weights)], parameters={**weights, **frozen})
    return root


def test_frozen_weights_that_were_left_out_are_named(tmp_path: Path) -> None:
    one = left_out(tmp_path / "one", {"w": values(3)}, {"f": values(2)})
    with pytest.raises(BadCheckpoint, match=rf"{one / TAG} does not hold the weights of 'f': it was saved without"):
        export(one, tmp_path / "w.safetensors")
    many = left_out(tmp_path / "many", {"w": values(3)}, {f"f{number}": values(2) for number in range(7)})
    with pytest.raises(BadCheckpoint, match="weights of 'f0', 'f1', 'f2', 'f3', 'f4' and 2 more: it was saved"):
        export(many, tmp_path / "w.safetensors")
    assert names_in(tmp_path) == ["many", "one"]


def test_optimizer_state_that_cannot_be_named_is_not_needed(tmp_path: Path) -> None:
    weights = {"a": values(4, 4), "b": values(4, 4, seed=1)}
    root = save_stage_0(tmp_path / "c", weights, optimizer=adam(weights, [["b"], ["a"]]))
    export(root, tmp_path / "w.safetensors")
    assert_same(load_file(tmp_path / "w.safetensors"), weights)


# Shards ---------------------------------------------------------------------------------------------------------


def test_shards_and_their_index(source: Path, weights: dict[str, Tensor], tmp_path: Path) -> None:
    done = export(source, tmp_path / "model.safetensors", max_shard_size=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert done.files[-1] == tmp_path / "model.safetensors.index.json"
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in weights.values())}
    assert sorted({*index["weight_map"].values()}) == [path.name for path in done.files[:-1]]
    assert done.files[0].name == f"model-00001-of-{len(done.files) - 1:05d}.safetensors"
    assert_same({name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}, weights)
    for path in done.files[:-1]:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 100
    with pytest.raises(FileExistsError, match=r"model\.safetensors\.index\.json exists already"):
        export(source, tmp_path / "model.safetensors", max_shard_size=100)


@pytest.mark.parametrize(("text", "nbytes"), [("2TiB", 2 * 2**40), ("7 b", 7), (12, 12), ("0.5kb", 500)])
def test_sizes(text: str | int, nbytes: int) -> None:
    assert size_of(text) == nbytes


@pytest.mark.parametrize("text", ["0.0001KB", 0, -5, "5 PB", "1e9"])
def test_no_sizes(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"max_shard_size=.* give a size such as 5GB, 500MB or 1\.5GiB"):
        size_of(text)


# Whole or not at all --------------------------------------------------------------------------------------------

ONE_FILE, SHARDS = "5GB", 100


@pytest.mark.parametrize("size", [ONE_FILE, SHARDS])
def test_an_interrupt_leaves_nothing(source: Path, size: str | int, tmp_path: Path) -> None:
    def stop(done: int, expected: int) -> None:
        if done > expected // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "w.safetensors", max_shard_size=size, progress=stop)
    assert names_in(tmp_path) == []


def test_an_error_while_the_files_appear_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail_at_the_index(self: Path, target: Path) -> Path:
        if target.suffix == ".json":
            raise OSError(errno.EIO, "Input/output error", str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_at_the_index)
    with pytest.raises(OSError, match=r"w\.safetensors\.index\.json"):
        export(source, tmp_path / "w.safetensors", max_shard_size=SHARDS)
    assert names_in(tmp_path) == []


KILLED = """
import os, signal, sys
sys.argv[0] = "zeroladder"
from lightning_zeroladder.checkpoint.exporting import export
def die(done, expected):
    if done > expected // 2:
        os.kill(os.getpid(), signal.SIGKILL)
export(sys.argv[1], sys.argv[2], max_shard_size=int(sys.argv[3]), progress=die)
"""


def test_a_kill_leaves_hidden_files_that_the_same_command_overwrites(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    words = [sys.executable, "-c", KILLED, str(source), str(out), str(SHARDS)]
    assert subprocess.run(words, cwd=ROOT, timeout=60).returncode == -signal.SIGKILL
    left = names_in(tmp_path)
    assert left
    assert all(name.startswith(".") and name.endswith(".partial") for name in left)
    done = export(source, out, max_shard_size=SHARDS)
    assert names_in(tmp_path) == sorted(path.name for path in done.files)


def test_no_room_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(OSError, match=rf"{tmp_path}: 0\.3 kB are needed, 0\.1 kB are free"):
        export(source, tmp_path / "w.safetensors")
    assert names_in(tmp_path) == []


def test_a_disk_that_fills_up_names_the_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    @contextmanager
    def full(self: Path, *args: Any, **kwargs: Any) -> Iterator[Any]:
        def write(_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with real(self, *args, **kwargs) as file:
            yield SimpleNamespace(write=write) if self.suffix == ".partial" else file

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match=r"No space left on device: .*w\.safetensors\.partial"):
        export(source, tmp_path / "w.safetensors")
    assert names_in(tmp_path) == []


def test_damage_is_found_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    path = sorted(broken.rglob("*rank_1_*optim_states.pt"))[0]
    flip_a_bit(path)
    for size in (ONE_FILE, SHARDS):
        with pytest.raises(BadCheckpoint, match=f"{path.name}: the bytes of its record"):
            export(broken, tmp_path / "w.safetensors", max_shard_size=size)
    assert names_in(tmp_path) == ["broken"]


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": values(1 << 20)}
    root = save_stage_0(tmp_path / "c", weights, optimizer=adam(weights, [["w"]]))
    monkeypatch.setattr(reader, "BLOCK_BYTES", 1 << 14)
    tracemalloc.start()
    try:
        export(root, tmp_path / "w.safetensors", dtype="bf16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20  # a quarter of the tensor; casting holds a few copies of a block, opening some 300 kB
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], weights["w"].bfloat16())


def test_progress_counts_what_is_written(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = export(source, tmp_path / "w.safetensors", dtype="bf16", progress=lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert seen[-1] == (done.nbytes, done.nbytes)
