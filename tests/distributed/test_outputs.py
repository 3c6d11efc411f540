"""What a run leaves behind, and how memory limits and earlier decisions steer it."""

from __future__ import annotations

from typing import Any

import pytest
from harness import outcome, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("outputs")
    payload = {"folder": str(folder / "cases")}
    return run_ranks("output_cases:run", payload, ranks=2, timeout_s=240, tmp_path=folder)


def test_a_run_leaves_a_journal_a_report_and_a_config(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "files"):
        assert data["files"] == ["ds_config.json", "journal.jsonl", "report.json"]
        assert data["events"][0] == "begin"
        assert data["events"].count("trying") == data["events"].count("trial") == 4
        assert data["events"][-1] == "decision"
        assert data["complete"] is True
        assert data["context"] == [2, 1, "32-true"]
        assert data["parameters"] == data["expected_parameters"]
        assert data["optimizer"] == "AdamW"
        assert data["counted"] == [4, 4, 4, 4]
        assert data["units"] == [4.0] * 4
        assert min(data["peaks"]) > 100 << 20
        assert data["ds_stage"] == data["committed"]
        assert data["moves"] == (3 if data["committed"] == 3 else 4)


def test_scalars_reach_every_logger_and_the_instruments_leave(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "files"):
        expected = {
            f"zero_ladder/stage_{stage}/{name}"
            for stage in range(4)
            for name in ("samples_per_s", "step_s", "peak_bytes", "communication_s")
        }
        assert set(data["columns"]) == expected
        assert data["board"] == 1
        assert data["ladder_left"] is False


def test_an_earlier_decision_is_taken_over_without_a_trial(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "earlier_decision"):
        assert data["stage"] == data["decided"]
        assert data["moves"] == 0
        assert data["journal"] is False


def test_the_callback_profiles_a_fixed_stage_on_its_own(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "fixed_stage_profile"):
        assert data == {"stage": 2, "counted": 6, "left": False}


def test_where_no_rung_keeps_the_margin_the_smallest_is_taken(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "tight_memory"):
        assert data["fits"] is False
        assert data["committed"] == data["smallest"]
        assert sorted(data["verdicts"][:4]) == ["committed", "over margin", "over margin", "over margin"]
        # The model is a few thousand weights: no offload of theirs frees what a Python process holds.
        assert set(data["verdicts"][4:]) == {"skipped"}
        assert "no block of the model repeats" in data["words"][4]
        assert all(words.startswith("needs") for words in data["words"][5:])
        assert "What would close it" in data["reason"]


def test_a_rung_that_cannot_fit_is_not_tried(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "cannot_fit"):
        assert data["words"][0].endswith("not tried")
        assert data["words"][0].startswith("needs")
        assert 0 not in data["stages"]


def test_where_nothing_can_fit_the_run_ends_with_what_would_help(results: list[dict[str, Any]]) -> None:
    for words in outcome(results, "nothing_fits"):
        assert words.startswith("NothingFits: ")
        assert "GPUs" in words
        assert "Tensor parallelism of degree" in words


def test_configure_model_is_sharded_at_birth_only_where_nothing_else_holds_the_model(
    results: list[dict[str, Any]],
) -> None:
    for whole, sharded in zip(outcome(results, "born_whole"), outcome(results, "born_sharded"), strict=True):
        assert whole["sharded"] is False
        assert sharded["sharded"] is True
        assert sharded["first"] == 3
        # Same seed and data: the stage does not show in the losses beyond fp32 rounding.
        assert max(abs(a - b) for a, b in zip(whole["losses"], sharded["losses"], strict=True)) < 1e-6
        assert whole["sum"] == pytest.approx(sharded["sum"], abs=1e-3)


def test_a_callers_config_is_not_changed_and_may_repeat_the_accumulation(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "callers_config"):
        assert data == {"unchanged": True, "accumulate": 2}


def test_a_failed_rung_shows_its_exception(results: list[dict[str, Any]]) -> None:
    for data in outcome(results, "shows_the_real_exception"):
        assert data["stage"] == 2
        assert data["message"] == "OutOfMemoryError: 17 GiB more than there is"
        assert data["words"] == "out of memory in forward at step 1"


def test_weights_loaded_in_configure_model_work_or_the_error_says_what_to_write(results: list[dict[str, Any]]) -> None:
    for stages in outcome(results, "loads_whole"):
        assert {0, 1, 2, 3} <= set(stages)
    for words in outcome(results, "loads_in_shards"):
        assert words.startswith("configure_model() loaded weights into a model that is being created in shards")
        assert "load the weights afterwards" in words
        assert "size mismatch" in words
