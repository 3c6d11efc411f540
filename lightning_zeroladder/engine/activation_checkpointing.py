"""Activation checkpointing for any model: its repeated blocks keep their inputs and are recomputed in backward.

Blocks are wrapped one by one, on the instances: parameter names, the state dict and the classes stay what they are, and
the wrapping comes off again.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

__all__ = ["ActivationCheckpointing", "repeated_blocks"]

_CONTAINERS = (ModuleList, ModuleDict, Sequential)
_ENABLE, _DISABLE = "gradient_checkpointing_enable", "gradient_checkpointing_disable"


class ActivationCheckpointing:
    """Turns activation checkpointing of a module on and off.

    In order of preference: the classes that were named; the module's own switch (``gradient_checkpointing_enable``, as
    Hugging Face's models have it, which knows what else has to change, such as the cache of keys and values); the
    repeated blocks.

    Args:
        module: The module that is trained. Nothing is changed yet.
        classes: Names of classes whose instances are recomputed, such as ``("Block",)``.

    Raises:
        MisconfigurationException: If no part of the module is of a class that was named.
    """

    def __init__(self, module: Module, classes: Sequence[str] = ()) -> None:
        self._on = False
        self._before: list[tuple[Module, dict[str, Any]]] = []
        self._switches: list[Module] = []
        self._blocks: list[Module] = []
        self.unavailable: str | None = None
        """Why nothing can be recomputed, as a phrase; None if something can."""
        if classes:
            self._blocks = _named_blocks(module, classes)
        else:
            self._look_around(module)

    def _look_around(self, module: Module) -> None:
        self._switches = _own_switches(module)
        if any(getattr(part, "is_gradient_checkpointing", False) for part in self._switches):
            self._switches, self.unavailable = [], "the model recomputes activations already"
        elif not self._switches:
            self._blocks = repeated_blocks(module)
            if not self._blocks:
                self.unavailable = (
                    "no block of the model repeats; name the class of what is to be recomputed, as in "
                    "checkpoint_blocks=('Block',)"
                )

    @property
    def what(self) -> str:
        """What is recomputed, for instance ``12 x Block``."""
        kinds = Counter(type(part).__name__ for part in [*self._switches, *self._blocks])
        return ", ".join(f"{count} x {name}" for name, count in kinds.items())

    def switch(self, on: bool) -> None:
        """Turn it on or off; does nothing if it is so already. Between optimizer steps, with no backward to come.

        Args:
            on: Whether activations are to be recomputed from now on.
        """
        if on == self._on or self.unavailable:
            return
        self._on = on
        for part in self._switches:
            _enable(part) if on else getattr(part, _DISABLE)()
        if on:
            self._before = [(block, _own_forward(block)) for block in self._blocks]
            for block in self._blocks:
                block.forward = _Recomputed(block)
        else:
            for block, forward in self._before:
                vars(block).pop("forward", None)
                vars(block).update(forward)
            self._before = []


class _Recomputed:
    """Stands in for the ``forward`` of a block. An object rather than a closure: a deep copy calls the copied block."""

    def __init__(self, block: Module) -> None:
        self._block = block
        self._forward: Callable[..., Any] = block.forward
        functools.update_wrapper(self, self._forward)  # code that looks at the signature sees the block's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # Stopping early would leave a submodule in the middle of its forward, and the hooks by which stage 3 releases
        # its weights would not run.
        with set_checkpoint_early_stop(False):
            return checkpoint(
                functools.partial(self._forward, **kwargs),  # their names may be those of checkpoint's own arguments
                *args,
                use_reentrant=False,
                context_fn=functools.partial(_same_buffers, self._block),
            )


def _same_buffers(block: Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the forward and of its repetition: both start from the same buffers, the first alone changes them.

    Batch norm counts in its buffers, and spectral norm computes its weights with them.
    """
    before: list[Tensor] = []

    @contextmanager
    def first() -> Iterator[None]:
        before.extend(buffer.detach().clone() for buffer in _saved_buffers(block))
        yield

    @contextmanager
    def again() -> Iterator[None]:
        after = [buffer.detach().clone() for buffer in _saved_buffers(block)]
        _set_buffers(block, before)
        try:
            yield
        finally:
            _set_buffers(block, after)

    return first(), again()


