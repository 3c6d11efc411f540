from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lightning_zeroladder.report import (
    RunReport,
    collect_hardware,
    collect_versions,
    read_report,
    report_to_json,
    write_report,
)


def test_round_trip_by_directory_and_by_file(tmp_path: Path, run_report: RunReport) -> None:
    run_dir = tmp_path / "runs" / "a"
    write_report(run_dir, run_report)
    assert read_report(run_dir) == run_report
    assert read_report(run_dir / "report.json") == run_report


def test_incomplete_report_stays_incomplete(tmp_path: Path, run_report: RunReport) -> None:
    write_report(tmp_path, replace(run_report, complete=False, moves=()))
    report = read_report(tmp_path)
    assert report.complete is False
    assert report.moves == ()


def test_files_written(tmp_path: Path, run_report: RunReport) -> None:
    write_report(tmp_path, run_report)
    assert sorted(os.listdir(tmp_path)) == ["ds_config.json", "report.json"]
    assert json.loads((tmp_path / "ds_config.json").read_text()) == run_report.ds_config
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["schema"] == 1
    assert written["moves"][1] == {
        "from_stage": 1,
        "to_stage": 2,
        "at_step": 400,
        "seconds": 2.25,
        "memory_not_returned_bytes": 4096,
    }


def test_second_write_replaces_the_first(tmp_path: Path, run_report: RunReport) -> None:
    write_report(tmp_path, replace(run_report, complete=False))
    write_report(tmp_path, run_report)
    assert read_report(tmp_path).complete is True


def test_value_that_json_cannot_express_leaves_the_old_report(tmp_path: Path, run_report: RunReport) -> None:
    write_report(tmp_path, run_report)
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_report(tmp_path, replace(run_report, complete=False, ds_config={"stage": object()}))
    assert read_report(tmp_path) == run_report
    assert sorted(os.listdir(tmp_path)) == ["ds_config.json", "report.json"]


def test_failed_replace_leaves_the_old_report_and_no_temporary_file(
    tmp_path: Path, run_report: RunReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(tmp_path, run_report)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path, replace(run_report, complete=False))
    assert sorted(os.listdir(tmp_path)) == ["ds_config.json", "report.json"]
    assert read_report(tmp_path) == run_report


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"report\.json") as caught:
        read_report(tmp_path)
    assert str(tmp_path / "report.json") in str(caught.value)
    with pytest.raises(FileNotFoundError, match="expected the directory of a run"):
        read_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{not json", "is not JSON: .* at line 1, column 2"),
        (b"\xff\xfe\x00", "expected UTF-8 text"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (b'{"schema": 7}', "has schema 7, expected 1"),
        (b'{"schema": 1, "complete": true}', "missing context, .*ds_config; found schema, complete"),
        (b"{}", "missing schema, .*; found none"),
    ],
)
def test_unreadable_file_is_named_with_what_was_found(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_report(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "report.json"))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("context", "precision"), "precision"),
        (("decision", "results", 0, "words"), "words"),
        (("decision", "reason"), "reason"),
        (("moves", 0, "seconds"), "seconds"),
    ],
)
def test_missing_inner_key_is_named(
    tmp_path: Path, run_report: RunReport, path: tuple[str | int, ...], words: str
) -> None:
    data = json.loads(json.dumps(report_to_json(run_report)))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=words) as caught:
        read_report(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'report.json'} is damaged")


def test_versions_name_python_and_the_packages() -> None:
    versions = collect_versions()
    assert list(versions) == ["python", "torch", "deepspeed", "lightning", "torchmetrics", "lightning_zeroladder"]
    assert versions["python"] == platform.python_version()
    assert versions["lightning"][0].isdigit()


def test_hardware_has_no_host_name() -> None:
    hardware = collect_hardware()
    assert hardware["memory_bytes"] == psutil.virtual_memory().total
    assert hardware["cpus"] == os.cpu_count()
    assert platform.node() not in hardware.values()
    assert "hostname" not in hardware
