from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ladder_cases import SETTINGS, finite, ladders, ran, skipped, trial_results

from lightning_zeroladder.ladder import (
    Decision,
    LadderSettings,
    NothingFits,
    SkipKind,
    TrialResult,
    decide,
    decision_from_json,
    settings_from_json,
    single_device,
    to_json,
    trial_from_json,
)


@given(trial_results())
def test_trials_survive(trial: TrialResult) -> None:
    assert trial_from_json(json.loads(json.dumps(to_json(trial)))) == trial


@given(ladders)
def test_decisions_survive(trials: list[TrialResult]) -> None:
    decision: Decision
    try:
        decision = decide(trials, SETTINGS)
    except NothingFits:
        decision = single_device(SETTINGS, {})
    assert decision_from_json(json.loads(json.dumps(to_json(decision)))) == decision


@given(
    st.builds(
        LadderSettings,
        stages=st.lists(st.integers(0, 3)).map(tuple),
        steps_per_rung=st.integers(2, 500),
        warmup_steps=st.integers(0, 100),
        headroom=st.floats(0, 0.99),
        memory_limit_bytes=st.integers(1, 10**12),
        exhaustive=st.booleans(),
        tie=finite,
    )
)
def test_settings_survive(settings: LadderSettings) -> None:
    assert settings_from_json(json.loads(json.dumps(to_json(settings)))) == settings


def test_form() -> None:
    form = to_json(ran(2))
    assert form["rung"] == {"stage": 2, "settings": [], "checkpoint_activations": False}
    assert form["failure"] is None
    assert settings_from_json({"stages": [1], "unknown": 1}) == LadderSettings(stages=(1,))


def test_reports_from_before_the_escalations_are_read() -> None:
    form = json.loads(json.dumps(to_json(skipped(2, SkipKind.RUN_ENDED))))
    del form["rung"]["checkpoint_activations"], form["skip"]["reason"]
    assert trial_from_json(form) == skipped(2, SkipKind.RUN_ENDED)


def test_values_without_a_form_are_refused() -> None:
    @dataclass
    class Odd:
        value: object

    with pytest.raises(TypeError, match="no JSON form"):
        to_json(Odd(object()))  # type: ignore[arg-type]
