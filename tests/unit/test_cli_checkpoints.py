"""The commands ``zeroladder inspect``, ``convert`` and ``export``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TAG, adam, add_manifest, flip_a_bit, in_every_layout, save_stage_0, values
from safetensors.torch import load_file

import lightning_zeroladder
from lightning_zeroladder.checkpoint import converting, exporting, inspecting
from lightning_zeroladder.checkpoint.opening import open_checkpoint
from lightning_zeroladder.cli import checkpoints as commands
from lightning_zeroladder.cli import main

ROOT = Path(__file__).parents[2]

WEIGHTS = {"a.weight": values(50, 7), "b.[bold]weight": values(5)}

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layouts")
    tied = {"tied.weight": WEIGHTS["a.weight"]}
    source = save_stage_0(root / "stage 0", {**WEIGHTS, **tied}, optimizer=adam(WEIGHTS, [list(WEIGHTS)]))
    add_manifest(source, groups=[list(WEIGHTS)], parameters=WEIGHTS)
    return in_every_layout(source, root)


@pytest.fixture
def source(layouts: dict[str, Path], tmp_path: Path) -> Path:
    """A copy in a folder whose name rich would take for markup."""
    return shutil.copytree(layouts["stage 3"], tmp_path / "run [red] 1")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def table_of(shown: str) -> dict[str, str]:
    """The rows of the table of ``inspect`` by their name; where a row has none it belongs to the one above."""
    rows = (line.split("  ", 1) for line in shown.splitlines()[1:])
    return {name.strip(): value.strip() for name, value in (row for row in rows if len(row) == 2) if name.strip()}


def test_inspect_shows_a_table(source: Path, capsys: Capture) -> None:
    assert main(["inspect", str(source)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].strip() == str(source / "checkpoint")
    assert "b.[bold]weight  5" in shown.out
    rows = table_of(shown.out)
    assert rows["saved"] == "ZeRO stage 3, 3 ranks, float32"
    assert rows["loads into"] == "any stage, any world size"
    assert rows["parameters"] == "355 trained, in 2 tensors"
    assert rows["optimizer"] == "AdamW (exp_avg, exp_avg_sq)"
    assert rows["groups"] == "1, learning rate 0.1"
    assert rows["progress"] == "3 steps, 24 samples"
    assert rows["batch"] == "8 samples per micro-batch and rank, 1 micro-batch per step"
    assert rows["manifest"] == "yes"
    assert rows["whole"] == "yes: every byte has its checksum"
    assert shown.err == ""


def test_inspect_of_a_damaged_one_fails(source: Path, capsys: Capture) -> None:
    path = next(source.rglob("*rank_2_*optim_states.pt"))
    flip_a_bit(path)
    assert main(["inspect", str(source), "--quick"]) == 0
    assert table_of(capsys.readouterr().out)["whole"] == "not checked (--quick)"
    assert main(["inspect", str(source)]) == 1
    assert table_of(capsys.readouterr().out)["whole"].startswith("no: ")
    assert main(["inspect", str(source), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["whole"], found["stage"]) == (False, 3)
    assert str(path) in found["problem"]
    path.unlink()
    assert main(["inspect", str(source), "--json", "--quick"]) == 1
    assert "was saved by 3 ranks" in json.loads(capsys.readouterr().out)["problem"]


def test_convert(source: Path, out: Path, capsys: Capture) -> None:
    assert main(["convert", str(source), str(out / "u")]) == 0
    assert capsys.readouterr().out.startswith(f"{out / 'u'}: universal, ")
    assert open_checkpoint(out / "u").found.universal
    assert main(["convert", str(source), str(out / "n"), "--to-stage", "1", "--to-world-size", "2"]) == 0
    state = open_checkpoint(out / "n").state
    assert (state.stage, state.world_size) == (1, 2)
    assert main(["convert", str(out / "u"), str(out / "m"), "--to-world-size", "2"]) == 1
    assert "give --to-stage as well" in capsys.readouterr().err


def test_export(source: Path, out: Path, capsys: Capture) -> None:
    path = out / "w.safetensors"
    assert main(["export", str(source), str(path), "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(path),
        "2 tensors, 0.7 kB",
        "left out, being another name of one that is there: tied.weight",
    ]
    assert load_file(path)["a.weight"].equal(WEIGHTS["a.weight"].bfloat16())
    assert main(["export", str(source), str(out / "m.safetensors"), "--max-shard-size", "1kB"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        str(out / f"m{end}")
        for end in ("-00001-of-00002.safetensors", "-00002-of-00002.safetensors", ".safetensors.index.json")
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspect", "nowhere"], "nowhere does not exist"),
        (["inspect", "out"], "out is no DeepSpeed checkpoint"),
        (["convert", "nowhere", "out/x"], "nowhere does not exist"),
        (["convert", "SOURCE", "none/x"], "none does not exist: make the folder first"),
        (["convert", "SOURCE", "SOURCE"], "exists already"),
        (["convert", "SOURCE", "out/x", "--to-stage", "4"], "to_stage=4: ZeRO has the stages 0, 1, 2 and 3"),
        (["export", "SOURCE", "out/x.bin"], "out/x.bin': give a file name that ends in .safetensors"),
        (["export", "SOURCE", "none/x.safetensors"], "none does not exist: make the folder first"),
        (["export", "SOURCE", "out/x.safetensors", "--dtype", "int8"], "dtype='int8': weights are exported as"),
        (["export", "SOURCE", "out/x.safetensors", "--max-shard-size", "big"], "give a size such as 5GB"),
    ],
)
def test_mistakes_are_one_line_and_status_1(
    words: list[str], says: str, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(out.parent)
    assert main([str(source) if word == "SOURCE" else word for word in words]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("zeroladder: ")
    assert says in shown.err
    assert shown.err.count("\n") == 1
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("command", ["inspect", "convert", "export"])
def test_wrong_arguments_are_status_2_and_help_is_0(command: str, capsys: Capture) -> None:
    assert main([command]) == 2
    assert "CKPT" in capsys.readouterr().err
    assert main([command, "--help"]) == 0
    assert f"usage: zeroladder {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "module"),
    [(["convert", "SOURCE", "OUT/u"], converting), (["export", "SOURCE", "OUT/w.safetensors"], exporting)],
)
def test_an_interrupt_is_status_130_and_leaves_nothing(
    words: list[str], module: Any, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "verify", interrupted)  # all is written by then
    assert main([word.replace("SOURCE", str(source)).replace("OUT", str(out)) for word in words]) == 130
    assert capsys.readouterr().err.startswith("zeroladder: interrupted")
    assert list(out.iterdir()) == []


# Progress -------------------------------------------------------------------------------------------------------


def test_long_work_ends_in_one_line_in_a_log(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(commands, "_SHORT_S", 0.0)
    assert main(["inspect", str(source), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["whole"] is True
    assert shown.err.startswith("reading ")
    assert shown.err.endswith(" s\n")
    assert shown.err.count("\n") == 1


def test_long_work_shows_a_bar_on_a_terminal(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(commands, "_SHORT_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # how rich is told that it writes to a terminal
    monkeypatch.setenv("TERM", "xterm")
    assert main(["export", str(source), str(out / "w.safetensors")]) == 0
    shown = capsys.readouterr()
    assert "exporting" in shown.err
    assert "took" not in shown.err
    assert shown.out.splitlines()[0] == str(out / "w.safetensors")


# Without torch --------------------------------------------------------------------------------------------------

BARE = """
import sys
sys.modules.update(torch=None, deepspeed=None, lightning=None)  # importing one of them is an error
sys.argv[0] = "zeroladder"
from lightning_zeroladder.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "SOURCE"],
        ["convert", "SOURCE", "OUT/u"],
        ["convert", "SOURCE", "OUT/n", "--to-stage", "0", "--to-world-size", "1"],
        ["export", "SOURCE", "OUT/w.safetensors", "--dtype", "fp16"],
    ],
)
def test_neither_torch_nor_deepspeed_nor_lightning_is_imported(words: list[str], source: Path, out: Path) -> None:
    arguments = [word.replace("SOURCE", str(source)).replace("OUT", str(out)) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", BARE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_functions_are_the_packages(layouts: dict[str, Path]) -> None:
    assert lightning_zeroladder.export is exporting.export
    assert lightning_zeroladder.convert is converting.convert
    assert lightning_zeroladder.inspect is inspecting.inspect
    assert Path(lightning_zeroladder.inspect(layouts["stage 0"], full=False).path).name == TAG
