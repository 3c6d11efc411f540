"""One rank of `harness.run_ranks`: imports the target, runs it, writes the result."""

from __future__ import annotations

import faulthandler
import gc
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
    job = json.loads((folder / "job.json").read_text())
    faulthandler.dump_traceback_later(max(1.0, job["timeout_s"] - 5.0))  # says where a rank hangs before it is killed
    function = getattr(importlib.import_module(module), name)
    gc.collect()
    gc.freeze()  # what imports made stays; the collections that every move does are then quick
    result = function(job["payload"])
    (folder / f"result.{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a process group left open by a failed case must not keep the rank from ending
