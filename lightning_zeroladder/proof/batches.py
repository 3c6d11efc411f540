"""Record the micro-batches that the ranks of one run get, and give them to the ranks of another."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_zeroladder.proof.plan import BadJob

__all__ = ["Batches", "user_batches"]

_ENDLESS = 1 << 40
"""Lightning counts epochs, and schedulers with them, by the length of a loader: all runs train one epoch."""


class Batches:
    """The training batches of a rank: an iterable that takes the place of the user's dataloader.

    Random numbers are seeded anew for each micro-batch, by its number, so that dropout does the same to it on whichever
    rank it is.

    Args:
        folder: Where recorded micro-batches are.
        number: Returns the number, within the whole run, of this rank's n-th micro-batch.
        source: The user's own batches, which are recorded; None to read those that were.
        batch_size: Samples per micro-batch where it is known: DeepSpeed asks for it.
    """

    def __init__(
        self,
        folder: Path,
        number: Callable[[int], int],
        source: Callable[[], Iterator[Any]] | None,
        batch_size: int | None,
    ) -> None:
        self._folder = folder
        self._number = number
        self._source = source
        if batch_size is not None:
            self.batch_sampler = SimpleNamespace(batch_size=batch_size)

    def __len__(self) -> int:
        """Return more than any run takes."""
        return _ENDLESS

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's micro-batches, until the recorded ones end."""
        source = self._source() if self._source is not None else None
        index = 0
        while True:
            number = self._number(index)
            path = self._folder / f"{number}.pickle"
            if source is not None:
                _record(next(source), path)
            if not path.exists():
                return
            # Written by this process or one that it was started with, into a folder that only its user can write to.
            batch = pickle.loads(path.read_bytes())
            _seed(number)
            yield batch
            index += 1


def _record(batch: Any, path: Path) -> None:
    try:
        path.write_bytes(pickle.dumps(batch))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise BadJob(
            f"A training batch ({type(batch).__name__}) cannot be written down for the other runs: {error}. Let the "
            "dataloader return tensors, and containers of them."
        ) from error


def _seed(number: int) -> None:
    seed = 1 + number
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def user_batches(trainer: pl.Trainer, loaders: Any) -> Iterator[Any]:
    """Yield the batches that a fit would get from what ``train_dataloader`` returned, one epoch after the other.

    Raises:
        BadJob: If there are none.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    combined.flattened = [
        _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, loader) for loader in combined.flattened
    ]
    epoch = 0
    while True:
        for loader in combined.flattened:
            _set_sampler_epoch(loader, epoch)
        batch = None
        for batch, _, _ in iter(combined):
            yield batch
        if batch is None:
            raise BadJob("The training dataloader has no batches on some rank: use more data, or smaller batches.")
        epoch += 1
