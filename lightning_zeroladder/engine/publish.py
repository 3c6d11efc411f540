"""Bring the weights that forward uses in line with the fp32 weights of a live engine."""

from __future__ import annotations

from typing import Any

from lightning_zeroladder.engine.shards import live_shards

__all__ = ["publish"]


def publish(engine: Any) -> None:
    """Copy the fp32 weights into the forward weights, on all ranks. A collective at stages 1 to 3.

    Args:
        engine: A live ``DeepSpeedEngine`` that is not within an accumulation window.
    """
    optimizer = engine.optimizer
    stage = int(engine.zero_optimization_stage())
    if stage == 3:
        _publish_stage_3(optimizer)
    elif stage > 0:
        optimizer.update_lp_params()
    elif optimizer is not engine.basic_optimizer:
        weights = dict(engine.module.named_parameters())
        for shard in live_shards(engine):
            param = weights[shard.name]
            param.data.copy_(shard.master.view(param.shape))


def _publish_stage_3(optimizer: Any) -> None:
    """Fill each rank's pieces, then give every rank the small parameters that all ranks keep whole."""
    optimizer.checkpoint_event_prologue()
    pieces = zip(
        optimizer.fp32_partitioned_groups_flat,
        optimizer.fp16_partitioned_groups_flat,
        optimizer.fp16_partitioned_groups,
        strict=True,
    )
    for master, flat, members in pieces:
        if master.numel() == 0:
            continue
        flat.data.copy_(master.data)
        for member, values in zip(members, optimizer.unflatten(flat, members), strict=True):
            member.data = values.data
    optimizer.checkpoint_event_epilogue()
