"""Versions of the packages that matter to a result."""

from __future__ import annotations

import platform

__all__ = ["collect_versions"]

_PACKAGES = ("torch", "deepspeed", "lightning", "torchmetrics", "lightning_zeroladder")


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter to a result, without importing them.

    A package without metadata is ``not installed``.
    """
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions
