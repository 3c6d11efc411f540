"""Worker side of test_checkpoint_compatible: DeepSpeed reads what we write, and we read what it writes."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from checkpoint_cases import STEPS, TAG, Job, Varied, adamw, different
from harness import run_cases
from optimizer_cases import OPTIMIZERS, Walker, config, init_distributed
from toys import whole_weights

from lightning_zeroladder.checkpoint.converting import convert
from lightning_zeroladder.engine.save import SaveContext, save

UNIVERSAL_TO_STOCK = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2), (3, 3))
NATIVE_TO_STOCK = ((0, 1), (0, 3), (1, 0), (1, 3), (2, 0), (2, 1), (3, 0), (3, 2))
STOCK_UNIVERSAL = ((1, 0), (1, 3), (2, 2), (3, 1), (3, 3))


def one_group(module: torch.nn.Module) -> torch.optim.Optimizer:
    """DeepSpeed's stage 3 gives every group the hyperparameters of the first when it loads a universal checkpoint."""
    return torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=3e-3, eps=1e-4)


def stock_engine(stage: int, dtype: str, *, universal: bool = False, make: Any = adamw) -> tuple[Any, Any]:
    """A DeepSpeed engine without anything of ours."""
    torch.manual_seed(2)
    module = Varied()
    if dtype == "bf16":
        module.bfloat16()
    made = config(stage, dtype)
    made["zero_optimization"]["stage3_param_persistence_threshold"] = 40
    made["checkpoint"] = {"load_universal": universal}
    engine, *_ = deepspeed.initialize(
        config=made,
        model=module,
        model_parameters=[param for param in module.parameters() if param.requires_grad],
        optimizer=make(module),
        dist_init_required=False,
    )
    return module, engine


class Stock(Job):
    """A job whose engine DeepSpeed built and loads by itself."""

    def __init__(self, stage: int, dtype: str, *, universal: bool = False, make: Any = adamw) -> None:
        self.dtype = dtype
        self.module, self.engine = stock_engine(stage, dtype, universal=universal, make=make)

    def close(self) -> None:
        self.engine.destroy()
        self.engine = None


def on_first_rank(action: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def saved_by_us(folder: Path, stage: int, dtype: str, *, universal: bool = False, make: Any = adamw) -> list[float]:
    job = Job(stage, dtype, seed=1, make=make)
    job.train(0, STEPS)
    job.save(folder / "ours", universal=universal)
    after = job.train(STEPS, STEPS)
    job.close()
    return after


def stock_loads(folder: Path, *, source: int, stage: int, dtype: str, universal: bool, by_saving: bool = False) -> Any:
    """DeepSpeed's own ``load_checkpoint`` reads a universal or native checkpoint that we wrote."""
    make = one_group if universal and stage == 3 else adamw
    expected = saved_by_us(folder, source, dtype, universal=by_saving, make=make)
    place = folder / "ours"
    if not by_saving:
        place = folder / "converted"
        target = {} if universal else {"to_stage": stage, "to_world_size": dist.get_world_size()}
        on_first_rank(lambda: convert(folder / "ours", place, **target))
    job = Stock(stage, dtype, universal=universal, make=make)
    path, _ = job.engine.load_checkpoint(str(place), load_lr_scheduler_states=False)
    assert path is not None
    if universal:  # DeepSpeed leaves these at their initial values
        first = Job(0, dtype, seed=1, make=make)
        first.train(0, STEPS)
        for name, buffer in first.module.named_buffers():
            dict(job.module.named_buffers())[name].copy_(buffer)
        with deepspeed.zero.GatheredParameters([job.module.frozen.weight], modifier_rank=0):
            job.module.frozen.weight.data.copy_(first.module.frozen.weight)
        first.close()
    losses = job.train(STEPS, STEPS)
    steps = job.engine.global_steps
    job.close()
    return {"losses": losses, "expected": expected, "steps": steps}


def _ds_to_universal(source: Path, out: Path) -> None:
    script = Path(deepspeed.__file__).parent / "checkpoint" / "ds_to_universal.py"
    command = [sys.executable, str(script), "--input_folder", str(source), "--output_folder", str(out)]
    command += ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def we_load_stock(folder: Path, *, source: int, stage: int, dtype: str, universal: bool) -> Any:
    """A checkpoint that DeepSpeed saved, as it is or after its own converter, in one of our jobs."""
    stock = Stock(source, dtype)
    stock.train(0, STEPS)
    stock.engine.save_checkpoint(str(folder / "stock"), tag=TAG, client_state={"note": "kept"})
    weights = whole_weights(stock.module)
    expected = stock.train(STEPS, STEPS)
    stock.close()
    place = folder / "stock"
    if universal:
        on_first_rank(lambda: _ds_to_universal(place / TAG, folder / "universal" / "step"))
        place = folder / "universal"
    job = Job(stage, dtype, seed=3)
    restored = job.load(place)
    ours = whole_weights(job.module)
    differs = [name for name in ours if not torch.equal(ours[name], weights[name])]
    losses = job.train(STEPS, STEPS)
    job.close()
    return {"losses": losses, "expected": expected, "differs": differs, "note": restored.client["note"]}


def _deepspeeds(name: str) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """DeepSpeed compiles these the first time they are made."""

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from deepspeed.ops import adam

        return getattr(adam, name)(params, lr=3e-3, eps=1e-4)

    return make


ANY_OPTIMIZER = {**OPTIMIZERS, **{name: _deepspeeds(name) for name in ("FusedAdam", "DeepSpeedCPUAdam")}}


def keeps_optimizer_state(folder: Path, *, name: str, pair: tuple[int, int], dtype: str) -> Any:
    """Any optimizer: train, save, go on; load at another stage, go on from there."""
    first = Walker(ANY_OPTIMIZER[name], dtype)
    first.slot.build(first.builder(pair[0]))
    first.train(STEPS)
    job = _JobOf(first)
    digest = job.digest()
    job.save(folder / "ours")
    first.train(STEPS)
    expected = first.losses[STEPS:]
    first.slot.take_down()
    second = Walker(ANY_OPTIMIZER[name], dtype)
    with torch.no_grad():
        for param in second.module.parameters():
            param.add_(1.0)
    second.slot.build(second.builder(pair[1]))
    again = _JobOf(second)
    again.load(folder / "ours")
    differs = different(again.digest(), digest)
    second.losses = list(first.losses[:STEPS])
    second.train(STEPS)
    second.slot.take_down()
    return {"differs": differs, "losses": second.losses[STEPS:], "expected": expected}


class _JobOf(Job):
    """Saves and loads what a Walker trains."""

    def __init__(self, walker: Walker) -> None:
        self.dtype, self.module, self.slot, self.engine = walker.dtype, walker.module, walker.slot, walker.slot.engine


def factored(folder: Path, *, source: int, stage: int) -> Any:
    """Adafactor keeps vectors for a matrix that it sees whole."""
    job = Job(source, "fp32", seed=1, make=_adafactor)
    job.train(0, STEPS)
    job.save(folder / "ours")
    expected = job.train(STEPS, STEPS)
    job.close()
    again = Job(stage, "fp32", seed=2, make=_adafactor)
    before = {name: tensor.clone() for name, tensor in whole_weights(again.module).items()}
    message, losses = None, []
    try:
        again.load(folder / "ours", factored=True)
        losses = again.train(STEPS, STEPS)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    untouched = all(torch.equal(tensor, before[name]) for name, tensor in whole_weights(again.module).items())
    again.close()
    return {"message": message, "losses": losses, "expected": expected, "untouched": untouched}


def other_host(folder: Path) -> Any:
    """Case C8: without a shared file system each host sees the shards of its own ranks only."""
    job = Job(2, "fp32", seed=1)
    job.train(0, STEPS)
    job.save(folder / "ours")
    if dist.get_rank() == 0:
        shutil.copytree(folder / "ours", folder / "host")
        next((folder / "host" / TAG).glob("zero_pp_rank_0_*optim_states.pt")).unlink()
    dist.barrier()
    try:
        job.load(folder / ("ours" if dist.get_rank() == 0 else "host"))
        message = None
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    losses = job.train(STEPS, 1)  # no rank is left waiting
    job.close()
    return {"message": message, "losses": losses, "host": socket.gethostname()}


def own_folders(folder: Path) -> Any:
    """Without a shared file system each host saves what its ranks have, and the folders put together are whole."""
    job = Job(2, "fp32", seed=1)
    job.train(0, STEPS)
    digest = job.digest()
    mine = folder / f"host{dist.get_rank()}" / "ours"
    for _ in range(2):  # the second one takes the place of the first
        context = SaveContext("32-true", local_rank=0)
        save(
            job.engine,
            job.slot.client,
            mine,
            lambda target: job.engine.save_checkpoint(str(target), tag=TAG, client_state={"note": "x"}),
            context,
            tag=TAG,
            universal=False,
        )
    seen = sorted(entry.name for entry in mine.parent.iterdir())
    dist.barrier()
    on_first_rank(lambda: shutil.copytree(folder / "host1" / "ours", folder / "host0" / "ours", dirs_exist_ok=True))
    job.close()
    again = Job(3, "fp32", seed=2)
    again.load(folder / "host0" / "ours")
    differs = different(again.digest(), digest)
    again.close()
    return {"seen": seen, "differs": differs}


def no_space(folder: Path) -> Any:
    """A full disk is found out before anything is written; the older checkpoint stays."""
    job = Job(1, "fp32", seed=1)
    job.train(0, STEPS)
    job.save(folder / "ours")
    digest = job.digest()
    job.train(STEPS, 1)
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=1000)  # type: ignore[assignment]
    try:
        job.save(folder / "ours")
        message = None
    except OSError as error:
        message = str(error)
    finally:
        shutil.disk_usage = usage
    again = Job(2, "fp32", seed=2)
    again.load(folder / "ours")
    differs = different(again.digest(), digest)
    left = sorted(entry.name for entry in folder.iterdir())
    job.close()
    again.close()
    return {"message": message, "differs": differs, "left": left}


