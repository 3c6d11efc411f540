"""Checkpoints in every layout, every kind of damage, and what may come of it: the generator of the fault campaign.

A corruption has to end in a clear error that names the file or its folder, or in a result that equals the undamaged one
bit for bit. A process killed while it converts or saves has to leave nothing or something whole.
"""

from __future__ import annotations

import os
import random
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any

import torch

from lightning_zeroladder.checkpoint.archive import Archive, Span
from lightning_zeroladder.checkpoint.converting import convert
from lightning_zeroladder.checkpoint.errors import BadCheckpoint, CheckpointMismatch
from lightning_zeroladder.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    describe_file,
    read_manifest,
    write_manifest,
)
from lightning_zeroladder.checkpoint.opening import open_checkpoint
from lightning_zeroladder.checkpoint.pickles import Opaque, TensorRef, global_name, is_global
from lightning_zeroladder.checkpoint.reader import Reader, verify
from lightning_zeroladder.checkpoint.state import SavedTensor
from lightning_zeroladder.checkpoint.writer import write_archive

__all__ = [
    "TAG",
    "Campaign",
    "Fault",
    "Job",
    "Kind",
    "Outcome",
    "Verdict",
    "files_of",
    "make_layouts",
    "read_whole",
]

TAG = "checkpoint"

# Checkpoints ----------------------------------------------------------------------------------------------------

GROUPS: list[dict[str, tuple[int, ...]]] = [
    {"embed.weight": (11, 6), "fc.weight": (5, 6), "fc.bias": (5,)},
    {"norm.weight": (6,), "scale": (1,)},
]
FROZEN = {"frozen.weight": (4, 3)}
TIED = {"head.weight": "embed.weight"}


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained. One rank without frozen weights leaves a checkpoint in which little would be missed."""

    ranks: int = 2
    precision: torch.dtype = torch.bfloat16
    frozen: bool = True

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.precision}, {'frozen weights' if self.frozen else 'all trained'}"


def make_stage_0(root: Path, seed: int, job: Job) -> None:
    """Save a checkpoint of stage 0 as DeepSpeed and Lightning would, and a manifest as ours."""
    random_numbers = torch.Generator().manual_seed(seed)

    def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=random_numbers).to(dtype)

    masters = [[values(shape) for shape in group.values()] for group in GROUPS]
    module: OrderedDict[str, torch.Tensor] = OrderedDict()
    for group, tensors in zip(GROUPS, masters, strict=True):
        module.update((name, tensor.to(job.precision)) for name, tensor in zip(group, tensors, strict=True))
    module.update((name, module[of]) for name, of in TIED.items())
    if job.frozen:
        module.update((name, values(shape, job.precision)) for name, shape in FROZEN.items())
    buffers = {"norm.mean": values((6,)), "norm.batches": torch.tensor(40 + seed)}
    module.update(buffers)
    optimizer = _stage_0_optimizer(masters, values)
    if job.precision != torch.float32:
        outer = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 7, "optimizer_state_dict": optimizer}
        optimizer = {**outer, "fp32_groups": masters}
    tree = {
        **{"module": module, "buffer_names": list(buffers), "optimizer": optimizer, "param_shapes": None},
        **{"frozen_param_shapes": None, "shared_params": None, "frozen_param_fragments": None, "lr_scheduler": None},
        **{"data_sampler": None, "random_ltd": None, "skipped_steps": 0, "global_steps": 7, "global_samples": 56},
        **{"dp_world_size": job.ranks, "mp_world_size": 1, "ds_version": "0.19.8"},
        "ds_config": {"zero_optimization": {"stage": 0}, "gradient_clipping": 1.0},
        **{"epoch": 1, "global_step": 7, "pytorch-lightning_version": "2.6.6", "loops": {"fit": {"done": (3, 4)}}},
        "callbacks": {"Seen": {"scores": values((3,)), "best": Path("best.ckpt")}},
    }
    (root / TAG).mkdir(parents=True)
    torch.save(tree, root / TAG / "mp_rank_00_model_states.pt")
    write_manifest(
        root / TAG,
        Manifest(
            **{"kind": "native", "stage": 0, "world_size": job.ranks, "accumulate": 1, "micro_batch": 4},
            **{"global_samples": 56, "global_steps": 7, "precision": "bf16-mixed", "optimizer": "AdamW"},
            groups=[list(group) for group in GROUPS],
            parameters={name: {"shape": list(value.shape)} for name, value in module.items() if name not in buffers},
            aliases=TIED,
            versions={"torch": "2.6"},
            files=[describe_file(root / TAG / "mp_rank_00_model_states.pt", root / TAG)],
        ),
    )
    (root / "latest").write_text(TAG)


def _stage_0_optimizer(masters: list[list[torch.Tensor]], values: Callable[..., torch.Tensor]) -> dict[str, Any]:
    numbers = count()
    param_groups, state = [], {}
    for index, tensors in enumerate(masters):
        param_groups.append({"lr": 0.1 + index, "betas": (0.9, 0.99), "params": [next(numbers) for _ in tensors]})
        for number, tensor in zip(param_groups[-1]["params"], tensors, strict=True):
            moments = {"exp_avg": values(tuple(tensor.shape)), "exp_avg_sq": values(tuple(tensor.shape)).square()}
            state[number] = {"step": torch.tensor(7.0), **moments}
    return {"state": state, "param_groups": param_groups}


def save_again_with_torch(folder: Path) -> None:
    """Write every archive that holds no object of DeepSpeed's with ``torch.save``, and the manifest anew."""
    for path in sorted(folder.rglob("*.pt")):
        try:
            tree = torch.load(path, weights_only=True)
        except Exception:
            continue
        torch.save(tree, path)
    manifest = read_manifest(folder)
    assert manifest is not None
    entries = [describe_file(folder / entry.name, folder) for entry in manifest.files]
    write_manifest(folder, replace(manifest, files=entries))


