"""Count a model's parameters, also one that has not been built yet."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module

from lightning_zeroladder.costmodel import ModelCount

__all__ = ["count_parameters", "meta_count"]


def count_parameters(module: Module) -> ModelCount:
    """Count elements, whole also where stage 3 has divided them."""
    trainable = frozen = 0
    for param in module.parameters():
        numel = int(getattr(param, "ds_numel", param.numel()))
        if param.requires_grad:
            trainable += numel
        else:
            frozen += numel
    return ModelCount(trainable, frozen)


def meta_count(module: pl.LightningModule) -> ModelCount | None:
    """Count what ``configure_model`` would create, without memory for it.

    A copy of the module runs ``configure_model`` on the meta device; the random state is left as it was.

    Returns:
        The count, or None if there is no ``configure_model`` or it cannot run on the meta device.
    """
    if not is_overridden("configure_model", module):
        return None
    try:
        with torch.random.fork_rng(), torch.device("meta"):
            twin = copy.deepcopy(module)
            twin.configure_model()
    except Exception:  # user code may need the trainer or real tensors; the model is then built at the lowest stage
        return None
    return count_parameters(twin)
