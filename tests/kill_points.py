"""Processes that are killed in the middle of converting or saving a checkpoint, and what they leave.

Run as a script, because it forks: one process gets everything ready (imports, engines), and each kill point is a child
of it that goes on from there and kills itself at its n-th operation on the file system, a write half-way through.

    python kill_points.py {convert,save} FOLDER COUNT SEED RESULT

writes a list of outcomes into the file RESULT. A forked child has no threads of its parent's, so none of gloo's either:
it is the only rank, to which a collective does nothing, and so nothing is what it does here.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from faults import TAG, Job, Outcome, Verdict, files_of, make_layouts, read_whole

from lightning_zeroladder.checkpoint import output
from lightning_zeroladder.checkpoint.converting import convert

__all__ = ["Killer", "convert_kills", "save_kills"]

# Killing --------------------------------------------------------------------------------------------------------


class Killer:
    """Notes what a process does to the file system, and kills it at one of these operations.

    Args:
        at: Which one, from 1 on; None for none.
    """

    def __init__(self, at: int | None = None) -> None:
        self.course: list[str] = []
        self._at = at

    def step(self, name: str) -> bool:
        """Note an operation that is about to be done; return whether it is the one."""
        self.course.append(name)
        return len(self.course) == self._at

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def install(self) -> None:
        """Watch this process from now on. There is no way back: it is meant for a child that ends soon."""
        for name in ("rename", "replace", "mkdir", "rmdir", "unlink", "remove"):
            setattr(os, name, self._watched(name, getattr(os, name)))
        output._exchange = self._watched("exchange", output._exchange)
        os.open = self._watched("open", os.open, lambda _, flags, *__, **___: flags & (os.O_CREAT | os.O_TRUNC))
        io.open = self._open
        __builtins__.open = self._open  # type: ignore[attr-defined]
        save = torch.save

        def save_through_python(value: Any, path: str, *args: Any, **kwargs: Any) -> None:
            with self._open(path, "wb", 0) as file:
                save(value, file, *args, **kwargs)

        torch.save = save_through_python

    def _watched(
        self, name: str, function: Callable[..., Any], counts: Callable[..., Any] = lambda *_, **__: True
    ) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if counts(*args, **kwargs) and self.step(name):
                self.kill()
            return function(*args, **kwargs)

        return watched

    def _open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        **kwargs: Any,
    ) -> Any:
        if not set(mode) & set("wax+"):
            return _open(file, mode, buffering, encoding, errors, newline, **kwargs)
        if self.step("open"):
            self.kill()
        raw = _Watched(file, mode.replace("b", "").replace("t", ""))
        raw.killer = self
        if buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


_open = open


class _Watched(io.FileIO):
    killer: Killer

    def write(self, data: Any) -> int:
        if self.killer.step("write"):
            super().write(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
            self.killer.kill()
        return super().write(data)


def in_child(action: Callable[[], None], at: int | None = None, after_s: float | None = None) -> list[str]:
    """Do something in a forked child.

    Args:
        action: What to do.
        at: Operation at which the child kills itself.
        after_s: Seconds after which it is killed from here.

    Returns:
        The operations in order; none if it was killed.
    """
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        status = 1
        try:
            killer = Killer(at)
            killer.install()
            action()
            if killer.step("end"):
                killer.kill()
            os.write(tell, " ".join(killer.course).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(tell)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(told, "rb") as pipe:
        course = pipe.read().decode().split()
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
        raise RuntimeError("the child failed; its traceback is above")
    if at is not None and not os.WIFSIGNALED(status):
        raise RuntimeError(f"the child ended after {len(course)} operations and was not killed at operation {at}")
    return course


def points(course: list[str], count: int, chance: random.Random) -> list[int]:
    """Return operations at which to kill: around each by which something appears, others spread over the course."""
    appear = [at for at, name in enumerate(course, 1) if name in ("rename", "replace", "exchange")]
    around = {at for place in appear for at in (place, place + 1) if at <= len(course)}
    left = max(0, min(count, len(course)) - len(around))
    bounds = [len(course) * index // left for index in range(left + 1)] if left else []
    return sorted(around | {chance.randint(low + 1, high) for low, high in pairwise(bounds)})


# Converting -----------------------------------------------------------------------------------------------------


def convert_kills(root: Path, count: int, seed: int) -> Iterator[Outcome]:
    """Kill conversions: of stage 2 to the universal format, and of that to stage 3 for three ranks."""
    chance = random.Random(seed)
    layouts = make_layouts(root / "layouts", 1, Job())
    commands: list[tuple[str, Path, dict[str, int]]] = [
        ("stage 2 to universal", layouts["stage 2"], {}),
        ("universal to stage 3", layouts["universal"], {"to_stage": 3, "to_world_size": 3}),
        ("stage 0 to stage 1", layouts["stage 0"], {"to_stage": 1}),
    ]
    from_outside = max(1, count // 10)
    share = -(-(count - from_outside) // len(commands))
    for what, source, target in commands:
        place = root / what
        place.mkdir()
        whole = place / "whole"
        convert(source, whole, workers=1, **target)
        started = time.monotonic()
        course = in_child(partial(_convert, source, place / "counted", target))
        took_s = time.monotonic() - started
        for at in points(course, share, chance):
            yield from _convert_kill(f"convert {what}, killed at {at} of {len(course)}", source, whole, target, at=at)
        if what == commands[0][0]:
            for _ in range(from_outside):
                after_s = chance.uniform(0, took_s)
                yield from _convert_kill(
                    f"convert {what}, killed after {1e3 * after_s:.3f} ms", source, whole, target, after_s=after_s
                )


def _convert(source: Path, out: Path, target: dict[str, int]) -> None:
    convert(source, out, workers=1, **target)


def _convert_kill(what: str, source: Path, whole: Path, target: dict[str, int], **when: Any) -> Iterator[Outcome]:
    out = whole.parent / "out" / "new"
    out.parent.mkdir()
    in_child(partial(_convert, source, out, target), **when)
    yield _left(what, "converting", out, [whole])
    unfinished = out.with_name(".new.partial")
    for folder in (unfinished, *(unfinished.iterdir() if unfinished.is_dir() else ())):
        yield _opens_whole_or_not(what, folder, whole)
    if not out.exists():
        convert(source, out, workers=1, **target)
    left = sorted(path.name for path in out.parent.iterdir())
    same = files_of(out) == files_of(whole) and left == ["new"]
    detail = f"the same command again made something else, in {', '.join(left)}"
    yield Outcome(what, "again", Verdict.WHOLE if same else Verdict.BAD, "" if same else detail)
    shutil.rmtree(out.parent)


def _opens_whole_or_not(what: str, folder: Path, whole: Path) -> Outcome:
    """What was not finished may open only if everything is in it."""
    if not folder.is_dir():
        return Outcome(what, "partial", Verdict.NOTHING)
    try:
        content = read_whole(folder)
    except Exception:
        return Outcome(what, "partial", Verdict.NOTHING)
    same = content["parameters"] == _cached_contents(whole)[""]["parameters"]
    return Outcome(what, "partial", Verdict.WHOLE if same else Verdict.BAD, f"{folder.name} opens without being whole")


def _left(what: str, action: str, target: Path, whole: list[Path]) -> Outcome:
    """Compare what is at a path with folders that are whole."""
    if not target.exists():
        try:
            read_whole(target)
        except Exception:
            return Outcome(what, action, Verdict.NOTHING)
        return Outcome(what, action, Verdict.BAD, "what is not there opens")
    try:
        content = _contents(target)
    except Exception as error:
        return Outcome(what, action, Verdict.BAD, f"{type(error).__name__}: {error}")
    if content in [_cached_contents(folder) for folder in whole]:
        return Outcome(what, action, Verdict.WHOLE)
    return Outcome(what, action, Verdict.BAD, "it opens, but what is in it is something else")


def _contents(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, opened by its own name and by that of each copy in it."""
    inside = {path.name: read_whole(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    return {"": read_whole(folder), **inside}


_cached_contents = cache(_contents)


# Saving ---------------------------------------------------------------------------------------------------------


def save_kills(root: Path, count: int, seed: int) -> Iterator[Outcome]:
    """Kill saves over an existing checkpoint, and first ones; where names can be exchanged, and where not."""
    chance = random.Random(seed)
    runs = [_Run(root / "stage 1", stage=1, universal=False), _Run(root / "stage 3", stage=3, universal=True)]
    share = -(-count // 4)
    for run in runs:
        for previous in (True, False):
            exchange = run.universal
            course = run.save_in_child(previous=previous, exchange=exchange)
            for at in points(course, share, chance):
                yield from run.kill(at, len(course), previous=previous, exchange=exchange)


class _Run:
    """An engine that has saved once and trained a step since."""

    def __init__(self, root: Path, *, stage: int, universal: bool) -> None:
        self.universal = universal
        self._root = root
        self._target = root / "work" / "last.ckpt"
        self._what = f"stage {stage}"
        root.mkdir()
        self._engine, self._client = _engine(stage)
        _train(self._engine)
        self._save(root / "before")
        _train(self._engine)
        self._save(root / "after")

    def _save(self, target: Path) -> None:
        from lightning_zeroladder.engine.save import SaveContext, save

        def write(folder: Path) -> None:
            self._engine.save_checkpoint(str(folder), tag=TAG, client_state={"epoch": 1, "seen": torch.arange(5)})

        context = SaveContext(precision="32-true", local_rank=0)
        save(self._engine, self._client, target, write, context, tag=TAG, universal=self.universal)

    def save_in_child(self, *, previous: bool, exchange: bool, at: int | None = None) -> list[str]:
        """Save from a child; with ``previous`` over an older checkpoint."""
        shutil.rmtree(self._target.parent, ignore_errors=True)
        self._target.parent.mkdir()
        if previous:
            shutil.copytree(self._root / "before", self._target)
        return self._again(exchange=exchange, at=at)

    def _again(self, *, exchange: bool, at: int | None = None) -> list[str]:
        def action() -> None:
            _be_alone()
            if not exchange:
                output._exchange = lambda *_: False
            self._save(self._target)

        return in_child(action, at)

    def kill(self, at: int, course: int, *, previous: bool, exchange: bool) -> Iterator[Outcome]:
        over = "over an older one" if previous else "for the first time"
        what = f"save at {self._what} {over}, killed at {at} of {course}"
        self.save_in_child(previous=previous, exchange=exchange, at=at)
        before, after = self._root / "before", self._root / "after"
        left = _left(what, "saving", self._target, [before, after])
        if previous and left.verdict is Verdict.NOTHING:
            left = Outcome(what, "saving", Verdict.BAD, "the older checkpoint is gone")
        elif not self._target.exists() and previous:
            left = _previous(what, self._target, before)
        yield left
        if at % 3 == 0 or course - at < 3:
            self._again(exchange=exchange)
            again = _left(what, "again", self._target, [after])
            left_over = sorted(path.name for path in self._target.parent.iterdir() if path != self._target)
            if again.verdict is Verdict.NOTHING or any(self._target.name in name for name in left_over):
                again = Outcome(what, "again", Verdict.BAD, f"nothing was saved, or not all removed: {left_over}")
            yield again


def _previous(what: str, target: Path, before: Path) -> Outcome:
    same = read_whole(target) == _cached_contents(before)[""]
    return Outcome(what, "saving", Verdict.WHOLE if same else Verdict.BAD, "set aside while the new one gets its name")


def _engine(stage: int) -> tuple[Any, Any]:
    import deepspeed

    from lightning_zeroladder.engine.lifecycle import ClientOptimizer

    torch.manual_seed(stage)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))
    decayed = [{"params": [model[0].weight, model[2].weight]}, {"params": [*model[1].parameters(), model[0].bias]}]
    model[2].bias.requires_grad = False
    optimizer = torch.optim.AdamW(decayed, lr=0.01)
    client = ClientOptimizer(optimizer)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine, client


def _train(engine: Any) -> None:
    loss = engine(torch.randn(4, 5)).square().mean()
    engine.backward(loss)
    engine.step()


def _join_group() -> None:
    """Make a group of one, over gloo."""
    import deepspeed

    from lightning_zeroladder.engine.groups import use_cpu_accelerator, without_compiled_shm_op

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone, GLOO_SOCKET_IFNAME="lo")
    use_cpu_accelerator()
    with without_compiled_shm_op():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def _be_alone() -> None:
    """Let collectives do nothing, as they would for the one rank that there is."""
    for name in ("barrier", "all_reduce", "broadcast"):
        setattr(torch.distributed, name, lambda *_, **__: None)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Kill processes that convert or save checkpoints.")
    parser.add_argument("action", choices=["convert", "save"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.action == "save":
        _join_group()
    kills = {"convert": convert_kills, "save": save_kills}[options.action]
    outcomes = [asdict(outcome) for outcome in kills(options.folder, options.count, options.seed)]
    options.result.write_text(json.dumps(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort a process that ends in order