def as_deepspeed_converts(root: Path) -> None:
    """Take from a universal checkpoint what DeepSpeed's own converter does not write."""
    folder = root / f"{TAG}_universal"
    (folder / MANIFEST).unlink()
    (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    path = folder / "zero" / "optimizer_state.pt"
    tree = Archive(path).tree
    del tree["lightning_zeroladder"]
    with Reader() as reader:
        write_archive(path.with_suffix(".new"), tree, reader)
    path.with_suffix(".new").rename(path)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint is laid out, and to which stage and world size it is converted in the campaign."""

    stage: int | None
    to_stage: int
    to_ranks: int


LAYOUTS = {
    "stage 0": Layout(0, 3, 3),
    "stage 1": Layout(1, 2, 3),
    "stage 2": Layout(2, 0, 2),
    "stage 3": Layout(3, 1, 1),
    "universal": Layout(None, 3, 2),
    "DeepSpeed's universal": Layout(None, 2, 1),
}


def make_layouts(root: Path, seed: int, job: Job) -> dict[str, Path]:
    """Make the same checkpoint in every layout; returns the folder of each."""
    first = root / "stage 0"
    make_stage_0(first, seed, job)
    made = {"stage 0": first}
    for name, layout in LAYOUTS.items():
        if layout.stage == 0:
            continue
        made[name] = root / name
        convert(first, made[name], to_stage=layout.stage, workers=1)
        save_again_with_torch(made[name] / (TAG if layout.stage else f"{TAG}_universal"))
    as_deepspeed_converts(made["DeepSpeed's universal"])
    return made


# What a checkpoint holds ----------------------------------------------------------------------------------------


def read_whole(path: Path) -> dict[str, Any]:
    """Open a checkpoint, read everything in it, verify it, and return it as plain values."""
    state = open_checkpoint(path).state
    with Reader() as reader:
        parameters = {
            item.name: (item.shape, item.group, _plain([item.tensors, item.others, item.scalars], reader))
            for item in state.parameters.values()
        }
        told = {name: getattr(state, name) for name in ("kind", "stage", "world_size", "counters", "precision")}
        parts = ("groups", "scaler", "buffers", "buffers_of_rank", "extras", "client", "common", "aliases")
        content = {name: _plain(getattr(state, name), reader) for name in parts}
        verify(reader.account, reader)
    return {"parameters": parameters, **told, **content}


def _plain(value: Any, reader: Reader) -> Any:
    if isinstance(value, TensorRef):
        whole = value if value.contiguous else value.storage_tensor()
        return value.dtype, value.shape, value.stride, _read(reader, [value.source.span(whole)])
    if isinstance(value, SavedTensor):
        return value.dtype, value.numel, _read(reader, value.locate(0, value.numel))
    if isinstance(value, Opaque):
        parts = (value.args, value.state, value.content, value.pairs)
        return global_name(value), value.called, *(_plain(part, reader) for part in parts)
    if is_global(value):
        return "name", global_name(value)
    if isinstance(value, dict):
        return [(key, _plain(item, reader)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(item, reader) for item in value]
    return value


def _read(reader: Reader, spans: list[Span]) -> bytes:
    target = bytearray(sum(span.nbytes for span in spans))
    reader.read_into(spans, memoryview(target))
    return bytes(target)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder by its relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def listing(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return what is in a folder without reading it: names, kinds, sizes and times of change."""
    entries = ((path, path.lstat()) for path in sorted(folder.rglob("*")))
    return [(str(path), stat.st_mode, stat.st_size, stat.st_mtime_ns) for path, stat in entries]


# Corruptions ----------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    """A kind of damage."""

    MISSING = "missing file"
    CUT = "truncated file"
    EMPTY = "file of zero length"
    BIT = "flipped bit anywhere"
    BIT_TEXT = "flipped bit in latest or manifest"
    BIT_HEADER = "flipped bit in a record's header"
    BIT_DIRECTORY = "flipped bit in the zip directory"
    BIT_PICKLE = "flipped bit in a pickle"
    BIT_TENSOR = "flipped bit in a tensor"
    SWAPPED = "file of another run"
    OTHER_WORLD = "file of another world size"
    LEFTOVER = "file left over"
    TEMPORARY = "temporary folder left over"
    FOLDER = "folder in place of a file"
    DANGLING = "symbolic link to nowhere"
    UNREADABLE = "file without permission"
    APPENDED = "garbage at the end"


_BY_MANIFEST = (Kind.SWAPPED, Kind.OTHER_WORLD)
"""What can be noticed for certain only where there is a manifest."""

_MAY_NAME_OTHERS = (Kind.MISSING, Kind.LEFTOVER, *_BY_MANIFEST)
"""Where a message can name the files that are there, or the one of two that do not fit which is not the odd one."""

_IN_ARCHIVES = (Kind.BIT_HEADER, Kind.BIT_DIRECTORY, Kind.BIT_PICKLE, Kind.BIT_TENSOR)


@dataclass(frozen=True, slots=True)
class Fault:
    """A corruption.

    Attributes:
        kind: What is done.
        layout: To which checkpoint.
        manifest: Whether that has a manifest.
        name: To which file, relative to the checkpoint.
        at: Position in the file, in bits where a bit is flipped.
        source: Where the content comes from that is put there.
    """

    kind: Kind
    layout: str
    manifest: bool
    name: str
    at: int = 0
    source: Path | None = None

    def __str__(self) -> str:
        of = "with manifest" if self.manifest else "without manifest"
        origin = f" from {self.source.parents[1].name}" if self.kind is Kind.LEFTOVER and self.source else ""
        return f"{self.kind}{origin}, {self.name} at {self.at} of {self.layout} {of}"

    def apply(self, root: Path) -> None:
        """Do it to a copy of the checkpoint."""
        path = root / self.name
        if self.kind in (Kind.MISSING, Kind.FOLDER, Kind.DANGLING):
            path.unlink()
        if self.kind is Kind.CUT:
            os.truncate(path, self.at)
        elif self.kind is Kind.EMPTY:
            os.truncate(path, 0)
        elif self.source is not None:
            shutil.copyfile(self.source, path)
        elif self.kind in (Kind.FOLDER, Kind.TEMPORARY):
            path.mkdir()
        elif self.kind is Kind.DANGLING:
            path.symlink_to(path.with_name("nowhere"))
        elif self.kind is Kind.UNREADABLE:
            path.chmod(0)
        elif self.kind is Kind.APPENDED:
            with path.open("ab") as file:
                file.write(random.Random(self.at).randbytes(1 + self.at))
        elif self.kind.name.startswith("BIT"):
            data = bytearray(path.read_bytes())
            data[self.at // 8] ^= 1 << self.at % 8
            path.write_bytes(data)


def _places(path: Path) -> dict[Kind, list[tuple[int, int]]]:
    """Return where in an archive which kind of content is, as byte ranges."""
    archive = Archive(path)
    with zipfile.ZipFile(path) as file:
        starts = sorted(info.header_offset for info in file.infolist())
        directory = file.start_dir
    records = sorted(archive.records.values(), key=lambda record: record.start)
    tensors = [(item.start, item.start + item.nbytes) for item in records if item.name.startswith("data/")]
    pickle = archive.records["data.pkl"]
    return {
        Kind.BIT_HEADER: [(start, record.start) for start, record in zip(starts, records, strict=True)],
        Kind.BIT_DIRECTORY: [(directory, archive.nbytes)],
        Kind.BIT_PICKLE: [(pickle.start, pickle.start + pickle.nbytes)],
        Kind.BIT_TENSOR: [span for span in tensors if span[0] < span[1]],
    }


# Outcomes -------------------------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """What came of a corruption or a kill."""

    FILE = "error naming the file"
    FOLDER = "error naming its folder"
    WHOLE = "whole result"
    NOTHING = "nothing left"
    BAD = "BAD"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it, by which action, in words."""

    what: str
    action: str
    verdict: Verdict
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.action}: {self.verdict}: {self.detail}"


class Campaign:
    """Checkpoints to damage, and what they hold while they are whole.

    Args:
        root: An empty folder.
        job: What was trained.
    """

    def __init__(self, root: Path, job: Job) -> None:
        self.job = job
        self._root = root
        self._runs = {
            "this": make_layouts(root / "this", 1, job),
            "other": make_layouts(root / "other", 2, job),
            "wider": make_layouts(root / "wider", 1, replace(job, ranks=job.ranks + 1)),
        }
        self._bare = {name: self._without_manifest(name, path) for name, path in self._runs["this"].items()}
        self._expected: dict[tuple[str, bool], dict[str, Any]] = {}

    def _without_manifest(self, name: str, path: Path) -> Path:
        bare = self._root / "bare" / name
        shutil.copytree(path, bare)
        for manifest in bare.rglob(MANIFEST):
            manifest.unlink()
        return bare

    def source(self, layout: str, manifest: bool) -> Path:
        """Return an undamaged checkpoint."""
        return self._runs["this"][layout] if manifest else self._bare[layout]

    @property
    def variants(self) -> list[tuple[str, bool]]:
        """Layouts, each with and without manifest."""
        return [(layout, manifest) for manifest in (True, False) for layout in LAYOUTS if self._has(layout, manifest)]

    def _has(self, layout: str, manifest: bool) -> bool:
        return not manifest or any(self._runs["this"][layout].rglob(MANIFEST))

    def faults(self, count: int, seed: int = 0) -> Iterator[Fault]:
        """Yield corruptions, no two alike, spread over kinds and layouts; the same ones for the same seed."""
        rounds = [[(variant, kind) for kind in self._kinds(*variant)] for variant in self.variants]
        chance, seen = random.Random(seed), set()
        for index in range(count):
            of_variant = rounds[index % len(rounds)]
            (layout, manifest), kind = of_variant[(index // len(rounds)) % len(of_variant)]
            fault = self._fault(kind, layout, manifest, chance)
            while fault in seen:  # there are only so many files to take away
                kind = chance.choice([kind, Kind.BIT])
                fault = self._fault(kind, layout, manifest, chance)
            seen.add(fault)
            yield fault

    def _kinds(self, layout: str, manifest: bool) -> list[Kind]:
        left_out = set(() if manifest else _BY_MANIFEST)
        if LAYOUTS[layout].stage is not None:
            left_out.add(Kind.TEMPORARY)
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            left_out.add(Kind.UNREADABLE)  # nothing is forbidden to root
        return [kind for kind in Kind if kind not in left_out]

    def _fault(self, kind: Kind, layout: str, manifest: bool, chance: random.Random) -> Fault:
        source = self.source(layout, manifest)
        files = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*")) if path.is_file()]
        if kind is Kind.TEMPORARY:
            return Fault(kind, layout, manifest, f"{TAG}_universal/tmp")
        if kind is Kind.LEFTOVER:
            folder = next(iter(sorted(source.glob("checkpoint*"))))
            left = [path for path in self._left_over() if not (folder / path.name).exists()]
            path = chance.choice(left)
            return Fault(kind, layout, manifest, f"{folder.name}/{path.name}", source=path)
        if kind in _BY_MANIFEST:
            other = self._runs["other" if kind is Kind.SWAPPED else "wider"][layout]
            name = chance.choice([name for name in files if (other / name).exists() and "/" in name])
            return Fault(kind, layout, manifest, name, source=other / name)
        if kind in _IN_ARCHIVES:
            name = chance.choice([name for name in files if name.endswith(".pt")])
            spans = _places(source / name)[kind]
            start, end = chance.choice(spans or _places(source / name)[Kind.BIT_PICKLE])
            return Fault(kind, layout, manifest, name, chance.randrange(8 * start, 8 * end))
        if kind is Kind.BIT_TEXT:
            files = [name for name in files if not name.endswith(".pt")]
        name = chance.choice(files)
        size = (source / name).stat().st_size
        ends = {Kind.CUT: size, Kind.BIT: 8 * size, Kind.BIT_TEXT: 8 * size, Kind.APPENDED: 300}
        return Fault(kind, layout, manifest, name, chance.randrange(ends.get(kind, 1)))

    def _left_over(self) -> list[Path]:
        return sorted(
            path for name in ("stage 1", "stage 3") for path in (self._runs["wider"][name] / TAG).glob("*.pt")
        )

    # What comes of them

    def judge(self, fault: Fault, work: Path) -> list[Outcome]:
        """Damage a copy of a checkpoint, read and convert it, and compare.

        Args:
            fault: What to do.
            work: An empty folder.
        """
        root = work / "ckpt"
        shutil.copytree(self.source(fault.layout, fault.manifest), root)
        differs = fault.source is None or fault.source.read_bytes() != (
            (root / fault.name).read_bytes() if (root / fault.name).exists() else None
        )
        fault.apply(root)
        before = listing(root)
        expected = [self.expected(fault.layout, fault.manifest)]
        if fault.name.endswith(MANIFEST):
            expected.append(self.expected(fault.layout, False))
        outcomes = []
        for action, perform in self._actions(fault.layout).items():
            outcome = self._outcome(fault, root, work, action, perform, [entry[action] for entry in expected])
            if outcome.verdict is Verdict.WHOLE and fault.kind in _BY_MANIFEST and differs:
                outcome = replace(outcome, verdict=Verdict.BAD, detail="the other run's file was not noticed")
            outcomes.append(outcome)
        if listing(root) != before:
            outcomes.append(Outcome(f"{fault} ({self.job})", "all", Verdict.BAD, "the source was changed"))
        return outcomes

    def expected(self, layout: str, manifest: bool) -> dict[str, Any]:
        """Return what each action returns for the undamaged checkpoint."""
        if (layout, manifest) not in self._expected:
            work = self._root / "expected" / f"{layout} {manifest}"
            work.mkdir(parents=True)
            source = work / "ckpt"
            shutil.copytree(self.source(layout, manifest), source)
            self._expected[layout, manifest] = {
                action: perform(source, work / "out" / action) for action, perform in self._actions(layout).items()
            }
        return self._expected[layout, manifest]

    def _actions(self, layout: str) -> dict[str, Callable[[Path, Path], Any]]:
        target = LAYOUTS[layout]

        def to_universal(source: Path, out: Path) -> Mapping[str, bytes]:
            out.parent.mkdir(exist_ok=True)
            convert(source, out, workers=1)
            return files_of(out)

        def to_native(source: Path, out: Path) -> Mapping[str, bytes]:
            out.parent.mkdir(exist_ok=True)
            convert(source, out, to_stage=target.to_stage, to_world_size=target.to_ranks, workers=1)
            return files_of(out)

        return {"read": lambda source, _: read_whole(source), "universal": to_universal, "native": to_native}

    def _outcome(
        self,
        fault: Fault,
        root: Path,
        work: Path,
        action: str,
        perform: Callable[[Path, Path], Any],
        expected: list[Any],
    ) -> Outcome:
        out = work / "out" / action
        try:
            result = perform(root, out)
        except (BadCheckpoint, CheckpointMismatch, OSError) as error:
            verdict, detail = _named(fault, root, error)
            if out.parent.exists() and any(out.parent.iterdir()):
                left = ", ".join(path.name for path in out.parent.iterdir())
                verdict, detail = Verdict.BAD, f"after an error there is {left}"
        except Exception as error:
            verdict, detail = Verdict.BAD, f"{type(error).__name__}: {error}"
        else:
            same = result in expected
            verdict, detail = (Verdict.WHOLE, "") if same else (Verdict.BAD, _difference(result, expected[0]))
        shutil.rmtree(out.parent, ignore_errors=True)
        return Outcome(f"{fault} ({self.job})", action, verdict, detail)


def _named(fault: Fault, root: Path, error: Exception) -> tuple[Verdict, str]:
    """Return whether a message names what was damaged."""
    path, said = root / fault.name, str(error)
    if str(path) in said or (path.name in said and str(path.parent) in said):
        return Verdict.FILE, said
    others = [other for other in root.rglob("*") if other.is_file() and str(other) in said]
    if others and fault.kind not in _MAY_NAME_OTHERS:
        return Verdict.BAD, f"the message names {others[0]} instead of {path}: {said}"
    if any(str(folder) in said for folder in (path.parent, *path.parents) if folder.is_relative_to(root)):
        return Verdict.FOLDER, said
    return Verdict.BAD, f"the message names neither {path} nor its folder: {said}"


def _difference(result: Any, expected: Any) -> str:
    """Say where a result differs without a word."""
    if isinstance(result, dict) and isinstance(expected, dict):
        names = [name for name in {**result, **expected} if result.get(name) != expected.get(name)]
        return f"a silent difference in {', '.join(map(str, names[:5]))}"
    return "a silent difference"
