"""Rescue: out of a rung that failed on some rank, and on with the next one, with nothing lost.

All ranks learn of the failure over the lifeline, leave the rung, keep what they own of the state after the last
completed optimizer step, make new process groups, build the next rung's engine, pour the state into it, and run the
micro-batches of the open window again.
"""

from __future__ import annotations

import socket
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_zeroladder.engine.boundary import at_boundary
from lightning_zeroladder.engine.fragments import DamagedState, UnmovableState
from lightning_zeroladder.engine.groups import close_groups
from lightning_zeroladder.engine.lifecycle import EngineSlot, HeldRun
from lightning_zeroladder.engine.lifeline import Lifeline, Note, OtherRankFailed, RanksLost
from lightning_zeroladder.ladder import Failure, FailureKind, NothingFits, Rung
from lightning_zeroladder.replay import Window

if TYPE_CHECKING:
    from torch.nn import Parameter

    from lightning_zeroladder.engine.module import WeightPiece
    from lightning_zeroladder.strategy import ZeroAutoStrategy

__all__ = ["GUARDED_STEPS", "Rescue", "StepLost"]

T = TypeVar("T")

GUARDED_STEPS = 3
"""First optimizer steps of a trial before which every rank copies its state to the host.

Torch optimizers allocate their state, and the memory of a step settles, in the first of them: one that runs out of
memory in the middle of its update does so there. Copying before every step would cost more than it saves.
"""

SAVE_PATIENCE_S = 300.0
"""How long a rank that saves waits for the others to come to it."""

_TRACEBACK_CHARACTERS = 20_000

_PARTING_S = 20.0
"""How long a rank that ends with an error waits for the others to end as well."""


@dataclass(frozen=True, slots=True)
class _Status:
    """What a rank tells the others when it leaves a rung.

    Attributes:
        started: Whether it had built a first engine.
        steps: Optimizer steps of the state that it has whole; None if it broke off in the middle of one.
        waiting: Whether it was on its way to another rung.
        counted: Whether its state has checksums.
        kept: Steps of the copy that it kept of an earlier state.
        begun: Micro-batches of the open window that it has begun.
        trial_steps: Steps of the trial that it has counted.
        divided: Positions of the parameters that it holds a piece of only.
    """

    started: bool
    steps: int | None
    waiting: bool
    counted: bool
    kept: int | None
    begun: int
    trial_steps: int | None
    divided: list[int]


class StepLost(RuntimeError):
    """A rank failed in the middle of an optimizer step whose start nobody has kept."""


_FINAL = (DamagedState, UnmovableState, NothingFits, RanksLost, StepLost)
"""Errors that no other rung would help with."""


