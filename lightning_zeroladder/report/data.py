"""The report of a run: what is written beside it and read back by ``zeroladder report``.

Neither torch nor deepspeed is imported, so that reading a report starts quickly and works on any machine.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from lightning_zeroladder.ladder.serialize import decision_from_json, settings_from_json, to_json
from lightning_zeroladder.ladder.types import Decision, LadderSettings
from lightning_zeroladder.versions import collect_versions

__all__ = [
    "SCHEMA",
    "Move",
    "RunContext",
    "RunReport",
    "collect_hardware",
    "collect_versions",
    "read_report",
    "report_to_json",
    "write_report",
]

SCHEMA = 1
REPORT_NAME = "report.json"
DS_CONFIG_NAME = "ds_config.json"
_KEYS = ("schema", "complete", "context", "settings", "decision", "moves", "ds_config")


@dataclass(frozen=True, slots=True)
class Move:
    """One change of rung.

    Attributes:
        from_stage: ZeRO stage before.
        to_stage: ZeRO stage after.
        at_step: Optimizer steps of the run completed at that point.
        seconds: Time from the end of the last step on the old rung until the new one was ready; the slowest rank's.
        memory_not_returned_bytes: Memory of the old rung still held after its tear-down; the largest rank's.
    """

    from_stage: int
    to_stage: int
    at_step: int
    seconds: float
    memory_not_returned_bytes: int


@dataclass(frozen=True, slots=True)
class RunContext:
    """What the figures of a report depend on.

    Attributes:
        world_size: Data-parallel ranks (N).
        nodes: Machines they run on.
        accumulate: Micro-batches per optimizer step (k).
        precision: Lightning's name, such as ``bf16-mixed``.
        parameters: Elements of all parameters, summed over the shards.
        trainable_parameters: Elements of those that receive gradients.
        device: Device type, ``cuda`` or ``cpu``.
        optimizer: Class name of the optimizer.
        versions: Package name to version.
        hardware: What :func:`collect_hardware` returned.
    """

    world_size: int
    nodes: int
    accumulate: int
    precision: str
    parameters: int
    trainable_parameters: int
    device: str
    optimizer: str
    versions: dict[str, str]
    hardware: dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything that a run says about its ladder.

    Attributes:
        schema: Version of the file format, :data:`SCHEMA`.
        complete: False when the run ended before the ladder did.
        context: What the figures depend on.
        settings: What the user asked of the ladder.
        decision: What was chosen, why, and one result per rung.
        moves: Changes of rung, in the order in which they happened.
        ds_config: DeepSpeed configuration of the chosen rung.
    """

    schema: int
    complete: bool
    context: RunContext
    settings: LadderSettings
    decision: Decision
    moves: tuple[Move, ...]
    ds_config: dict[str, Any]


def report_to_json(report: RunReport) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings and numbers, in the layout of ``report.json``."""
    return {
        "schema": report.schema,
        "complete": report.complete,
        "context": asdict(report.context),
        "settings": to_json(report.settings),
        "decision": to_json(report.decision),
        "moves": [asdict(move) for move in report.moves],
        "ds_config": report.ds_config,
    }


def write_report(run_dir: Path, report: RunReport) -> None:
    """Write ``report.json`` and ``ds_config.json`` into ``run_dir``, which is created when missing.

    Each file is replaced as a whole: a reader, or a run that is killed meanwhile, sees the old or the new one.

    Raises:
        OSError: If the directory cannot be written to.
        TypeError: If ``ds_config`` holds a value that JSON cannot express.
    """
    texts = {DS_CONFIG_NAME: _dump(report.ds_config), REPORT_NAME: _dump(report_to_json(report))}
    run_dir.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        _replace(run_dir / name, text)


def read_report(path: Path) -> RunReport:
    """Read the report of a run.

    Args:
        path: Directory of the run, or its ``report.json``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no report that this version can read.
    """
    file = path / REPORT_NAME if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no report at {file}: expected the directory of a run, which holds {REPORT_NAME}, or that file itself"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not JSON: expected UTF-8 text, found other bytes ({error.reason})") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    _check(data, file)
    try:
        return _from_json(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        missing = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{file} is damaged: expected a report of schema {SCHEMA}, but {missing}") from error


def collect_hardware() -> dict[str, str | int | float]:
    """Describe this machine, without its name.

    Returns:
        ``platform``, ``cpus`` (logical) and ``memory_bytes``; where torch is loaded and sees a CUDA device also
        ``gpus``, ``gpu`` (name of the current one) and ``gpu_memory_bytes``.
    """
    hardware: dict[str, str | int | float] = {
        "platform": platform.platform(),
        "cpus": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        device = torch.cuda.current_device()
        hardware["gpus"] = torch.cuda.device_count()
        hardware["gpu"] = torch.cuda.get_device_name(device)
        hardware["gpu_memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return hardware


def _check(data: object, file: Path) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{file} is not a report: expected a JSON object, found {type(data).__name__}")
    if "schema" in data and data["schema"] != SCHEMA:
        raise ValueError(
            f"{file} has schema {data['schema']!r}, expected {SCHEMA}: read it with the version of "
            "lightning_zeroladder that wrote it"
        )
    missing = [key for key in _KEYS if key not in data]
    if missing:
        found = ", ".join(data) or "none"
        raise ValueError(f"{file} is not a report: missing {', '.join(missing)}; found {found}")


def _from_json(data: Mapping[str, Any]) -> RunReport:
    return RunReport(
        schema=data["schema"],
        complete=data["complete"],
        context=RunContext(**data["context"]),
        settings=settings_from_json(data["settings"]),
        decision=decision_from_json(data["decision"]),
        moves=tuple(Move(**move) for move in data["moves"]),
        ds_config=data["ds_config"],
    )


def _dump(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _replace(file: Path, text: str) -> None:
    # The temporary file lies beside the target because os.replace is atomic within one file system only.
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
