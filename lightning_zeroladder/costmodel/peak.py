"""Peak memory of a rank, term by term.

Model state is that of Rajbhandari et al. (2020), section 5; what comes on top was read off deepspeed 0.19:
communication buckets, the fp32 copy of the gradients at the optimizer step, stage 3's gathered layers. Activations of a
transformer follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section
4, without the attention matrix, which fused attention does not keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zeroladder.costmodel.job import OPTIMIZERS, PRECISIONS, Cluster, Model, RungSettings, Training

__all__ = ["Term", "activation_bytes", "memory_terms", "peak_bytes"]

_FP32 = 4
_ACTIVATION_BYTES_PER_ELEMENT = 34
"""Bytes that a block keeps for backward per element of the residual stream, in 16-bit training."""

_SLACK = 0.04
"""Share of the rest that an allocator holds without using it."""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the peak.

    Attributes:
        name: What it is.
        nbytes: Bytes on the device.
    """

    name: str
    nbytes: int


def activation_bytes(model: Model, training: Training, *, checkpointed: bool) -> int | None:
    """Return the activations of a micro-batch per rank in bytes; None if nothing tells.

    Args:
        model: Its shapes are used where nothing was measured.
        training: Micro-batch, sequence and what was measured (without checkpointing).
        checkpointed: Whether blocks keep their input only and are recomputed one at a time.
    """
    if training.activation_bytes is not None and not checkpointed:
        return training.activation_bytes
    shapes = model.shapes
    if shapes is None:
        return None
    stream = training.micro_batch * training.sequence * shapes.hidden
    scale = PRECISIONS[training.precision] / 2
    block = int(_ACTIVATION_BYTES_PER_ELEMENT * stream * scale)
    blocks = int(2 * stream * scale) * shapes.layers + block if checkpointed else block * shapes.layers
    logits = training.micro_batch * training.sequence * shapes.vocabulary * (PRECISIONS[training.precision] + _FP32)
    return blocks + logits


def memory_terms(model: Model, training: Training, cluster: Cluster, rung: RungSettings) -> tuple[Term, ...]:
    """Return what makes up the peak of a rank on its device.

    Args:
        model: Parameters.
        training: Precision, optimizer, batch.
        cluster: Number of ranks.
        rung: Stage and settings.
    """
    n, stage, weight = cluster.world_size, rung.stage, PRECISIONS[training.precision]
    low, trained = weight < _FP32, model.trainable
    shared = n if stage >= 1 else 1
    # Stages 1 to 3 keep an fp32 copy of their part also where the weights are fp32 already.
    master = _FP32 * trained // shared if low or stage >= 1 else 0
    moments = OPTIMIZERS[training.optimizer] * trained // shared
    step_grads = _FP32 * trained // shared if low or stage >= 1 else 0
    host = rung.offload_optimizer
    terms = [
        Term("weights", 0 if rung.offload_parameters else weight * model.parameters // (n if stage == 3 else 1)),
        Term("gradients", weight * trained // (n if stage >= 2 else 1)),
        Term("fp32 weights", 0 if host else master),
        Term("optimizer state", 0 if host else moments),
        Term("fp32 gradients at the step", 0 if host else step_grads),
        Term("communication buckets", _buckets(model, rung, weight)),
    ]
    if stage == 3:
        terms.append(Term("gathered layers", _gathered(model, rung, weight)))
    activations = activation_bytes(model, training, checkpointed=rung.checkpoint_activations)
    if activations is not None:
        terms.append(Term("activations", activations))
    held = [term for term in terms if term.nbytes]
    return (*held, Term("allocator slack", int(_SLACK * sum(term.nbytes for term in held))))


def _buckets(model: Model, rung: RungSettings, weight: int) -> int:
    size = min(rung.bucket_elements, model.trainable)
    return weight * size * (2 if rung.overlap and rung.stage >= 1 else 1)


def _gathered(model: Model, rung: RungSettings, weight: int) -> int:
    """Two layers at work, one of them being prefetched, and what is fetched ahead."""
    largest = model.largest_layer or model.parameters // 32
    return weight * min(model.parameters, 2 * largest + rung.prefetch_elements)


def peak_bytes(model: Model, training: Training, cluster: Cluster, rung: RungSettings) -> int:
    """Return the sum of `memory_terms`."""
    return sum(term.nbytes for term in memory_terms(model, training, cluster, rung))
