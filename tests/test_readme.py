"""What the README and the docs tell people to type exists, and what they quote is what the program says."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from faults import Job, make_layouts
from lightning.pytorch.cli import LightningCLI

import lightning_zeroladder
from lightning_zeroladder.cli import main
from lightning_zeroladder.cli.main import _COMMANDS
from lightning_zeroladder.report.data import DS_CONFIG_NAME, REPORT_NAME

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "lightning_zeroladder").rglob("*.py"))
GAP = "\0"
VALUES = r"\.\.\.|'[^']*'|\([^)]*\)|\bstage \d|\bbackward\b|\bmics_|\d[\d.]*|=| / "
"""What a quotation shows where the source has a name, or leaves out."""


def blocks(language: str, pages: list[Path] = PAGES) -> list[str]:
    return [
        block for page in pages for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)
    ]


def command_lines(pages: list[Path] = PAGES) -> list[str]:
    return [line for block in blocks("bash", pages) for line in block.splitlines() if line.strip()]


def own_commands() -> list[list[str]]:
    """The arguments of every ``zeroladder`` or ``python -m lightning_zeroladder`` line."""
    found = []
    for line in command_lines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["zeroladder"]:
            found.append(words[1:])
        elif words[:3] == ["python", "-m", "lightning_zeroladder"]:
            found.append(words[3:])
    return found


def source_texts() -> list[str]:
    """Every string of the package as a reader sees it, with what is filled in at run time as a gap."""
    texts = []
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def quoted_messages() -> list[str]:
    """The first cell of each row of the table of messages, without its backticks."""
    page = (ROOT / "docs" / "limits.md").read_text()
    cells = re.findall(r"^\| (`.*?) \| ", page, flags=re.MULTILINE)
    return [re.sub(r"^(`+) ?(.*?) ?\1$", r"\2", cell) for cell in cells]


def test_there_is_something_to_check():
    assert len(command_lines(PAGES[:1])) >= 5
    assert len(blocks("python", PAGES[:1])) >= 4


@pytest.mark.parametrize("line", command_lines())
def test_every_command_exists(line):
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert words[1] in targets
        return
    assert words[:3] == ["python", "-m", "lightning_zeroladder"] or words[0] == "zeroladder"
    assert words[3 if words[0] == "python" else 1] in _COMMANDS
    for name in [word for word in words if word.endswith(".yaml")]:
        assert (ROOT / name).is_file()


@pytest.mark.parametrize("code", blocks("python"))
def test_every_snippet_runs(code, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    exec(compile(code.replace('accelerator="auto"', 'accelerator="cpu"'), "README.md", "exec"), {})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_yaml_names_real_arguments(text):
    strategy = yaml.safe_load(text)["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_zeroladder.ZeroAutoStrategy"
    assert set(strategy["init_args"]) <= set(
        inspect.signature(lightning_zeroladder.ZeroAutoStrategy.__init__).parameters
    )


def test_the_table_of_settings_is_complete():
    named = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    parameters = inspect.signature(lightning_zeroladder.ZeroAutoStrategy.__init__).parameters
    assert named == set(parameters) - {"self", "deepspeed"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


LIGHTNING = ("fit", "validate", "test", "predict")


@pytest.mark.parametrize("args", [args for args in own_commands() if args[0] in LIGHTNING], ids=" ".join)
def test_the_options_of_fit_parse(args, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "argv", ["zeroladder"])  # LightningCLI warns of two sets of arguments
    lightning_zeroladder.register()
    cli = LightningCLI(args=args[1:], run=False, subclass_mode_model=True, subclass_mode_data=True)
    assert type(cli.trainer.strategy).__name__ == "ZeroAutoStrategy"


@pytest.mark.parametrize("args", [args for args in own_commands() if args[0] == "report"], ids=" ".join)
def test_the_options_of_report_parse(args, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # there is no report: 1 says that the arguments were understood, 2 that they were not
    assert main(args) == 1
    assert "no report at" in capsys.readouterr().err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_layouts(tmp_path_factory.mktemp("layouts"), 0, Job())["stage 2"]


@pytest.mark.parametrize(
    "args", [args for args in own_commands() if args[0] in ("inspect", "convert", "export")], ids=" ".join
)
def test_commands_on_checkpoints_run(args, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, tmp_path / "checkpoints" / "last.ckpt")
    assert main(args) == 0
    for made in [word for word in args[2:3] if not word.startswith("--")]:
        assert (tmp_path / made).exists()


@pytest.mark.parametrize("args", [args for args in own_commands() if args[0] == "plan"], ids=" ".join)
def test_plans_are_made(args, capsys):
    assert main(args) == 0
    assert "is the fastest that fits" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("args", [args for args in own_commands() if args[0] == "bench"], ids=" ".join)
def test_benches_are_started(args, tmp_path, monkeypatch):
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_zeroladder.cli.bench.started_by_launcher", lambda: False)
    monkeypatch.setattr("lightning_zeroladder.cli.bench.on_own_ranks", lambda *given: started.append(given) or 0)
    assert main(args) == 0
    assert started[0][:2] == ("bench", args[1:])
    assert started[0][2] >= 2


@pytest.mark.parametrize("args", [args for args in own_commands() if args[0] == "prove"], ids=" ".join)
def test_the_options_of_prove_parse(args, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # no step to take: 1 says that everything else was understood
    assert (ROOT / args[args.index("--config") + 1]).is_file()
    assert main([*args, "--steps", "0"]) == 1
    assert "steps=0: must be at least 2" in capsys.readouterr().err


@pytest.mark.parametrize("code", blocks("python"))
def test_every_imported_name_exists(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_arguments_named_in_the_text_exist(page):
    known = set(inspect.signature(lightning_zeroladder.ZeroAutoStrategy.__init__).parameters)
    for arguments in re.findall(r"ZeroAutoStrategy\(([^`\n]*)\)", page.read_text()):
        named = set(re.findall(r"(\w+)=", arguments)) - {"stage"}  # the one that is refused, and listed as such
        assert named <= known, arguments


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_yaml_builds_the_strategy(text):
    strategy = yaml.safe_load(text)["trainer"]["strategy"]
    lightning_zeroladder.ZeroAutoStrategy(**strategy["init_args"])


def test_the_table_of_messages_is_found():
    assert len(quoted_messages()) >= 20


@pytest.mark.parametrize("message", quoted_messages())
def test_every_message_is_one_of_the_programs(message):
    texts = source_texts()
    pieces = [piece.strip(" ',:()") for piece in re.split(VALUES, message)]
    sentences = [piece for piece in pieces if " " in piece] or [piece for piece in pieces if piece]
    assert sentences
    for piece in sentences:
        after_a_name = piece.partition(" ")[2]  # where the message begins with the name of a class
        assert any(piece in text or (after_a_name and f"{GAP} {after_a_name}" in text) for text in texts), piece


def test_the_files_of_a_run_are_named():
    source = (ROOT / "lightning_zeroladder" / "callbacks.py").read_text()
    assert "journal.jsonl" in source
    for name in ("journal.jsonl", REPORT_NAME, DS_CONFIG_NAME):
        assert f"`{name}`" in README


def test_the_scalars_are_named():
    source = (ROOT / "lightning_zeroladder" / "callbacks.py").read_text()
    scalars = set(re.findall(r'f"\{name\}/(\w+)"', source))
    assert {"step_s", "peak_bytes"} <= scalars
    for name in scalars:
        assert f"`{name}`" in README
