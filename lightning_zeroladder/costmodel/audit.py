"""What was counted on the wire against what was predicted, and what the difference from the textbook is, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_zeroladder.costmodel.traffic import Collective, Flow, Moment, StageSettings, TrafficModel, flows

__all__ = ["TOLERANCE", "Audit", "Counted", "Line", "Place", "compare", "merge_backward", "textbook_multiple"]

TOLERANCE = 0.01
"""Relative error up to which a prediction counts as right: padding to a multiple of the ranks, and small tensors."""


class Place(StrEnum):
    """Where in an optimizer step a collective is called."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOUNDARY = "boundary"


@dataclass(frozen=True, slots=True)
class Counted:
    """Calls of one collective at one place, per rank and optimizer step.

    Attributes:
        elements: Elements sent over a ring.
        nbytes: The same in bytes.
        calls: Calls.
    """

    elements: float
    nbytes: float
    calls: float


@dataclass(frozen=True, slots=True)
class Line:
    """One collective at one place.

    Attributes:
        collective: Name of the operation.
        place: Where it is called.
        what: What it carries, as predicted; empty where nothing was predicted.
        predicted_elements: Per rank and optimizer step.
        predicted_bytes: The same in bytes.
        counted: What was seen.
    """

    collective: str
    place: Place
    what: str
    predicted_elements: float
    predicted_bytes: float
    counted: Counted

    @property
    def error(self) -> float | None:
        """Prediction against count, relative to the count; None where nothing was counted."""
        if self.counted.elements == 0:
            return None
        return self.predicted_elements / self.counted.elements - 1


@dataclass(frozen=True, slots=True)
class Audit:
    """The comparison for one stage.

    Attributes:
        settings: Stage and what changes its traffic.
        model: What travels.
        world_size: Ranks N.
        accumulate: Micro-batches per optimizer step k.
        release: Of DeepSpeed.
        lines: One for each collective and place.
    """

    settings: StageSettings
    model: TrafficModel
    world_size: int
    accumulate: int
    release: str
    lines: tuple[Line, ...]

    @property
    def predicted_elements(self) -> float:
        """Sum over collectives, per rank and optimizer step."""
        return sum(line.predicted_elements for line in self.lines)

    @property
    def counted_elements(self) -> float:
        """The same, counted."""
        return sum(line.counted.elements for line in self.lines)

    @property
    def error(self) -> float:
        """Prediction of the sum against its count, relative to the count."""
        return self.predicted_elements / self.counted_elements - 1 if self.counted_elements else float("inf")

    @property
    def confirmed(self) -> bool:
        """Whether the formulas hold, in the sum and for each collective at each place."""
        share = TOLERANCE * max(self.counted_elements, self.predicted_elements)
        return self.counted_elements > 0 and all(
            abs(line.predicted_elements - line.counted.elements) <= share for line in self.lines
        )

    @property
    def multiple(self) -> float:
        """Counted elements in multiples of the parameters, the ring's (N - 1) / N taken out."""
        return self._multiple(self.counted_elements)

    def _multiple(self, elements: float) -> float:
        return elements / (self.model.trainable + self.model.frozen) * self.world_size / (self.world_size - 1)

    def words(self) -> tuple[str, ...]:
        """Say whether the formulas hold, and how the release differs from the textbook."""
        said = [self._verdict()]
        book, formula = textbook_multiple(self.settings.stage, self.accumulate)
        if abs(self.multiple - book) <= TOLERANCE * book:
            said.append(f"That is what the ZeRO paper says: {book} times the parameters ({formula}).")
            return tuple(said)
        how = "more" if self.multiple > book else "less"
        said.append(
            f"The ZeRO paper says {book} times the parameters ({formula}), deepspeed {self.release} sends "
            f"{self.multiple:.2f} times: {100 * abs(self.multiple / book - 1):.0f} % {how}."
        )
        return (*said, *self._why())

    def _verdict(self) -> str:
        if self.confirmed:
            return f"Confirmed: counted and predicted traffic agree within {100 * max(abs(self.error), 1e-4):.2f} %."
        wrong = [
            f"{line.collective} in {line.place}: predicted {line.predicted_elements:,.0f} elements, counted "
            f"{line.counted.elements:,.0f}"
            for line in self.lines
            if abs(line.predicted_elements - line.counted.elements)
            > TOLERANCE * max(self.counted_elements, self.predicted_elements)
        ]
        return (
            f"Refuted: deepspeed {self.release} does not send what the formulas say ({'; '.join(wrong)}). Do not rely "
            "on the traffic of zeroladder plan with this release."
        )

    def _why(self) -> list[str]:
        """Name the setting that makes the difference, where the counted collectives show it."""
        grads = {line.collective for line in self.lines if line.what == "gradients" and line.counted.elements}
        stage = self.settings.stage
        if stage in (1, 2) and grads == {Collective.ALL_REDUCE}:
            return [
                "It all-reduces gradients, which sends each of them twice, where it could reduce each to its owner: "
                "use_multi_rank_bucket_allreduce: false in zero_optimization does (audit --owners counts it)."
            ]
        said = []
        if stage == 3:
            gathers = sum(
                line.counted.elements
                for line in self.lines
                if line.collective == Collective.ALL_GATHER and line.place is not Place.BOUNDARY
            )
            large = self.model.trainable - self.model.persistent
            rounds = gathers * self.world_size / (self.world_size - 1) / max(1, large) / self.accumulate
            if rounds < 1.5:
                said.append(
                    "Weights gathered for forward are still there in backward, because a model of "
                    f"{self.model.trainable:,} parameters is below stage3_max_live_parameters: they travel once per "
                    "micro-batch, not twice (zeroladder audit --refetch counts the other case)."
                )
            if self.model.persistent:
                said.append(
                    f"{self.model.persistent:,} of its {self.model.trainable:,} parameters are in tensors of at most "
                    f"{self.settings.persistence_threshold:,} elements (stage3_param_persistence_threshold): those "
                    "stay whole on every rank and are gathered once per optimizer step."
                )
        return said


