"""Finds the command that was asked for and runs it. Each command imports what it needs, so that help is quick."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["main"]

_COMMANDS: dict[str, str] = {
    "fit": "train, with the strategy zero_auto known by name (LightningCLI)",
    "validate": "run the validation loop (LightningCLI)",
    "test": "run the test loop (LightningCLI)",
    "predict": "run the prediction loop (LightningCLI)",
    "plan": "predict memory, traffic and throughput of each stage from numbers",
    "bench": "measure the links between ranks, for plan",
    "audit": "count what a stage sends with the installed DeepSpeed, against the formulas",
    "report": "print the table of a run's ladder again",
    "inspect": "say what a checkpoint is, what it loads into, and whether it is whole",
    "convert": "convert a checkpoint: to universal, or to another stage and number of ranks",
    "export": "write the whole weights of a checkpoint as safetensors",
    "prove": "train, save, resume on other ranks at another stage, and compare the losses",
    "doctor": "look at this machine, and under torchrun at whether all ranks answer",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``zeroladder``.

    Args:
        argv: Arguments after the program's name; those of the process when None.

    Returns:
        Exit status: 0, or 1 when the command failed, or 2 when the arguments were wrong.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] == "--version":
        print(f"zeroladder {_version()}")
        return 0
    name, *rest = args
    if name not in _COMMANDS:
        return _fail(f"unknown command {name!r}; choose from {', '.join(_COMMANDS)}", status=2)
    own: dict[str, Callable[[list[str]], int]] = {
        "report": _report,
        "inspect": _checkpoints,
        "convert": _checkpoints,
        "export": _checkpoints,
        "prove": _prove,
        "plan": _plan,
        "bench": _bench,
        "audit": _audit,
        "doctor": _doctor,
    }
    try:
        if name not in own:
            return _lightning(None if argv is None else args)
        return own[name](args if own[name] is _checkpoints else rest)
    except SystemExit as stop:  # how argparse and jsonargparse end on --help and on wrong arguments
        if isinstance(stop.code, str):
            return _fail(stop.code)
        return stop.code or 0


def _report(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="zeroladder report", description="Print the table of a run's ladder again.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run, or its report.json")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead")
    options = parser.parse_args(args)

    import json

    from lightning_zeroladder.report.data import read_report, report_to_json
    from lightning_zeroladder.report.table import print_report

    try:
        report = read_report(options.run_dir)
    except (OSError, ValueError) as error:
        return _fail(str(error))
    if options.json:
        print(json.dumps(report_to_json(report), indent=2))
    else:
        print_report(report)
    return 0


def _checkpoints(args: list[str]) -> int:
    from lightning_zeroladder.checkpoint.errors import BadCheckpoint, CheckpointMismatch
    from lightning_zeroladder.cli import checkpoints

    name, *rest = args
    commands = {
        "inspect": checkpoints.run_inspect,
        "convert": checkpoints.run_convert,
        "export": checkpoints.run_export,
    }
    try:
        return commands[name](rest)
    except (BadCheckpoint, CheckpointMismatch, ValueError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was left behind", status=130)


def _plan(args: list[str]) -> int:
    from lightning_zeroladder.cli.plan import run_plan

    try:
        return run_plan(args)
    except (ValueError, OSError) as error:
        return _fail(str(error))


def _bench(args: list[str]) -> int:
    from lightning_zeroladder.cli.bench import run_bench

    try:
        return run_bench(args)
    except (ValueError, OSError, RuntimeError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", status=130)


def _audit(args: list[str]) -> int:
    from lightning_zeroladder.cli.audit import run_audit

    try:
        return run_audit(args)
    except (ValueError, OSError, RuntimeError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was left behind", status=130)


def _prove(args: list[str]) -> int:
    from lightning_zeroladder.cli.prove import run_prove

    try:
        return run_prove(args)
    except (ValueError, OSError, RuntimeError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was left behind", status=130)


def _doctor(args: list[str]) -> int:
    from lightning_zeroladder.cli.doctor import run_doctor

    return run_doctor(args)


def _lightning(args: list[str] | None) -> int:
    # An installed script has its own folder first on the path, not the one where the user's modules are.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())

    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.cli import LightningCLI

    import lightning_zeroladder

    lightning_zeroladder.register()
    # DeepSpeed calls collectives by names that torch is phasing out, and torch says so at each of them.
    warnings.filterwarnings("ignore", ".*torch.distributed.* is deprecated.*", FutureWarning)
    try:
        LightningCLI(
            args=args,
            subclass_mode_model=True,
            subclass_mode_data=True,
            # Without a logger the config would go to the working directory, over a config.yaml of the user's.
            save_config_callback=None,
        )
    except MisconfigurationException as error:
        return _fail(" ".join(str(error).split()))
    return 0


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {words}" for name, words in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: zeroladder COMMAND ...",
            "",
            "Find the fastest DeepSpeed ZeRO stage that fits, inside the training run.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help  show this help, or that of a command: zeroladder COMMAND --help",
            "  --version   show the version",
        ]
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lightning_zeroladder")
    except PackageNotFoundError:
        return "(not installed)"


def _fail(message: str, *, status: int = 1) -> int:
    sys.stderr.write(f"zeroladder: {message}\n")  # in one piece: ranks that share a terminal may fail at once
    return status
