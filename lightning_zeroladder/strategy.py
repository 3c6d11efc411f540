"""ZeroAutoStrategy: DeepSpeed under Lightning with the ZeRO stage found during the run."""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zeroladder.callbacks import LadderCallback
from lightning_zeroladder.checkpoint.folders import refuse_remote
from lightning_zeroladder.config import (
    check_config,
    check_rescue,
    ladder_settings,
    read_decision,
    reconcile_accumulation,
    rung_config,
    with_memory_limit,
)
from lightning_zeroladder.costmodel import ModelCount
from lightning_zeroladder.elastic.launching import ResumeLauncher
from lightning_zeroladder.elastic.run import ElasticRun
from lightning_zeroladder.engine import groups
from lightning_zeroladder.engine.activation_checkpointing import ActivationCheckpointing
from lightning_zeroladder.engine.boundary import begin_manual_backward, enter_window
from lightning_zeroladder.engine.lifecycle import EngineSlot, HeldRun, born_partitioned, return_freed_memory
from lightning_zeroladder.engine.lifeline import Lifeline
from lightning_zeroladder.engine.model_count import count_parameters, meta_count
from lightning_zeroladder.engine.optimizer_probe import OptimizerState, probe_optimizer
from lightning_zeroladder.engine.restore import restore
from lightning_zeroladder.engine.save import SaveContext, save
from lightning_zeroladder.engine.sockets import GROUP_SOCKETS
from lightning_zeroladder.escalation import Facts, job_size, largest_parameter, what_is_beyond
from lightning_zeroladder.ladder import Failure, Rung, climb
from lightning_zeroladder.ladder.types import ZERO_STAGES
from lightning_zeroladder.ladder.words import failure_words
from lightning_zeroladder.lightning_entries import describe_load, lightning_entries
from lightning_zeroladder.placement import certain_floors, only_stage_3_holds
from lightning_zeroladder.probe.across_ranks import across_ranks
from lightning_zeroladder.probe.leftover import LeftoverMemory
from lightning_zeroladder.replay import Window
from lightning_zeroladder.report.data import Move, RunReport
from lightning_zeroladder.requirements_check import (
    check_accelerator,
    check_optimizer,
    check_trainer,
    shardable_stages,
    warn_of_pytorch_lightning,
)
from lightning_zeroladder.rescue import Rescue

if TYPE_CHECKING:
    import deepspeed

__all__ = ["ZeroAutoStrategy"]

_LIGHTNING_TAG = "checkpoint"
"""Folder inside a checkpoint in which Lightning has DeepSpeed save."""

_LEFTOVER_WORTH_SAYING = 0.01
"""Share of the memory limit."""

_TRIAL_TIMEOUT_S = 300.0
"""Shortest default of ``trial_timeout``."""

T = TypeVar("T")


