"""What a torch optimizer keeps per parameter, found by stepping a copy of it on a tiny parameter."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["OptimizerState", "probe_optimizer"]

_SHAPE = (3, 5)
"""Not square and no two sizes of state that an optimizer derives from it are alike."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state an optimizer keeps.

    Attributes:
        elementwise: Keys with the parameter's shape, sorted.
        other: Keys of tensors with another shape (more than one element), sorted.
        bytes_per_parameter: Bytes of element-wise state for an fp32 parameter element.
    """

    elementwise: tuple[str, ...]
    other: tuple[str, ...]
    bytes_per_parameter: int


def probe_optimizer(optimizer: Optimizer) -> OptimizerState | None:
    """Step a shallow copy of an optimizer on a parameter of 15 elements and look at the state it made.

    The optimizer itself, its parameters and the random state are untouched.

    Args:
        optimizer: Any torch optimizer.

    Returns:
        What it keeps, or None if the copy could not be stepped (then only a real step will tell).
    """
    first = optimizer.param_groups[0]["params"][0]
    if optimizer.state.get(first):
        return _describe(optimizer.state[first], first)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    device = first.device
    param = torch.nn.Parameter(torch.full(_SHAPE, 0.5, device=device))
    param.grad = torch.full(_SHAPE, 0.25, device=device)
    copy = object.__new__(type(optimizer))
    # A learning-rate scheduler leaves a `step` on the instance that is bound to the original.
    copy.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    copy.param_groups = [{**group, "params": [param]}]
    copy.state = collections.defaultdict(dict)
    copy._optimizer_step_pre_hooks = collections.OrderedDict()
    copy._optimizer_step_post_hooks = collections.OrderedDict()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            copy.step()
    except Exception:  # any optimizer may object to being copied; the answer is then "unknown"
        return None
    return _describe(copy.state[param], param)


def _describe(state: dict[str, object], param: Tensor) -> OptimizerState:
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    elementwise = sorted(key for key, value in tensors.items() if value.shape == param.shape)
    other = sorted(key for key, value in tensors.items() if value.shape != param.shape and value.numel() > 1)
    nbytes = sum(tensors[key].element_size() for key in elementwise)
    return OptimizerState(tuple(elementwise), tuple(other), nbytes)
