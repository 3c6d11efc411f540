"""Carry the global batch and the position in the epoch into Lightning's loops when a run resumes on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops.progress import _BatchProgress
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_zeroladder.checkpoint.errors import BadCheckpoint
from lightning_zeroladder.checkpoint.folders import find_checkpoint
from lightning_zeroladder.checkpoint.manifest import Manifest, read_manifest
from lightning_zeroladder.elastic.batch import (
    KEEP,
    BatchPlan,
    Kept,
    check_global_batch,
    kept_of,
    plan_batch,
    rescaled_limit,
)
from lightning_zeroladder.elastic.position import Position, batches_left, position_of
from lightning_zeroladder.elastic.sampler import InjectedRank, ResumableSampler
from lightning_zeroladder.engine.together import gather_objects

__all__ = ["ElasticRun"]

_ENTRY = "zero_auto"
"""Under this name the position lies among the entries of a checkpoint."""


class ElasticRun:
    """What the strategy keeps of a run that may go on with another number of ranks.

    Args:
        global_batch: ``"keep"``, ``"scale"`` or samples per optimizer step.

    Raises:
        MisconfigurationException: For anything else.
    """

    def __init__(self, global_batch: str | int) -> None:
        try:
            self._setting = check_global_batch(global_batch)
        except ValueError as error:
            raise MisconfigurationException(f"ZeroAutoStrategy: {error}") from error
        self.checkpoint: str | None = None
        self.plan: BatchPlan | None = None
        self._changed: dict[str, tuple[Any, Any]] = {}
        self._told = False
        self._position: Position | None = None
        self._entered = False
        self._counted_before = 0

    # Before anything is built -----------------------------------------------------------------------------------

    def note_checkpoint(self, path: str | None) -> None:
        """Take the checkpoint that the fit is going to load."""
        self.checkpoint = path

    def begin(self, trainer: pl.Trainer) -> None:
        """Forget an earlier fit, and give the Trainer back the settings that were changed for it."""
        for name, (given, made) in self._changed.items():
            if getattr(trainer, name) == made:
                setattr(trainer, name, given)
        self._changed = {}
        self.plan, self._position, self._entered, self._counted_before = None, None, False, 0

    def settle(self, trainer: pl.Trainer, config: dict[str, Any], *, known: bool) -> None:
        """Set the accumulation, in the Trainer and the DeepSpeed config, and limits that are numbers of batches.

        Args:
            trainer: Its settings are changed.
            config: The DeepSpeed config, filled in.
            known: Whether the micro-batch size in it is the dataloader's.

        Raises:
            MisconfigurationException: If a number of samples is asked for and the micro-batch size is not known.
        """
        micro_batch = int(config["train_micro_batch_size_per_gpu"]) if known else 0
        kept = trainer.strategy.broadcast(_read_kept(self.checkpoint) if trainer.is_global_zero else None)
        self._told = kept is not None
        manual = not trainer.lightning_module.automatic_optimization
        try:
            self.plan = plan_batch(
                self._setting, trainer.accumulate_grad_batches, trainer.world_size, micro_batch, kept, fixed=manual
            )
        except ValueError as error:
            raise MisconfigurationException(f"ZeroAutoStrategy: {error}") from error
        if self.plan.message is not None:
            rank_zero_info(self.plan.message)
        self._set(trainer, "accumulate_grad_batches", self.plan.accumulate)
        config["gradient_accumulation_steps"] = self.plan.accumulate
        unit = self.plan.kept.actual // self.plan.accumulate
        for name in ("limit_train_batches", "val_check_interval"):
            given = getattr(trainer, name)
            if isinstance(given, int) and not isinstance(given, bool) and given > 0 and unit != self.plan.kept.unit:
                self._set(trainer, name, rescaled_limit(given, self.plan.kept.unit, unit))

    def _set(self, trainer: pl.Trainer, name: str, value: int) -> None:
        given = getattr(trainer, name)
        if given != value:
            self._changed[name] = (given, value)
            setattr(trainer, name, value)
            if name != "accumulate_grad_batches":
                rank_zero_info(f"zero_auto: {name}={value} instead of {given} has the same samples on these ranks.")

    @property
    def loss_factor(self) -> float:
        """What a loss is multiplied with, so that gradients keep their size at another accumulation."""
        return self.plan.loss_factor if self.plan is not None else 1.0

    def for_manifest(self) -> dict[str, int]:
        """Return what a resumed run has to know before it builds anything."""
        return asdict(self.plan.kept) if self.plan is not None else {}

    # Saving -----------------------------------------------------------------------------------------------------

    def add_entry(self, trainer: pl.Trainer, checkpoint: dict[str, Any], micro_steps: int) -> None:
        """Add the position, and the state of the loaders of every rank, to a checkpoint. A collective.

        Args:
            trainer: Is fitting.
            checkpoint: Lightning's entries.
            micro_steps: DeepSpeed's count of micro-batches.
        """
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        states = gather_objects(loops.get("state_dict", {}).get("combined_loader"))
        position = self._now(trainer, micro_steps)
        checkpoint[_ENTRY] = {**position.entries(), "loaders": states if any(states) else []}

    def _now(self, trainer: pl.Trainer, micro_steps: int) -> Position:
        if self._position is not None and not self._entered:
            return self._position  # it was loaded, and nothing has been trained since
        epochs: Any = trainer.fit_loop.epoch_progress.current
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        loaders = _loaders(trainer)
        units = tuple(_unit(loader, trainer.world_size) for loader in loaders)
        batches, epoch = progress.current.processed, epochs.processed
        between = epochs.ready == epoch
        finished = between or (progress.is_last_batch and progress.current.ready == batches)
        waiting = self._open(trainer, micro_steps)
        if finished:
            return Position(epoch, True, batches, (), units, (), (), (), waiting, trainer.world_size)
        zeros = (0,) * len(units)
        begun = self._position if self._position is not None and self._position.epoch == epoch else None
        since, seen, starts = batches, zeros, zeros
        if begun is not None and begun.inside:
            since, seen, starts = batches - begun.batches, begun.samples, begun.starts
        undone = min(waiting, since)
        samples = tuple(first + (since - undone) * max(1, unit) for first, unit in zip(seen, units, strict=True))
        done, (seeds, lengths) = batches - undone, _orders(loaders)
        return Position(epoch, False, done, samples, units, starts, seeds, lengths, undone, trainer.world_size)

    def _open(self, trainer: pl.Trainer, micro_steps: int) -> int:
        """Return the micro-batches whose gradients wait for an optimizer step."""
        if not trainer.lightning_module.automatic_optimization:
            return 0
        accumulate = trainer.accumulate_grad_batches
        return micro_steps % accumulate - (self._counted_before if micro_steps < accumulate else 0)

    # Loading ----------------------------------------------------------------------------------------------------

    def loaded(self, trainer: pl.Trainer, entries: dict[str, Any], saved_world_size: int) -> None:
        """Take the position from a checkpoint, and each rank the state of its own loaders.

        Args:
            trainer: Is fitting.
            entries: What Lightning goes on with; its loader states are changed.
            saved_world_size: Ranks that saved it.
        """
        loops = entries.get("loops", {}).get("fit_loop")
        if loops is None:
            return
        entry = dict(entries.pop(_ENTRY, {}))
        states: Sequence[Any] = entry.pop("loaders", [])
        self._position = position_of(entry) if entry else _position_of_loops(loops, saved_world_size)
        self._entered = False
        same = self._position.world_size == trainer.world_size
        if not same and not self._told and self._setting == KEEP and self.plan is not None:
            rank_zero_warn(
                f"zero_auto: the checkpoint does not tell its accumulation. An optimizer step has "
                f"{self.plan.kept.actual} samples now: to keep those of {saved_world_size} ranks, set "
                "accumulate_grad_batches to what that number divided by this one makes of it."
            )
        own = loops.get("state_dict", {})
        if not same:
            own.pop("combined_loader", None)
        elif states:
            own["combined_loader"] = states[trainer.global_rank]
        if any(_keeps_own_state(loader) for loader in _loaders(trainer)):
            trainer.fit_loop._combined_loader = None  # set up too early to be given the state: Lightning does it again

    def sampler_kwargs(self, world_size: int, rank: int) -> dict[str, int]:
        """Return what Lightning creates the samplers with that it injects."""
        return {"num_replicas": world_size, "rank": InjectedRank(rank)}

    def take_over(self, trainer: pl.Trainer, loader: object) -> None:
        """Let the sampler that Lightning has injected into a training loader begin in the middle of an epoch."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.state.stage != RunningStage.TRAINING:
            return
        batches = getattr(loader, "batch_sampler", None)
        if not isinstance(loader, DataLoader) or type(batches) is not BatchSampler:
            return
        sampler = batches.sampler
        if isinstance(sampler, DistributedSampler) and isinstance(sampler.rank, InjectedRank):
            ours = ResumableSampler(sampler)
            batches.sampler = ours
            self._keep_interval_inside(trainer, len(loader))
            position = self._position
            if position is not None and position.inside and not self._entered and not _keeps_own_state(loader):
                ours.begin(position.epoch, _samples(position, 0, loader, trainer.world_size), _seed(position, 0))

    def _keep_interval_inside(self, trainer: pl.Trainer, batches: int) -> None:
        """Validate at the end of an epoch that has become a batch shorter than the interval of before."""
        limit = trainer.limit_train_batches
        whole = min(batches, limit) if isinstance(limit, int) else max(1, int(batches * limit))
        interval: Any = trainer.val_check_interval
        if "val_check_interval" in self._changed and trainer.check_val_every_n_epoch is not None and interval > whole:
            self._changed["val_check_interval"] = (self._changed["val_check_interval"][0], whole)
            trainer.val_check_interval = whole

    def on_train_start(self, trainer: pl.Trainer) -> int | None:
        """Put Lightning's counts and the samplers where the run goes on; its dataloaders are set up.

        Returns:
            Micro-batches that the first window counts as done, to stay in step with Lightning; None to leave it.
        """
        position = self._position
        if position is None or self._entered or self.plan is None:
            return None
        self._entered = True
        loaders = _loaders(trainer)
        units = tuple(_unit(loader, trainer.world_size) for loader in loaders)
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        before = progress.total.processed - progress.current.processed
        ratio = _batch_ratio(position, units, trainer.world_size)
        if position.inside:
            done = self._enter(trainer, position, loaders, units, round(position.batches * ratio))
        else:
            whole = trainer.fit_loop.max_batches
            done = progress.current.processed and (position.batches if whole == float("inf") else int(whole))
            _say_lost(position)
        _set_progress(progress, done, round(before * ratio))
        self._counted_before = done % self.plan.accumulate if self.plan.changed and position.inside else 0
        return self._counted_before or None

    def _enter(
        self, trainer: pl.Trainer, position: Position, loaders: list[Any], units: tuple[int, ...], counted: int
    ) -> int:
        """Take up an epoch in its middle; returns Lightning's number of batches done."""
        same = position.world_size == trainer.world_size
        seen, starts, left, moved = [], [], [], False
        for index, loader in enumerate(loaders):
            samples = _samples(position, index, loader, trainer.world_size)
            sampler, own = _resumable(loader), same and _keeps_own_state(loader)
            if sampler is not None and samples >= sampler.whole:
                samples %= sampler.whole  # cycled beside a longer one
            # A loader with a state of its own skips by itself, from where its iterator had begun.
            start = position.starts[index] if own and index < len(position.starts) else samples
            if sampler is not None:
                _say_if_other_data(position, index, sampler)
                moved |= sampler.begin(position.epoch, start, _seed(position, index))
                left.append(_left(loader, sampler.whole - samples, trainer.world_size))
            elif not own:
                _say_left_alone(loader, position, same=same)
            seen.append(samples)
            starts.append(start)
        if moved:
            assert trainer.fit_loop._data_fetcher is not None
            iter(trainer.fit_loop._data_fetcher)
        done = _batches_done(trainer.fit_loop.max_batches, counted, seen, left, units)
        seeds, lengths = _orders(loaders)
        self._position = Position(
            position.epoch, False, done, tuple(seen), units, tuple(starts), seeds, lengths, 0, trainer.world_size
        )
        if left:
            _say_where(position, seen[0], loaders[0])
        return done


