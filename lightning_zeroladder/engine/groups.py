"""DeepSpeed's process-global pieces: its accelerator, its communication backend and its op table."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

__all__ = [
    "close_groups",
    "leave_groups_at_exit",
    "replace_backend",
    "use_cpu_accelerator",
    "without_compiled_shm_op",
]

_SHM_OP = "deepspeed_shm_comm"


@contextmanager
def without_compiled_shm_op() -> Iterator[None]:
    """Keep DeepSpeed from compiling its shared-memory op when a process group is made on CPU.

    It takes 30 to 40 s and a C++ compiler, and serves inference only; gloo does all that training needs.
    """
    import deepspeed.ops

    table: dict[str, Any] = deepspeed.ops.__compatible_ops__
    before = table.get(_SHM_OP)
    table[_SHM_OP] = False
    try:
        yield
    finally:
        if before is None:
            del table[_SHM_OP]
        else:
            table[_SHM_OP] = before


def leave_groups_at_exit() -> None:
    """Close the process groups before the interpreter goes: gloo's threads abort the process if they outlive it."""
    atexit.unregister(_leave_groups)
    atexit.register(_leave_groups)


def _leave_groups() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def close_groups() -> None:
    """Destroy every process group, also those that DeepSpeed keeps at module level, whatever state they are in."""
    from deepspeed.utils import groups

    replace_backend(None)
    for name, value in vars(groups).items():
        if name.startswith("_") and name.isupper() and not isinstance(value, bool | int | str | None):
            setattr(groups, name, {} if isinstance(value, dict) else None)
    if dist.is_initialized():
        dist.destroy_process_group()


def use_cpu_accelerator() -> None:
    """Make DeepSpeed compute on CPU also on a machine that has GPUs."""
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())


def replace_backend(backend: Any) -> Any:
    """Make DeepSpeed communicate through ``backend`` from now on and return the one it used before."""
    import deepspeed.comm.comm as comm

    before, comm.cdb = comm.cdb, backend
    return before
