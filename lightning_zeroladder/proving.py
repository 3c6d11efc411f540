"""The round trip that one should do before the first long run: train, save, resume elsewhere, and compare.

The runs are fresh processes each and train the user's own job on the same micro-batches, which the first of them writes
down: N ranks with k micro-batches per step are followed by M ranks with N k / M, so that each optimizer step sees the
same global batch. Compared are the training state when saved and right after it was loaded, bit for bit, and the mean
loss over the global batch of each later step. Where losses differ, two more runs tell whose doing it is.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_zeroladder.proof.job import Job, Outcome, Role
from lightning_zeroladder.proof.launch import RunFailed, launch
from lightning_zeroladder.proof.plan import BadJob, Request, check_request
from lightning_zeroladder.proof.verdict import (
    Proof,
    differing_state,
    judge,
    largest_difference,
    step_losses,
    tolerance_for,
)

__all__ = ["BadJob", "OnStep", "Proof", "RunFailed", "proof_to_json", "prove"]

OnStep = Callable[[str, int, int], None]
"""Called with what is running, the optimizer steps it has taken and those it is going to take."""


def prove(
    config: str | Path | Sequence[str | Path],
    *,
    devices: int = 2,
    to_devices: int | None = None,
    stage: int = 2,
    to_stage: int = 3,
    steps: int = 50,
    tolerance: float | None = None,
    arguments: Sequence[str] = (),
    work_dir: str | Path | None = None,
    timeout_s: float = 1800.0,
    progress: OnStep | None = None,
) -> Proof:
    """Prove that a job resumes on another number of devices and at another ZeRO stage.

    The job is that of a LightningCLI config. Of its Trainer, what is set here is set: devices, steps, one stage; no
    logger, no validation, no checkpoints but one. Everything lies in a temporary folder that is deleted at the end, and
    runs on this machine.

    Args:
        config: LightningCLI config with ``trainer``, ``model`` and ``data``; several are merged in their order.
        devices: Ranks that train and save.
        to_devices: Ranks that resume; has to divide the micro-batches of an optimizer step. Default: the largest such
            number below ``devices``.
        stage: ZeRO stage at first.
        to_stage: ZeRO stage after the resume.
        steps: Optimizer steps of the uninterrupted run; the checkpoint is saved half way.
        tolerance: Largest difference of a loss, relative to the largest loss. Default: 1e-5 in fp32, 2e-2 in bf16 and
            fp16.
        arguments: Further arguments for LightningCLI, such as ``--model.init_args.width=64``.
        work_dir: Where the temporary folder is made; it holds one checkpoint and the batches. Default: the system's.
        timeout_s: Longest time that a run may take.
        progress: Called now and then from the thread that called.

    Returns:
        What it showed; a job that does not resume is not an error.

    Raises:
        BadJob: If the job cannot be proven as asked; a ``ValueError``.
        FileNotFoundError: If a config or ``work_dir`` does not exist.
        RunFailed: If one of the runs ends with an error, or takes too long; a ``RuntimeError``.
    """
    request = Request(devices, to_devices, stage, to_stage, steps)
    check_request(request)
    if tolerance is not None and not tolerance >= 0:
        raise BadJob(f"tolerance={tolerance}: must be a number, at least 0.")
    configs = [Path(config)] if isinstance(config, str | Path) else [Path(one) for one in config]
    for path in configs:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: give the LightningCLI config of your job.")
    if work_dir is not None and not Path(work_dir).is_dir():
        raise FileNotFoundError(f"{work_dir} is not a folder.")
    with tempfile.TemporaryDirectory(prefix="zeroladder-prove-", dir=work_dir, ignore_cleanup_errors=True) as folder:
        (Path(folder) / "batches").mkdir()
        job = Job(Role.UNINTERRUPTED, tuple(map(str, configs)), tuple(arguments), folder, request)
        return _prove(job, tolerance, lambda job: _run(job, timeout_s, progress))


def _run(job: Job, timeout_s: float, progress: OnStep | None) -> list[Outcome]:
    if job.plan is None:
        title, first, steps = "uninterrupted", 0, job.request.steps
    else:
        title = f"{job.role} ({job.layout(job.plan)})"
        first, steps = job.first_step(job.plan), job.plan.steps

    def on_step(step: int) -> None:
        if progress is not None:
            progress(title, step - first, steps - first)

    on_step(first)
    outcomes = launch(job, timeout_s=timeout_s, on_step=on_step)
    on_step(steps)
    return outcomes


def _prove(job: Job, tolerance: float | None, run: Callable[[Job], list[Outcome]]) -> Proof:
    saved = run(job)
    plan, precision = saved[0].plan, saved[0].precision
    reference = _losses(job, saved)
    following = replace(job, plan=plan, batch_size=saved[0].batch_size)

    def compare(role: Role) -> tuple[tuple[float, ...], float, dict[str, int]]:
        outcomes = run(replace(following, role=role))
        losses = _losses(replace(following, role=role), outcomes)
        return losses, largest_difference(losses, reference), outcomes[0].state

    resumed, difference, state = compare(Role.RESUMED)
    limit, why = tolerance_for(precision)
    if tolerance is not None:
        limit, why = tolerance, "as asked"
    findings: dict[str, Any] = {
        "difference": difference,
        "tolerance": limit,
        "state_differs": differing_state(saved[0].state, state),
        "state_tensors": len(saved[0].state),
        "finite": all(map(math.isfinite, reference)),
    }
    passed, reason = judge(**findings)
    repeat = control = None
    if passed is None:
        _, repeat, _ = compare(Role.REPEATED)
        passed, reason = judge(**findings, repeat=repeat)
    if passed is None:
        _, control, _ = compare(Role.CONTROL)
        passed, reason = judge(**findings, repeat=repeat, control=control)
    findings.pop("finite")
    return Proof(
        passed=bool(passed),
        reason=reason,
        plan=plan,
        precision=precision,
        uninterrupted=reference,
        resumed=resumed,
        tolerance_reason=why,
        repeat_difference=repeat,
        control_difference=control,
        strategy=saved[0].strategy,
        **findings,
    )


def _losses(job: Job, outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    try:
        return step_losses(outcomes, outcomes[0].plan)
    except ValueError as error:
        raise RunFailed(f"the {job.role} run {error}.") from None


def proof_to_json(proof: Proof) -> dict[str, Any]:
    """Return a proof as what JSON can carry."""
    return asdict(proof)
