from __future__ import annotations

import argparse
import collections
import functools
import importlib
import operator
import os
import pickle
import subprocess
import zipfile
from collections import OrderedDict, defaultdict, deque
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zeroladder.checkpoint.archive import Archive
from lightning_zeroladder.checkpoint.errors import BadCheckpoint, UntrustedCheckpoint
from lightning_zeroladder.checkpoint.pickles import (
    Opaque,
    Placed,
    Size,
    dump_tree,
    global_name,
    is_global,
    load_tree,
    opaque,
)
from lightning_zeroladder.checkpoint.reader import Reader
from lightning_zeroladder.checkpoint.trust import materialize
from lightning_zeroladder.checkpoint.writer import write_archive


def dump(tree: object) -> bytes:
    return dump_tree(tree, lambda _: None)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
)
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
        | st.lists(st.integers(0, 9), max_size=3).map(Size)
    ),
    max_leaves=20,
)


def typed(tree: Any) -> Any:
    """A tree with the type of each value beside it, since True == 1 == 1.0 and OrderedDict == dict."""
    kind = type(tree).__name__
    if isinstance(tree, dict):
        return kind, [(typed(key), typed(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return kind, [typed(item) for item in tree]
    if isinstance(tree, set | frozenset):
        return kind, sorted(map(repr, map(typed, tree)))
    return kind, repr(tree)  # repr tells -0.0 from 0.0


@settings(deadline=None, max_examples=200)
@given(TREES)
def test_a_tree_survives_being_written_and_read(tree):
    assert typed(load_tree(dump(tree))) == typed(tree)


@settings(deadline=None, max_examples=100)
@given(TREES.filter(lambda tree: "Size" not in repr(typed(tree))))
def test_what_is_written_is_a_pickle_for_everyone_and_what_others_write_is_read(tree):
    assert typed(pickle.loads(dump(tree))) == typed(tree)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert typed(load_tree(pickle.dumps(tree, protocol))) == typed(tree)


def test_numbers_that_equal_nothing_or_are_very_long():
    assert repr(load_tree(dump([float("nan"), -0.0, float("-inf")]))) == "[nan, -0.0, -inf]"
    for number in (2**2039 - 1, 2**2039, -(2**2039), 2**2040, 3**5000, -(3**5000)):
        assert load_tree(dump(number)) == pickle.loads(dump(number)) == number


def test_shared_and_circular_objects_stay_shared_and_circular():
    shared: dict[str, Any] = {"list": [1]}
    shared["self"] = shared
    ordered = OrderedDict(a=shared)
    ordered.extra = [ordered, shared]
    tree = load_tree(dump([shared, ordered, ordered, (shared["list"],)]))
    assert tree[0]["self"] is tree[0]
    assert tree[1] is tree[2]
    assert tree[1]["a"] is tree[0]
    assert tree[1].extra[0] is tree[1]
    assert tree[3][0] is tree[0]["list"]


def test_a_circle_through_an_object_of_a_class():
    node = SimpleNamespace(name="parent")
    node.child = SimpleNamespace(parent=node)
    tree = load_tree(dump(load_tree(pickle.dumps(node, 2))))
    assert global_name(tree) == "types.SimpleNamespace"
    assert tree.attributes["child"].attributes["parent"] is tree
    built = materialize(tree, "here", trusted=True)
    assert built.child.parent is built
    assert type(built) is SimpleNamespace


def test_what_a_tree_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="object has no place in a checkpoint"):
        dump({"a": [object()]})


# Objects of classes ---------------------------------------------------------------------------------------------


class Plain:
    """Restored by its __new__ and a dict of attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    """Restored by a pair of dicts."""

    __slots__ = ("a", "b")

    def __init__(self, a: int, b: int) -> None:
        self.a, self.b = a, b

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and (other.a, other.b) == (self.a, self.b)

    __hash__ = None  # type: ignore[assignment]


class Rebuilt(list):  # type: ignore[type-arg]
    """Restored by a call, with items and a state of its own kind."""

    def __reduce__(self) -> Any:
        return Rebuilt, (tuple(self[:2]),), 5, iter(self[2:])

    def __setstate__(self, state: int) -> None:
        self.state = state


class Attributes(dict):  # type: ignore[type-arg]
    """A dict with attributes."""


class Twin(collections.UserDict):  # type: ignore[type-arg]
    """Nothing special."""


def attributes() -> Attributes:
    made = Attributes(a=[1], b=None)
    made.extra = {"c": 2}
    return made


OBJECTS = [
    Plain([1, {"a": (2,)}]),
    Slotted(1, 2),
    Rebuilt([1, 2, 3, 4]),
    attributes(),
    Twin(a=1),
    defaultdict(list, a=[1]),
    deque([1, 2], maxlen=3),
    datetime(2026, 12, 1, 10, 30),
    timedelta(days=1, seconds=2),
    PurePosixPath("/a/b"),
    argparse.Namespace(lr=0.1, layers=[1, 2]),
    collections.Counter("abca"),
    range(1, 9, 2),
    slice(1, None, 2),
    torch.float32,
    torch.device("cpu"),
    torch.Size([1, 2]),
]


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_objects_come_back_after_any_number_of_copies(tmp_path, value):
    torch.save({"value": value}, tmp_path / "a.pt")
    with Reader() as reader:
        write_archive(tmp_path / "b.pt", Archive(tmp_path / "a.pt").tree, reader)
        write_archive(tmp_path / "c.pt", Archive(tmp_path / "b.pt").tree, reader)
    assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "c.pt").read_bytes()
    for name in ("a.pt", "c.pt"):
        built = materialize(Archive(tmp_path / name).tree, "here", trusted=True)["value"]
        assert type(built) is type(value)
        assert built == value
        if hasattr(value, "__dict__"):
            assert {key: item for key, item in vars(built).items() if key != "state"} == vars(value)
        peer = torch.load(tmp_path / name, weights_only=False)["value"]
        assert peer == value
        if isinstance(value, Rebuilt):
            assert built.state == peer.state == 5


def test_nothing_is_made_while_reading():
    made = load_tree(pickle.dumps(Plain(3), 2))
    assert isinstance(made, Opaque)
    assert (global_name(made), made.called, made.args) == (f"{__name__}.Plain", False, ())
    assert made.attributes == {"value": 3}
    assert load_tree(pickle.dumps(Slotted(1, 2), 2)).attributes == {"a": 1, "b": 2}
    rebuilt = load_tree(pickle.dumps(Rebuilt([1, 2, 3, 4]), 2))
    assert (rebuilt.called, rebuilt.args, rebuilt.content, rebuilt.state) == (True, ((1, 2),), [3, 4], 5)
    assert rebuilt.attributes == {}


def test_objects_can_be_made_by_hand():
    made = opaque("types", "SimpleNamespace", state={"a": 1}, called=True)
    assert pickle.loads(dump(made)) == SimpleNamespace(a=1)
    assert pickle.loads(dump(opaque("datetime", "timedelta", 2, called=True))) == timedelta(2)
    assert is_global(type(made))
    assert not is_global(made)
    assert pickle.loads(dump(type(made))) is SimpleNamespace


def test_python_2_names_of_protocol_2_are_understood():
    for value in (range(2), int, str):
        assert materialize(load_tree(pickle.dumps(value, 2)), "here") == value
    assert global_name(load_tree(b"c__builtin__\nxrange\n.")) == "builtins.range"


# Pickles that mean harm -----------------------------------------------------------------------------------------


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def attacks(marker: Path) -> dict[str, tuple[Any, Any]]:
    """What would make a file: what is called first, and the call."""
    touch = f"open({str(marker)!r}, 'w').close()"
    command = ["touch", str(marker)]
    return {
        "system": (os.system, Call(os.system, f"touch {marker}")),
        "eval": (eval, Call(eval, touch)),
        "exec": (exec, Call(exec, touch)),
        "eval of compile": (eval, Call(eval, Call(compile, touch, "x", "exec"))),
        "open": (open, Call(open, str(marker), "w")),
        "os.open": (os.open, Call(os.open, str(marker), os.O_CREAT | os.O_WRONLY)),
        "getattr": (getattr, Call(getattr, marker, "touch")),
        "import": (__import__, Call(__import__, "this")),
        "import_module": (importlib.import_module, Call(importlib.import_module, "this")),
        "list of map": (map, Call(list, Call(map, exec, [touch]))),
        "Popen": (subprocess.Popen, Call(subprocess.Popen, command)),
        "check_output": (subprocess.check_output, Call(subprocess.check_output, command)),
        "partial": (functools.partial, Call(functools.partial, eval, touch)),
        "methodcaller": (operator.methodcaller, Call(operator.methodcaller, "touch")),
        "torch.load": (torch.load, Call(torch.load, str(marker), None, None)),
        "torch.save": (torch.save, Call(torch.save, 1, str(marker))),
        "torch.hub": (torch.hub.load, Call(torch.hub.load, "a/b", "c")),
        "pickle.loads": (pickle.loads, Call(pickle.loads, pickle.dumps(Call(eval, touch)))),
    }


NAMES = sorted(attacks(Path("marker")))

PLACES: dict[str, Any] = {
    "alone": lambda attack: attack,
    "in a list": lambda attack: {"module": OrderedDict(), "client": [1, (attack,)]},
    "as a key": lambda attack: {"d": Call(dict, [(Call(tuple, [attack]), 1)])},
    "as an argument of what is harmless": lambda attack: defaultdict(None, {"x": Call(timedelta, attack)}),
    "as an item of an object": lambda attack: Items(attack),
    "as the state of an object": lambda attack: argparse.Namespace(value=attack),
    "as an attribute of a dict": lambda attack: with_attribute(attack),
}


class Items(list):  # type: ignore[type-arg]
    """A deque that holds something."""

    def __init__(self, item: Any) -> None:
        super().__init__([item])

    def __reduce__(self) -> Any:
        return deque, (), None, iter(list(self))


def with_attribute(value: Any) -> Any:
    made: OrderedDict[str, Any] = OrderedDict(a=1)
    made.extra = value
    return made


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_anything_is_named_and_not_made(tmp_path, monkeypatch, name, place):
    function, attack = attacks(tmp_path / "marker")[name]
    torch.save(PLACES[place](attack), tmp_path / "x.pt")
    ran: list[Any] = []
    for module, called in ((os, "system"), (subprocess, "Popen"), (subprocess, "check_output"), (torch.hub, "load")):
        monkeypatch.setattr(module, called, lambda *args, **_: ran.append(args))
    archive = Archive(tmp_path / "x.pt")
    tree = archive.tree
    with pytest.raises(UntrustedCheckpoint) as caught:
        materialize(tree, f"{archive.path}, entry 'client'")
    monkeypatch.undo()
    expected = global_name(load_tree(pickle.dumps(function, 2)))
    assert f"{archive.path}, entry 'client' wants {expected} to be called or made" in str(caught.value)
    assert "trusted_checkpoints=True" in str(caught.value)
    assert not ran
    assert not (tmp_path / "marker").exists()


def test_the_same_file_is_what_it_seems_to_be_for_pickle(tmp_path):
    """That the attacks are real: torch.load without restrictions runs one of them."""
    torch.save(attacks(tmp_path / "marker")["eval"][1], tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "marker").exists()


def test_a_name_that_is_not_called_is_refused_as_well(tmp_path):
    torch.save(defaultdict(eval), tmp_path / "x.pt")
    with pytest.raises(UntrustedCheckpoint, match=r"wants builtins\.eval to be called or made"):
        materialize(Archive(tmp_path / "x.pt").tree, "here")


def test_a_users_own_class_opens_when_it_is_trusted(tmp_path):
    torch.save({"hyper_parameters": Plain(torch.arange(3)), "epoch": 2}, tmp_path / "x.pt")
    tree = Archive(tmp_path / "x.pt").tree
    with pytest.raises(UntrustedCheckpoint, match=rf"x\.pt wants {__name__}\.Plain to be called or made"):
        materialize(tree, str(tmp_path / "x.pt"))
    built = materialize(tree, str(tmp_path / "x.pt"), trusted=True)
    assert built["epoch"] == 2
    assert type(built["hyper_parameters"]) is Plain
    assert built["hyper_parameters"].value.tolist() == [0, 1, 2]


OPCODES = {
    "an old-style instance": b"(S'touch x'\nios\nsystem\n.",
    "an object built on the stack": b"(cos\nsystem\nS'touch x'\no.",
    "a name from the stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x07touch x\x85R.",
    "an object with keywords": b"\x80\x04\x8c\x02os\x8c\x06system\x93)}\x92.",
}


@pytest.mark.parametrize("data", OPCODES.values(), ids=OPCODES)
def test_every_way_to_call_only_notes_the_call(monkeypatch, data):
    ran: list[Any] = []
    monkeypatch.setattr(os, "system", ran.append)
    tree = load_tree(data)
    assert global_name(tree) == "os.system"
    with pytest.raises(UntrustedCheckpoint, match=r"os\.system"):
        materialize(tree, "here")
    assert not ran


@pytest.mark.parametrize("name", ["torch\nSize", "torch._utils\n_rebuild_tensor_v2", "_codecs\nencode", "os\nsystem"])
@pytest.mark.parametrize("state", [b"}X\x01\0\0\0aK\x01s", b"N}X\x0c\0\0\0__defaults__K\x01s\x86"])
def test_a_pickle_changes_nothing_in_this_process(name, state):
    with pytest.raises(BadCheckpoint):
        load_tree(b"\x80\x02c" + name.encode() + b"\n" + state + b"b.")
    assert load_tree(dump([b"x", Size((1, 2))])) == [b"x", Size((1, 2))]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x09N.",
        b"hello",
        b"\x82\x01.",
        b"(lp0\n",
        b"\x80\x02h\x05.",
        b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.",
        b"c_codecs\nencode\n(X\x01\0\0\0aX\x05\0\0\0rot13tR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02))\x89NtR.",
        b"X\x07\0\0\0storageQ.",
    ],
)
def test_what_is_no_pickle_of_torch(data):
    with pytest.raises(BadCheckpoint):
        load_tree(data)


def tensor_pickle(offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """A tensor in a storage of six elements."""
    placed = Placed("0", "int16", 6, offset, shape, stride)
    return dump_tree(placed, lambda value: value)


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [(-1, (2,), (1,)), (5, (2,), (1,)), (0, (2, 4), (3, 1)), (0, (-1,), (1,)), (0, (2,), (-1,)), (0, (2,), (6,))],
)
def test_a_tensor_beyond_its_storage_is_refused(offset, shape, stride):
    with pytest.raises(BadCheckpoint, match="reaches beyond its 6 elements"):
        load_tree(tensor_pickle(offset, shape, stride))


@pytest.mark.parametrize(
    ("offset", "shape", "stride"), [(0, (2, 3), (3, 1)), (5, (), ()), (6, (0,), (1,)), (0, (2,), (5,)), (1, (3,), (0,))]
)
def test_a_tensor_within_its_storage_is_read(offset, shape, stride):
    ref = load_tree(tensor_pickle(offset, shape, stride))
    assert (ref.offset, ref.shape, ref.stride, ref.storage.numel) == (offset, shape, stride, 6)


def test_a_storage_of_an_unknown_kind_is_refused():
    data = b"\x80\x02((X\x07\0\0\0storagectorch\nQInt8Storage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ."
    with pytest.raises(BadCheckpoint, match=r"unknown storage torch\.QInt8Storage"):
        load_tree(data)


def test_a_deep_nest_is_an_error_and_not_the_end_of_the_process(tmp_path):
    deep = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("x/data.pkl", deep)
    with pytest.raises(BadCheckpoint, match=r"x\.pt .*nested too deeply"):
        _ = Archive(tmp_path / "x.pt").tree


def test_a_call_of_what_a_call_returned_is_refused():
    with pytest.raises(BadCheckpoint, match="'partial' object is not callable"):
        load_tree(b"cfunctools\npartial\n)R)R.")