def _read_kept(path: str | None) -> Kept | None:
    """Return what a checkpoint's manifest says of its batches; None without one. What is wrong, loading will say."""
    if path is None:
        return None
    try:
        manifest = read_manifest(find_checkpoint(path).folder)
    except (BadCheckpoint, OSError):
        return None
    if manifest is None:
        return None
    return kept_of(manifest.batches) or _kept_of_numbers(manifest)


def _kept_of_numbers(manifest: Manifest) -> Kept | None:
    accumulate, micro_batch = manifest.accumulate, manifest.micro_batch
    if not accumulate or not micro_batch:
        return None
    unit = micro_batch * manifest.world_size
    return Kept(accumulate * unit, accumulate * unit, accumulate, accumulate, unit, micro_batch)


def _position_of_loops(loops: dict[str, Any], world_size: int) -> Position:
    """Return the position of a checkpoint without our entry, whose samples are those of today's batches."""
    progress, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]["current"]
    batches, epoch = int(progress["current"]["processed"]), int(epochs["processed"])
    finished = epochs["ready"] == epoch or (progress["is_last_batch"] and progress["current"]["ready"] == batches)
    return Position(epoch, bool(finished), batches, (), (), (), (), (), 0, world_size)


def _loaders(trainer: pl.Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []


def _resumable(loader: Any) -> ResumableSampler | None:
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return sampler if isinstance(sampler, ResumableSampler) else None


def _keeps_own_state(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _unit(loader: Any, world_size: int) -> int:
    """Return the samples of a batch over all ranks; 0 if the loader does not tell."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size * world_size if isinstance(size, int) else 0


def _samples(position: Position, index: int, loader: Any, world_size: int) -> int:
    """Return the samples of a loader that were seen, in those of its batches where the checkpoint counts only these."""
    if index < len(position.samples):
        return position.samples[index]
    return position.batches * position.world_size * max(1, _unit(loader, world_size) // world_size)


def _orders(loaders: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return seeds and lengths of the epochs that are under way."""
    samplers = [_resumable(loader) for loader in loaders]
    seeds = (sampler.seed_of_epoch if sampler is not None else 0 for sampler in samplers)
    return tuple(seeds), tuple(sampler.whole if sampler is not None else 0 for sampler in samplers)


def _seed(position: Position, index: int) -> int | None:
    return position.seeds[index] if index < len(position.seeds) and position.lengths[index] else None


def _left(loader: Any, samples: int, world_size: int) -> int:
    return batches_left(
        max(0, samples),
        world_size,
        loader.batch_size,
        drop_samples=_resumable(loader).drop_last,  # type: ignore[union-attr]
        drop_last=loader.drop_last,
    )


def _batch_ratio(position: Position, units: tuple[int, ...], world_size: int) -> float:
    """Return how many of today's batches hold as many samples as one of the checkpoint's."""
    if position.units and units and position.units[0] and units[0]:
        return position.units[0] / units[0]
    return position.world_size / world_size


def _batches_done(whole: float, counted: int, seen: list[int], left: list[int], units: tuple[int, ...]) -> int:
    """Return how many batches Lightning has to count as done for the epoch to end where it should.

    Args:
        whole: Batches of an epoch as Lightning counts it, with its limits.
        counted: Batches that hold what was seen, as near as it comes.
        seen: Samples of each loader that were seen.
        left: Batches that are left of each loader that begins in the middle.
        units: Samples in a batch of each loader.
    """
    if whole == float("inf"):
        return counted
    if len(units) != 1 or not left:
        return max(0, min(counted, int(whole) - 1))
    up_to_limit = -(-(int(whole) * units[0] - seen[0]) // units[0])
    return int(whole) - min(left[0], max(1, up_to_limit))


def _set_progress(progress: _BatchProgress, done: int, before: int) -> None:
    """Count batches of this size, keeping how far the last one had come: Lightning goes by that."""
    current: Any = progress.current
    behind = {name: current.ready - getattr(current, name) for name in ("ready", "started", "processed", "completed")}
    waiting = current.ready - current.processed  # a batch that an exception has ended
    for tracker, count in ((current, done), (progress.total, before + done)):
        for name, missing in behind.items():
            setattr(tracker, name, max(0, count + waiting - missing))


def _say_where(position: Position, seen: int, loader: Any) -> None:
    again = f", {position.undone} batches before the checkpoint once more" if position.undone else ""
    rank_zero_info(
        f"zero_auto: going on in epoch {position.epoch} after {seen} of {len(loader.dataset)} samples{again}. "
        "Lightning's warning of a dataloader that is not resumable does not apply."
    )


def _say_if_other_data(position: Position, index: int, sampler: ResumableSampler) -> None:
    saved = position.lengths[index] if index < len(position.lengths) else 0
    if saved not in (0, sampler.whole):
        rank_zero_warn(
            f"zero_auto: the training data have {sampler.whole} samples, {saved} when the checkpoint was saved in the "
            f"middle of epoch {position.epoch}: which of them were seen cannot be told, the epoch goes on in an order "
            "of its own."
        )


def _say_lost(position: Position) -> None:
    if position.undone:
        rank_zero_warn(
            f"zero_auto: the checkpoint was saved at the end of epoch {position.epoch} with gradients of "
            f"{position.undone} micro-batches waiting, because the accumulation does not divide the epoch. They are no "
            "part of a checkpoint."
        )


def _say_left_alone(loader: Any, position: Position, *, same: bool) -> None:
    if _keeps_own_state(loader):
        rank_zero_warn(
            f"zero_auto: {type(loader).__name__} keeps its own position, saved on {position.world_size} ranks: it "
            "means nothing on another number of them. The epoch begins anew, and samples are seen again."
        )
        return
    owner: Any = loader
    batches: Any = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if batches is not None:
        owner = batches.sampler if type(batches) is BatchSampler else batches
    name = type(owner).__name__
    rank_zero_warn(
        f"zero_auto: the run resumes in the middle of epoch {position.epoch}. The training data come from your own "
        f"{name}, which is left alone: it has to skip what was seen{'' if same else ' on the other ranks'} by itself."
    )
