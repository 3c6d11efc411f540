"""Which rung a job should train at, by prediction: a row per rung, and the reasons in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_zeroladder.costmodel.job import OPTIMIZERS, PRECISIONS, Cluster, Model, RungSettings, Training
from lightning_zeroladder.costmodel.memory import ModelCount, state_bytes
from lightning_zeroladder.costmodel.peak import Term, memory_terms
from lightning_zeroladder.costmodel.step_time import StepTime, communication_s, step_time
from lightning_zeroladder.costmodel.traffic import StageSettings, TrafficModel

__all__ = ["FSDP_NAMES", "OWNERS", "Plan", "Row", "check", "make_plan"]

FSDP_NAMES = {0: "NO_SHARD", 1: "-", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
"""What FSDP calls a stage's layout; it has none like stage 1."""

OWNERS = "reduced to owners"
"""Name of the variant of stages 1 and 2 with ``use_multi_rank_bucket_allreduce: false``."""

_LIVE_PARAMETERS = 10**9
"""Default of ``stage3_max_live_parameters``."""

_FP32 = 4
_CLOSE = 0.02
"""Rungs whose expected throughput differs by less than this share are one as good as the other."""


@dataclass(frozen=True, slots=True)
class Row:
    """A rung with what is predicted for it.

    Attributes:
        name: Stage and settings in words.
        rung: The same as data.
        state_bytes: Weights, gradients and optimizer state per rank.
        terms: What makes up the peak.
        time: Seconds of an optimizer step.
        flows: Seconds of each kind of collective.
        fits: Whether the peak leaves the headroom.
    """

    name: str
    rung: RungSettings
    state_bytes: int
    terms: tuple[Term, ...]
    time: StepTime
    flows: tuple[tuple[str, float], ...]
    fits: bool

    @property
    def peak_bytes(self) -> int:
        """Predicted peak per rank."""
        return sum(term.nbytes for term in self.terms)


@dataclass(frozen=True, slots=True)
class Plan:
    """A prediction for a job.

    Attributes:
        rows: Rungs in the order of the ladder.
        choice: Index of the recommended one; None if none fits.
        reasons: Why, and what would change it, in sentences.
        tokens: Tokens per rank and optimizer step.
        limit_bytes: Memory that a rank may use.
    """

    rows: tuple[Row, ...]
    choice: int | None
    reasons: tuple[str, ...]
    tokens: int
    limit_bytes: int

    def tokens_per_s(self, row: Row, *, best: bool = False) -> float:
        """Tokens per second and GPU of a row."""
        return self.tokens / (row.time.best_s if best else row.time.expected_s)


def check(model: Model, training: Training, cluster: Cluster) -> None:
    """Check numbers that no job can have.

    Raises:
        ValueError: With what was given, what is allowed, and what to do.
    """
    positive = {
        "params": model.parameters,
        "gpus": cluster.world_size,
        "gpus_per_node": cluster.per_node,
        "hbm": cluster.memory_bytes,
        "flops": cluster.flops,
        "bandwidth": cluster.bytes_per_s,
        "micro_batch": training.micro_batch,
        "seq_len": training.sequence,
        "accumulate": training.accumulate,
    }
    for name, value in positive.items():
        if value <= 0:
            raise ValueError(f"{name}={value:g}: must be above 0.")
    if cluster.world_size > cluster.per_node and cluster.world_size % cluster.per_node:
        raise ValueError(
            f"gpus={cluster.world_size} is not a multiple of gpus_per_node={cluster.per_node}: give whole nodes."
        )
    for name, given, known in (
        ("optimizer", training.optimizer, OPTIMIZERS),
        ("precision", training.precision, PRECISIONS),
    ):
        if given not in known:
            raise ValueError(f"{name}={given!r} is not known; known are {', '.join(known)}.")


def make_plan(
    model: Model, training: Training, cluster: Cluster, *, headroom: float = 0.10, textbook: bool = False
) -> Plan:
    """Predict every rung and choose one.

    Args:
        model: Parameters and shapes.
        training: Batch, precision, optimizer.
        cluster: GPUs and links.
        headroom: Share of the memory that has to stay free.
        textbook: Use the round numbers of the ZeRO paper for traffic (2, 2, k + 1 and 3k times the parameters) in place
            of what deepspeed 0.19 sends.

    Raises:
        ValueError: For numbers that no job can have.
    """
    check(model, training, cluster)
    limit = int(cluster.memory_bytes * (1 - headroom))
    plain = [(name, rung) for name, rung in _rungs(model, textbook) if cluster.world_size > 1 or rung.stage == 0]
    rows = [_row(name, rung, model, training, cluster, limit, textbook) for name, rung in plain]
    if not any(row.fits for row in rows):
        rows += [_row(*item, model, training, cluster, limit, textbook) for item in _escalations(plain[-1], model)]
    choice = _choose(rows)
    return Plan(tuple(rows), choice, tuple(_reasons(rows, choice, model, training, cluster)), training.tokens, limit)


def _rungs(model: Model, textbook: bool) -> list[tuple[str, RungSettings]]:
    if textbook:
        stages = [StageSettings(stage, multi_rank_buckets=False, persistence_threshold=0) for stage in range(4)]
        return [(f"stage {settings.stage}", RungSettings(settings)) for settings in stages]
    rungs = [("stage 0", RungSettings(StageSettings(0)))]
    for stage in (1, 2):
        rungs.append((f"stage {stage}", RungSettings(StageSettings(stage))))
        single = StageSettings(stage, multi_rank_buckets=False)
        rungs.append((f"stage {stage}, {OWNERS}", RungSettings(single)))
    again = model.parameters > _LIVE_PARAMETERS
    return [*rungs, ("stage 3", RungSettings(StageSettings(3, refetch=again)))]


