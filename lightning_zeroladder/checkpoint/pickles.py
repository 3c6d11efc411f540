"""Read a pickle as a tree of plain data without running anything it names, and write such a tree again.

A pickle is a program: it names functions and has them called. Here names stay names. Containers and tensors become
Python containers and `TensorRef`; whatever else a pickle would build becomes an `Opaque`, which remembers what was
asked for and does nothing. `trust.materialize` turns a tree into real objects where that is wanted and allowed.
"""

from __future__ import annotations

import _compat_pickle
import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from lightning_zeroladder.checkpoint.dtypes import STORAGE_OF, dtype_of_storage
from lightning_zeroladder.checkpoint.errors import BadCheckpoint

__all__ = [
    "Opaque",
    "Placed",
    "Size",
    "Storage",
    "TensorRef",
    "dump_tree",
    "global_name",
    "is_global",
    "load_tree",
    "opaque",
]


class Size(tuple):  # type: ignore[type-arg]
    """A ``torch.Size``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """Elements in one record of an archive.

    Attributes:
        key: Name of the record below ``data/``.
        dtype: Name of the element type, such as ``float32``.
        numel: Number of elements.
    """

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a pickle describes it, its elements still on disk.

    Attributes:
        storage: Where the elements are.
        offset: First element, within the storage.
        shape: Shape.
        stride: Stride in elements.
        source: The archive that holds the storage.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    source: Any = None

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return self.storage.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after the other."""
        if len(self.shape) == 1:  # nearly all that is read in pieces
            return self.stride[0] == 1 or self.shape[0] <= 1
        if not self.numel:
            return True
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True

    def storage_tensor(self) -> TensorRef:
        """Return the whole storage as a tensor of one dimension."""
        return replace(self, offset=0, shape=(self.storage.numel,), stride=(1,))


class Opaque:
    """Something a pickle wanted to be built: what was named, with which arguments, state and content."""

    name_in_pickle: ClassVar[tuple[str, str]]

    def __new__(cls, *args: Any) -> Opaque:
        """Remember the arguments; called by the unpickler for both of its ways of making an object."""
        self = super().__new__(cls)
        self.args = args
        self.called = False
        self.state = None
        self.has_state = False
        self.content = []
        self.pairs = []
        return self

    def __init__(self, *args: Any) -> None:
        """Remember that the object came from a call of the name, not from its ``__new__``."""
        self.called = True

    args: tuple[Any, ...]
    called: bool
    state: Any
    has_state: bool
    content: list[Any]
    pairs: list[tuple[Any, Any]]

    def __setstate__(self, state: Any) -> None:
        """Remember the state; the unpickler hands it over in this way."""
        self.state, self.has_state = state, True

    def __setitem__(self, key: Any, value: Any) -> None:
        """Remember a pair; a pickle fills dict-like objects in this way."""
        self.pairs.append((key, value))

    def append(self, item: Any) -> None:
        """Remember an item; a pickle fills list-like objects in this way."""
        self.content.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        """Remember several items."""
        self.content.extend(items)

    @property
    def attributes(self) -> dict[str, Any]:
        """The object's attributes where its state is a plain dict of them."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:
            state = {**(state[0] or {}), **(state[1] or {})}
        return state if isinstance(state, dict) else {}


def opaque(module: str, name: str, *args: Any, state: Any = None, called: bool = False) -> Opaque:
    """Make the tree of an object: an instance of the named class, or what calling the name returns."""
    named = type(name, (Opaque,), {"name_in_pickle": (module, name)})
    made: Opaque = named.__new__(named, *args)
    made.called = called
    if state is not None:
        made.__setstate__(state)
    return made


def is_global(value: Any) -> bool:
    """Whether a value in a tree is a bare name, such as ``torch.float32``."""
    return isinstance(value, type) and issubclass(value, Opaque)


def global_name(value: Any) -> str:
    """Return the dotted name that an `Opaque`, or a bare name, stands for."""
    return ".".join(value.name_in_pickle)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise BadCheckpoint(f"bytes are written in the encoding {encoding!r}, only latin1 occurs in pickles")
    return text.encode("latin1")


def _bytes(content: bytes | str = b"", encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes that are none; a number would ask for that many of them."""
    if not isinstance(content, bytes | str):
        raise BadCheckpoint(f"bytes are made from {type(content).__name__}, only bytes and text occur in pickles")
    return _encode(content, encoding) if isinstance(content, str) else content


