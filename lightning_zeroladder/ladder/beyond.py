"""The rungs beyond the plain stages: what a run offers of them, and in which order they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lightning_zeroladder.ladder.buckets import Buckets
from lightning_zeroladder.ladder.types import LadderSettings, Rung

__all__ = ["Beyond", "Group", "HostShare", "Option", "escalations", "plain_groups", "without_offload"]

Settings = tuple[tuple[str, bool | int | str], ...]

_OPTIMIZER_ON_HOST: Settings = (("offload_optimizer", "cpu"),)
_PARAMETERS_ON_HOST: Settings = (("offload_optimizer", "cpu"), ("offload_param", "cpu"))
_ON_NVME: Settings = (("offload_optimizer", "nvme"), ("offload_param", "nvme"))
_OFFLOADS = ("offload_optimizer", "offload_param")


class Option(StrEnum):
    """Something that a rung can add to a stage and that may be missing here."""

    QUANTIZED_WEIGHTS = "zero_quantized_weights"
    QUANTIZED_GRADIENTS = "zero_quantized_gradients"
    CHECKPOINTING = "activation checkpointing"
    OPTIMIZER_ON_HOST = "offload_optimizer to cpu"
    PARAMETERS_ON_HOST = "offload_param to cpu"
    NVME = "offload to nvme"


@dataclass(frozen=True, slots=True)
class HostShare:
    """What an offload does to a stage's memory on the device, in bytes per rank.

    Attributes:
        floor_bytes: What certainly stays on the device.
        freed_bytes: The most that can leave it, compared with the same stage without the offload.
    """

    floor_bytes: int
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Beyond:
    """What a run offers beyond the plain stages.

    Attributes:
        buckets: Communication buffers of its config; None: they are left alone.
        optimizer_on_host: What ``offload_optimizer`` does, by stage; a stage that is missing cannot have it.
        parameters_on_host: What ``offload_param`` does on top of it at stage 3; None where it is no option.
        nvme: Whether a path was given.
        nodes: Machines of the run.
        ranks_per_node: Ranks on each.
        allow_quantized: Whether communication may round weights and gradients.
        unavailable: Why an option cannot be used, as a phrase.
    """

    buckets: Buckets | None = None
    optimizer_on_host: Mapping[int, HostShare] = field(default_factory=dict)
    parameters_on_host: HostShare | None = None
    nvme: bool = False
    nodes: int = 1
    ranks_per_node: int = 1
    allow_quantized: bool = False
    unavailable: Mapping[Option, str] = field(default_factory=dict)

    def host_share(self, rung: Rung) -> HostShare | None:
        """What the rung's offload does; None without one."""
        if rung.setting("offload_param") is not None:
            return self.parameters_on_host
        if rung.setting("offload_optimizer") is not None:
            return self.optimizer_on_host.get(rung.stage)
        return None


@dataclass(frozen=True, slots=True)
class Group:
    """Rungs that are tried together, from the lowest stage up.

    Attributes:
        rungs: In order.
        option: What they need; None if nothing.
    """

    rungs: tuple[Rung, ...]
    option: Option | None = None


def plain_groups(settings: LadderSettings, beyond: Beyond) -> Iterator[Group]:
    """The stages, and what makes stage 3 faster: these are tried whether or not a lower rung fits."""
    yield Group(tuple(Rung(stage) for stage in sorted(settings.stages)))
    if 3 not in settings.stages:
        return
    inside_node: Settings = ()
    if beyond.nodes > 1 and beyond.ranks_per_node > 1:
        # A copy of the weights inside each node: backward gathers them without crossing the slow links.
        inside_node = (("zero_hpz_partition_size", beyond.ranks_per_node),)
        yield Group((Rung(3, inside_node),))
    if beyond.allow_quantized:
        for option in (Option.QUANTIZED_WEIGHTS, Option.QUANTIZED_GRADIENTS):
            yield Group((Rung(3, _sorted(*inside_node, (option.value, True))),), option)


def escalations(settings: LadderSettings, beyond: Beyond) -> Iterator[Group]:
    """What is tried when no plain stage fits, from the cheapest in time to the dearest.

    Each offload comes without activation checkpointing first: recomputing costs about a third of the step, which a
    model whose memory is all weights and optimizer state would pay for nothing.
    """
    stages = sorted(settings.stages)
    yield Group(tuple(Rung(stage, (), True) for stage in stages), Option.CHECKPOINTING)
    sharded = tuple(stage for stage in stages if stage in beyond.optimizer_on_host)
    offloads: list[tuple[Option, Settings, tuple[int, ...]]] = [(Option.OPTIMIZER_ON_HOST, _OPTIMIZER_ON_HOST, sharded)]
    if 3 in stages and beyond.parameters_on_host is not None:
        offloads.append((Option.PARAMETERS_ON_HOST, _PARAMETERS_ON_HOST, (3,)))
        if beyond.nvme:
            offloads.append((Option.NVME, _ON_NVME, (3,)))
    for option, extra, its_stages in offloads:
        yield Group(tuple(Rung(stage, extra) for stage in its_stages), option)
        if option not in beyond.unavailable and Option.CHECKPOINTING not in beyond.unavailable:
            yield Group(tuple(Rung(stage, extra, True) for stage in its_stages), option)


def without_offload(rung: Rung) -> Rung:
    """The same rung with everything on the device."""
    kept = tuple((name, value) for name, value in rung.settings if name not in _OFFLOADS)
    return Rung(rung.stage, kept, rung.checkpoint_activations)


def _sorted(*settings: tuple[str, bool | int | str]) -> Settings:
    return tuple(sorted(settings, key=lambda item: item[0]))
