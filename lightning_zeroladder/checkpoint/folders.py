"""Find the files of a checkpoint folder and say what is wrong with it before any of them is read."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_zeroladder.checkpoint.errors import BadCheckpoint

__all__ = ["Folder", "Found", "find_checkpoint", "refuse_remote"]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # with one slash too: a Path has made one of two
_EXPERT = re.compile(r"(layer_\d+_expert_\d+|expp_rank_\d+|layer_\d+-model)_.*\.pt")


@dataclass(frozen=True, slots=True)
class Found:
    """Where a checkpoint is.

    Attributes:
        root: The folder with ``latest``, or the one that was given.
        folder: The folder with the files.
        universal: Whether it is a universal checkpoint.
    """

    root: Path
    folder: Path
    universal: bool


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of a native checkpoint.

    Attributes:
        path: The folder.
        model: Model states: one file, or at stage 3 one of each rank.
        optimizer: Optimizer states of each rank; none at stage 0.
    """

    path: Path
    model: tuple[Path, ...]
    optimizer: tuple[Path, ...]

    @classmethod
    def of(cls, path: Path) -> Folder:
        """Sort the files of a folder.

        Raises:
            BadCheckpoint: If it has none, has those of tensor, pipeline or expert parallelism, or files that do not
                belong together.
        """
        whole: list[Path] = []
        model: dict[int, Path] = {}
        optimizer: dict[int, list[Path]] = {}
        if (path / "offloaded_tensors").exists():
            raise BadCheckpoint(
                f"{path} was saved with optimizer state on NVMe, which DeepSpeed copies as it is into "
                f"{path / 'offloaded_tensors'}: only the same job can load it. Save without NVMe offload to convert it."
            )
        for file in sorted(path.iterdir()):
            if _EXPERT.fullmatch(file.name):
                raise BadCheckpoint(f"{file} belongs to an expert- or pipeline-parallel model, which is not supported.")
            if match := _MODEL.fullmatch(file.name):
                rank, parallel = match.groups()
                _refuse_model_parallel(file, parallel)
                if rank is None:
                    whole.append(file)
                else:
                    model[int(rank)] = file
            elif match := _OPTIMIZER.fullmatch(file.name):
                _refuse_model_parallel(file, match.group(3))
                optimizer.setdefault(int(match.group(2)), []).append(file)
        if not whole and not model:
            raise BadCheckpoint(_nothing_found(path, bool(optimizer)))
        for files in optimizer.values():
            if len(files) > 1:
                raise BadCheckpoint(_mixed(path, files, "the same rank's shard of runs in two precisions"))
        if whole and model:
            odd = (*whole, *model.values())
            raise BadCheckpoint(_mixed(path, odd, "model states of stage 3 and of a lower stage"))
        return cls(
            path,
            tuple(whole or _in_order(path, model, "model")),
            tuple(_in_order(path, {rank: files[0] for rank, files in optimizer.items()}, "optimizer")),
        )

    def check_ranks(self, world_size: int) -> None:
        """Compare the files with the number of ranks that the checkpoint says it was saved by.

        Raises:
            BadCheckpoint: If some are missing or left over, with their names.
        """
        sharded = [file for file in self.model if file.name.startswith("zero_pp_rank_")]
        for files in (sharded, self.optimizer):
            if len(files) > world_size:
                odd = files[world_size:]
                raise BadCheckpoint(_mixed(self.path, odd, f"shards beyond the {world_size} ranks that saved it"))
            if files and len(files) < world_size:
                raise BadCheckpoint(
                    f"{self.path} was saved by {world_size} ranks, but on host {socket.gethostname()} there are "
                    f"{len(files)} of their files: those behind {files[-1].name} are missing. {_SHARED}"
                )


_SHARED = (
    "Copy the missing files there, or use a folder that all hosts share; every host has to see the files of all ranks."
)


def _refuse_model_parallel(file: Path, index: str) -> None:
    if int(index) != 0:
        raise BadCheckpoint(f"{file} belongs to a tensor- or pipeline-parallel model, which is not supported.")


