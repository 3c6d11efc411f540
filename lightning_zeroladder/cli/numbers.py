"""Numbers on the command line: as one says them, such as 13e9, and none that mean nothing."""

from __future__ import annotations

import argparse
import math

__all__ = ["decimal", "size"]


def decimal(text: str) -> float:
    """Read a finite number, for argparse.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, write it like 13e9 or 0.5") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def size(text: str) -> int:
    """Read a whole number that may be written like 13e9, for argparse.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    value = decimal(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)
