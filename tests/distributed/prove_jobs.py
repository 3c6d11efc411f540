"""Small jobs for test_prove: one that resumes whatever it is spread over, and some that do not."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Numbers(pl.LightningDataModule):
    """A shuffled regression of 5 epochs or so, with state and a hook that would show if it was called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = 0

    def train_dataloader(self) -> Any:
        x = torch.randn(52, 6, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x * 2 + 0.1 * torch.randn_like(x), y

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["loaded"]


class Dropping(pl.LightningModule):
    """Dropout, a scheduler per step, buffers, and SGD, which sees the size of gradients."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 19), nn.BatchNorm1d(19), nn.Dropout(rate), nn.GELU(), nn.Linear(19, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=2e-2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Perturbed(Dropping):
    """Changes a weight when it is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        with torch.no_grad():
            self.net[4].bias.add_(1.0)


class Forgetful(Dropping):
    """Trains by a number that its checkpoints do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.seen)


class Failing(Dropping):
    """Ends with an error in its first step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise LookupError("the third shelf is empty")
