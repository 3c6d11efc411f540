from __future__ import annotations

import errno
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from trees import map_tensors

from lightning_zeroladder.checkpoint.archive import Archive, Record, Span, read_bytes
from lightning_zeroladder.checkpoint.dtypes import ITEMSIZE
from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.pickles import Opaque, Size, Storage, TensorRef, global_name, is_global
from lightning_zeroladder.checkpoint.reader import Reader
from lightning_zeroladder.checkpoint.trust import read_tensor


def saved(tmp_path: Path, value: object, name: str = "x.pt") -> Archive:
    torch.save(value, tmp_path / name)
    return Archive(tmp_path / name)


def loaded(archive: Archive) -> object:
    """What the archive holds, with tensors read."""
    with Reader() as reader:
        return map_tensors(archive.tree, lambda ref: read_tensor(ref, reader))


def random_bits(dtype: str, *shape: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (numel * ITEMSIZE[dtype],), dtype=torch.uint8, generator=torch.manual_seed(3))
    if dtype == "bool":
        raw %= 2
    return raw.view(getattr(torch, dtype)).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bytes(a.contiguous().reshape(-1).view(torch.uint8).numpy()) == bytes(
        b.contiguous().reshape(-1).view(torch.uint8).numpy()
    )


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_elements_of_every_type_come_back_bit_for_bit(tmp_path, dtype):
    tensor = random_bits(dtype, 5, 7)
    archive = saved(tmp_path, tensor)
    assert archive.tree.dtype == dtype
    assert archive.tree.shape == (5, 7)
    assert same_bits(loaded(archive), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0),
        torch.empty(0, 3)[:, 1:],
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(24).view(2, 3, 4)[:, 1:, ::2],
        torch.arange(3.0).expand(4, 3),
        torch.arange(10.0)[4:7],
        torch.arange(10.0)[::3],
        torch.arange(5.0).view(1, 5).as_strided((1, 5), (99, 1)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} by {tensor.stride()}",
)
def test_shapes_and_strides(tmp_path, tensor):
    archive = saved(tmp_path, tensor)
    assert archive.tree.contiguous == tensor.is_contiguous()
    assert archive.tree.numel == tensor.numel()
    assert same_bits(loaded(archive), tensor)


def test_views_of_one_storage_stay_views_of_one_storage(tmp_path):
    whole = torch.arange(20, dtype=torch.int16)
    tree = saved(tmp_path, {"whole": whole, "part": whole[5:9], "square": whole.view(4, 5)}).tree
    assert {ref.storage for ref in tree.values()} == {Storage("0", "int16", 20)}
    assert [ref.offset for ref in tree.values()] == [0, 5, 0]
    assert [read_bytes(ref.source.span(ref)) for ref in tree.values()] == [
        whole.numpy().tobytes(),
        whole[5:9].numpy().tobytes(),
        whole.numpy().tobytes(),
    ]


def test_parameters_and_state_dicts_with_their_attributes(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = module.state_dict()
    read = loaded(saved(tmp_path, {"state": state, "parameter": module[0].weight}))
    assert type(read["state"]) is OrderedDict
    assert list(read["state"]) == list(state)
    assert all(same_bits(read["state"][name], state[name]) for name in state)
    assert read["state"]._metadata == state._metadata
    assert same_bits(read["parameter"], module[0].weight.detach())


def test_plain_values(tmp_path):
    values = {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, -(2**200), 2**5000],
        "floats": [0.0, -1.5, 1e-310, float("inf")],
        "text": ["", "ä\0\ud800", "x" * 300],
        "bytes": [b"", b"\0\xff", bytearray(), bytearray(b"\0\xff")],
        "sets": [set(), {1, 2}, frozenset(), frozenset({"a"})],
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "complex": 1 - 2j,
        7: {("k", 1): OrderedDict(b=1, a=2)},
    }
    read = saved(tmp_path, values).tree
    assert read == values
    assert [type(item) for item in read["bytes"]] == [bytes, bytes, bytearray, bytearray]
    assert [type(item) for item in read["sets"]] == [set, set, frozenset, frozenset]
    assert list(read[7]["k", 1]) == ["b", "a"]


