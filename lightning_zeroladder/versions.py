"""Versions of the packages that matter to a result."""

from __future__ import annotations

import platform
from collections.abc import Iterable

__all__ = ["check_versions", "collect_versions", "unsupported_versions"]

_DISTRIBUTION = "lightning_zeroladder"
_PACKAGES = ("torch", "deepspeed", "lightning", "torchmetrics", _DISTRIBUTION)


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter to a result, without importing them.

    A package without metadata is ``not installed``.
    """
    return {"python": platform.python_version()} | {name: _installed(name) or "not installed" for name in _PACKAGES}


def check_versions() -> None:
    """Refuse packages that this release does not work with, before an import deep inside fails in words of its own.

    A source tree that was never installed states no ranges: nothing is checked then.

    Raises:
        ImportError: Naming each package with its version, the range, and the command that puts it right.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements = requires(_DISTRIBUTION) or []
    except PackageNotFoundError:
        return
    wrong = unsupported_versions(requirements)
    if wrong:
        found = "; ".join(f"{name} {_installed(name) or '(not installed)'} where {wrong[name]} works" for name in wrong)
        install = " ".join(f"'{name}{allowed}'" for name, allowed in wrong.items())
        raise ImportError(
            f"lightning_zeroladder {_installed(_DISTRIBUTION)} found {found}. Run: python -m pip install {install}"
        )


def unsupported_versions(requirements: Iterable[str]) -> dict[str, str]:
    """Return the packages whose installed version is outside its requirement, with the versions that it allows.

    Args:
        requirements: As a distribution's metadata states them, such as ``torch>=2.6``. Those of extras are left out.
    """
    from packaging.requirements import Requirement

    wrong = {}
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _installed(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            wrong[requirement.name] = str(requirement.specifier)
    return wrong


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
