from __future__ import annotations

import importlib.metadata

import pytest

from lightning_zeroladder import versions
from lightning_zeroladder.versions import check_versions, collect_versions, unsupported_versions


@pytest.fixture
def installed(monkeypatch):
    """Pretend what is installed and what this package requires."""

    def pretend(requirements: list[str] | None, **packages: str) -> None:
        def version(name: str) -> str:
            try:
                return packages[name]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        def requires(name: str) -> list[str] | None:
            if requirements is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return requirements

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "requires", requires)

    return pretend


def test_versions_inside_their_ranges_pass(installed):
    installed(["torch>=2.6", "deepspeed<0.20,>=0.19"], torch="2.13.0+cpu", deepspeed="0.19.8")
    check_versions()


def test_a_nightly_build_counts_as_its_release(installed):
    installed([], torch="2.14.0.dev20261105")
    assert unsupported_versions(["torch>=2.6"]) == {}


def test_versions_outside_are_named_with_the_command_that_puts_them_right(installed):
    installed(["torch>=2.6", "deepspeed<0.20,>=0.19"], torch="2.4.1", deepspeed="0.20.0", lightning_zeroladder="0.1.0")
    with pytest.raises(ImportError) as caught:
        check_versions()
    assert str(caught.value) == (
        "lightning_zeroladder 0.1.0 found torch 2.4.1 where >=2.6 works; deepspeed 0.20.0 where <0.20,>=0.19 works. "
        "Run: python -m pip install 'torch>=2.6' 'deepspeed<0.20,>=0.19'"
    )


def test_a_package_that_is_missing_is_named(installed):
    installed(["isal>=1.7"], lightning_zeroladder="0.1.0")
    with pytest.raises(ImportError, match=r"isal \(not installed\) where >=1.7 works"):
        check_versions()


def test_extras_are_nobodys_duty(installed):
    installed([])
    assert unsupported_versions(["matplotlib>=3.8; extra == 'plot'"]) == {}


def test_a_tree_that_was_never_installed_states_no_ranges(installed):
    installed(None)
    check_versions()


def test_what_is_installed_here_is_supported():
    assert unsupported_versions(importlib.metadata.requires("lightning_zeroladder") or []) == {}


def test_results_name_the_versions_they_were_made_with(installed):
    installed([], torch="2.13.0", lightning="2.6.6", torchmetrics="1.9.0", lightning_zeroladder="0.1.0")
    found = collect_versions()
    assert found["torch"] == "2.13.0"
    assert found["deepspeed"] == "not installed"
    assert found["python"] == versions.platform.python_version()
