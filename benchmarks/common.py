"""What the benchmarks share: the model, the peer strategy, step times, starting ranks, and how a result is headed."""

from __future__ import annotations

import json
import os
import platform
import random
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from rig import start, stop
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_zeroladder import LadderCallback
from lightning_zeroladder.engine.groups import without_compiled_shm_op

__all__ = [
    "Blocks",
    "PlainDeepSpeed",
    "StepTimes",
    "bootstrap_interval",
    "heading",
    "ladder_is_over",
    "leave_group",
    "mlp",
    "noise",
    "quiet",
    "rank_command",
    "read_json",
    "spawn_ranks",
    "trainer_for",
    "wait_for_ranks",
    "write_json",
]


def mlp(width: int, depth: int) -> nn.Module:
    """``depth`` linear layers of ``width`` x ``width``, each followed by a GELU."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))


class Blocks(pl.LightningModule):
    """An MLP trained on noise: every step costs the same.

    Args:
        width: Features of each layer.
        depth: Number of layers.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp(width, depth)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # Its own input is out of reach for noise: a loss that went to 0 would end in denormal, slower numbers.
        return mse_loss(self.net(batch), batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Noise(Dataset[Tensor]):
    def __init__(self, rows: int, width: int, batches: int) -> None:
        self._batches = [torch.randn(rows, width) for _ in range(4)]
        self._length = batches

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        return self._batches[index % len(self._batches)]


def noise(rows: int, width: int, batches: int = 1_000_000) -> DataLoader[Tensor]:
    """A loader of ready-made batches of shape (rows, width)."""
    return DataLoader(_Noise(rows, width, batches), batch_size=None)


class PlainDeepSpeed(DeepSpeedStrategy):
    """The peer: Lightning's own strategy, with only its refusals of CPU lifted; on CUDA it is the stock one."""

    @override
    def setup_environment(self) -> None:
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_environment()
        else:
            super(DeepSpeedStrategy, self).setup_environment()  # all that is left out is the refusal

    @override
    def setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        with without_compiled_shm_op():
            self._init_deepspeed_distributed()

    @override
    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        if self.root_device.type != "cpu":
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        import deepspeed

        engine, wrapped, *_ = deepspeed.initialize(
            config=self.config,
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, wrapped


class StepTimes(pl.Callback):
    """Seconds of every optimizer step, from the end of the step before; it looks the same under every strategy.

    Args:
        accumulate: Micro-batches per optimizer step.
    """

    def __init__(self, accumulate: int = 1) -> None:
        self.seconds: list[float] = []
        self._accumulate = accumulate
        self._last_s: float | None = None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self._accumulate:
            return
        now_s = time.perf_counter()
        if self._last_s is not None:
            self.seconds.append(now_s - self._last_s)
        self._last_s = now_s


def ladder_is_over(trainer: pl.Trainer) -> bool:
    """Whether no ladder callback is left in the run."""
    return not any(isinstance(callback, LadderCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def trainer_for(strategy: DeepSpeedStrategy, folder: Path, *, nodes: int, devices: int, **settings: Any) -> pl.Trainer:
    """A Trainer without anything that is not measured."""
    return pl.Trainer(
        accelerator="cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= devices else "cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **settings,
    )


def quiet() -> None:
    """Keep libraries from writing between the lines of a result."""
    import logging

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def leave_group() -> None:
    """Leave the process group in order: at exit the threads of one that is left standing can abort the process."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# Ranks ----------------------------------------------------------------------------------------------------------


def rank_command(script: str, *arguments: str) -> list[str]:
    """Command line that runs a benchmark script with this interpreter."""
    return [sys.executable, str(Path(script).resolve()), *arguments]


def spawn_ranks(
    command: Sequence[str], world_size: int, *, env: Mapping[str, str] | None = None, log: Path | None = None
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of a one-host job the way torchrun would.

    Args:
        command: Program and arguments.
        world_size: Number of ranks.
        env: Added to the environment.
        log: File for what the ranks print; None to let it through.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world_size):
        rank_env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"bench-{port}",
            "OMP_NUM_THREADS": "1",
        }
        processes.append(start(command, {**os.environ, **rank_env, **(env or {})}, log))
    return processes


def wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float, log: Path | None = None) -> None:
    """Wait until all ranks ended well; on failure or timeout end them all.

    Raises:
        RuntimeError: If a rank failed or the time was over; with the end of ``log``, if one is given.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            codes = [process.poll() for process in processes]
            if any(codes):
                raise RuntimeError(f"a rank failed: exit codes {codes}{_tail(log)}")
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks did not end within {timeout_s:.0f} s{_tail(log)}")
            time.sleep(0.01)
    finally:
        stop(processes)


def _tail(log: Path | None) -> str:
    return f"\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}" if log is not None else ""


# Results --------------------------------------------------------------------------------------------------------


def heading(title: str) -> str:
    """Date, hardware, versions and the exact command, to stand above a result."""
    memory_gib = psutil.virtual_memory().total / 2**30
    load, *_ = os.getloadavg()
    versions = " ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "lightning"))
    gpus = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return "\n".join(
        [
            f"# {title}",
            f"date      {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            f"hardware  {os.cpu_count()} x {_cpu_name()}, {memory_gib:.0f} GiB{gpus}, {platform.system()} "
            f"{platform.release()}; load average at the start {load:.1f}",
            f"software  python {platform.python_version()} {versions}",
            f"command   python {' '.join([_shown(sys.argv[0]), *sys.argv[1:]])}",
            "",
        ]
    )


def bootstrap_interval(
    ratios: Sequence[float], *, draws: int = 10_000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median of ``ratios``."""
    generator = random.Random(seed)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    tail = (1 - level) / 2
    return medians[int(tail * draws)], medians[int((1 - tail) * draws) - 1]


def write_json(path: Path, value: Any) -> None:
    """Write a value that JSON can express."""
    path.write_text(json.dumps(value), encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read what :func:`write_json` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _shown(script: str) -> str:
    return f"benchmarks/{Path(script).name}"