class Rescue:
    """Guards what a run does on a rung.

    Args:
        strategy: The strategy that owns the engine.
        lifeline: The line to the other ranks.
        window: The open accumulation window.
    """

    def __init__(self, strategy: ZeroAutoStrategy, lifeline: Lifeline, window: Window) -> None:
        self._strategy, self._line, self._window = strategy, lifeline, window
        self._held: HeldRun | None = None
        self._pending: HeldRun | None = None
        self._entering: Rung | None = None
        self._has_state = False
        self._stepping = False
        self._suspect: Note | None = None
        self._hooked: Optimizer | None = None
        self._run: Callable[[Callable[[], Any]], Any] = lambda closure: closure()
        self.phase = "construction"
        self._measurable = True
        self._begun_by_all = 0
        self._saves = 0
        self._parted = False
        self._step_began_s = time.monotonic()
        self._shortest_stall_s: float | None = None
        self.recoveries = 0

    # What is guarded --------------------------------------------------------------------------------------------

    def build_first(self, rung: Rung) -> None:
        """Build the first engine of the run."""
        self._entering = rung
        self._through(self._build, lambda: None)

    def move(self, action: Callable[[], HeldRun], rung: Rung) -> None:
        """Move to another rung, between optimizer steps.

        Args:
            action: Takes the state out of the live engine and takes that down.
            rung: Where to.
        """

        def move() -> None:
            self.phase = "moving state"
            self._pending = action()
            self._enter()

        self._entering = rung
        self._through(move, lambda: None)

    def micro_batch(self, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        """Run a micro-batch, with the optimizer step where it is due.

        Args:
            closure: Computes the loss and its gradients; can be called again.
            run: Runs a closure on the live engine, and steps.
        """
        if not self._strategy.has_where_to_go:
            return self._once_and_for_all(lambda: run(closure))
        if not len(self._window) and self._held is None and self._strategy.in_early_trial(GUARDED_STEPS):
            with self._strategy.untimed():
                self._held = self._slot.copy()
        self._window.add(closure)
        self._run = run
        return self._through(lambda: self._once(closure), lambda: self._replay(last_counts=True))

    def _replay(self, *, last_counts: bool) -> Any:
        """Run the micro-batches of the window again.

        A rank can have begun more of them than the one that failed. The training loop of the others comes to those
        after the replay, with a collective of its own before each: this rank has to take part.
        """
        done = 0

        def once(closure: Callable[[], Any]) -> Any:
            nonlocal done
            if done >= self._begun_by_all:
                self._strategy.join_batch_start()
            done += 1
            return self._once(closure)

        return self._window.replay(once, last_counts=last_counts)

    def _once(self, closure: Callable[[], Any]) -> Any:
        self.phase = "forward"
        result = self._run(closure)
        self._after_micro_batch()
        return result

    def _once_and_for_all(self, action: Callable[[], T]) -> T:
        """Do something that no rescue would follow: an error ends the run, and promptly so on every rank."""
        try:
            with self._line.guarded():
                return action()
        except Exception as error:
            if self._line.note is not None:
                self._raise(self._line.note, error)
            raise

    def between(self, collective: Callable[[], T]) -> T:
        """Run a collective that belongs to no micro-batch; again after a rescue."""
        if self._line.inside:
            return collective()
        if not self._strategy.has_where_to_go:
            return self._once_and_for_all(collective)

        def again() -> T:
            self._replay(last_counts=False)
            return collective()

        return self._through(collective, again, own=False)

    def meet_to_save(self) -> None:
        """Make sure that all ranks save, before the first collective of it.

        Raises:
            RuntimeError: If some have not come, because the call is made on some ranks only.
        """
        self._saves += 1
        missing = self._line.meet(f"save/{self._saves}", SAVE_PATIENCE_S)
        if missing:
            raise RuntimeError(
                f"save_checkpoint was called on rank {self._line.rank}, but ranks {', '.join(map(str, missing))} did "
                f"not come to it within {SAVE_PATIENCE_S:.0f} s. Every rank holds a part of the state, so all of them "
                "have to call it: take trainer.save_checkpoint() out of `if trainer.is_global_zero`."
            )

    # Through failures -------------------------------------------------------------------------------------------

    def _through(self, action: Callable[[], T], again: Callable[[], T], *, own: bool = True) -> T:
        """Do something; where a rank fails meanwhile, go on to the next rung and do it again.

        Args:
            action: What to do first.
            again: What to do after a rescue.
            own: Whether an error of this rank is the rung's; without it only those of others are.
        """
        while True:
            try:
                with self._line.guarded():
                    return action()
            except _FINAL:
                raise
            except Exception as error:
                if not own and self._line.note is None:
                    raise
                note = self._tell(error)
                self._judge(note, error)
                _drop_frames(error)
            self._rescue(note)
            action, own = again, True

    def _rescue(self, note: Note) -> None:
        """Leave the rung with all ranks and enter the next one."""
        while True:
            self._leave(note)
            self._decide(note)  # on every rank, whatever happens to another one meanwhile: they must not part here
            try:
                with self._line.guarded():
                    if self._has_state:
                        self._enter()
                    else:
                        self._build()
                return
            except _FINAL:
                raise
            except Exception as error:
                note = self._tell(error)
                self._judge(note, error)
                _drop_frames(error)

    def _tell(self, error: Exception) -> Note:
        """Tell the others, unless one has been quicker; returns what the first said."""
        told = self._line.note
        if told is not None:
            return told
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        trace = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
        kind = FailureKind.OUT_OF_MEMORY if out_of_memory else FailureKind.ERROR
        message = self._strategy.explain(error) or str(error)
        note = Note(
            self._line.rank,
            socket.gethostname(),
            str(kind),
            self.phase,
            type(error).__name__,
            message,
            trace,
            self._line.steps,
        )
        return self._line.fail(note)

    def _judge(self, note: Note, error: Exception) -> None:
        """Raise an error that is not the rung's: one that another rung gave as well, or one that ends the run."""
        if note.fatal:
            self._raise(note, error)
        if note.kind != FailureKind.ERROR:
            return
        if not self._strategy.walks:
            self._raise(note, error)
        known = self._suspect
        if known is not None and (known.error, known.message) == (note.error, note.message):
            self._raise(note, error)
        self._suspect = note

    def _raise(self, note: Note, error: Exception) -> NoReturn:
        if note.rank == self._line.rank and not note.fatal:
            raise error
        raise OtherRankFailed(
            f"rank {note.rank} on {note.host} failed in {note.phase}: {note.words}\n\nThere:\n{note.traceback}"
        ) from None

    # Leaving and entering ---------------------------------------------------------------------------------------

    def _leave(self, note: Note) -> None:
        """Keep what this rank owns, take the engine down, meet the others and make new process groups."""
        self._line.wait_for_cut()
        own = self._own_state()
        self._strategy.release_engine()
        pieces = self._slot.abandon()
        status = _Status(
            started=self._has_state,
            steps=own.steps if own is not None else None,
            waiting=self._pending is not None,
            counted=own is not None and bool(own.state.checksums),
            kept=self._held.steps if self._held is not None else None,
            begun=len(self._window),
            trial_steps=self._strategy.trial_steps,
            divided=_divided(pieces),
        )
        told_by_rank = self._line.leave(asdict(status))
        if any("ended" in told for told in told_by_rank):
            self._part_from(told_by_rank, pieces)
        statuses = [_Status(**told) for told in told_by_rank]
        self._line.regroup(close_groups, self._strategy.make_groups)
        self.recoveries += 1
        self._begun_by_all = min(told.begun for told in statuses)
        self._measurable = len({told.trial_steps for told in statuses}) == 1
        self._slot.assemble(pieces, _divided_anywhere(told_by_rank), self._strategy.root_device)
        self._has_state = all(told.started for told in statuses)
        self._pending = self._chosen(own, statuses, note) if self._has_state else None
        self._stepping = False

    def _own_state(self) -> HeldRun | None:
        """Return the state after the last completed step as far as this rank has it whole; None where it has not."""
        if self._pending is not None:
            return self._pending
        if self._slot.engine is None or not self._has_state or self._stepping:
            return None
        return self._slot.copy()

    def _chosen(self, own: HeldRun | None, statuses: list[_Status], note: Note) -> HeldRun:
        """Return the state to go on from, the same on all ranks: where they stand, or where the step began."""
        intact = all(told.steps is not None for told in statuses) and len({told.steps for told in statuses}) == 1
        kept = self._held is not None and len({told.kept for told in statuses}) == 1
        counted = all(told.counted for told in statuses)
        if intact and own is not None:
            # Some ranks have entered the rung that others failed to build: they go back to what they came with, which
            # is cut as the others' is.
            if any(told.waiting for told in statuses) and self._entering is None and kept:
                assert self._held is not None
                own, counted = replace(self._held, rewrites_weights=False), True
            chosen = own
        elif kept:
            assert self._held is not None
            chosen, counted = replace(self._held, rewrites_weights=True), bool(self._held.state.checksums)
        else:
            raise StepLost(
                f"rank {note.rank} on {note.host} failed in the middle of an optimizer step ({note.words}). Some ranks "
                "have taken the step and others have not, and a copy of the state before it is kept for the first "
                f"{GUARDED_STEPS} steps of a trial only. Resume from the last checkpoint.\n\nThere:\n{note.traceback}"
            )
        return chosen if counted else self._slot.verified(chosen, self._strategy.root_device)

    def _decide(self, note: Note) -> None:
        """Decide where to go."""
        failed = self._failed()
        failure = Failure(FailureKind(note.kind), note.phase, note.steps, note.words)
        self._entering = self._strategy.next_rung(failed, failure, measurable=self._measurable)

    def _build(self) -> None:
        assert self._entering is not None
        self.phase = "construction"
        self._strategy.install(self._slot.build(self._strategy.builder(self._entering)), self._entering)
        self._entered()

    def _enter(self) -> None:
        assert self._entering is not None
        assert self._pending is not None
        self.phase = "construction"
        held = self._pending
        self._strategy.install(self._slot.resume(held, self._strategy.builder(self._entering)), self._entering)
        self._held = replace(held, rewrites_weights=True)  # where the first step begins, should it break off
        self._entered()

    def _entered(self) -> None:
        self._has_state = True
        self._stepping = False  # DeepSpeed takes a step without gradients while it builds some engines
        self._entering = self._pending = None
        self._line.steps = self._steps
        self._watch_optimizer()

    def _failed(self) -> Rung:
        """Return the rung that failed: the one being entered, where that is so on some rank."""
        failed = self._entering or self._strategy.rung
        assert failed is not None
        return failed

    # Steps ------------------------------------------------------------------------------------------------------

    def _after_micro_batch(self) -> None:
        self._line.beat()
        if not at_boundary(self._strategy.deepspeed_engine):
            return
        if self._held is not None:
            self._agree()
        self._held = self._suspect = None
        self._stepping = False
        self._window.close()
        self._line.steps = self._steps
        self._allow_for_slow_steps()

    def watch_for_hangs(self, seconds: float | None, *, fixed: bool = False) -> None:
        """Give up a trial in which no rank completes a micro-batch for some time.

        Args:
            seconds: The time; None to stop watching.
            fixed: Whether it is exact; without it, it grows to ten times the slowest step.
        """
        self._line.watch_for_hangs(seconds)
        self._shortest_stall_s = None if fixed else seconds

    def _allow_for_slow_steps(self) -> None:
        now_s = time.monotonic()
        if self._shortest_stall_s is not None:
            longest_s = max(self._line.stall_s or 0.0, 10.0 * (now_s - self._step_began_s))
            self._line.stall_s = max(self._shortest_stall_s, longest_s)
        self._step_began_s = now_s

    def _agree(self) -> None:
        """Wait for all ranks to have completed the step: from here it can only be taken back by all."""
        with self._strategy.untimed():
            dist.all_reduce(torch.zeros(1, device=self._strategy.root_device))

    def _watch_optimizer(self) -> None:
        """Know when the torch optimizer begins to change the state."""
        client = self._slot.client
        if client is None or client.optimizer is self._hooked:
            return
        self._hooked = client.optimizer

        def begins(*_: Any) -> None:
            self._stepping = True

        self._hook = client.optimizer.register_step_pre_hook(begins)

    @property
    def _steps(self) -> int:
        return int(self._strategy.deepspeed_engine.global_steps)

    @property
    def _slot(self) -> EngineSlot:
        return self._strategy.slot

    # The end ----------------------------------------------------------------------------------------------------

    def on_exception(self, error: BaseException) -> None:
        """Free the other ranks when this one ends with an error that no rescue is for.

        Where all of them end with an error and none is lost, they part with a whole module and process groups that
        work, so that what comes after the fit can use both.
        """
        try:
            if self._line.note is None:
                self._line.fail(self._last_words(error))
            if isinstance(error, Exception) and not isinstance(error, RanksLost) and not self._parted:
                self._part(error)
        except Exception as failure:
            warnings.warn(f"zero_auto: the ranks could not part in order: {failure}", stacklevel=2)
            close_groups()
        self.close(together=False)

    def _last_words(self, error: BaseException) -> Note:
        trace = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
        host, name = socket.gethostname(), type(error).__name__
        return Note(self._line.rank, host, "error", self.phase, name, str(error), trace, self._line.steps, True)

    def _part(self, error: Exception) -> None:
        self._line.wait_for_cut()
        self._strategy.release_engine()
        pieces = self._slot.abandon()
        words = f"rank {self._line.rank} on {socket.gethostname()} ended with {type(error).__name__}: {error}"
        told = self._line.leave({"divided": _divided(pieces), "ended": words}, patience_s=_PARTING_S)
        self._meet_for_the_last_time(told, pieces)

    def _part_from(self, told: list[dict[str, Any]], pieces: dict[Parameter, WeightPiece]) -> NoReturn:
        """End as well, where others have not left a rung but the run."""
        self._meet_for_the_last_time(told, pieces)
        raise OtherRankFailed("; ".join(status["ended"] for status in told if "ended" in status))

    def _meet_for_the_last_time(self, told: list[dict[str, Any]], pieces: dict[Parameter, WeightPiece]) -> None:
        self._parted = True
        self._line.regroup(close_groups, self._strategy.make_groups)
        self._slot.assemble(pieces, _divided_anywhere(told), self._strategy.root_device)

    def close(self, *, together: bool) -> None:
        """Let go of the line, the hook and all copies."""
        self._line.close(together=together)
        if self._hooked is not None:
            self._hook.remove()
            self._hooked = None
        self._window.close()
        self._held = self._pending = None


def _divided(pieces: dict[Parameter, WeightPiece]) -> list[int]:
    """Return the positions of the parameters that this rank holds a piece of only."""
    return [number for number, piece in enumerate(pieces.values()) if not piece.whole]


def _divided_anywhere(told: list[dict[str, Any]]) -> set[int]:
    return {number for status in told for number in status["divided"]}


def _drop_frames(error: BaseException) -> None:
    """Let go of the frames of a handled error: they hold activations and the engine."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__context__
