"""What the launching process and the ranks of a run tell each other, as files in a temporary folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from lightning_zeroladder.proof.plan import Layout, Plan, Request

__all__ = ["Job", "Outcome", "Role"]


class Role(StrEnum):
    """What a run is for."""

    UNINTERRUPTED = "uninterrupted"
    RESUMED = "resumed"
    REPEATED = "repeated"
    """The uninterrupted run once more: tells whether the job gives the same losses twice."""
    CONTROL = "control"
    """Resumed where it was saved: tells whether it is the change of layout that makes the difference."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the user's job.

    Attributes:
        role: What it is for.
        configs: LightningCLI configs.
        arguments: Further arguments for LightningCLI.
        folder: Folder of the proof, shared by its runs.
        request: What was asked for.
        plan: None in the first run, which makes it when it has read the config.
        batch_size: Samples per micro-batch as DeepSpeed is told; None in the first run, which asks the dataloader.
    """

    role: Role
    configs: tuple[str, ...]
    arguments: tuple[str, ...]
    folder: str
    request: Request
    plan: Plan | None = None
    batch_size: int | None = None

    @property
    def records(self) -> bool:
        """Whether this run reads the user's data and writes it down for the others."""
        return self.plan is None

    @property
    def resumes(self) -> bool:
        """Whether this run begins with the checkpoint."""
        return self.role in (Role.RESUMED, Role.CONTROL)

    @property
    def devices(self) -> int:
        """Ranks of this run."""
        return self.layout(self.plan).devices if self.plan is not None else self.request.devices

    def layout(self, plan: Plan) -> Layout:
        """Return the layout of this run."""
        return plan.after if self.role is Role.RESUMED else plan.before

    def first_step(self, plan: Plan) -> int:
        """Return the optimizer steps that were taken before this run begins."""
        return plan.saved_after if self.resumes else 0

    @property
    def place(self) -> Path:
        """Folder of this run."""
        return Path(self.folder) / self.role

    @property
    def batches(self) -> Path:
        """Folder of the recorded micro-batches."""
        return Path(self.folder) / "batches"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint, saved in the middle of the first run."""
        return Path(self.folder) / "half.ckpt"

    @property
    def progress(self) -> Path:
        """File with the optimizer steps taken so far."""
        return self.place / "progress.txt"

    def output(self, rank: int) -> Path:
        """File with what a rank printed."""
        return self.place / f"output.{rank}.txt"

    def problem(self, rank: int) -> Path:
        """File in which a rank says, in words, why it cannot go on."""
        return self.place / f"problem.{rank}.txt"

    def outcome(self, rank: int) -> Path:
        """File with the outcome of a rank."""
        return self.place / f"outcome.{rank}.json"

    def write(self) -> Path:
        """Make the folder of this run and write the job into it; returns the file."""
        self.place.mkdir()
        path = self.place / "job.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            Role(values["role"]),
            tuple(values["configs"]),
            tuple(values["arguments"]),
            values["folder"],
            Request(**values["request"]),
            _plan(values["plan"]),
            values["batch_size"],
        )


def _plan(values: Mapping[str, Any] | None) -> Plan | None:
    if values is None:
        return None
    return Plan(Layout(**values["before"]), Layout(**values["after"]), values["steps"], values["saved_after"])


@dataclass(slots=True)
class Outcome:
    """What a rank found.

    Attributes:
        plan: The plan that it followed.
        losses: Loss of each micro-batch that it took, by the number of the micro-batch within the whole run.
        state: Checksums of the training state: when it was saved, or right after it was loaded. From rank 0.
        precision: Lightning's precision.
        batch_size: Samples per micro-batch as DeepSpeed knows them.
        strategy: Strategy of the config, where it is another one than zero_auto.
    """

    plan: Plan
    losses: dict[int, float] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    precision: str = ""
    batch_size: int = 1
    strategy: str | None = None

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Read what `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        plan = _plan(values.pop("plan"))
        assert plan is not None
        losses = {int(number): loss for number, loss in values.pop("losses").items()}
        return cls(plan, losses, **values)
