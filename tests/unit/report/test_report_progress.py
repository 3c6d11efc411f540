from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from lightning_zeroladder.report import LadderProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called from the test, not as a fixture: pytest puts its own stream back between set-up and call."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


def run(progress: LadderProgress) -> None:
    progress.start("stage 2", 200)
    progress.update(50, 12345.6, "tokens/s/GPU")
    progress.close()


def test_silent_when_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    run(LadderProgress(enabled=False))
    assert terminal.getvalue() == ""


def test_one_line_per_rung_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    run(LadderProgress(enabled=True))
    captured = capsys.readouterr()
    assert captured.out == "ladder: trying stage 2, at most 200 steps\n"
    assert captured.err == ""


def test_tqdm_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    progress = LadderProgress(enabled=True, progress_bar=SimpleNamespace(process_position=1))
    progress.start("stage 2", 200)
    assert progress._tqdm.pos == -4  # tqdm counts lines downwards as negative; Lightning's bars take 2 and 3
    progress.update(50, 12345.6, "tokens/s/GPU")
    progress._tqdm.refresh()
    shown = terminal.getvalue()
    assert "ladder: stage 2" in shown
    assert "50/200" in shown
    assert "12,346 tokens/s/GPU" in shown
    progress.start("stage 3", 100)
    assert progress._tqdm.total == 100
    progress.close()
    assert progress._tqdm is None


def test_task_in_a_live_rich_display(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch)
    with Progress(console=Console(file=io.StringIO(), force_terminal=True), auto_refresh=False) as rich:
        rich.add_task("Epoch 0", total=10)
        progress = LadderProgress(enabled=True, progress_bar=SimpleNamespace(progress=rich))
        progress.start("stage 2 (a=[b])", 200)
        progress.update(50, 12345.6, "tokens/s/GPU")
        task = rich.tasks[1]
        assert task.description == "ladder: stage 2 (a=\\[b]), 12,346 tokens/s/GPU"
        assert (task.completed, task.total, task.visible) == (50, 200, True)
        progress.start("stage 3", 100)
        assert len(rich.tasks) == 2
        assert (task.description, task.completed, task.total) == ("ladder: stage 3", 0, 100)
        progress.close()
        assert task.visible is False
        assert [each.id for each in rich.tasks] == [0, 1]


def test_follows_lightning_to_a_new_rich_display(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch)

    def display() -> Progress:
        return Progress(console=Console(file=io.StringIO(), force_terminal=True), auto_refresh=False)

    bar = SimpleNamespace(progress=display())
    bar.progress.start()
    progress = LadderProgress(enabled=True, progress_bar=bar)
    progress.start("stage 2", 200)
    bar.progress.stop()
    bar.progress = display()
    with bar.progress:
        progress.update(7, 10.0, "samples/s/GPU")
        assert [(task.description, task.completed) for task in bar.progress.tasks] == [
            ("ladder: stage 2, 10 samples/s/GPU", 7)
        ]
        progress.close()
