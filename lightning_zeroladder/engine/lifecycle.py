"""Build a DeepSpeed engine, take it down without a trace, and move the training state from one to the next."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zeroladder.engine.boundary import at_boundary
from lightning_zeroladder.engine.fragments import HeldState, count_weights, pour, recount, salvage, take
from lightning_zeroladder.engine.module import (
    ModuleLedger,
    WeightPiece,
    assemble_weights,
    drop_prefetches,
    is_partitioned,
    own_storage,
    reclaim_weights,
    wait_for_prefetches,
    weight_pieces,
)
from lightning_zeroladder.engine.shards import live_shards, local_weights
from lightning_zeroladder.probe.memory import trim_host_memory

__all__ = ["ClientOptimizer", "EngineSlot", "HeldRun", "born_partitioned", "return_freed_memory", "write_scaler"]

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "_global_grad_norm", "_step_applied")
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


Builder = Callable[[Optimizer | None], Any]
"""Calls ``deepspeed.initialize`` with a torch optimizer (None: the config defines it) and returns the engine."""


class ClientOptimizer:
    """The user's torch optimizer with the parameter lists that it was created with.

    DeepSpeed replaces the lists by flat tensors; taking an engine down puts them back.

    Args:
        optimizer: The torch optimizer.
        params: The parameters of its one group, where an engine has already replaced them.
    """

    def __init__(self, optimizer: Optimizer, params: list[Parameter] | None = None) -> None:
        self.optimizer = optimizer
        self._params: list[tuple[dict[str, Any], list[Parameter]]] = [
            (group, list(group["params"] if params is None else params)) for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        """Give the groups their parameters back and drop all state."""
        for group, params in self._params:
            group["params"] = list(params)
        self.optimizer.param_groups[:] = [group for group, _ in self._params]
        self.optimizer.state.clear()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups with their hyperparameters."""
        return [group for group, _ in self._params]

    def names(self, module: Module) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        names = {param: name for name, param in module.named_parameters()}
        return [[names[param] for param in params if param in names] for _, params in self._params]

    def set_hyperparameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set everything in the groups but their parameters, as ``load_state_dict`` of a torch optimizer does."""
        for (group, _), values in zip(self._params, groups, strict=False):
            group.update({key: value for key, value in values.items() if key not in ("params", "param_names")})

    @contextmanager
    def keeping_hyperparameters(self) -> Iterator[None]:
        """Keep everything in the groups but their parameters as it is now, whatever happens inside."""
        before = [{key: value for key, value in group.items() if key != "params"} for group, _ in self._params]
        yield
        for (group, _), values in zip(self._params, before, strict=True):
            for key in set(group) - values.keys() - {"params"}:
                del group[key]
            group.update(values)


@dataclass(frozen=True, slots=True)
class HeldRun:
    """What outlives an engine: the rank's share of the state, the counters and the loss scaler."""

    state: HeldState
    counters: dict[str, Any]
    scaler: dict[str, Any]
    rewrites_weights: bool = False
    """Whether the weights used in forward may be ahead of the state and have to be made from it."""

    @property
    def steps(self) -> int:
        """Optimizer steps completed."""
        return int(self.counters["global_steps"])


def _scaler(engine: Any) -> Any:
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _read(source: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names if getattr(source, name, None) is not None}


