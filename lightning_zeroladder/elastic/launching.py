"""Learn which checkpoint a fit resumes from before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_registry import _is_registry
from typing_extensions import override

__all__ = ["ResumeLauncher"]


class ResumeLauncher(_SubprocessScriptLauncher):
    """Starts processes as Lightning's launcher does, and tells the checkpoint that the fit will load.

    Lightning names it to a strategy only when it is to be loaded, after ``configure_optimizers`` has asked for the
    number of optimizer steps; the accumulation, on which that depends, has to be settled before.

    Args:
        started_by: Lightning's launcher.
        note: Called on every rank with the path, None for a run from scratch.
    """

    def __init__(self, started_by: Any, note: Callable[[str | None], None]) -> None:
        super().__init__(started_by.cluster_environment, started_by.num_processes, started_by.num_nodes)
        self._note = note

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._note(None)
            if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
                bound = inspect.signature(function).bind(*args, **kwargs)
                self._resolve(trainer, bound.arguments)
                args, kwargs = bound.args, bound.kwargs
            return function(*args, **kwargs)

        return super().launch(run, *args, trainer=trainer, **kwargs)

    def _resolve(self, trainer: pl.Trainer, arguments: dict[str, Any]) -> None:
        """Find out what ``best``, ``last`` and ``hpc`` stand for, once: looking again would warn again."""
        given = arguments.get("ckpt_path")
        connector = trainer._checkpoint_connector
        by_attribute = connector._user_managed  # the user has set trainer.ckpt_path
        if _is_registry(given):
            return
        path = connector._select_ckpt_path(
            TrainerFn.FITTING, given, model_provided=True, model_connected=trainer.lightning_module is not None
        )
        self._note(str(path) if path is not None else None)
        if not by_attribute or given is not None:
            arguments["ckpt_path"] = path
