"""A small byte-level GPT and a data module of real text that every Python installation carries."""

from __future__ import annotations

import importlib
import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BYTES = 256


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class ByteGPT(pl.LightningModule):
    """Predicts the next byte.

    Args:
        width: Features per position.
        layers: Transformer blocks.
        heads: Attention heads.
        seq_len: Longest sequence, in bytes.
        lr: Learning rate of AdamW.
    """

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, seq_len: int = 128, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(0.02 * torch.randn(seq_len, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.position[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1).float(), batch["labels"].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1).float(), batch["labels"].flatten())
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class ByteWindows(Dataset[dict[str, Tensor]]):
    """Windows of a text, each with the same window one byte later as its labels."""

    def __init__(self, text: bytes, seq_len: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * self.seq_len : (index + 1) * self.seq_len + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


def stdlib_text(limit_bytes: int) -> bytes:
    """Return the help topics and the source of the standard library, in a fixed order, up to a size in bytes."""
    topics = importlib.import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= limit_bytes:
            break
        text += path.read_bytes()
    return text[:limit_bytes]


class StdlibText(pl.LightningDataModule):
    """Batches of the standard library's text.

    Args:
        batch_size: Sequences per rank and micro-batch.
        seq_len: Bytes per sequence.
        limit_bytes: Size of the text.
    """

    def __init__(self, batch_size: int = 8, seq_len: int = 128, limit_bytes: int = 4_000_000) -> None:
        super().__init__()
        self.batch_size, self.seq_len, self.limit_bytes = batch_size, seq_len, limit_bytes

    def setup(self, stage: str) -> None:
        text = stdlib_text(self.limit_bytes)
        split = int(0.95 * len(text))
        self.train_set = ByteWindows(text[:split], self.seq_len)
        self.val_set = ByteWindows(text[split:], self.seq_len)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.val_set, batch_size=self.batch_size, drop_last=True)
