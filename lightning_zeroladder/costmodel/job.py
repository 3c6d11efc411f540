"""What a prediction is about: a model, how it is trained, and on which machines."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zeroladder.costmodel.links import Links, Where
from lightning_zeroladder.costmodel.traffic import Collective, StageSettings

__all__ = ["OPTIMIZERS", "PRECISIONS", "Cluster", "Model", "RungSettings", "Training", "Transformer"]

OPTIMIZERS: dict[str, int] = {
    "adam": 8,
    "adamw": 8,
    "adam-8bit": 2,
    "lion": 4,
    "rmsprop": 4,
    "sgd": 0,
    "sgd-momentum": 4,
    "adagrad": 4,
}
"""Bytes of optimizer state per trained element, without an fp32 copy of the weights."""

PRECISIONS: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a weight and of a gradient."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """Shapes from which activations follow.

    Attributes:
        layers: Blocks.
        hidden: Width of the residual stream.
        vocabulary: Tokens of the output layer.
    """

    layers: int
    hidden: int
    vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its numbers.

    Attributes:
        trainable: Parameter elements with a gradient.
        frozen: Parameter elements without.
        largest_layer: Elements of the largest module that is gathered at once; 0 if unknown.
        shapes: For activations, if it is a transformer.
    """

    trainable: int
    frozen: int = 0
    largest_layer: int = 0
    shapes: Transformer | None = None

    @property
    def parameters(self) -> int:
        """All elements."""
        return self.trainable + self.frozen


@dataclass(frozen=True, slots=True)
class Training:
    """How it is trained.

    Attributes:
        micro_batch: Samples per micro-batch and rank.
        sequence: Tokens per sample.
        accumulate: Micro-batches per optimizer step k.
        precision: One of `PRECISIONS`.
        optimizer: One of `OPTIMIZERS`.
        activation_bytes: Activations of a micro-batch per rank, if they were measured.
    """

    micro_batch: int = 1
    sequence: int = 1
    accumulate: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    activation_bytes: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens per rank and optimizer step."""
        return self.micro_batch * self.sequence * self.accumulate


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines.

    Attributes:
        world_size: GPUs N, one rank each.
        per_node: GPUs in a node.
        memory_bytes: Memory of a GPU.
        flops: Achieved rate of a GPU in FLOP/s, for matrix products of this precision.
        inside_bytes_per_s: Bandwidth that a rank gets in a collective inside a node.
        across_bytes_per_s: The same where it crosses nodes.
        latency_s: Time of a collective call without any bytes.
        links: What was measured: it takes the place of bandwidths and latency.
    """

    world_size: int
    per_node: int
    memory_bytes: int
    flops: float
    inside_bytes_per_s: float
    across_bytes_per_s: float
    latency_s: float = 30e-6
    links: Links | None = None

    @property
    def nodes(self) -> int:
        """Nodes."""
        return -(-self.world_size // self.per_node)

    @property
    def where(self) -> Where:
        """Links that a collective over all ranks uses."""
        return Where.ACROSS if self.nodes > 1 else Where.INSIDE

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of a collective over all ranks: that of its slowest link, and of an all-reduce if measured.

        Raises:
            ValueError: If links were measured, but not these.
        """
        if self.links is not None:
            return self.links.bytes_per_s(Collective.ALL_REDUCE, self.where)
        return self.across_bytes_per_s if self.nodes > 1 else self.inside_bytes_per_s


@dataclass(frozen=True, slots=True)
class RungSettings:
    """A stage with the settings that change memory and traffic.

    Attributes:
        traffic: The stage, and what changes what it sends.
        bucket_elements: ``reduce_bucket_size``, in elements.
        overlap: ``overlap_comm``: a second bucket is filled while the first is sent.
        prefetch_elements: ``stage3_prefetch_bucket_size``.
        checkpoint_activations: Recompute activations in backward.
        offload_optimizer: Keep optimizer state and fp32 weights on the host.
        offload_parameters: Keep weights on the host too (stage 3).
    """

    traffic: StageSettings
    bucket_elements: int = 500_000_000
    overlap: bool = True
    prefetch_elements: int = 50_000_000
    checkpoint_activations: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.traffic.stage