def test_what_belongs_to_torch_is_told_apart(tmp_path):
    read = saved(tmp_path, [torch.Size([2, 3]), (2, 3), torch.float32, torch.device("cpu"), range(3)]).tree
    assert [type(item) for item in read[:2]] == [Size, tuple]
    assert is_global(read[2])
    assert global_name(read[2]) == "torch.float32"
    assert [(global_name(item), item.args) for item in read[3:]] == [
        ("torch.device", ("cpu",)),
        ("builtins.range", (0, 3, 1)),
    ]


def test_objects_that_refer_to_each_other_in_a_circle_are_read(tmp_path):
    circle: list[object] = [torch.ones(2)]
    circle.append({"back": circle})
    read = saved(tmp_path, {"circle": circle, "again": circle}).tree
    assert read["circle"][1]["back"] is read["circle"]
    assert read["again"] is read["circle"]
    assert read["circle"][0].source is not None


def test_records_lie_where_the_zip_format_says(tmp_path):
    tensors = [torch.arange(1000.0), torch.arange(3)]
    archive = saved(tmp_path, tensors)
    with zipfile.ZipFile(archive.path) as peer:
        assert {f"x/{name}" for name in archive.records} == set(peer.namelist())
        for name, record in archive.records.items():
            assert read_bytes(Span(record, 0, record.nbytes)) == peer.read(f"x/{name}")
            assert record.crc == peer.getinfo(f"x/{name}").CRC
    assert archive.nbytes == archive.path.stat().st_size


def test_a_span_is_part_of_a_flattened_tensor(tmp_path):
    tensor = torch.arange(100, dtype=torch.int32)[10:70].view(6, 10)
    archive = saved(tmp_path, tensor)
    span = archive.span(archive.tree, 7, 20)
    assert (span.start, span.nbytes) == (4 * 17, 4 * 20)
    assert read_bytes(span) == tensor.reshape(-1)[7:27].numpy().tobytes()
    assert archive.span(archive.tree, 58).nbytes == 4 * 2


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (0, 61), (60, 1), (5, -1), (61, 0)])
def test_a_span_outside_of_its_tensor_is_refused(tmp_path, start, numel):
    archive = saved(tmp_path, torch.arange(100)[10:70])
    with pytest.raises(BadCheckpoint, match=r"x\.pt .*of a tensor of 60 elements at 10 of 100 were asked for"):
        archive.span(archive.tree, start, numel)


def test_a_span_of_a_scattered_tensor_is_refused(tmp_path):
    archive = saved(tmp_path, torch.arange(6).view(2, 3).t())
    with pytest.raises(BadCheckpoint, match=r"shape \(3, 2\) lies scattered in its storage \(strides \(1, 3\)\)"):
        archive.span(archive.tree)


def test_a_span_needs_its_record(tmp_path):
    archive = saved(tmp_path, torch.arange(6))
    record = archive.records["data/0"]
    archive.records["data/0"] = Record(record.path, record.name, record.start, 47, record.crc)
    with pytest.raises(BadCheckpoint, match="should hold 48 bytes, it is 47 bytes"):
        archive.span(archive.tree)
    del archive.records["data/0"]
    with pytest.raises(BadCheckpoint, match="should hold 48 bytes, it is missing"):
        archive.span(archive.tree)


def test_the_fingerprint_tells_contents_apart_without_reading_them(tmp_path):
    a = saved(tmp_path, torch.arange(100.0), "a.pt").fingerprint()
    (tmp_path / "b").mkdir()
    same = Archive((tmp_path / "a.pt").rename(tmp_path / "b" / "a.pt")).fingerprint()
    changed = torch.arange(100.0)
    changed[50] = 50.5
    assert same == a
    assert saved(tmp_path, changed, "a.pt").fingerprint() != a
    assert a.startswith("zip-crc32:")


