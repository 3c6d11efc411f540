"""One rank of `harness.run_ranks`: imports the target, runs it, writes the result."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path


def main(target: str, folder: Path) -> None:
    """Run ``module:function`` with the payload in ``folder``."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # ranks share the cores
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(json.loads((folder / "payload.json").read_text()))
    (folder / f"result.{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a process group left open by a failed case must not keep the rank from ending
