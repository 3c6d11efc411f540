"""``python -m lightning_zeroladder`` is ``zeroladder``."""

from __future__ import annotations

import sys

from lightning_zeroladder.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