def _bytearray(content: bytes | str = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(_bytes(content, encoding))


def _tensor(source: Any, storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> TensorRef:
    if not isinstance(storage, Storage):
        raise BadCheckpoint("a tensor without a plain storage")
    ref = TensorRef(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)), source)
    last = ref.offset + sum((extent - 1) * step for extent, step in zip(ref.shape, ref.stride, strict=True))
    if min(ref.offset, *ref.shape, *ref.stride, 0) < 0 or (ref.numel and last >= storage.numel):
        raise BadCheckpoint(f"a tensor of shape {ref.shape} that reaches beyond its {storage.numel} elements")
    return ref


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _tensor_with_attributes(rebuild: Any, _: Any, args: tuple[Any, ...], *state: Any) -> Any:
    """A tensor to which attributes were added, as stage 3 does to its shards; they are of no use elsewhere."""
    return rebuild(*args)


class _Callable:
    """What a pickle may call and cannot change: the opcode that sets state reaches attributes of functions as well."""

    __slots__ = ("_function", "_name")

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self._function = function
        self._name = name or function.__name__.lstrip("_")

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise BadCheckpoint(f"it sets state of {self._name}, which has none")


_HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytes"): _Callable(_bytes),
    ("builtins", "bytearray"): _Callable(_bytearray),
    ("builtins", "complex"): complex,
    ("_codecs", "encode"): _Callable(_encode),
    ("torch", "Size"): _Callable(Size),
    ("torch._utils", "_rebuild_parameter"): _Callable(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): _Callable(_tensor_with_attributes),
}
"""What stands in for the names that occur in every checkpoint; none of it touches anything but its arguments."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, source: Any) -> None:
        super().__init__(file)
        tensor = _Callable(partial(_tensor, source), "tensor")
        self._names = {**_HARMLESS, ("torch._utils", "_rebuild_tensor_v2"): tensor}
        self._written: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = self._written.get((module, name))
        if known is None:
            known = self._written[module, name] = self._find(module, name)
        return known

    def _find(self, module: str, name: str) -> Any:
        # Protocol 2, which torch uses, writes the names that Python 2 had.
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        if (module, name) not in self._names:
            self._names[module, name] = type(name, (Opaque,), {"name_in_pickle": (module, name)})
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage_type, key, _, numel = pid
        dtype = dtype_of_storage(storage_type.name_in_pickle[1]) if is_global(storage_type) else None
        if kind != "storage" or dtype is None:
            raise BadCheckpoint(f"a tensor of the unknown storage {global_name(storage_type)}")
        return Storage(str(key), dtype, int(numel))


def load_tree(data: bytes, source: Any = None) -> Any:
    """Read a pickle as plain data. Nothing that it names is imported or run.

    Args:
        data: The pickle.
        source: The archive that holds the tensors' elements.

    Raises:
        BadCheckpoint: If it is no pickle, or not of a kind that torch writes.
    """
    try:
        return _Unpickler(io.BytesIO(data), source).load()
    except BadCheckpoint:
        raise
    except Exception as error:
        raise BadCheckpoint(f"its pickle cannot be read ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a tensor of a tree went in the archive being written."""

    key: str
    dtype: str
    storage_numel: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def dump_tree(tree: Any, place: Callable[[Any], Placed | None]) -> bytes:
    """Write a tree as a protocol 2 pickle that ``torch.load`` reads.

    Args:
        tree: What `load_tree` returns, or the same made by hand.
        place: Called for every value that is none of the plain kinds; returns where it went as a tensor, or None if
            it is no tensor.

    Raises:
        TypeError: For a value that has no place in a checkpoint.
    """
    out = io.BytesIO()
    out.write(b"\x80\x02")
    _Writer(out.write, place).value(tree)
    out.write(b".")
    return out.getvalue()


