"""What a checkpoint's pickle describes, with something in place of each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_zeroladder.checkpoint.pickles import Opaque, Size, Storage, TensorRef


def map_tensors(tree: Any, change: Callable[[TensorRef], Any]) -> Any:
    """Return a tree with every `TensorRef` replaced by what ``change`` makes of it; containers are changed in place."""
    return _mapped(tree, change, {})


def _mapped(tree: Any, change: Callable[[TensorRef], Any], done: dict[int, Any]) -> Any:
    """Do the work of `map_tensors`; objects in a tree may refer to each other in a circle, so each is visited once."""
    if id(tree) in done:
        return done[id(tree)]
    if isinstance(tree, TensorRef):
        return change(tree)
    if isinstance(tree, dict | list | Opaque):
        done[id(tree)] = tree
    if isinstance(tree, dict):
        for key, value in tree.items():
            tree[key] = _mapped(value, change, done)
        if vars_of := getattr(tree, "__dict__", None):
            _mapped(vars_of, change, done)
    elif isinstance(tree, list):
        tree[:] = [_mapped(value, change, done) for value in tree]
    elif isinstance(tree, Opaque):
        tree.args = _mapped(tree.args, change, done)
        tree.state = _mapped(tree.state, change, done)
        tree.content = _mapped(tree.content, change, done)
        tree.pairs = _mapped(tree.pairs, change, done)
    elif isinstance(tree, tuple) and not isinstance(tree, Size | Storage):
        return tuple(_mapped(value, change, done) for value in tree)
    return tree