def _escalations(top: tuple[str, RungSettings], model: Model) -> list[tuple[str, RungSettings]]:
    """What the ladder goes on with: activation checkpointing, then offloading the optimizer, then parameters too."""
    name, rung = top
    found = []
    if model.shapes is not None:
        rung = replace(rung, checkpoint_activations=True)
        name = f"{name}, activation checkpointing"
        found.append((name, rung))
    found.append((f"{name}, optimizer on the host", replace(rung, offload_optimizer=True)))
    offloaded = replace(rung, offload_optimizer=True, offload_parameters=True)
    return [*found, (f"{name}, optimizer and parameters on the host", offloaded)]


def _row(
    name: str,
    rung: RungSettings,
    model: Model,
    training: Training,
    cluster: Cluster,
    limit: int,
    textbook: bool,
) -> Row:
    weight = PRECISIONS[training.precision]
    state = state_bytes(
        rung.stage,
        ModelCount(model.trainable, model.frozen),
        world_size=cluster.world_size,
        weight_bytes=weight,
        optimizer_bytes=OPTIMIZERS[training.optimizer] + (_FP32 if weight < _FP32 else 0),
    )
    traffic = TrafficModel(model.trainable, model.frozen)
    links = replace(cluster, latency_s=0.0) if textbook else cluster
    time = step_time(model, traffic, training, links, rung, ring=not textbook)
    flows = communication_s(traffic, training, links, rung, ring=not textbook)
    terms = memory_terms(model, training, cluster, rung)
    fits = sum(term.nbytes for term in terms) <= limit
    return Row(name, rung, state, terms, time, tuple(flows.items()), fits)


def _choose(rows: Sequence[Row]) -> int | None:
    """Return the fastest that fits; of those that are one as good as the other, the lowest."""
    fitting = [index for index, row in enumerate(rows) if row.fits]
    if not fitting:
        return None
    fastest = min(rows[index].time.expected_s for index in fitting)
    return next(index for index in fitting if rows[index].time.expected_s <= fastest * (1 + _CLOSE))


def _reasons(rows: Sequence[Row], choice: int | None, model: Model, training: Training, cluster: Cluster) -> list[str]:
    if choice is None:
        least = min(rows, key=lambda row: row.peak_bytes)
        missing = least.peak_bytes - cluster.memory_bytes
        words = f"is {missing / 1e9:.1f} GB more than a GPU has" if missing > 0 else "leaves too little free"
        biggest = max(least.terms, key=lambda term: term.nbytes)
        return [
            f"No rung fits: even '{least.name}' needs {least.peak_bytes / 1e9:.1f} GB, which {words}. Most of it "
            f"({biggest.nbytes / 1e9:.1f} GB) is {biggest.name}.",
            _what_helps(biggest),
        ]
    chosen = rows[choice]
    share = chosen.time.communication_s / chosen.time.compute_s
    reasons = [
        f"{chosen.name[0].upper()}{chosen.name[1:]} is the fastest that fits: {chosen.peak_bytes / 1e9:.1f} GB of "
        f"{cluster.memory_bytes / 1e9:.0f} GB, {chosen.time.communication_s:.2f} s of communication beside "
        f"{chosen.time.compute_s:.2f} s of compute per step ({100 * share:.0f} %)."
    ]
    lower = [row for row in rows[:choice] if not row.fits]
    if lower:
        last = lower[-1]
        reasons.append(f"{last.name[0].upper()}{last.name[1:]} would need {last.peak_bytes / 1e9:.1f} GB.")
    others = [row for row in rows if row.fits and row is not chosen]
    if others:
        second = min(others, key=lambda row: row.time.expected_s)
        slower = second.time.expected_s / chosen.time.expected_s - 1
        reasons.append(
            f"Next is {second.name}, {100 * slower:.1f} % slower." if slower >= 0 else f"{second.name} ties."
        )
    if chosen.rung.offload_optimizer:
        reasons.append("The time that state takes between host and device is not counted: it will be slower than that.")
    return [*reasons, *_changes(rows, chosen, training)]


def _what_helps(term: Term) -> str:
    if term.name == "activations":
        return "ZeRO does not divide activations: a smaller micro-batch, shorter sequences, or tensor parallelism do."
    if term.name == "communication buckets":
        return "Smaller buckets help: reduce_bucket_size is in elements."
    return "More GPUs divide it further; tensor parallelism divides a layer."


def _changes(rows: Sequence[Row], chosen: Row, training: Training) -> list[str]:
    """Say what would change the answer, where a change of one number does."""
    found = []
    stage_2 = [row for row in rows if row.rung.stage == 2]
    if chosen.rung.stage == 1 and stage_2 and training.accumulate > 1:
        found.append(
            f"With accumulation {training.accumulate} stage 2 sends its gradients {training.accumulate} times per "
            "step, stage 1 once: with less accumulation stage 2 comes closer."
        )
    if chosen.rung.stage == 2 and not any(row.fits for row in rows if row.rung.stage < 2):
        found.append("With a smaller micro-batch, whose activations leave room, stage 1 may fit and sends less.")
    if chosen.rung.stage == 3 and chosen.time.communication_s > chosen.time.compute_s:
        found.append("Communication is longer than compute: a larger micro-batch hides more of it.")
    return found
