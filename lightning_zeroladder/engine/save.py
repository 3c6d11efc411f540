"""Save a live engine so that the checkpoint appears only when it is whole, with a manifest beside its files."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lightning_zeroladder.checkpoint.converting import manifest_of, write_universal
from lightning_zeroladder.checkpoint.manifest import FileEntry, Manifest, describe_file, write_manifest
from lightning_zeroladder.checkpoint.opening import open_checkpoint
from lightning_zeroladder.checkpoint.output import check_space, remove_tree, replace_folder
from lightning_zeroladder.engine.lifecycle import ClientOptimizer
from lightning_zeroladder.engine.shards import live_shards
from lightning_zeroladder.engine.together import gather_objects, together
from lightning_zeroladder.versions import collect_versions

__all__ = ["SaveContext", "save"]


@dataclass(frozen=True, slots=True)
class SaveContext:
    """What a manifest tells and the engine does not know.

    Attributes:
        precision: Lightning's precision.
        local_rank: Rank on this host.
        batches: What a resumed run has to know of its batches.
    """

    precision: str
    local_rank: int
    batches: Mapping[str, int] = field(default_factory=dict)


def save(
    engine: Any,
    client: ClientOptimizer | None,
    target: Path,
    write: Callable[[Path], None],
    context: SaveContext,
    *,
    tag: str,
    universal: bool,
) -> None:
    """Save a checkpoint. A collective.

    DeepSpeed writes it aside; then the manifest is added and the folder gets its name, in the place of an older one
    of the same name, which is deleted last. A job that is killed at any moment leaves the older one or the new one.

    Args:
        engine: A live ``DeepSpeedEngine``.
        client: The torch optimizer that it steps.
        target: The folder to appear.
        write: Has DeepSpeed save into the folder it is given, under ``tag``; called on every rank.
        context: For the manifest.
        tag: Name of the folder with the files.
        universal: Also leave a universal copy beside it.

    Raises:
        OSError: If there is no room or no permission; on every rank, before anything is written.
    """
    aside = target.with_name(f".{target.name}.saving")
    leader = _prepare(engine, target, aside, context.local_rank, copies=2 if universal else 1)
    write(aside)
    manifest = _manifest(engine, client, context)
    if universal:
        _add_universal(engine, client, aside, tag)
    folder = aside / tag
    seen = together(lambda: _describe(folder) if leader else [])
    # Without a shared file system each host has some of the files; put together in one folder they are the checkpoint.
    files = {entry.name: entry for entries in gather_objects(seen) for entry in entries}
    complete = replace(manifest, files=[files[name] for name in sorted(files)])
    together(lambda: write_manifest(folder, complete) if leader else None)
    together(lambda: replace_folder(aside, target) if leader else None)


def _describe(folder: Path) -> list[FileEntry]:
    return [describe_file(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]


def _prepare(engine: Any, target: Path, aside: Path, local_rank: int, *, copies: int) -> bool:
    """Make the folder to write into; returns whether this rank looks after it, one of each file system does."""
    rank = torch.distributed.get_rank()
    needed = copies * sum(gather_objects(_bytes_of(engine)))
    mark = aside / str(gather_objects(secrets.token_hex(8))[0])

    def make(*, is_leader: bool) -> None:
        if not is_leader:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        check_space(target.parent, needed)
        remove_tree(aside)
        aside.mkdir()

    together(lambda: make(is_leader=rank == 0))
    together(lambda: mark.touch() if rank == 0 else None)
    leader = rank == 0 or (local_rank == 0 and not mark.exists())
    together(lambda: make(is_leader=leader and rank != 0))
    if rank == 0:
        mark.unlink()
    return leader


def _bytes_of(engine: Any) -> int:
    """Return about how many bytes this rank is going to write."""
    rank = torch.distributed.get_rank()
    nbytes = 0
    sharded = engine.zero_optimization_stage() > 0
    if engine.optimizer is not None and (sharded or rank == 0):
        state: Mapping[Any, Mapping[str, Any]] = engine.basic_optimizer.state
        owners = {id(shard.owner): shard.owner for shard in live_shards(engine)}
        nbytes += sum(owner.numel() * owner.element_size() for owner in owners.values())
        for owner in owners.values():
            tensors = [value for value in state.get(owner, {}).values() if isinstance(value, torch.Tensor)]
            nbytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if rank == 0 and engine.zero_optimization_stage() < 3:
        nbytes += sum(param.numel() * param.element_size() for param in engine.module.parameters())
    return nbytes


def _manifest(engine: Any, client: ClientOptimizer | None, context: SaveContext) -> Manifest:
    parameters = {
        name: {
            "shape": list(getattr(param, "ds_shape", param.shape)),
            "dtype": str(param.dtype).removeprefix("torch."),
        }
        for name, param in engine.module.named_parameters()
    }
    return Manifest(
        kind="native",
        stage=int(engine.zero_optimization_stage()),
        world_size=torch.distributed.get_world_size(),
        accumulate=int(engine.gradient_accumulation_steps()),
        micro_batch=int(engine.train_micro_batch_size_per_gpu()),
        global_samples=int(engine.global_samples),
        global_steps=int(engine.global_steps),
        precision=context.precision,
        optimizer=type(client.optimizer).__name__ if client is not None else None,
        groups=client.names(engine.module) if client is not None else [],
        parameters=parameters,
        aliases=_tied_names(engine.module),
        versions=collect_versions(),
        batches=context.batches,
    )


def _tied_names(module: torch.nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        of = first.setdefault(id(param), name)
        if of != name:
            tied[name] = of
    return tied


def _add_universal(engine: Any, client: ClientOptimizer | None, aside: Path, tag: str) -> None:
    """Write a universal copy, each rank some parameters of it."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = client.names(engine.module) if client is not None else None
    folder = aside / f"{tag}_universal"
    opened = together(lambda: open_checkpoint(aside / tag, names))
    together(lambda: write_universal(folder, opened.state, (rank, world_size)))
    if rank == 0:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        write_manifest(folder, manifest_of(opened, None, world_size, folder, files))
        (aside / "latest_universal").write_text(folder.name, encoding="utf-8")