def _write(target: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(target, name):
            setattr(target, name, value)


def write_scaler(engine: Any, state: Mapping[str, Any]) -> None:
    """Set the state of the engine's loss scaler, where it has one."""
    _write(_scaler(engine), {name: value for name, value in state.items() if name in _SCALER_STATE})


def return_freed_memory() -> None:
    """Give memory that nothing refers to back to the device and, on glibc, to the operating system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_host_memory()


@contextmanager
def _keeping_random_state() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


class EngineSlot:
    """Holds the one engine of a run, and replaces it.

    Args:
        module: The module to train. Keeps its parameters, by identity, through every engine.
        optimizer: The torch optimizer that steps it. None if the DeepSpeed config defines it, or without training.
    """

    def __init__(self, module: Module, optimizer: Optimizer | None) -> None:
        self.module = module
        self.client = ClientOptimizer(optimizer) if optimizer is not None else None
        self.engine: Any = None
        self._ledger: ModuleLedger | None = None
        self._scaler_state: dict[str, Any] = {}

    def build(self, builder: Builder) -> Any:
        """Build the first engine of a run.

        Args:
            builder: Calls ``deepspeed.initialize`` with the module and the given optimizer and returns the engine.
        """
        trained = [param for param in self.module.parameters() if param.requires_grad]
        engine = self._build(builder)
        if self.client is None and engine.basic_optimizer is not None:
            self.client = ClientOptimizer(engine.basic_optimizer, trained)
        self._undo_trial_step()
        return engine

    def hold(self) -> HeldRun:
        """Copy the state of the live engine to the host and take the engine down. A collective.

        Drop every other reference to the engine before calling, or some of its memory stays.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # DeepSpeed reduces and gathers on streams of its own
        state = take(self.engine)
        self._scaler_state.update(_read(_scaler(self.engine), _SCALER_STATE))
        held = HeldRun(state, _closed_window(self.engine), dict(self._scaler_state))
        self.take_down()
        return held

    def copy(self) -> HeldRun:
        """Copy the state of the live engine to the host, without any other rank; the engine stays.

        Its checksums are missing: `verified` adds them.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # DeepSpeed reduces and gathers on streams of its own
        parameters = salvage(self.engine)
        self._scaler_state.update(_read(_scaler(self.engine), _SCALER_STATE))
        return HeldRun(HeldState(parameters, {}), _closed_window(self.engine), dict(self._scaler_state))

    def verified(self, held: HeldRun, device: torch.device) -> HeldRun:
        """Return a copied run with the checksums that the state must have after it was poured. A collective.

        The module must be whole. Its weights count, unless they are to be made from the state.

        Raises:
            DamagedState: If the ranks' weights differ.
        """
        checksums = recount(held.state.parameters, device)
        if not held.rewrites_weights:
            checksums.update(count_weights(self.module, device))
        return replace(held, state=replace(held.state, checksums=checksums))

    def resume(self, held: HeldRun, builder: Builder) -> Any:
        """Build the next engine and pour a held run into it. A collective."""
        assert self.client is not None
        with _keeping_random_state(), self.client.keeping_hyperparameters():
            engine = self._build(builder)
            pour(held.state, engine, with_weights=held.rewrites_weights)
        _write(engine, held.counters)
        _write(_scaler(engine), held.scaler)
        return engine

    def take_down(self) -> None:
        """Destroy the live engine and leave plain whole parameters in the module. A collective after stage 3.

        Also cleans up after an engine whose construction failed. Idempotent.
        """
        wait_for_prefetches(self.module)
        owned = reclaim_weights(self.module)
        self._dismantle()
        while owned:
            param, weights = owned.pop()
            param.grad = None
            param.data = own_storage(weights)
            del weights
        return_freed_memory()

    def abandon(self) -> dict[Parameter, WeightPiece]:
        """Take the engine down without the other ranks, whatever it was doing.

        Returns:
            What this rank holds of each parameter's weights; `assemble` makes the module whole from it. Until then
            the parameters are of no use.
        """
        drop_prefetches(self.module)
        pieces = weight_pieces(self.module)
        self._dismantle()
        return pieces

    def assemble(
        self, pieces: dict[Parameter, WeightPiece], partitioned: Collection[int], device: torch.device
    ) -> None:
        """Make the module whole after `abandon`, over new process groups. A collective.

        Args:
            pieces: What `abandon` returned.
            partitioned: Positions of the parameters that some rank holds a piece of only.
            device: Where the ranks communicate.
        """
        assemble_weights(pieces, partitioned, device)
        return_freed_memory()

    def _dismantle(self) -> None:
        """Destroy the engine and take its traces off the module; the parameters' data are left to the caller."""
        if self.engine is not None:
            wrapper = self.engine.optimizer
            self.engine.destroy()
            self.engine.optimizer = None
            if wrapper is not None and wrapper is self.engine.basic_optimizer:
                vars(wrapper).pop("zero_grad", None)
            elif wrapper is not None:
                _hollow(wrapper)
        self.engine = None
        if self.client is not None:
            self.client.restore()
        _forget(self.module)
        if self._ledger is not None:
            self._ledger.restore()
            self._ledger = None

    def _build(self, builder: Builder) -> Any:
        if self.engine is not None:
            raise RuntimeError("An engine is still live; hold() it first.")
        self._ledger = ModuleLedger(self.module)
        try:
            self.engine = builder(self.client.optimizer if self.client is not None else None)
            self._adopt_optimizer()
        finally:
            self._ledger.note_additions()
        self._keep_open_windows()
        return self.engine

    def _keep_open_windows(self) -> None:
        """Ignore a request to zero gradients in the middle of an accumulation window.

        Lightning makes one at the first batch of each epoch. Where the accumulation does not divide the epoch, stages
        0 and 1 would drop the gradients of the last batches while 2 and 3 keep them; DeepSpeed itself zeroes them
        after every step.
        """
        engine, wrapper = self.engine, self.engine.optimizer
        if wrapper is None or not engine.managed_gradient_accumulation():
            return
        zero_grad = wrapper.zero_grad

        def zero_grad_between_windows(*args: Any, **kwargs: Any) -> None:
            if engine._running_engine_step or at_boundary(engine):
                zero_grad(*args, **kwargs)

        wrapper.zero_grad = zero_grad_between_windows

    def _adopt_optimizer(self) -> None:
        """Put the user's optimizer back where DeepSpeed made a new one of its class (it does for Adagrad).

        The one it makes has the defaults of the class in one group: learning rates and schedules would be lost, and
        stages 1 and 2 would have linked the parameters of the first group only to their fp32 copies.
        """
        if self.client is None:
            return
        wrapper, ours = self.engine.optimizer, self.client.optimizer
        made = getattr(wrapper, "optimizer", None)
        if made is None or made is ours or self.engine.basic_optimizer is not ours:
            return
        ours.state.clear()
        ours.state.update(made.state)
        wrapper.optimizer = ours
        wrapper._link_all_hp_params()
        if int(self.engine.zero_optimization_stage()) < 3:
            wrapper._param_slice_mappings = wrapper._create_param_mapping()  # goes into checkpoints

    def _undo_trial_step(self) -> None:
        """Take back the step with zero gradients by which stage 0 in low precision allocates its state.

        It decays the weights and advances the step count; no other stage does it, and stages must not differ.
        """
        if type(self.engine.optimizer).__name__ not in ("FP16_UnfusedOptimizer", "FP16_Optimizer"):
            return
        assert self.client is not None
        weights = dict(self.engine.module.named_parameters())
        for shard in live_shards(self.engine):
            shard.master.copy_(local_weights(weights[shard.name])[0])
        self.client.optimizer.state.clear()


def _closed_window(engine: Any) -> dict[str, Any]:
    """Return the engine's counters as they were when the last accumulation window closed."""
    counters = _read(engine, _COUNTERS)
    counters["micro_steps"] -= counters["micro_steps"] % engine.gradient_accumulation_steps()
    return counters


def _hollow(wrapper: Any) -> None:
    """Empty a destroyed optimizer wrapper, so that whoever still refers to it keeps no tensors alive.

    Lightning's closure of the running batch does, and calls its `zero_grad` when a batch is replayed.
    """
    vars(wrapper).clear()
    wrapper.zero_grad = lambda *_, **__: None


def _forget(module: Module) -> None:
    """Clear what DeepSpeed keeps at module level about a model (each of these would keep the whole engine)."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    stack = parameter_offload.FWD_MODULE_STACK
    parts = set(module.modules())
    stack[:] = [entry for entry in stack if entry not in parts]
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            clear = getattr(cell.cell_contents, "cache_clear", None)
            if clear is not None:
                clear()


def born_partitioned(module: Module) -> bool:
    """Whether the module was created with its parameters already divided among ranks."""
    return any(is_partitioned(param) for param in module.parameters())