def _in_order(path: Path, files: dict[int, Path], what: str) -> list[Path]:
    missing = sorted(set(range(max(files, default=-1) + 1)) - files.keys())
    if missing:
        raise BadCheckpoint(
            f"{path}: on host {socket.gethostname()} the {what} states of rank {', '.join(map(str, missing))} are "
            f"missing, those of rank {max(files)} are there. {_SHARED}"
        )
    return [files[rank] for rank in sorted(files)]


def _mixed(path: Path, files: Sequence[Path], what: str) -> str:
    names = ", ".join(file.name for file in files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    return f"{path} mixes files of different runs ({what}): {names}. Move those that do not belong there away."


def _nothing_found(path: Path, has_optimizer: bool) -> str:
    if has_optimizer:
        return f"{path} has optimizer states but no *_model_states.pt: the checkpoint is not whole."
    inside_of = sorted(file.parent for file in path.glob("*/*_model_states.pt"))
    if inside_of:
        pointer = "latest_universal" if (inside_of[0] / "zero").is_dir() else "latest"
        return (
            f"{path / pointer} is missing or no file: it should hold the name of the folder with the files. Write it, "
            f"or give that folder itself, such as {inside_of[0]}."
        )
    inside = sorted(file.name for file in path.iterdir())[:5]
    return f"{path} is no DeepSpeed checkpoint: no *_model_states.pt in it (there is {', '.join(inside) or 'nothing'})."


def find_checkpoint(path: str | Path) -> Found:
    """Find the checkpoint that a path means.

    The path may be the folder that Lightning or ``engine.save_checkpoint`` was given (with a file ``latest`` or
    ``latest_universal``), or the folder with the files themselves.

    Raises:
        BadCheckpoint: If there is none.
    """
    root = _existing(path)
    if (root / "latest").is_file():
        return _found(root, _tagged(root, "latest"))
    if (root / "latest_universal").is_file():
        return _found(root, _tagged(root, "latest_universal"))
    return _found(root, root)


def _found(root: Path, folder: Path) -> Found:
    return Found(root, folder, (folder / "zero").is_dir())


def refuse_remote(path: str | Path) -> str:
    """Return a local path as text.

    Raises:
        BadCheckpoint: If it is an address such as ``s3://...``.
    """
    if _REMOTE.match(str(path)):
        raise BadCheckpoint(
            f"{path} is a remote path. DeepSpeed reads and writes its shards as local files: use a folder that every "
            "host sees, or mount the storage."
        )
    return str(path)


def _existing(path: str | Path) -> Path:
    root = Path(refuse_remote(path))
    if root.is_symlink() and not root.exists():
        raise BadCheckpoint(f"{root} is a symbolic link to {root.readlink()}, which does not exist.")
    previous = root.with_name(f".{root.name}.previous")
    if not root.exists() and previous.is_dir():
        return previous  # a save was cut off between setting the old one aside and showing the new one
    if not root.exists():
        raise BadCheckpoint(f"{root} does not exist on host {socket.gethostname()}. {_near(root)}")
    if root.is_file():
        raise BadCheckpoint(
            f"{root} is a file. A DeepSpeed checkpoint is a folder; this may be one that another strategy saved. Load "
            "its weights with torch.load and model.load_state_dict before training."
        )
    return root


def _near(root: Path) -> str:
    if not root.parent.is_dir():
        return f"Its folder {root.parent} does not exist either."
    names = sorted(entry.name for entry in root.parent.iterdir() if not entry.name.startswith("."))
    return f"In {root.parent} there is {', '.join(names[:5]) or 'nothing'}."


def _tagged(root: Path, pointer: str) -> Path:
    try:
        tag = (root / pointer).read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{root / pointer} is damaged: it should hold the name of a folder beside it.") from error
    folder = root / tag
    if not tag or "/" in tag or "\0" in tag or not folder.is_dir():
        raise BadCheckpoint(
            f"{root / pointer} names the folder {tag!r}, which is not there. Write the name of an existing one into "
            f"it, or give the folder itself. {_near(root / 'x')}"
        )
    return folder
