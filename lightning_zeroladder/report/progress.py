"""Progress of the ladder, shown beside the progress bar of Lightning, whichever of its two that is."""

from __future__ import annotations

import sys
from typing import Any

from rich.markup import escape
from rich.progress import Progress, TaskID

__all__ = ["LadderProgress"]


class LadderProgress:
    """Shows rung, step and throughput so far.

    On a terminal it is a bar below Lightning's own: a task of Lightning's ``RichProgressBar``, which owns the
    screen while it is live, or else a tqdm bar. Elsewhere it is one line per rung.
    """

    def __init__(self, enabled: bool, *, progress_bar: object | None = None) -> None:
        """Show nothing yet.

        Args:
            enabled: False on every rank but one, and when progress bars are off: nothing is ever shown then.
            progress_bar: ``trainer.progress_bar_callback``.
        """
        self._enabled = enabled
        self._progress_bar = progress_bar
        self._label = ""
        self._total_steps = 0
        self._tqdm: Any = None
        self._rich: tuple[Progress, TaskID] | None = None

    def start(self, rung_label: str, total_steps: int) -> None:
        """Begin a rung that takes at most ``total_steps`` optimizer steps."""
        if not self._enabled:
            return
        self._label, self._total_steps = rung_label, total_steps
        live = self._live()  # asked first: while a display is live, older releases of rich say stdout is no terminal
        if live is not None:
            self._close_tqdm()
            self._show_rich(live, step=0, suffix="")
        elif sys.stdout.isatty():
            self._show_tqdm()
        else:
            print(f"ladder: trying {rung_label}, at most {total_steps} steps", flush=True)

    def update(self, step: int, throughput: float, unit: str) -> None:
        """Show that ``step`` optimizer steps of the rung are done.

        Args:
            step: Optimizer steps of this rung so far, 1 after the first.
            throughput: Units per second and rank so far.
            unit: Its name, such as ``tokens/s/GPU``.
        """
        if self._tqdm is not None:
            self._tqdm.set_postfix_str(f"{throughput:,.0f} {unit}", refresh=False)
            self._tqdm.update(step - self._tqdm.n)
        elif self._rich is not None:
            # Lightning makes a new display when its own was stopped between epochs; the old one shows nothing more.
            self._show_rich(self._live() or self._rich[0], step=step, suffix=f", {throughput:,.0f} {unit}")

    def close(self) -> None:
        """Take the bar off the screen; ``start`` may be called again."""
        self._close_tqdm()
        if self._rich is not None:
            progress, task = self._rich
            # Hidden, not removed: Lightning looks its tasks up by position and would find the wrong one.
            progress.update(task, visible=False)

    def _live(self) -> Progress | None:
        progress = getattr(self._progress_bar, "progress", None)
        if not isinstance(progress, Progress):
            return None
        return progress if progress.live.is_started and progress.console.is_terminal else None

    def _show_rich(self, progress: Progress, *, step: int, suffix: str) -> None:
        description = escape(f"ladder: {self._label}{suffix}")
        if self._rich is None or self._rich[0] is not progress:
            self._rich = progress, progress.add_task(description, total=self._total_steps)
        progress.update(self._rich[1], description=description, total=self._total_steps, completed=step, visible=True)

    def _show_tqdm(self) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

        self._close_tqdm()
        self._tqdm = tqdm(
            total=self._total_steps,
            desc=f"ladder: {self._label}",
            # Lightning's tqdm bars take the lines 2p (training) and 2p + 1 (validation) of standard output.
            position=2 * int(getattr(self._progress_bar, "process_position", 0)) + 2,
            file=sys.stdout,
            leave=False,
            dynamic_ncols=True,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
        )

    def _close_tqdm(self) -> None:
        if self._tqdm is not None:
            self._tqdm.close()
            self._tqdm = None
