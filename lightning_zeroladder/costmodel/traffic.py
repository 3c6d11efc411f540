"""What each ZeRO stage sends over the network: elements per rank, by collective and by moment.

A ring over N ranks sends (N - 1) / N of a tensor per rank for a reduce-scatter or an all-gather, and twice that for an
all-reduce, which is the one followed by the other (Patarasuk and Yuan, 2009). Which collectives a stage calls was read
off deepspeed 0.19, which does not do what the ZeRO paper says where its defaults are left alone: see
`StageSettings.multi_rank_buckets`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Collective", "Flow", "Moment", "StageSettings", "TrafficModel", "flows", "sent_elements"]


class Collective(StrEnum):
    """A collective operation."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    REDUCE = "reduce"


class Moment(StrEnum):
    """When it happens."""

    MICRO_BATCH = "each micro-batch"
    BOUNDARY = "once per optimizer step"


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Settings that change what a stage sends.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        multi_rank_buckets: ``use_multi_rank_bucket_allreduce``, on by default: stages 1 and 2 then all-reduce
            gradients, so that a rank receives those of others as well, where they could reduce each to its owner.
        persistence_threshold: ``stage3_param_persistence_threshold``: smaller parameters stay whole on every rank.
        refetch: Whether weights have to be gathered again for backward: they are where a model has more of them than
            ``stage3_max_live_parameters``, or uses them again later than ``stage3_max_reuse_distance``.
    """

    stage: int
    multi_rank_buckets: bool = True
    persistence_threshold: int = 100_000
    refetch: bool = True


@dataclass(frozen=True, slots=True)
class TrafficModel:
    """The tensors of a model that travel.

    Attributes:
        trainable: Elements with a gradient.
        frozen: Elements without; they travel at stage 3 only.
        persistent: Trainable elements in parameters below stage 3's persistence threshold.
        frozen_persistent: The same of the frozen ones.
    """

    trainable: int
    frozen: int = 0
    persistent: int = 0
    frozen_persistent: int = 0


@dataclass(frozen=True, slots=True)
class Flow:
    """One kind of collective call.

    Attributes:
        collective: Operation.
        moment: When.
        elements: Elements of the whole tensors that it is called on.
        what: Gradients or weights, in words.
        in_backward: Whether it is called while backward runs, so that it can hide behind it.
    """

    collective: Collective
    moment: Moment
    elements: int
    what: str
    in_backward: bool

    def sent(self, world_size: int) -> float:
        """Elements that one rank sends in one call over a ring.

        A reduce sends the tensor to one owner: averaged over ranks that is what a reduce-scatter sends.
        """
        once = self.elements * (world_size - 1) / world_size
        return 2 * once if self.collective is Collective.ALL_REDUCE else once


def flows(settings: StageSettings, model: TrafficModel) -> tuple[Flow, ...]:
    """Return the collectives of an optimizer step.

    Args:
        settings: Stage and what changes its traffic.
        model: What travels.

    Raises:
        ValueError: If the stage is unknown.
    """
    grads = model.trainable
    if settings.stage == 0:
        return (Flow(Collective.ALL_REDUCE, Moment.BOUNDARY, grads, "gradients", in_backward=False),)
    if settings.stage in (1, 2):
        moment = Moment.BOUNDARY if settings.stage == 1 else Moment.MICRO_BATCH
        how = Collective.ALL_REDUCE if settings.multi_rank_buckets else Collective.REDUCE
        return (
            Flow(how, moment, grads, "gradients", in_backward=settings.stage == 2),
            Flow(Collective.ALL_GATHER, Moment.BOUNDARY, grads, "updated weights", in_backward=False),
        )
    if settings.stage == 3:
        return tuple(_stage_3(settings, model))
    raise ValueError(f"stage={settings.stage}: must be one of 0, 1, 2, 3.")


def _stage_3(settings: StageSettings, model: TrafficModel) -> Iterable[Flow]:
    weights = model.trainable + model.frozen - model.persistent - model.frozen_persistent
    yield Flow(Collective.ALL_GATHER, Moment.MICRO_BATCH, weights, "weights for forward", in_backward=False)
    if settings.refetch:
        yield Flow(Collective.ALL_GATHER, Moment.MICRO_BATCH, weights, "weights for backward", in_backward=True)
    yield Flow(Collective.REDUCE_SCATTER, Moment.MICRO_BATCH, model.trainable, "gradients", in_backward=True)
    if model.persistent:
        yield Flow(Collective.ALL_GATHER, Moment.BOUNDARY, model.persistent, "small weights", in_backward=False)


def sent_elements(settings: StageSettings, model: TrafficModel, *, world_size: int, accumulate: int) -> float:
    """Return the elements that one rank sends per optimizer step.

    Args:
        settings: Stage and what changes its traffic.
        model: What travels.
        world_size: Data-parallel ranks N.
        accumulate: Micro-batches per optimizer step k.

    Raises:
        ValueError: If a number is out of range.
    """
    if world_size < 1 or accumulate < 1:
        raise ValueError(f"world_size={world_size}, accumulate={accumulate}: both must be at least 1.")
    return sum(
        flow.sent(world_size) * (accumulate if flow.moment is Moment.MICRO_BATCH else 1)
        for flow in flows(settings, model)
    )
