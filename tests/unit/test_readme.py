"""What the README and the docs tell people to type exists."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import yaml

from lightning_zeroladder import ZeroAutoStrategy

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def command_lines() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


def test_there_is_something_to_check():
    assert len(command_lines()) >= 5
    assert len(blocks("python")) >= 4


@pytest.mark.parametrize("line", command_lines())
def test_every_command_exists(line):
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert words[1] in targets
        return
    from lightning_zeroladder.cli.main import _COMMANDS

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
    assert set(strategy["init_args"]) <= set(inspect.signature(ZeroAutoStrategy.__init__).parameters)


def test_the_table_of_settings_is_complete():
    named = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    parameters = inspect.signature(ZeroAutoStrategy.__init__).parameters
    assert named == set(parameters) - {"self", "deepspeed"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