class _Writer:
    """Emits opcodes. Objects that can change are written once: a user's own may refer to each other in a circle."""

    def __init__(self, emit: Callable[[bytes], Any], place: Callable[[Any], Placed | None]) -> None:
        self._emit = emit
        self._place = place
        self._written: dict[int, tuple[int, Any]] = {}

    def value(self, value: Any) -> None:
        kind = type(value)
        if id(value) in self._written:
            self._emit(b"j" + struct.pack("<I", self._written[id(value)][0]))
        elif value is None:
            self._emit(b"N")
        elif kind is bool:
            self._emit(b"\x88" if value else b"\x89")
        elif kind is int:
            self._int(value)
        elif kind is float:
            self._emit(b"G" + struct.pack(">d", value))
        elif kind is str:
            data = value.encode("utf-8", "surrogatepass")
            self._emit(b"X" + struct.pack("<I", len(data)) + data)
        elif kind is complex:
            self._global("builtins", "complex")
            self._sequence((value.real, value.imag), b"tR")
        elif kind in (bytes, bytearray):
            self._call("_codecs" if kind is bytes else "builtins", "encode" if kind is bytes else "bytearray", value)
        elif kind is tuple:
            self._sequence(value, b"t")
        elif kind is Size:
            self._global("torch", "Size")
            self._sequence((tuple(value),), b"tR")
        elif kind is list:
            self._emit(b"]")
            self._remember(value)
            self._sequence(value, b"e")
        elif kind is dict:
            self._emit(b"}")
            self._remember(value)
            self._pairs(value.items())
        elif kind is OrderedDict:
            self._ordered(value)
        elif kind in (set, frozenset):
            self._global("builtins", kind.__name__)
            self._sequence((list(value),), b"tR")
        elif isinstance(value, Opaque):
            self._opaque(value)
        elif is_global(value):
            self._global(*value.name_in_pickle)
        else:
            self._tensor(value)

    def _int(self, value: int) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self._emit(b"J" + struct.pack("<i", value))
            return
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        self._emit((b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))) + data)

    def _remember(self, value: Any) -> None:
        """Note what was just begun; keeping it also keeps its id from being given to another object."""
        number = len(self._written)
        self._written[id(value)] = (number, value)
        self._emit(b"r" + struct.pack("<I", number))

    def _call(self, module: str, name: str, value: bytes | bytearray) -> None:
        self._global(module, name)
        self._sequence((value.decode("latin1"), "latin1") if name == "encode" else (bytes(value),), b"tR")

    def _global(self, module: str, name: str) -> None:
        self._emit(f"c{module}\n{name}\n".encode())

    def _sequence(self, items: Iterable[Any], end: bytes) -> None:
        self._emit(b"(")
        for item in items:
            self.value(item)
        self._emit(end)

    def _pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._sequence((part for pair in pairs for part in pair), b"u")

    def _ordered(self, value: OrderedDict[Any, Any]) -> None:
        self._global("collections", "OrderedDict")
        self._emit(b")R")
        self._remember(value)
        self._pairs(value.items())
        if vars(value):
            self.value(vars(value))
            self._emit(b"b")

    def _opaque(self, value: Opaque) -> None:
        self._global(*value.name_in_pickle)
        self._sequence(value.args, b"tR" if value.called else b"t\x81")
        self._remember(value)
        if value.content:
            self._sequence(value.content, b"e")
        if value.pairs:
            self._pairs(value.pairs)
        if value.has_state:
            self.value(value.state)
            self._emit(b"b")

    def _tensor(self, value: Any) -> None:
        placed = self._place(value)
        if placed is None:
            raise TypeError(f"{type(value).__name__} has no place in a checkpoint")
        self._global("torch._utils", "_rebuild_tensor_v2")
        self._emit(b"((")
        self.value("storage")
        self._global("torch", STORAGE_OF[placed.dtype])
        for part in (placed.key, "cpu", placed.storage_numel):
            self.value(part)
        self._emit(b"tQ")
        for argument in (placed.offset, placed.shape, placed.stride, False):
            self.value(argument)
        self._global("collections", "OrderedDict")  # its backward hooks: none
        self._emit(b")RtR")
