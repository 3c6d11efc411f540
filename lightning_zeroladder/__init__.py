"""ZeRO stage selection for PyTorch Lightning: ``Trainer(strategy="zero_auto")``.

Importing the package makes the name ``zero_auto`` known to Lightning.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_zeroladder.callbacks import LadderCallback
    from lightning_zeroladder.checkpoint.converting import convert
    from lightning_zeroladder.checkpoint.exporting import export
    from lightning_zeroladder.checkpoint.inspecting import inspect
    from lightning_zeroladder.proving import prove
    from lightning_zeroladder.strategy import ZeroAutoStrategy

__all__ = ["LadderCallback", "ZeroAutoStrategy", "convert", "export", "inspect", "prove", "register"]

_FUNCTIONS = {
    "convert": "checkpoint.converting",
    "export": "checkpoint.exporting",
    "inspect": "checkpoint.inspecting",
    "prove": "proving",
}


def register() -> None:
    """Make ``zero_auto`` known to Lightning's strategy registry. Done on import; doing it again changes nothing.

    Raises:
        ImportError: If Lightning, DeepSpeed, torch or another requirement is of a version that is not supported.
    """
    from lightning_zeroladder.versions import check_versions

    check_versions()
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_zeroladder.requirements_check import warn_of_pytorch_lightning
    from lightning_zeroladder.strategy import ZeroAutoStrategy

    warn_of_pytorch_lightning()
    ZeroAutoStrategy.register_strategies(StrategyRegistry)


def __getattr__(name: str) -> Any:
    if name == "ZeroAutoStrategy":
        from lightning_zeroladder.strategy import ZeroAutoStrategy

        return ZeroAutoStrategy
    if name == "LadderCallback":
        from lightning_zeroladder.callbacks import LadderCallback

        return LadderCallback
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"lightning_zeroladder.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _is_own_command() -> bool:
    """Whether Python was started as ``zeroladder`` or ``python -m lightning_zeroladder``.

    Those load Lightning themselves where they need it; reading a report should not wait for torch.
    """
    return Path(sys.argv[0] if sys.argv else "").name in ("zeroladder", "-m")


if not _is_own_command():
    register()
