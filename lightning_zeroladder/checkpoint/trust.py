"""Turn what a checkpoint's pickle describes into real objects, as far as that runs no code of the file's choosing."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from typing import Any

import torch

from lightning_zeroladder.checkpoint.errors import UntrustedCheckpoint
from lightning_zeroladder.checkpoint.pickles import Opaque, Size, TensorRef, global_name, is_global
from lightning_zeroladder.checkpoint.reader import Reader, verify

__all__ = ["materialize", "read_tensor"]

_HARMLESS = frozenset(
    {
        *("collections.defaultdict", "collections.deque", "collections.Counter", "argparse.Namespace"),
        *("datetime.datetime", "datetime.date", "datetime.timedelta", "datetime.timezone", "decimal.Decimal"),
        *("pathlib.Path", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "builtins.range"),
        *("pathlib.PureWindowsPath", "pathlib.PurePath", "builtins.slice", "fractions.Fraction", "uuid.UUID"),
        *("builtins.int", "builtins.float", "builtins.str", "builtins.bool", "builtins.list", "builtins.dict"),
        *("builtins.set", "builtins.tuple", "torch.device", "numpy.dtype", "numpy.ndarray"),
        *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
        *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
        *("lightning.fabric.utilities.data.AttributeDict", "lightning.pytorch.utilities.parsing.AttributeDict"),
        *("lightning.pytorch.trainer.states.TrainerFn", "lightning.pytorch.trainer.states.TrainerStatus"),
        *("lightning.pytorch.trainer.states.RunningStage", "lightning.pytorch.utilities.enums.GradClipAlgorithmType"),
    }
)
"""Classes and functions that do nothing but hold their arguments."""


def materialize(tree: Any, where: str, *, trusted: bool = False) -> Any:
    """Build the real objects of a tree.

    Args:
        tree: What `pickles.load_tree` returned, its tensors tied to their archives.
        where: The file and entry, for the message.
        trusted: Import and call whatever the file names.

    Raises:
        UntrustedCheckpoint: If the file names something that is not known to be harmless, and is not trusted.
        BadCheckpoint: If a tensor in it is damaged.
    """
    with Reader() as reader:
        built = _Builder(where, trusted, reader).build(tree)
        verify(reader.account, reader)
    return built


def read_tensor(ref: TensorRef, reader: Reader) -> torch.Tensor:
    """Read a tensor into host memory."""
    whole = ref if ref.contiguous else ref.storage_tensor()
    dtype = getattr(torch, ref.dtype)
    flat = torch.empty(whole.numel, dtype=dtype)
    if whole.numel:
        reader.read_into([ref.source.span(whole)], flat.view(torch.uint8).numpy().data)
    return flat.view(ref.shape) if ref.contiguous else flat.as_strided(ref.shape, ref.stride, ref.offset).clone()


class _Builder:
    """Builds each object of a tree once: a user's own may refer to each other, in a circle too."""

    def __init__(self, where: str, trusted: bool, reader: Reader) -> None:
        self._where = where
        self._trusted = trusted
        self._reader = reader
        self._built: dict[int, Any] = {}

    def build(self, value: Any) -> Any:
        if isinstance(value, TensorRef):
            return read_tensor(value, self._reader)
        if is_global(value):
            return self._named(value)
        if isinstance(value, Size):
            return torch.Size(value)
        if id(value) in self._built:
            return self._built[id(value)]
        if isinstance(value, Opaque):
            return self._object(value)
        if isinstance(value, dict):
            made: Any = OrderedDict() if isinstance(value, OrderedDict) else {}
            self._built[id(value)] = made
            made.update((self.build(key), self.build(item)) for key, item in value.items())
            if isinstance(value, OrderedDict):
                vars(made).update({key: self.build(item) for key, item in vars(value).items()})
            return made
        if isinstance(value, list):
            made = self._built[id(value)] = []
            made.extend(self.build(item) for item in value)
            return made
        if isinstance(value, tuple | set | frozenset):
            return type(value)(self.build(item) for item in value)
        return value

    def _named(self, value: Any) -> Any:
        module, name = value.name_in_pickle
        module = "builtins" if module == "__builtin__" else module
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if not self._trusted and f"{module}.{name}" not in _HARMLESS:
            raise UntrustedCheckpoint(
                f"{self._where} wants {global_name(value)} to be called or made. A checkpoint can run any code in this "
                "way, so only what is known to be harmless is opened by itself; nothing was run. If it is yours, "
                "or comes from someone you trust, open it with trusted_checkpoints=True "
                "(ZeroAutoStrategy(trusted_checkpoints=True))."
            )
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def _object(self, value: Opaque) -> Any:
        kind = self._named(type(value))
        args = [self.build(argument) for argument in value.args]
        made = kind(*args) if value.called else kind.__new__(kind, *args)
        self._built[id(value)] = made
        for item in value.content:
            made.append(self.build(item))
        for key, item in value.pairs:
            made[self.build(key)] = self.build(item)
        if value.has_state:
            self._set_state(made, self.build(value.state))
        return made

    @staticmethod
    def _set_state(made: Any, state: Any) -> None:
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
            return
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if attributes:  # an object with slots alone has no place for them
            vars(made).update(attributes)
        for name, item in (slots or {}).items():
            setattr(made, name, item)
