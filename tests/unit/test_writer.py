from __future__ import annotations

import errno
import io
import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import map_tensors

from lightning_zeroladder.checkpoint.archive import Archive, read_bytes
from lightning_zeroladder.checkpoint.dtypes import ITEMSIZE
from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.pickles import Size, TensorRef
from lightning_zeroladder.checkpoint.reader import Reader, verify
from lightning_zeroladder.checkpoint.trust import read_tensor
from lightning_zeroladder.checkpoint.writer import NewTensor, write_archive, zeros


def new(tensor: torch.Tensor, pieces: int = 3) -> NewTensor:
    """A tensor to be written, in blocks of uneven size."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    step = max(1, -(-len(data) // pieces))
    blocks = [data[at : at + step] for at in range(0, len(data), step)]
    return NewTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), blocks)


def write(path: Path, tree: object) -> Path:
    with Reader() as reader:
        assert write_archive(path, tree, reader) == path.stat().st_size
        verify(reader.account, reader)
    return path


def test_torch_and_zipfile_accept_an_archive_of_every_type(tmp_path):
    torch.manual_seed(0)
    tensors = OrderedDict(
        (dtype, torch.randint(0, 2, (3, 5)).to(getattr(torch, dtype)).t().contiguous()) for dtype in sorted(ITEMSIZE)
    )
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 3)
    tree = {"module": OrderedDict((name, new(tensor)) for name, tensor in tensors.items()), "step": 7}
    path = write(tmp_path / "x.pt", tree)
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert file.namelist()[:2] == ["archive/data.pkl", "archive/byteorder"]
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert list(loaded["module"]) == list(tensors)
        for name, tensor in tensors.items():
            assert loaded["module"][name].dtype == tensor.dtype
            assert torch.equal(loaded["module"][name], tensor)
        assert loaded["step"] == 7


def test_records_are_aligned_so_that_they_can_be_mapped(tmp_path):
    sizes = [1, 63, 64, 65, 0, 1000]
    path = write(tmp_path / "x.pt", [new(torch.zeros(size, dtype=torch.uint8)) for size in sizes])
    archive = Archive(path)
    assert all(record.start % 64 == 0 for record in archive.records.values())
    assert [archive.records[f"data/{index}"].nbytes for index in range(len(sizes))] == sizes


def test_an_archive_is_the_same_whenever_and_wherever_it_is_written(tmp_path):
    (tmp_path / "b").mkdir()
    tree = {"a": [1, {"b": None}], "t": torch.arange(9.0)}
    first = write(tmp_path / "x.pt", {**tree, "t": new(tree["t"], 2)})
    second = write(tmp_path / "b" / "y.pt", {**tree, "t": new(tree["t"], 7)})
    assert first.read_bytes() == second.read_bytes()


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=9)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.tuples(st.sampled_from(sorted(ITEMSIZE)), SHAPES, st.integers(0, 9)).map(
    lambda drawn: (
        torch.arange(drawn[2], drawn[2] + torch.Size(drawn[1]).numel())
        .view(drawn[1])
        .to(getattr(torch, drawn[0]))
        .clone()
    )
)
TREES = st.recursive(
    LEAVES | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(st.integers(), inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


def mapped(tree: Any, change: Any) -> Any:
    if isinstance(tree, dict):
        return type(tree)((key, mapped(value, change)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(value, change) for value in tree)
    return change(tree)


def comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.tolist()
    return type(value).__name__, value


@settings(deadline=None, max_examples=60)
@given(TREES)
def test_tree_to_archive_to_tree(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("trees")
    expected = mapped(tree, comparable)
    write(folder / "a.pt", mapped(tree, lambda value: new(value) if isinstance(value, torch.Tensor) else value))
    write(folder / "b.pt", Archive(folder / "a.pt").tree)
    torch.save(tree, folder / "peer.pt")
    write(folder / "c.pt", Archive(folder / "peer.pt").tree)
    for name in ("a.pt", "b.pt", "c.pt"):
        with Reader() as reader:
            read = map_tensors(Archive(folder / name).tree, lambda ref: read_tensor(ref, reader))
            verify(reader.account, reader)
        assert mapped(read, comparable) == expected
        assert mapped(torch.load(folder / name, weights_only=False), comparable) == expected


def test_tensors_that_share_memory_share_it_in_a_copy(tmp_path):
    whole = torch.arange(600.0)
    tied = {"a": whole, "b": whole, "part": whole[10:20], "t": whole.view(20, 30).t(), "again": whole.view(20, 30).t()}
    torch.save(tied, tmp_path / "a.pt")
    loaded = torch.load(write(tmp_path / "b.pt", Archive(tmp_path / "a.pt").tree), weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() == loaded["t"].data_ptr() == loaded["again"].data_ptr()
    for name, tensor in tied.items():
        assert torch.equal(loaded[name], tensor)
    assert loaded["t"].stride() == (1, 30)
    assert len(loaded["part"].untyped_storage()) == 40  # a part does not bring the whole along


def test_a_part_of_a_large_storage_is_copied_alone(tmp_path):
    torch.save(torch.zeros(1_000_000)[5:10], tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size > 4_000_000
    copy = write(tmp_path / "b.pt", Archive(tmp_path / "a.pt").tree)
    assert copy.stat().st_size < 2_000
    assert torch.equal(torch.load(copy, weights_only=True), torch.zeros(5))


def test_a_new_tensor_under_two_names_is_written_once(tmp_path):
    tensor = new(torch.arange(100.0))
    tensor = NewTensor(tensor.dtype, tensor.shape, iter(list(tensor.blocks)))  # can be asked for once only
    loaded = torch.load(write(tmp_path / "x.pt", {"a": tensor, "tied": tensor}), weights_only=True)
    assert loaded["a"].data_ptr() == loaded["tied"].data_ptr()
    assert torch.equal(loaded["tied"], torch.arange(100.0))


def test_copying_is_accounted_for_and_verified(tmp_path):
    torch.save({"a": torch.arange(100.0), "b": torch.arange(50)}, tmp_path / "a.pt")
    archive = Archive(tmp_path / "a.pt")
    with Reader() as reader:
        write_archive(tmp_path / "b.pt", archive.tree, reader)
        assert reader.nbytes == 800
        assert {record.name for record in reader.account.runs} == {"data/0", "data/1"}
    with (tmp_path / "a.pt").open("r+b") as file:
        file.seek(archive.records["data/1"].start + 399)
        file.write(b"\xff")
    with Reader() as reader:
        write_archive(tmp_path / "c.pt", archive.tree, reader)
        with pytest.raises(BadCheckpoint, match=r"a\.pt: the bytes of its record 'data/1'"):
            verify(reader.account, reader)


@pytest.mark.parametrize("sizes", [[3], [3, 2], [], [4, 1]])
def test_bytes_that_are_too_few_or_too_many_are_a_fault_of_ours(tmp_path, sizes):
    tensor = NewTensor("int8", (4,), [bytes(size) for size in sizes])
    with Reader() as reader, pytest.raises(RuntimeError, match=rf"{sum(sizes)} bytes came, 4 were announced"):
        write_archive(tmp_path / "x.pt", {"t": tensor}, reader)


def test_nothing_is_written_where_a_value_has_no_place(tmp_path):
    with Reader() as reader, pytest.raises(TypeError, match="object has no place in a checkpoint"):
        write_archive(tmp_path / "x.pt", {"t": object()}, reader)
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_says_which_file(tmp_path):
    (tmp_path / "x.pt").symlink_to("/dev/full")
    with Reader() as reader, pytest.raises(OSError, match=r"x\.pt") as caught:
        write_archive(tmp_path / "x.pt", {"t": new(torch.zeros(9))}, reader)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("nbytes", [0, 1, 65535, 65536, 65537, 200_000])
def test_zeros(nbytes):
    assert b"".join(zeros(nbytes)) == bytes(nbytes)


# Beyond 4 GiB, without writing it: blocks of zeros become holes in the file ---------------------------------------

_BLOCK = bytes(64 << 20)


class _Sparse(io.FileIO):
    """A file in which large blocks are skipped over instead of written. Only ever given zeros as large blocks."""

    def write(self, data: Any) -> int:
        if len(data) < len(_BLOCK):
            return super().write(data)
        self.seek(len(data), io.SEEK_CUR)
        return len(data)


class _SparsePath(type(Path())):  # type: ignore[misc]
    def open(self, mode: str, buffering: int) -> Any:
        assert buffering == 0
        return _Sparse(str(self), mode)


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """An archive with a tensor of 4 GiB and one more block, and a small one behind it."""
    path = tmp_path_factory.mktemp("huge") / "x.pt"
    count = (4 << 30) // len(_BLOCK) + 1
    large = NewTensor("uint8", (count, len(_BLOCK)), (_BLOCK for _ in range(count)))
    tree = {"large": large, "small": new(torch.arange(1000))}
    with Reader() as reader:
        write_archive(_SparsePath(path), tree, reader)
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("the file system has no sparse files")
    yield path
    path.unlink()


def test_an_archive_over_4_gib_is_read_by_us(huge):
    archive = Archive(huge)
    tree = archive.tree
    assert tree["large"].numel == (4 << 30) + len(_BLOCK)
    assert archive.records["data/0"].nbytes == (4 << 30) + len(_BLOCK)
    assert archive.records["data/1"].start > 4 << 30
    assert all(record.start % 64 == 0 for record in archive.records.values())
    assert read_bytes(archive.span(tree["small"])) == torch.arange(1000).numpy().tobytes()
    assert read_bytes(archive.span(tree["large"], (4 << 30) - 2, 4)) == bytes(4)


def test_an_archive_over_4_gib_is_read_by_torch_and_zipfile(huge):
    with zipfile.ZipFile(huge) as file:
        sizes = {info.filename: (info.file_size, info.header_offset) for info in file.infolist()}
        assert file.read("archive/data/1") == torch.arange(1000).numpy().tobytes()
    assert sizes["archive/data/0"][0] == (4 << 30) + len(_BLOCK)
    assert sizes["archive/data/1"][1] > 4 << 30
    loaded = torch.load(huge, weights_only=True, mmap=True)
    assert torch.equal(loaded["small"], torch.arange(1000))
    assert loaded["large"].shape == (65, 64 << 20)
    assert loaded["large"][-1, -1] == 0


def test_a_copy_of_a_view_by_strides_keeps_shape_and_values(tmp_path):
    tensor = torch.arange(24, dtype=torch.int16).view(2, 3, 4)[:, ::2, 1:]
    torch.save(tensor, tmp_path / "a.pt")
    copy = write(tmp_path / "b.pt", Archive(tmp_path / "a.pt").tree)
    tree = Archive(copy).tree
    assert isinstance(tree, TensorRef)
    assert (tree.shape, tree.stride, tree.offset) == ((2, 2, 3), (12, 8, 1), 1)
    assert torch.equal(torch.load(copy, weights_only=True), tensor)


def test_sizes_stay_sizes(tmp_path):
    path = write(tmp_path / "x.pt", {"shape": Size((2, 3)), "seed": random.Random(1).getrandbits(300)})
    loaded = torch.load(path, weights_only=False)
    assert type(loaded["shape"]) is torch.Size
    assert loaded == {"shape": torch.Size([2, 3]), "seed": random.Random(1).getrandbits(300)}
    assert os.path.getsize(path) < 2000