def _saved_buffers(block: Module) -> Iterator[Tensor]:
    """Buffers that are part of the state; the others (masks, tables of positions) are made from the sizes alone."""
    for part in block.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield buffer


def _set_buffers(block: Module, values: Sequence[Tensor]) -> None:
    for buffer, value in zip(_saved_buffers(block), values, strict=True):
        buffer.data.copy_(value)  # through .data: autograd need not take it for a change between forward and backward


def _own_forward(block: Module) -> dict[str, Any]:
    """A ``forward`` that was set on the instance already, if any."""
    return {name: value for name, value in vars(block).items() if name == "forward"}


def _enable(part: Module) -> None:
    method = getattr(part, _ENABLE)
    if "gradient_checkpointing_kwargs" not in inspect.signature(method).parameters:
        method()
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if "early_stop" in inspect.signature(checkpoint).parameters:
        options["early_stop"] = False  # as in `_Recomputed`
    method(gradient_checkpointing_kwargs=options)


def _own_switches(module: Module) -> list[Module]:
    """The outermost parts that can turn checkpointing on and off by themselves."""
    found: list[Module] = []
    inside: set[Module] = set()
    for part in module.modules():  # a part comes before what it contains
        if part in inside or not (callable(getattr(part, _ENABLE, None)) and callable(getattr(part, _DISABLE, None))):
            continue
        if getattr(part, "supports_gradient_checkpointing", True):
            found.append(part)
            inside.update(part.modules())
    return found


def repeated_blocks(module: Module) -> list[Module]:
    """Find the blocks that a model is a stack of.

    Of the classes that occur several times in one ``ModuleList``, ``ModuleDict`` or ``Sequential``, have parts of their
    own (recomputing a single layer saves nothing, its input is kept either way) and do not contain themselves, the one
    with the most parameters.

    Args:
        module: Any module; its weights may be divided among ranks.

    Returns:
        All instances of that class in such places, none if there is no such class.
    """
    found: dict[type[Module], dict[Module, None]] = {}
    for container in module.modules():
        if isinstance(container, _CONTAINERS):
            members = list(dict.fromkeys(container.children()))
            kinds = Counter(type(member) for member in members)
            for member in members:
                if kinds[type(member)] > 1 and _can_be_recomputed(member):
                    found.setdefault(type(member), {})[member] = None
    stacks = [list(blocks) for blocks in found.values() if not _nested(list(blocks))]
    return max(stacks, key=_elements, default=[])


def _can_be_recomputed(block: Module) -> bool:
    if isinstance(block, ModuleList | ModuleDict | torch.jit.ScriptModule):
        return False  # they have no forward, or none that can be exchanged
    return next(block.children(), None) is not None


def _nested(blocks: Sequence[Module]) -> bool:
    among = set(blocks)
    return any(part in among for block in blocks for part in block.modules() if part is not block)


def _elements(blocks: Sequence[Module]) -> int:
    params = {param for block in blocks for param in block.parameters()}
    return sum(int(getattr(param, "ds_numel", param.numel())) for param in params)


def _named_blocks(module: Module, classes: Sequence[str]) -> list[Module]:
    """The outermost instances of the classes."""
    found: list[Module] = []
    inside: set[Module] = set()
    for part in module.modules():
        if part not in inside and type(part).__name__ in classes:
            found.append(part)
            inside.update(part.modules())
    seen = {type(part).__name__ for part in module.modules()}
    unknown = [name for name in classes if name not in seen]
    if unknown:
        repeated = Counter(type(part).__name__ for part in module.modules() if _can_be_recomputed(part))
        known = ", ".join(name for name, count in repeated.most_common() if count > 1) or "none"
        raise MisconfigurationException(
            f"checkpoint_blocks={tuple(classes)}: no part of the model is of class {', '.join(unknown)}. Classes with "
            f"several instances: {known}. Leave checkpoint_blocks out to have the repeated block found."
        )
    return found