def textbook_multiple(stage: int, accumulate: int) -> tuple[int, str]:
    """Return what the ZeRO paper sends per rank and optimizer step, in multiples of the parameters, and the formula.

    Rajbhandari et al. (2020), section 7, with k micro-batches per step.

    Raises:
        ValueError: If the stage is unknown.
    """
    k = accumulate
    books = {0: (2, "2"), 1: (2, "2"), 2: (k + 1, "k + 1"), 3: (3 * k, "3k")}
    if stage not in books:
        raise ValueError(f"stage={stage}: must be one of 0, 1, 2, 3.")
    return books[stage]


def compare(
    settings: StageSettings,
    model: TrafficModel,
    counted: Mapping[tuple[str, Place], Counted],
    *,
    world_size: int,
    accumulate: int,
    element_bytes: int,
    release: str,
) -> Audit:
    """Set counts beside predictions.

    Args:
        settings: Stage and what changes its traffic.
        model: What travels.
        counted: By collective and place, per rank and optimizer step.
        world_size: Ranks N.
        accumulate: Micro-batches per optimizer step k.
        element_bytes: Bytes of a weight and of a gradient on the wire.
        release: Of DeepSpeed.

    Raises:
        ValueError: If there are less than two ranks, or no micro-batch.
    """
    if world_size < 2 or accumulate < 1:
        raise ValueError(f"ranks={world_size}, accumulate={accumulate}: at least 2 ranks and 1 micro-batch are needed.")
    expected = flows(settings, model)
    keys = dict.fromkeys([*((str(flow.collective), _place(flow)) for flow in expected), *counted])
    lines = []
    for name, place in keys:
        here = [flow for flow in expected if (str(flow.collective), _place(flow)) == (name, place)]
        elements = sum(flow.sent(world_size) * _times(flow, accumulate) for flow in here)
        seen = counted.get((name, place), Counted(0, 0, 0))
        what = ", ".join(flow.what for flow in here)
        lines.append(Line(name, place, what, elements, elements * element_bytes, seen))
    return Audit(settings, model, world_size, accumulate, release, tuple(lines))


def _times(flow: Flow, accumulate: int) -> int:
    return accumulate if flow.moment is Moment.MICRO_BATCH else 1


def _place(flow: Flow) -> Place:
    if flow.moment is Moment.BOUNDARY:
        return Place.BOUNDARY
    return Place.BACKWARD if flow.in_backward else Place.FORWARD


def merge_backward(
    backward: Sequence[Mapping[str, Counted]], expected_at_boundary: frozenset[str]
) -> dict[tuple[str, Place], Counted]:
    """Tell what belongs to every backward from what belongs to the boundary.

    DeepSpeed reduces the gradients of stages 0 and 1 in the backward of the last micro-batch: what is called in that
    one alone is the boundary's.

    Args:
        backward: By collective, for each micro-batch of a step in order.
        expected_at_boundary: Collectives that are predicted at the boundary: with one micro-batch, the last one is
            every one, and the count alone cannot tell.
    """
    found = {}
    for name in dict.fromkeys(name for counts in backward for name in counts):
        counts = [counts.get(name, Counted(0, 0, 0)) for counts in backward]
        once = not any(count.calls for count in counts[:-1]) if len(counts) > 1 else name in expected_at_boundary
        place = Place.BOUNDARY if once else Place.BACKWARD
        found[name, place] = Counted(
            sum(count.elements for count in counts),
            sum(count.nbytes for count in counts),
            sum(count.calls for count in counts),
        )
    return found
