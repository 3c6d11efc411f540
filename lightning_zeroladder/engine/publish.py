"""Bring the weights that forward uses in line with the fp32 weights of a live engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

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
    elif stage > 0 and hasattr(optimizer, "parallel_partitioned_bit16_groups") and _gloo(optimizer):
        _publish_in_place(optimizer)
    elif stage > 0:
        optimizer.update_lp_params()
    elif optimizer is not engine.basic_optimizer:
        weights = dict(engine.module.named_parameters())
        for shard in live_shards(engine):
            param = weights[shard.name]
            param.data.copy_(shard.master.view(param.shape))


def _gloo(optimizer: Any) -> bool:
    groups = optimizer.real_dp_process_group
    return dist.is_initialized() and all(dist.get_backend(group) == "gloo" for group in groups)


@torch.no_grad()
def _publish_in_place(optimizer: Any) -> None:
    """Do what ``update_lp_params`` of stages 1 and 2 does by an all-gather, for which gloo makes two more copies."""
    pending = []
    for pieces, master, group in zip(
        optimizer.parallel_partitioned_bit16_groups,
        optimizer.single_partition_of_fp32_groups,
        optimizer.real_dp_process_group,
        strict=True,
    ):
        pieces[dist.get_rank(group)].data.copy_(master.data)
        if len(pieces) > 1:
            pending += [
                dist.broadcast(piece, dist.get_global_rank(group, rank), group, async_op=True)
                for rank, piece in enumerate(pieces)
            ]
    for work in pending:
        work.wait()


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