class ZeroAutoStrategy(DeepSpeedStrategy):
    """Finds the fastest ZeRO stage that fits in the first steps of the run, and trains on at it.

    Every step is a real training step: the live state moves from stage to stage between optimizer steps.
    """

    strategy_name = "zero_auto"

    def __init__(
        self,
        *,
        stages: Sequence[int] = ZERO_STAGES,
        steps_per_rung: int = 200,
        warmup_steps: int = 20,
        headroom: float = 0.10,
        memory_limit_bytes: int | None = None,
        tokens_per_batch: Callable[[Any], int] | None = None,
        run_dir: str | Path | None = None,
        exhaustive: bool = False,
        decision: str | Path | None = None,
        save_universal: bool = False,
        trusted_checkpoints: bool = False,
        on_oom: Literal["climb", "raise"] = "climb",
        trial_timeout: float | None = None,
        global_batch: Literal["keep", "scale"] | int = "keep",
        checkpoint_blocks: Sequence[str] = (),
        nvme_path: str | Path | None = None,
        allow_quantized: bool = False,
        **deepspeed: Any,
    ) -> None:
        """Take the settings; nothing is built yet.

        Args:
            stages: ZeRO stages to try, out of 0, 1, 2, 3. One stage: train at it without a trial.
            steps_per_rung: Largest number of optimizer steps of a trial.
            warmup_steps: Steps at the start of each trial that are not counted.
            headroom: Share of the memory limit that has to stay free, 0 to 1.
            memory_limit_bytes: Memory per rank. Default: the device's; on CPU the host's available memory divided by
                the ranks on it.
            tokens_per_batch: Called with a batch, returns how many tokens it holds. Default: read off the batch.
            run_dir: Where the journal and report go. Default: ``<default_root_dir>/zero_ladder``.
            exhaustive: Try every stage to its full number of steps.
            decision: ``report.json`` (or its folder) of an earlier run: start at the stage decided there.
            save_universal: Leave a copy in DeepSpeed's universal format in every checkpoint.
            trusted_checkpoints: Run the code that a loaded checkpoint names, which is needed where it holds objects of
                one's own classes (hyperparameters, callbacks). Without it such a checkpoint is refused.
            on_oom: What to do when a step runs out of memory after the commit: ``climb`` moves to the next stage and
                runs the step's micro-batches again there, ``raise`` ends the run.
            trial_timeout: Seconds without any rank completing a micro-batch after which a trial counts as failed.
                Default: ten times the slowest step so far, at least five minutes.
            global_batch: Samples per optimizer step after a resume on another number of ranks: ``"keep"`` as many as
                before, by changing the accumulation; ``"scale"`` them with the ranks; or a number, from the start.
            checkpoint_blocks: Names of the classes whose instances are recomputed in backward where no stage fits
                without, such as ``("Block",)``. Default: the model's own switch, or its repeated blocks.
            nvme_path: Folder on a fast local disk. Given, weights and optimizer state go there where nothing else fits.
            allow_quantized: Also try to send rounded weights and gradients at stage 3 (qwZ, qgZ).
            **deepspeed: Arguments of `lightning.pytorch.strategies.DeepSpeedStrategy`, except ``stage``.

        Raises:
            MisconfigurationException: For settings that cannot work, before anything is built.
        """
        warn_of_pytorch_lightning()
        if "stage" in deepspeed:
            raise MisconfigurationException(
                f"ZeroAutoStrategy(stage={deepspeed['stage']}) has no meaning: the ladder chooses the stage. "
                f"Pass stages=({deepspeed['stage']},) to fix it, or strategy='deepspeed_stage_{deepspeed['stage']}'."
            )
        self.settings = ladder_settings(stages, steps_per_rung, warmup_steps, headroom, memory_limit_bytes, exhaustive)
        check_rescue(on_oom, trial_timeout)
        self._on_oom, self._trial_timeout = on_oom, trial_timeout
        self.rung: Rung | None = None
        self._decided = read_decision(decision) if decision is not None else None
        self._save_universal = save_universal
        self._trusted_checkpoints = trusted_checkpoints
        self._checkpoint_blocks = tuple(checkpoint_blocks)
        self._nvme_path = nvme_path
        self._allow_quantized = allow_quantized
        self._checkpointing: ActivationCheckpointing | None = None
        self._factored = False
        self._tokens_per_batch = tokens_per_batch
        self._run_dir = Path(run_dir) if run_dir is not None else None
        self._slot: EngineSlot | None = None
        self._ladder: LadderCallback | None = None
        self._climbed: set[int] = set()
        self._rescue: Rescue | None = None
        self._moves: list[Move] = []
        self._leftover: LeftoverMemory | None = None
        self._base_config: dict[str, Any] = {}
        self._elastic = ElasticRun(global_batch)
        self._knows_micro_batch = True
        if nvme_path is not None:
            deepspeed["nvme_path"] = str(nvme_path)
        # Named here, `stage` is no argument that a command line or YAML file offers.
        super().__init__(stage=self.settings.stages[0], **deepspeed)
        assert self.config is not None
        self._given_config = self.config
        if deepspeed.get("config") is not None or self.DEEPSPEED_ENV_VAR in os.environ:
            check_config(self._given_config, self.settings.stages)

    # Before the model exists ------------------------------------------------------------------------------------

    @override
    def connect(self, model: pl.LightningModule) -> None:
        if self._slot is not None:
            self.release_engine()
            self._slot.take_down()
            self._slot = None
        if self._checkpointing is not None:
            self._checkpointing.switch(False)
            self._checkpointing = None
        super().connect(model)
        self._elastic.begin(model.trainer)
        self.config = copy.deepcopy(self._given_config)
        self._config_initialized = False
        self.rung = None
        self._climbed.clear()
        self._moves.clear()

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = ResumeLauncher(self._launcher, self._elastic.note_checkpoint)

    @override
    def setup_environment(self) -> None:
        check_accelerator(self.accelerator)
        trainer = self._trainer
        if self.root_device.type == "cpu":
            groups.use_cpu_accelerator()
        # DeepSpeedStrategy's own version does one thing more than its parent's: it refuses everything but CUDA.
        super(DeepSpeedStrategy, self).setup_environment()
        self.settings = with_memory_limit(self.settings, self.root_device, self.num_processes)
        if trainer.state.fn == TrainerFn.FITTING:
            check_trainer(trainer)
            self._join_ladder(trainer)
            self._open_rescue(trainer)

    @override
    def setup_distributed(self) -> None:
        groups.leave_groups_at_exit()
        with GROUP_SOCKETS.noting():
            if self.root_device.type != "cpu":
                super().setup_distributed()
                return
            reset_seed()
            self.set_world_ranks()
            with groups.without_compiled_shm_op():
                self._init_deepspeed_distributed()

    def join_batch_start(self) -> None:
        """Take part in what Lightning's training loop does on all ranks before each batch: share a SIGTERM."""
        if hasattr(TrainingEpochLoop, "_broadcast_sigterm_tensor"):
            dist.broadcast(torch.zeros(1, dtype=torch.long, device=self.root_device), src=0)

    def make_groups(self, store: Store) -> None:
        """Make the process groups again, over a store of our own, after those that there were are lost."""
        backend = self._process_group_backend
        dist.init_process_group(
            backend, store=store, rank=self.global_rank, world_size=self.world_size, timeout=self._timeout
        )
        with groups.without_compiled_shm_op() if self.root_device.type == "cpu" else nullcontext():
            self._init_deepspeed_distributed()

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        sharded = self._must_be_born_sharded()
        self._configure_rung(Rung(3 if sharded else self.settings.stages[0]))
        if not sharded:
            yield
            return
        try:
            with super().model_sharded_context():
                yield
        except RuntimeError as error:
            if "size mismatch" not in str(error) and "shape" not in str(error):
                raise
            raise MisconfigurationException(
                "configure_model() loaded weights into a model that is being created in shards, because it does not "
                "fit whole on one device: its parameters are empty until they are gathered. Create the model from its "
                "config there and load the weights afterwards, or call from_pretrained() under "
                f"transformers' HfDeepSpeedConfig. The error was: {error}"
            ) from error

    # Building engines -------------------------------------------------------------------------------------------

    @override
    def _initialize_deepspeed_train(self, model: Module) -> None:
        assert isinstance(self.config, dict)
        optimizer, scheduler = None, None
        if "optimizer" not in self.config:
            optimizer, scheduler = self._init_optimizers()
        self._slot = EngineSlot(model, optimizer)
        state = probe_optimizer(optimizer) if optimizer is not None else None
        self._factored = bool(state is not None and state.other)
        if optimizer is not None:
            check_optimizer(optimizer, state, self.settings.stages)
        return_freed_memory()
        self._leftover = LeftoverMemory(self.root_device)
        self._checkpointing = ActivationCheckpointing(model, self._checkpoint_blocks)
        rung = self._first_rung(model, optimizer, state)
        if born_partitioned(model) and rung.stage != 3:
            self._slot.take_down()
        self._build_first(rung)
        self._adopt_scheduler(scheduler)

    def _build_first(self, rung: Rung) -> None:
        if self._rescue is not None:
            self._rescue.build_first(rung)
        else:
            self.install(self.slot.build(self.builder(rung)), rung)

    @override
    def _initialize_deepspeed_inference(self, model: Module) -> None:
        rung = Rung(3 if born_partitioned(model) else 0)
        self._configure_rung(rung)
        self._slot = EngineSlot(model, None)
        self.model = self._slot.build(lambda _: self._inference_engine(model))
        self.rung = rung

    def _inference_engine(self, model: Module) -> deepspeed.DeepSpeedEngine:
        import deepspeed

        assert isinstance(self.config, dict)
        config: dict[str, Any] = {key: self.config[key] for key in ("fp16", "bf16") if key in self.config}
        config["train_micro_batch_size_per_gpu"] = 1
        if self.zero_stage_3:
            config["zero_optimization"] = self.config["zero_optimization"]
            config["zero_allow_untested_optimizer"] = True
        engine, *_ = deepspeed.initialize(
            args=self._device_argument, config=config, model=model, model_parameters=[], dist_init_required=False
        )
        return engine

    @property
    def _device_argument(self) -> argparse.Namespace:
        """Tell DeepSpeed the device by its index, which is not the local rank where the Trainer picked devices."""
        index = self.root_device.index
        return argparse.Namespace(device_rank=self.local_rank if index is None else index)

    @override
    def _setup_model_and_optimizer(
        self, model: Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[deepspeed.DeepSpeedEngine, Optimizer]:
        import deepspeed

        engine, wrapped, *_ = deepspeed.initialize(
            args=self._device_argument,
            config=self.config,
            model=model,
            model_parameters=[param for param in model.parameters() if param.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, wrapped

    def builder(self, rung: Rung) -> Callable[[Optimizer | None], Any]:
        """Return what builds the engine of a rung."""
        assert self._checkpointing is not None
        self._checkpointing.switch(rung.checkpoint_activations)

        def build(optimizer: Optimizer | None) -> Any:
            assert self._slot is not None
            self._configure_rung(rung)
            if optimizer is not None and isinstance(self.config, dict):
                self.config.pop("optimizer", None)
                self.config.pop("scheduler", None)
            with GROUP_SOCKETS.noting():
                engine, _ = self._setup_model_and_optimizer(self._slot.module, optimizer)
            self._set_deepspeed_activation_checkpointing()
            return engine

        return build

    def install(self, engine: Any, rung: Rung) -> None:
        """Train on an engine from now on."""
        self.model = engine
        self.optimizers = [engine.optimizer]
        self.rung = rung
        if self._ladder is not None:
            self._ladder.on_rung_entered(rung)

    # Moving and recovering --------------------------------------------------------------------------------------

    def move_to(self, rung: Rung) -> None:
        """Take the training state to another rung. A collective, between optimizer steps.

        Raises:
            DamagedState: If the state after the move is not the one before it, bit for bit.
            NothingFits: If the rung, and every other one, cannot be built.
        """
        origin, started_s, leftover_bytes = self.rung, time.perf_counter(), 0
        assert origin is not None

        def hold() -> HeldRun:
            nonlocal leftover_bytes
            assert self._leftover is not None
            self.release_engine()
            held = self.slot.hold()
            leftover_bytes = self._leftover.after_teardown(held.state.nbytes)
            return held

        if self._rescue is not None:
            self._rescue.move(hold, rung)
        else:
            self.install(self.slot.resume(hold(), self.builder(rung)), rung)
        elapsed_s = time.perf_counter() - started_s
        self._note_move(origin, *across_ranks([elapsed_s, float(leftover_bytes)], "max", self.root_device))

    def _note_move(self, origin: Rung, seconds: float, leftover_bytes: float) -> None:
        assert self.rung is not None
        at_step = int(self.deepspeed_engine.global_steps)
        self._moves.append(Move(origin.stage, self.rung.stage, at_step, seconds, int(leftover_bytes)))
        if leftover_bytes > _LEFTOVER_WORTH_SAYING * self.settings.memory_limit_bytes:
            rank_zero_warn(
                f"zero_auto: {leftover_bytes / 2**20:.0f} MiB of memory were not returned on leaving {origin.label}."
            )

    def next_rung(self, failed: Rung, failure: Failure, *, measurable: bool) -> Rung:
        """Return the rung to go on with after one failed; called on every rank.

        Raises:
            NothingFits: If there is none.
        """
        if self._ladder is not None:
            return self._ladder.on_rung_failed(failed, failure, measurable=measurable)
        self._climbed.add(failed.stage)
        rung = climb(self.settings, self._climbed, failed, failure)
        rank_zero_warn(f"zero_auto: {failed.label} {failure_words(failure)}; the run goes on at {rung.label}.")
        return rung

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        automatic = self.lightning_module is None or self.lightning_module.automatic_optimization
        if self._rescue is None or automatic:
            return super().training_step(*args, **kwargs)
        step, progress = super().training_step, _ManualProgress(self._trainer)

        def from_the_start() -> Any:
            progress.rewind()
            return step(*args, **kwargs)

        return self._rescue.micro_batch(from_the_start, lambda closure: closure())

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._rescue is not None:
            self._rescue.phase = "backward"
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            begin_manual_backward(self.deepspeed_engine)
        if self._elastic.loss_factor != 1:
            closure_loss = closure_loss * self._elastic.loss_factor
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._rescue is not None:
            self._rescue.phase = "optimizer step"
        return loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        assert self.lightning_module is not None
        if self._rescue is None or not self.lightning_module.automatic_optimization:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        step = super().optimizer_step
        return self._rescue.micro_batch(closure, lambda closure: step(self.optimizers[0], closure, model, **kwargs))

    # Collectives of Lightning between micro-batches -------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._rescue is None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, *args, **kwargs)
        before, reduce = tensor.clone(), super().reduce
        # It adds up in place, and one that broke off may have written.
        return self._rescue.between(lambda: reduce(tensor.copy_(before), *args, **kwargs))

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        broadcast = super().broadcast
        return broadcast(obj, src) if self._rescue is None else self._rescue.between(lambda: broadcast(obj, src))

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        barrier = super().barrier
        if self._rescue is None:
            barrier(*args, **kwargs)
        else:
            self._rescue.between(lambda: barrier(*args, **kwargs))

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._rescue is not None:
            self._rescue.on_exception(exception)
            self._rescue = None
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._end_rescue()
        super().teardown()

    def _open_rescue(self, trainer: pl.Trainer) -> None:
        """Open the line between the ranks, by which a failure of one is known to all."""
        if self.world_size == 1:
            return
        if not GROUP_SOCKETS and self.root_device.type == "cpu":
            rank_zero_warn(
                "zero_auto: the process group was made before the Trainer, so a rank that fails alone cannot call the "
                "others out of a collective: such a failure ends the run. Let the Trainer make the group."
            )
            return
        assert self.cluster_environment is not None
        environment = self.cluster_environment
        line = Lifeline.open(environment.main_address, {environment.main_port})
        assert self.lightning_module is not None
        self._rescue = Rescue(self, line, Window(self.lightning_module, lambda: dict(trainer._results or {})))
        if self._ladder is not None:
            self._rescue.watch_for_hangs(self._trial_timeout or _TRIAL_TIMEOUT_S, fixed=self._trial_timeout is not None)

    def _end_rescue(self) -> None:
        if self._rescue is not None:
            self._rescue.close(together=True)
            self._rescue = None

    def in_early_trial(self, steps: int) -> bool:
        """Whether a trial runs that has completed fewer optimizer steps than this."""
        done = self.trial_steps
        return done is not None and done < steps

    @property
    def trial_steps(self) -> int | None:
        """Optimizer steps that the running trial has completed; None while none runs."""
        return self._ladder.trial_steps if self._ladder is not None else None

    def untimed(self) -> AbstractContextManager[None]:
        """Keep what happens inside out of what the trial measures."""
        return self._ladder.untimed() if self._ladder is not None else nullcontext()

    def explain(self, error: Exception) -> str | None:
        """Return what an error means where the rung explains it; None where it says so itself."""
        return None

    # Checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        assert self._slot is not None
        if self._rescue is not None:
            self._rescue.meet_to_save()
        target = Path(self.broadcast(refuse_remote(filepath)))

        if self._trainer.state.fn == TrainerFn.FITTING:
            self._elastic.add_entry(self._trainer, checkpoint, int(self.deepspeed_engine.micro_steps))

        def write(folder: Path) -> None:
            super(ZeroAutoStrategy, self).save_checkpoint(checkpoint, folder, storage_options)

        context = SaveContext(str(self._trainer.precision), self.local_rank, self._elastic.for_manifest())
        save(
            self._slot.engine,
            self._slot.client,
            target,
            write,
            context,
            tag=_LIGHTNING_TAG,
            universal=self._save_universal,
        )

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of any ZeRO stage and world size, native or universal, into the running engine.

        Raises:
            BadCheckpoint: If it is damaged or incomplete; on every rank, before anything is changed.
            CheckpointMismatch: If it belongs to another model or optimizer.
        """
        if self.load_full_weights and self.zero_stage_3:
            return dict(super().load_checkpoint(checkpoint_path, weights_only))
        assert self._slot is not None
        assert self.rung is not None
        trainer, path = self._trainer, self.broadcast(str(checkpoint_path))
        client = self._slot.client if trainer.state.fn == TrainerFn.FITTING else None
        restored = restore(
            self._slot.engine,
            client,
            path,
            strict=trainer.lightning_module.strict_loading,
            without_frozen=self.exclude_frozen_parameters,
            factored=self._factored,
            trusted=self._trusted_checkpoints,
        )
        rank_zero_info(describe_load(restored.opened, self.rung.stage, self.world_size))
        if restored.kept:
            rank_zero_warn(f"The checkpoint has no {', '.join(restored.kept[:5])}: these kept the values they had.")
        entries = lightning_entries(restored, trainer)
        if client is not None:
            self._elastic.loaded(trainer, entries, restored.opened.state.world_size)
        return entries

    # Where a resumed run goes on --------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return self._elastic.sampler_kwargs(self.world_size, self.global_rank)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._elastic.take_over(self._trainer, dataloader)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        counted = self._elastic.on_train_start(self._trainer)
        if counted is not None:
            enter_window(self.deepspeed_engine, counted)

    def note_batch_size(self, samples: int | None) -> None:
        """Take the micro-batch size from the first batch where the dataloader did not tell it."""
        if samples is None or self._base_config.get("train_micro_batch_size_per_gpu", 1) != 1:
            return
        self._base_config["train_micro_batch_size_per_gpu"] = samples
        self.deepspeed_engine.set_train_micro_batch_size(samples)

    def end_ladder(self) -> None:
        """Stop watching: from here a step is what it is under a fixed stage."""
        self._ladder = None
        if self._rescue is not None:
            self._rescue.watch_for_hangs(None)

    @property
    def walks(self) -> bool:
        """Whether the ladder is still being walked."""
        return self._ladder is not None

    @property
    def has_where_to_go(self) -> bool:
        """Whether a failed rung need not be the end of the run."""
        return self.walks or (self._on_oom == "climb" and len(self.settings.stages) > 1)

    def release_engine(self) -> None:
        """Drop the references to the engine that Lightning holds through this strategy."""
        if self._ladder is not None:
            self._ladder.on_rung_left()
        self.model = self.lightning_module
        self.optimizers = []

    # What the ladder needs to know ------------------------------------------------------------------------------

    @property
    def moves(self) -> tuple[Move, ...]:
        """Moves of this run so far."""
        return tuple(self._moves)

    @property
    def slot(self) -> EngineSlot:
        """What holds the engine."""
        assert self._slot is not None
        return self._slot

    def rung_config(self, rung: Rung) -> dict[str, Any]:
        """Return the DeepSpeed config of a rung as the run uses it."""
        assert self.lightning_module is not None
        manual = not self.lightning_module.automatic_optimization
        return rung_config(self._base_config, rung, manual_optimization=manual, nvme_path=self._nvme_path)

    def _configure_rung(self, rung: Rung) -> None:
        self._init_config_if_needed()
        self.config = self.rung_config(rung)

    @override
    def _format_config(self) -> None:
        if self.lightning_module is not None:
            assert isinstance(self.config, dict)
            reconcile_accumulation(self.config, self.lightning_module.trainer.accumulate_grad_batches)
        super()._format_config()
        if self.lightning_module is not None and self._trainer.state.fn == TrainerFn.FITTING:
            assert isinstance(self.config, dict)
            self._elastic.settle(self._trainer, self.config, known=self._knows_micro_batch)
        self._base_config = copy.deepcopy(self.config or {})

    @override
    def _auto_select_batch_size(self) -> int:
        # DeepSpeed uses the micro-batch size for its log and its sample count only. A loader without a batch sampler
        # (iterable datasets) does not tell; the ladder sets it from the first batch.
        source = self._trainer.fit_loop._data_source
        batches = getattr(source.dataloader(), "batch_sampler", None) if source.is_defined() else None
        size = getattr(batches, "batch_size", None)
        self._knows_micro_batch = isinstance(size, int)
        return size if isinstance(size, int) else 1

    def _join_ladder(self, trainer: pl.Trainer) -> None:
        """Put the callback that drives the ladder among the Trainer's callbacks, unless there is nothing to find."""
        self.settings = replace(self.settings, stages=shardable_stages(trainer, self.settings.stages))
        if self._decided is not None or len(self.settings.stages) == 1:
            self._ladder = None
            return
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, LadderCallback)]
        self._ladder = LadderCallback(
            self.settings, tokens_per_batch=self._tokens_per_batch, run_dir=self._run_dir, trainer=trainer
        )
        # First, so that a move is over before any other callback sees the batch.
        callbacks.insert(0, self._ladder)

    def _first_rung(self, model: Module, optimizer: Optimizer | None, state: OptimizerState | None) -> Rung:
        if self._ladder is not None:
            assert self._checkpointing is not None
            facts = self._facts(model, state)
            beyond = what_is_beyond(
                facts,
                optimizer,
                no_checkpointing=self._checkpointing.unavailable,
                nvme_path=self._nvme_path,
                allow_quantized=self._allow_quantized,
            )
            floors = self._floors(facts.count, state)
            return self._ladder.first_rung(floors, self.world_size, beyond, job_size(facts))
        if self._decided is not None:
            return self._decided_rung(self._decided)
        return Rung(self.settings.stages[0])

    def _decided_rung(self, report: RunReport) -> Rung:
        rung = report.decision.rung
        if report.context.world_size != self.world_size:
            rank_zero_warn(
                f"The decision for {rung.label} was taken on {report.context.world_size} ranks, this run has "
                f"{self.world_size}: another stage may be faster. Leave `decision` out to measure again."
            )
        rank_zero_info(f"zero_auto: starting at {rung.label}, decided in an earlier run.")
        return rung

    def _facts(self, model: Module, state: OptimizerState | None) -> Facts:
        return Facts(
            count=count_parameters(model),
            largest=largest_parameter(model),
            world_size=self.world_size,
            nodes=self.num_nodes,
            low_precision=self._low_precision,
            moment_bytes=state.bytes_per_parameter if state is not None else 0,
            zero_config=self._base_config.get("zero_optimization", {}),
            device=self.root_device,
            accumulate=self._trainer.accumulate_grad_batches,
        )

    def _floors(self, count: ModelCount, state: OptimizerState | None) -> dict[int, int]:
        return certain_floors(
            self.settings.stages,
            count,
            world_size=self.world_size,
            low_precision=self._low_precision,
            moment_bytes=state.bytes_per_parameter if state is not None else 0,
            zero_config=self._base_config.get("zero_optimization", {}),
        )

    def _must_be_born_sharded(self) -> bool:
        """Whether only stage 3 can hold the model, so that ``configure_model`` has to create it in shards."""
        assert self.lightning_module is not None
        if self.world_size == 1:
            return False
        if self.settings.stages == (3,) or (self._decided is not None and self._decided.decision.rung.stage == 3):
            return True
        count = meta_count(self.lightning_module)
        return count is not None and only_stage_3_holds(
            self.settings.stages,
            count,
            world_size=self.world_size,
            low_precision=self._low_precision,
            zero_config=self._given_config.get("zero_optimization", {}),
            memory_limit_bytes=self.settings.memory_limit_bytes,
        )

    @property
    def _low_precision(self) -> bool:
        return bool(self.precision_plugin.precision != "32-true")

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        assert self.lightning_module is not None
        optimizers, schedulers = _init_optimizers_and_lr_schedulers(self.lightning_module)
        if len(optimizers) != 1 or len(schedulers) > 1:
            raise MisconfigurationException(
                f"configure_optimizers returned {len(optimizers)} optimizers and {len(schedulers)} schedulers; "
                "DeepSpeed takes one optimizer and at most one scheduler. Put parameters that need other settings in "
                "groups of one optimizer, or use strategy='ddp'."
            )
        return optimizers[0], schedulers[0] if schedulers else None

    def _adopt_scheduler(self, scheduler: LRSchedulerConfig | None) -> None:
        """Let Lightning step the scheduler, the user's or the one that the DeepSpeed config defines."""
        assert self._slot is not None
        from_config = self._slot.engine.lr_scheduler
        self._slot.engine.lr_scheduler = None
        if scheduler is not None:
            self.lr_scheduler_configs = [scheduler]
        elif from_config is not None:
            self.lr_scheduler_configs = [LRSchedulerConfig(from_config, interval="step")]

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="DeepSpeed with the ZeRO stage found during the run"
            )


class _ManualProgress:
    """What a batch of manual optimization advances: Lightning's count of steps, schedulers, learning rates."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._loop = trainer.fit_loop.epoch_loop.manual_optimization
        self._steps = self._loop.optim_step_progress
        self._steps_before = copy.deepcopy(self._steps.state_dict())
        self._schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
        self._schedulers_before = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        self._rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self._trainer = trainer

    def rewind(self) -> None:
        """Put it back to where the batch began."""
        self._steps.load_state_dict(copy.deepcopy(self._steps_before))
        for scheduler, state in zip(self._schedulers, self._schedulers_before, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
        for group, rate in zip(self._trainer.optimizers[0].param_groups, self._rates, strict=True):
            group["lr"] = rate
        self._loop.on_run_start()  # has the loop count the steps of an optimizer that is new since
