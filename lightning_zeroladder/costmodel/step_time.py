"""Time of an optimizer step: compute, and what of the traffic cannot hide behind it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zeroladder.costmodel.job import PRECISIONS, Cluster, Model, RungSettings, Training
from lightning_zeroladder.costmodel.links import Links
from lightning_zeroladder.costmodel.traffic import Flow, Moment, TrafficModel, flows

__all__ = ["StepTime", "communication_s", "compute_s", "step_time"]

_BACKWARD_SHARE = 2 / 3
"""Share of forward and backward that backward takes: it computes two products for each of forward's."""

_HIDDEN_FORWARD = 0.5
"""Share of stage 3's gathers for forward that prefetching hides, as long as a layer computes longer than it travels."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an optimizer step.

    Attributes:
        compute_s: Forward and backward.
        communication_s: All collectives, one after the other.
        best_s: With everything hidden that can run beside compute.
        expected_s: With what usually stays in the open.
    """

    compute_s: float
    communication_s: float
    best_s: float
    expected_s: float


def compute_s(model: Model, training: Training, cluster: Cluster, *, recompute: bool = False) -> float:
    """Return forward and backward of an optimizer step in seconds: 6 FLOP per parameter and token.

    Two for forward and four for backward (Kaplan et al., 2020, section 2.1); recomputing activations adds a forward.
    Frozen parameters take part in forward and in the gradient of the input, but have none of their own.

    Raises:
        ValueError: If the rate is not above 0.
    """
    if cluster.flops <= 0:
        raise ValueError(f"flops={cluster.flops}: must be above 0, give the achieved FLOP/s of one GPU.")
    per_token = 6 * model.trainable + 4 * model.frozen + (2 * model.parameters if recompute else 0)
    return per_token * training.tokens / cluster.flops


def communication_s(
    model: TrafficModel, training: Training, cluster: Cluster, rung: RungSettings, *, ring: bool = True
) -> dict[str, float]:
    """Return the seconds of each kind of collective per optimizer step, by what it carries.

    Args:
        model: What travels.
        training: Precision and accumulation.
        cluster: Links.
        rung: Stage and settings.
        ring: Count what a ring of N ranks sends; False: the textbook's round numbers, which are its limit for large N.
            Links that were measured are not used then.

    Raises:
        ValueError: If links were measured, but not those that this job uses.
    """
    seconds: dict[str, float] = {}
    if cluster.world_size == 1:
        return seconds
    for flow in flows(rung.traffic, model):
        calls = training.accumulate if flow.moment is Moment.MICRO_BATCH else 1
        if ring and cluster.links is not None:
            seconds[_name(flow)] = calls * _measured_s(flow, training, cluster, cluster.links, rung)
            continue
        elements = flow.sent(cluster.world_size if ring else 10**12)
        nbytes = elements * PRECISIONS[training.precision]
        buckets = max(1, -(-flow.elements // max(1, rung.bucket_elements)))
        seconds[_name(flow)] = calls * (nbytes / cluster.bytes_per_s + buckets * cluster.latency_s)
    return seconds


def _measured_s(flow: Flow, training: Training, cluster: Cluster, links: Links, rung: RungSettings) -> float:
    """Return the seconds of a flow, bucket by bucket, each as long as a collective of its size took."""
    full, rest = divmod(flow.elements, max(1, rung.bucket_elements))

    def one(elements: float) -> float:
        nbytes = elements * PRECISIONS[training.precision]
        return links.seconds(flow.collective, cluster.where, nbytes, ranks=cluster.world_size)

    return (full * one(rung.bucket_elements) if full else 0.0) + (one(rest) if rest else 0.0)


def step_time(
    model: Model,
    traffic: TrafficModel,
    training: Training,
    cluster: Cluster,
    rung: RungSettings,
    *,
    ring: bool = True,
) -> StepTime:
    """Return the predicted time of an optimizer step.

    Best: everything overlaps that is called while something else computes. Expected: the burst of stages 0 and 1 at the
    boundary and the all-gather of updated weights are in the open; gradients sent during backward hide behind it as far
    as it lasts; of stage 3's gathers for forward a half hides.

    Args:
        model: Parameters.
        traffic: What travels.
        training: Batch, precision, accumulation.
        cluster: Rate and links.
        rung: Stage and settings.
        ring: As in `communication_s`.
    """
    computing = compute_s(model, training, cluster, recompute=rung.checkpoint_activations)
    each = communication_s(traffic, training, cluster, rung, ring=ring)
    by_name = {_name(flow): flow for flow in flows(rung.traffic, traffic)}
    backward = sum(seconds for name, seconds in each.items() if by_name[name].in_backward)
    in_forward = sum(
        seconds
        for name, seconds in each.items()
        if not by_name[name].in_backward and by_name[name].moment is Moment.MICRO_BATCH
    )
    total = sum(each.values())
    burst = total - backward - in_forward
    left = max(0.0, backward - _BACKWARD_SHARE * computing)
    hidden = min(_HIDDEN_FORWARD * in_forward, (1 - _BACKWARD_SHARE) * computing)
    expected = computing + burst + left + in_forward - hidden
    best = max(computing + burst, total)
    return StepTime(computing, total, best, max(best, expected))


def _name(flow: Flow) -> str:
    return f"{flow.what} ({flow.collective}, {flow.moment})"