def repacked(tmp_path: Path, change: dict[str, bytes | None], compression: int = zipfile.ZIP_STORED) -> Path:
    """An archive with some records replaced or, for None, left out."""
    torch.save(torch.arange(4), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as source, zipfile.ZipFile(tmp_path / "y.pt", "w", compression) as target:
        content: dict[str, bytes | None] = {name: source.read(name) for name in source.namelist()}
        for name, data in {**content, **change}.items():
            if data is not None:
                target.writestr(name, data)
    return tmp_path / "y.pt"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x/data.pkl": None}, r"it has no record 'data\.pkl'"),
        ({"y/data.pkl": b"N."}, r"it has several records 'data\.pkl'"),
        ({"x/byteorder": b"big"}, "big-endian"),
        ({"x/byteorder": b"little", "x/data/0": None}, None),
    ],
)
def test_records_that_do_not_fit(tmp_path, change, words):
    path = repacked(tmp_path, change)
    if words is None:
        assert loaded_error(path).endswith("it is missing. Use another checkpoint or a good copy of this file.")
        return
    with pytest.raises(BadCheckpoint, match=words) as caught:
        Archive(path)
    assert str(path) in str(caught.value)


def loaded_error(path: Path) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        loaded(Archive(path))
    return str(caught.value)


def test_a_compressed_archive_is_refused(tmp_path):
    path = repacked(tmp_path, {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(BadCheckpoint, match="is compressed"):
        Archive(path)


@pytest.mark.parametrize("content", [b"x", b"PK\5\6", b"\x80\x02N.", bytes(1000)])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=rf"x\.pt \({len(content)} bytes\) is cut off, damaged, or not written"):
        Archive(tmp_path / "x.pt")


def test_an_empty_file_and_one_that_is_missing(tmp_path):
    (tmp_path / "x.pt").touch()
    with pytest.raises(BadCheckpoint, match=r"x\.pt is empty \(0 bytes\)"):
        Archive(tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError, match=r"y\.pt"):
        Archive(tmp_path / "y.pt")


def test_the_old_format_of_torch_save_is_refused(tmp_path):
    torch.save(torch.ones(3), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(BadCheckpoint, match=r"not written by torch\.save"):
        Archive(tmp_path / "x.pt")


def test_reading_says_which_file_fails(tmp_path):
    with pytest.raises(OSError, match=str(tmp_path)) as caught:
        read_bytes(Span(Record(tmp_path, "data/0", 0, 4, 0), 0, 4))
    assert caught.value.errno == errno.EISDIR
    (tmp_path / "x").write_bytes(b"abc")
    with pytest.raises(BadCheckpoint, match=rf"{tmp_path / 'x'} ends within its record 'data/0'"):
        read_bytes(Span(Record(tmp_path / "x", "data/0", 0, 4, 0), 0, 4))


def test_equal_descriptions_are_seen_and_damaged_ones_are_not_equal(tmp_path):
    first, second = (saved(tmp_path, {"a": torch.full((3,), value)}, f"{value}.pt") for value in (1.0, 2.0))
    assert first.pickle == second.pickle
    assert loaded(second)["a"].tolist() == [2.0] * 3
    path = tmp_path / "2.0.pt"
    data = bytearray(path.read_bytes())
    data[second.records["data.pkl"].start + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"2\.0\.pt .*checksum of its record 'data\.pkl'"):
        _ = Archive(path).pickle


def test_map_tensors_reaches_every_corner():
    ref = TensorRef(Storage("0", "int8", 1), 0, (1,), (1,))
    made = Opaque(ref)
    made.state, made.content, made.pairs = {"s": ref}, [ref], [("k", ref)]
    ordered = OrderedDict(a=ref)
    ordered.extra = (ref, [ref])
    mapped = map_tensors({"made": made, "ordered": ordered, "shape": Size((1, 2))}, lambda _: "here")
    assert (made.args, made.state, made.content, made.pairs) == (("here",), {"s": "here"}, ["here"], [("k", "here")])
    assert mapped["ordered"] == {"a": "here"}
    assert ordered.extra == ("here", ["here"])
    assert type(mapped["shape"]) is Size
