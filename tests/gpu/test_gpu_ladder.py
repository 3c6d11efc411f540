"""The ladder on real GPUs with NCCL; skipped without one."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_zeroladder import ZeroAutoStrategy
from lightning_zeroladder.engine.digest import checksum
from lightning_zeroladder.probe.clock import Phase, StepClock
from lightning_zeroladder.probe.memory import default_memory_limit, read_peak, reset_peak
from lightning_zeroladder.report.data import read_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = (self.net(x) - x[:, :1]).float().pow(2).mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_the_clock_times_with_events():
    clock = StepClock(cuda=True)
    matrix = torch.randn(2048, 2048, device="cuda")
    for _ in range(3):
        clock.switch(Phase.FORWARD)
        for _ in range(20):
            matrix @ matrix
        with clock.collective():
            matrix @ matrix
        clock.close_step()
    steps = clock.drain()
    assert len(steps) == 3
    assert all(step.phase_s[Phase.FORWARD] > step.communication_s > 0 for step in steps)


def test_memory_is_the_allocators():
    device = torch.device("cuda", 0)
    reset_peak(device)
    before = read_peak(device).peak_bytes
    block = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    peak = read_peak(device)
    del block
    assert peak.peak_bytes - before == 64 << 20
    assert peak.reserved_bytes is not None
    assert peak.reserved_bytes >= peak.peak_bytes
    assert default_memory_limit(device, 1) == torch.cuda.get_device_properties(device).total_memory


def test_a_checksum_is_the_same_on_gpu_and_cpu():
    values = torch.randn(300_001)
    assert checksum(values.cuda(), 7).item() == checksum(values, 7).item()


def test_one_gpu_commits_at_once(tmp_path):
    strategy = ZeroAutoStrategy(run_dir=tmp_path)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, strategy=strategy, max_steps=5, logger=False, enable_checkpointing=False,
        precision="bf16-mixed", default_root_dir=tmp_path,
    )  # fmt: skip
    model = Regression()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8))
    assert len(model.losses) == 5
    report = read_report(tmp_path)
    assert (report.decision.rung.stage, report.context.device) == (0, "cuda")
