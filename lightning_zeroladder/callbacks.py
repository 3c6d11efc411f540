"""LadderCallback: measures rungs from Lightning's hooks and says when to move on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_zeroladder.config import with_memory_limit
from lightning_zeroladder.engine.boundary import at_boundary
from lightning_zeroladder.engine.model_count import count_parameters
from lightning_zeroladder.engine.observe import BackendObserver
from lightning_zeroladder.ladder import (
    Beyond,
    Commit,
    Decision,
    Failure,
    FailureKind,
    JobSize,
    Journal,
    LadderSettings,
    Rung,
    TrialResult,
    TryRung,
    candidates,
    decide,
    ended_early,
    fastest_fitting,
    next_action,
    single_device,
    to_json,
)
from lightning_zeroladder.ladder.words import failure_words
from lightning_zeroladder.probe.batch import samples_in, units_in
from lightning_zeroladder.probe.clock import Phase, StepClock
from lightning_zeroladder.probe.trial import Trial
from lightning_zeroladder.report.data import (
    SCHEMA,
    RunContext,
    RunReport,
    collect_hardware,
    collect_versions,
    write_report,
)
from lightning_zeroladder.report.progress import LadderProgress
from lightning_zeroladder.report.table import print_report

if TYPE_CHECKING:
    from lightning_zeroladder.strategy import ZeroAutoStrategy

__all__ = ["LadderCallback"]


class LadderCallback(Callback):
    """Times the steps of a rung, decides with the ladder's rules, and asks the strategy to move.

    ``ZeroAutoStrategy`` adds it by itself. Under a plain ``DeepSpeedStrategy`` it profiles that strategy's stage:
    ``Trainer(strategy="deepspeed_stage_2", callbacks=[LadderCallback()])``.

    Args:
        settings: Budget, headroom and limit.
        tokens_per_batch: Called with a batch, returns how many tokens it holds. Default: read off the batch.
        run_dir: Where the journal and report go. Default: ``<default_root_dir>/zero_ladder``.
        trainer: Given by the strategy that walks the ladder; leave out to profile a fixed stage.
    """

    def __init__(
        self,
        settings: LadderSettings | None = None,
        *,
        tokens_per_batch: Callable[[Any], int] | None = None,
        run_dir: str | Path | None = None,
        trainer: pl.Trainer | None = None,
    ) -> None:
        self.settings = settings or LadderSettings()
        self._tokens_per_batch = tokens_per_batch
        self._run_dir = Path(run_dir) if run_dir is not None else None
        self._walking: ZeroAutoStrategy | None = trainer.strategy if trainer is not None else None  # type: ignore[assignment]
        self._trials: tuple[TrialResult, ...] = ()
        self._floors: Mapping[int, int] = {}
        self._beyond: Beyond | None = None
        self._job: JobSize | None = None
        self._world_size = 1
        self._device = torch.device("cpu")
        self._trial: Trial | None = None
        self._clock: StepClock | None = None
        self._observer: BackendObserver | None = None
        self._progress = LadderProgress(enabled=False)
        self._journal: Journal | None = None
        self._action: TryRung | Commit | None = None
        self._decision: Decision | None = None
        self._finished = False
        self._knows_batch_size = False

    # Called by the strategy -------------------------------------------------------------------------------------

    def first_rung(
        self, floors: Mapping[int, int], world_size: int, beyond: Beyond | None = None, job: JobSize | None = None
    ) -> Rung:
        """Choose the rung that the run starts on.

        Args:
            floors: Bytes per rank that each stage certainly needs.
            world_size: Data-parallel ranks.
            beyond: What there is beyond the plain stages.
            job: Sizes from which an error says what would help.

        Raises:
            NothingFits: If no stage can fit.
        """
        assert self._walking is not None
        self._beyond, self._job = beyond, job
        self._floors, self._world_size, self._device = floors, world_size, self._walking.root_device
        self._open_journal(self._walking._trainer)
        if world_size == 1:
            self._decision = single_device(self.settings, floors)
            rank_zero_info(f"zero_auto: {self._decision.reason}; training at {self._decision.rung.label}.")
            return self._decision.rung
        return self._next_rung()

    def on_rung_entered(self, rung: Rung) -> None:
        """Begin a trial of a rung whose engine is ready, unless it had one; called on every rank."""
        if self._decision is None and all(trial.rung != rung for trial in self._trials):
            self._begin_trial(rung)

    def on_rung_left(self) -> None:
        """Take the instruments off a rung that is about to be left in the middle of something."""
        if self._observer is not None:
            self._observer.stop()
            self._observer = None

    def on_rung_failed(self, rung: Rung, failure: Failure, *, measurable: bool) -> Rung:
        """Record that a rung failed and return the one to go on with; called on every rank with the same arguments.

        After an error that is not about memory this is the lowest rung that has worked: what fails there as well is
        not the rung's fault.

        Args:
            rung: What failed.
            failure: How.
            measurable: Whether the ranks have counted the same steps, so that what they measured can be put together.

        Raises:
            NothingFits: If none is left.
        """
        step = self._trial.steps + 1 if self._trial is not None and self._trial.rung == rung else 1
        failure = replace(failure, step=step)
        rank_zero_warn(f"zero_auto: {rung.label} {failure_words(failure)}: {failure.message}")
        measured = self._measured(rung) if measurable else None
        self._end_trial()
        known = tuple(trial for trial in self._trials if trial.rung != rung)
        self._trials = (*known, TrialResult(rung, measurement=measured, failure=failure))
        self._record("failed", rung=rung, failure=failure)
        self._decision = self._action = None
        worked = candidates(self._trials)
        if failure.kind is FailureKind.ERROR and worked:
            self._trials, self._action = self._next_action()
            return worked[0].rung
        return self._next_rung()

    @property
    def trial_steps(self) -> int | None:
        """Optimizer steps that the running trial has completed; None while none runs."""
        return self._trial.steps if self._trial is not None else None

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Keep what happens inside out of the trial's times."""
        phase = self._clock.phase if self._clock is not None else Phase.OUTSIDE
        self._switch(Phase.OUTSIDE)
        try:
            yield
        finally:
            self._switch(phase)

    # Lightning's hooks ------------------------------------------------------------------------------------------

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._walking is None:
            self._begin_fixed(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        enabled = trainer.is_global_zero and trainer.progress_bar_callback is not None
        self._progress = LadderProgress(enabled, progress_bar=trainer.progress_bar_callback)
        if self._trial is not None:
            self._progress.start(self._trial.rung.label, self.settings.steps_per_rung)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._note_batch_size(trainer, batch)
        if self._action is not None and self._walking is not None and at_boundary(trainer.strategy.model):
            self._carry_out(self._action, trainer)
        elif self._decision is not None:
            self._finish(trainer, self._decision)
        if self._trial is not None:
            self._switch(Phase.FORWARD)
            self._trial.add_batch(*self._units(batch))

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self._switch(Phase.BACKWARD)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch(Phase.FORWARD)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._switch(Phase.OPTIMIZER)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._trial is None or self._action is not None:
            return
        self._switch(Phase.DATA)
        if not at_boundary(trainer.strategy.model):
            return
        trial = self._trial
        trial.close_step()
        self._progress.update(trial.steps, trial.throughput() or 0.0, self._rate_unit(trainer))
        if trial.is_over():
            self._settle(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch(Phase.OUTSIDE)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch(Phase.DATA)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._finished:
            return
        if self._decision is not None:
            self._finish(trainer, self._decision)
            return
        running = self._trial.rung if self._trial is not None else None
        if running is not None and all(trial.rung != running for trial in self._trials):
            measured = self._measured(running)
            if measured is not None:
                self._trials = (*self._trials, TrialResult(running, measurement=measured))
        if isinstance(self._action, Commit):
            self._finish(trainer, self._action.decision)
        else:
            self._finish(trainer, ended_early(self.settings, self._trials, running), complete=False)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_trial()
        if not self._finished:
            self._record("exception", message=f"{type(exception).__name__}: {exception}")

    # The walk ---------------------------------------------------------------------------------------------------

    def _settle(self, trainer: pl.Trainer) -> None:
        """End a trial that has run long enough and decide what comes next."""
        assert self._trial is not None
        rung = self._trial.rung
        measured = self._measured(rung)
        assert measured is not None
        result = TrialResult(rung, measurement=measured)
        self._trials = (*self._trials, result)
        self._record("trial", result=result)
        self._log(trainer, result)
        self._end_trial()
        if self._walking is None:
            self._decision = decide(self._trials, self.settings)
            return
        self._trials, self._action = self._next_action()

    def _carry_out(self, action: TryRung | Commit, trainer: pl.Trainer) -> None:
        assert self._walking is not None
        self._action = None
        if isinstance(action, TryRung):
            self._record("move", rung=action.rung)
            self._walking.move_to(action.rung)
            return
        self._decision = action.decision
        if self._walking.rung != action.decision.rung:
            self._record("move", rung=action.decision.rung)
            self._walking.move_to(action.decision.rung)
        if self._decision is not None:  # it is taken back where the rung failed to build again
            self._finish(trainer, self._decision)

    def _next_action(self) -> tuple[tuple[TrialResult, ...], TryRung | Commit]:
        return next_action(self.settings, self._trials, self._floors, self._world_size, self._beyond, self._job)

    def _next_rung(self) -> Rung:
        self._trials, action = self._next_action()
        if isinstance(action, TryRung):
            return action.rung
        self._decision = action.decision
        return action.decision.rung

    def _begin_fixed(self, trainer: pl.Trainer) -> None:
        from lightning.pytorch.strategies import DeepSpeedStrategy

        strategy = trainer.strategy
        if not isinstance(strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                f"LadderCallback profiles ZeRO stages; the Trainer uses {type(strategy).__name__}. Pass "
                "strategy='zero_auto' (which adds the callback by itself) or strategy='deepspeed_stage_N'."
            )
        assert isinstance(strategy.config, dict)
        rung = Rung(int(strategy.config.get("zero_optimization", {}).get("stage", 0)))
        settings = with_memory_limit(self.settings, strategy.root_device, strategy.num_processes)
        self.settings = replace(settings, stages=(rung.stage,))
        self._world_size, self._device = trainer.world_size, strategy.root_device
        self._open_journal(trainer)
        self._begin_trial(rung)

    def _begin_trial(self, rung: Rung) -> None:
        self._clock = StepClock(cuda=self._device.type == "cuda")
        best = fastest_fitting(self._trials, self.settings)
        self._trial = Trial(rung, self.settings, self._clock, self._device, best.measurement if best else None)
        self._observer = BackendObserver(self._clock.collective)
        self._observer.start()
        self._record("trying", rung=rung)
        self._progress.start(rung.label, self.settings.steps_per_rung)

    def _end_trial(self) -> None:
        if self._observer is not None:
            self._observer.stop()
        self._observer, self._trial, self._clock = None, None, None

    def _measured(self, rung: Rung) -> Any:
        if self._trial is None or self._trial.rung != rung:
            return None
        return self._trial.measurement()

    def _finish(self, trainer: pl.Trainer, decision: Decision, *, complete: bool = True) -> None:
        """Report, and take every instrument out of the run."""
        self._finished = True
        self._end_trial()
        self._progress.close()
        report = self._report(trainer, decision, complete)
        self._record("decision", decision=decision, complete=complete)
        if trainer.is_global_zero:
            write_report(self._directory(trainer), report)
            if self._world_size > 1 or not complete:
                print_report(report)
        if complete:
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
            if self._walking is not None:
                self._walking.end_ladder()

    # Small parts ------------------------------------------------------------------------------------------------

    def _switch(self, phase: Phase) -> None:
        if self._clock is not None:
            self._clock.switch(phase)

    def _units(self, batch: Any) -> tuple[int, str]:
        if self._tokens_per_batch is not None:
            return int(self._tokens_per_batch(batch)), "tokens"
        return units_in(batch)

    def _note_batch_size(self, trainer: pl.Trainer, batch: Any) -> None:
        if not self._knows_batch_size and self._walking is not None:
            self._knows_batch_size = True
            self._walking.note_batch_size(samples_in(batch))

    def _rate_unit(self, trainer: pl.Trainer) -> str:
        assert self._trial is not None
        return f"{self._trial.unit}/s/{'GPU' if trainer.strategy.root_device.type == 'cuda' else 'rank'}"

    def _directory(self, trainer: pl.Trainer) -> Path:
        return self._run_dir or Path(trainer.default_root_dir) / "zero_ladder"

    def _open_journal(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            self._journal = Journal(self._directory(trainer) / "journal.jsonl")
            self._record("begin", settings=self.settings, world_size=self._world_size)

    def _record(self, event: str, **fields: Any) -> None:
        if self._journal is not None:
            self._journal.append(event, **{name: _plain(value) for name, value in fields.items()})

    def _log(self, trainer: pl.Trainer, result: TrialResult) -> None:
        measured = result.measurement
        assert measured is not None
        name = f"zero_ladder/{result.rung.slug}"
        scalars = {
            f"{name}/{measured.unit}_per_s": measured.throughput,
            f"{name}/step_s": measured.step_s.median,
            f"{name}/peak_bytes": float(measured.peak_bytes),
            f"{name}/communication_s": measured.breakdown.communication_s,
        }
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _report(self, trainer: pl.Trainer, decision: Decision, complete: bool) -> RunReport:
        count = count_parameters(trainer.lightning_module)
        walking = self._walking
        config = walking.rung_config(decision.rung) if walking is not None else trainer.strategy.config  # type: ignore[attr-defined]
        optimizer = trainer.strategy.model.basic_optimizer  # type: ignore[union-attr]
        context = RunContext(
            world_size=trainer.world_size,
            nodes=trainer.num_nodes,
            accumulate=trainer.accumulate_grad_batches,
            precision=str(trainer.precision),
            parameters=count.trainable + count.frozen,
            trainable_parameters=count.trainable,
            device=trainer.strategy.root_device.type,
            optimizer=type(optimizer).__name__,
            versions=collect_versions(),
            hardware=collect_hardware(),
        )
        moves = walking.moves if walking is not None else ()
        return RunReport(SCHEMA, complete, context, self.settings, decision, moves, dict(config))


def _plain(value: Any) -> Any:
    return to_json(value) if hasattr(value, "__dataclass_fields__") else value