def uneven_steps(folder: Path) -> Any:
    """Two parameters of a group with other step counts fit stage 0 only; the engine is as it was."""
    job = Job(0, "fp32", seed=1)
    job.train(0, STEPS)
    optimizer = job.engine.basic_optimizer
    optimizer.state[dict(job.module.named_parameters())["embed.weight"]]["step"] += 1
    job.save(folder / "ours")
    job.close()
    messages = {}
    for stage in (0, 2):
        again = Job(stage, "fp32", seed=2)
        before = again.digest()
        try:
            again.load(folder / "ours")
            messages[stage] = None
        except Exception as error:
            messages[stage] = f"{type(error).__name__}: {error}"
        untouched = not different(again.digest(), before)
        again.close()
    return {"messages": [messages[0], messages[2]], "untouched": untouched}


def _adafactor(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([param for param in module.parameters() if param.requires_grad], lr=1e-2)


def quiet(case: Callable[[Path], Any], folder: Path) -> Any:
    """DeepSpeed prints while it loads."""
    with contextlib.redirect_stdout(io.StringIO()):
        return case(folder)


def all_cases() -> dict[str, Callable[[Path], Any]]:
    cases: dict[str, Callable[[Path], Any]] = {}
    for source, stage in UNIVERSAL_TO_STOCK:
        cases[f"universal-{source}-{stage}"] = functools.partial(
            stock_loads, source=source, stage=stage, dtype="fp32", universal=True
        )
    for source, stage in ((0, 2), (2, 3)):
        cases[f"saved-universal-{source}-{stage}"] = functools.partial(
            stock_loads, source=source, stage=stage, dtype="fp32", universal=True, by_saving=True
        )
    for dtype in ("fp32", "bf16"):
        for source, stage in NATIVE_TO_STOCK:
            cases[f"native-{dtype}-{source}-{stage}"] = functools.partial(
                stock_loads, source=source, stage=stage, dtype=dtype, universal=False
            )
        for stage in (0, 1, 2, 3):
            cases[f"stock-{dtype}-{stage}"] = functools.partial(
                we_load_stock, source=stage, stage=(stage + 1) % 4, dtype=dtype, universal=False
            )
    for source, stage in STOCK_UNIVERSAL:
        cases[f"stock-universal-{source}-{stage}"] = functools.partial(
            we_load_stock, source=source, stage=stage, dtype="fp32", universal=True
        )
    for name in OPTIMIZERS:
        for pair in ((0, 3), (3, 1), (2, 0)):
            cases[f"optimizer-{name}-{pair[0]}-{pair[1]}"] = functools.partial(
                keeps_optimizer_state, name=name, pair=pair, dtype="fp32"
            )
    for name in ("FusedAdam", "DeepSpeedCPUAdam"):
        for pair in ((0, 3), (3, 0), (2, 1)):
            for dtype in ("fp32", "bf16"):
                cases[f"optimizer-{name}-{dtype}-{pair[0]}-{pair[1]}"] = functools.partial(
                    keeps_optimizer_state, name=name, pair=pair, dtype=dtype
                )
    cases |= {"other-host": other_host, "own-folders": own_folders, "no-space": no_space, "uneven-steps": uneven_steps}
    cases["factored-0-0"] = functools.partial(factored, source=0, stage=0)
    cases["factored-0-2"] = functools.partial(factored, source=0, stage=2)
    cases["factored-2-0"] = functools.partial(factored, source=2, stage=0)
    cases["factored-1-2"] = functools.partial(factored, source=1, stage=2)
    return {name: functools.partial(quiet, case) for name, case in cases.items()}


def run(payload: dict[str, Any]) -> dict[str, Any]:
    init_distributed()
    cases = all_cases()
    only = payload.get("only") or list(cases)
    return run_cases({name: cases[name] for name in only}, payload["folder"])
