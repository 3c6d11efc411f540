"""The ladder's dataclasses to plain JSON values and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from lightning_zeroladder.ladder.types import (
    Decision,
    Failure,
    FailureKind,
    LadderSettings,
    Measurement,
    Rung,
    RungResult,
    Skip,
    SkipKind,
    Statistic,
    StepBreakdown,
    TrialResult,
    Verdict,
)

__all__ = ["JSON", "decision_from_json", "settings_from_json", "to_json", "trial_from_json"]

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


def to_json(obj: Decision | LadderSettings | Measurement | Rung | RungResult | TrialResult) -> dict[str, JSON]:
    """A dataclass of the ladder as a dict of JSON values: enums as their values, tuples as lists."""
    return {field.name: _value(getattr(obj, field.name)) for field in fields(obj)}


def settings_from_json(data: Mapping[str, Any]) -> LadderSettings:
    """Inverse of ``to_json`` for settings; a key that is missing takes its default."""
    names = {field.name for field in fields(LadderSettings)}
    known = {name: value for name, value in data.items() if name in names}
    if "stages" in known:
        known["stages"] = tuple(known["stages"])
    return LadderSettings(**known)


def trial_from_json(data: Mapping[str, Any]) -> TrialResult:
    """Inverse of ``to_json`` for a trial."""
    measurement, failure, skip = data.get("measurement"), data.get("failure"), data.get("skip")
    return TrialResult(
        rung=_rung(data["rung"]),
        measurement=None if measurement is None else _measurement(measurement),
        failure=None if failure is None else Failure(**{**failure, "kind": FailureKind(failure["kind"])}),
        skip=None if skip is None else _skip(skip),
    )


def decision_from_json(data: Mapping[str, Any]) -> Decision:
    """Inverse of ``to_json`` for a decision."""
    results = tuple(
        RungResult(trial_from_json(row["trial"]), Verdict(row["verdict"]), row["words"]) for row in data["results"]
    )
    return Decision(rung=_rung(data["rung"]), fits=data["fits"], reason=data["reason"], results=results)


def _value(value: Any) -> JSON:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form here; the ladder's dataclasses hold plain values only.")


def _rung(data: Mapping[str, Any]) -> Rung:
    return Rung(
        stage=data["stage"],
        settings=tuple((name, value) for name, value in data["settings"]),
        checkpoint_activations=data.get("checkpoint_activations", False),  # missing in reports of early versions
    )


def _measurement(data: Mapping[str, Any]) -> Measurement:
    parts = {"step_s": Statistic(**data["step_s"]), "breakdown": StepBreakdown(**data["breakdown"])}
    return Measurement(**{**data, **parts})


def _skip(data: Mapping[str, Any]) -> Skip:
    rival = data.get("rival")
    return Skip(
        kind=SkipKind(data["kind"]),
        needed_bytes=data.get("needed_bytes"),
        best_case_gain=data.get("best_case_gain"),
        rival=None if rival is None else _rung(rival),
        reason=data.get("reason"),
    )
