"""Small checkpoints as DeepSpeed writes them, made without it: stage 0 by ``torch.save``, others by converting it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zeroladder.checkpoint.archive import Archive
from lightning_zeroladder.checkpoint.converting import convert
from lightning_zeroladder.checkpoint.manifest import Manifest, describe_file, write_manifest

TAG = "global_step3"
MODEL = "mp_rank_00_model_states.pt"

Groups = Sequence[Sequence[str]]


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 31 * sum(shape))).to(dtype)


def adam(weights: Mapping[str, Tensor], groups: Groups, step: float = 3.0) -> dict[str, Any]:
    """The state of an Adam that trains some of the weights, with the learning rates 0.1, 0.2, ... of its groups."""
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    return {
        "state": {
            number: {
                "step": torch.tensor(step),
                "exp_avg": values(*weights[name].shape, seed=number),
                "exp_avg_sq": values(*weights[name].shape, seed=number).square(),
            }
            for name, number in numbers.items()
        },
        "param_groups": [
            {"lr": (index + 1) / 10, "params": [numbers[name] for name in group]} for index, group in enumerate(groups)
        ],
    }


def save_stage_0(
    root: Path,
    weights: Mapping[str, Any],
    *,
    optimizer: Any,
    buffers: Mapping[str, Tensor] | None = None,
    masters: Sequence[Sequence[Tensor]] | None = None,
    ranks: int = 2,
    **entries: Any,
) -> Path:
    """Save a checkpoint of stage 0; with ``masters`` as of bf16, which keeps fp32 weights in the optimizer."""
    buffers = dict(buffers or {})
    if masters is not None:
        outer = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 3, "optimizer_state_dict": optimizer}
        optimizer = {**outer, "fp32_groups": masters}
    tree = {
        **{"module": OrderedDict({**weights, **buffers}), "buffer_names": list(buffers), "optimizer": optimizer},
        **{"param_shapes": None, "frozen_param_shapes": None, "shared_params": None, "frozen_param_fragments": None},
        **{"data_sampler": None, "random_ltd": None, "skipped_steps": 0, "global_steps": 3, "global_samples": 24},
        **{"dp_world_size": ranks, "mp_world_size": 1, "ds_version": "0.19.8"},
        "ds_config": {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 0},
        },
        **entries,
    }
    (root / TAG).mkdir(parents=True)
    torch.save(tree, root / TAG / MODEL)
    (root / "latest").write_text(TAG)
    return root


def add_manifest(root: Path, *, groups: Groups = (), parameters: Mapping[str, Tensor] | None = None) -> None:
    """Give the checkpoint a manifest, as one that ``zero_auto`` saved has."""
    folder = root / TAG
    files = [describe_file(path, folder) for path in sorted(folder.glob("*.pt"))]
    shapes = {name: {"shape": list(tensor.shape), "dtype": "float32"} for name, tensor in (parameters or {}).items()}
    write_manifest(
        folder,
        Manifest(
            **{"kind": "native", "stage": 0, "world_size": 2, "accumulate": 1, "micro_batch": 8},
            **{"global_samples": 24, "global_steps": 3, "precision": "32-true", "optimizer": "AdamW"},
            **{"groups": groups, "parameters": shapes, "aliases": {}, "versions": {"torch": "2.6"}, "files": files},
        ),
    )


def in_every_layout(stage_0: Path, root: Path) -> dict[str, Path]:
    """Return the checkpoint and what it is converted to: the other stages, on 3 ranks, and universal."""
    made = {"stage 0": stage_0, "universal": convert(stage_0, root / "universal", workers=1).path}
    for stage in (1, 2, 3):
        out = root / f"stage {stage}"
        made[out.name] = convert(stage_0, out, to_stage=stage, to_world_size=3, workers=1).path
    return made


def flip_a_bit(path: Path) -> None:
    """Damage the largest tensors in a file: weights and moments are of one size."""
    records = [record for record in Archive(path).records.values() if record.name.startswith("data/")]
    largest = max(record.nbytes for record in records)
    data = bytearray(path.read_bytes())
    for record in records:
        if record.nbytes == largest:
            data[record.start] ^= 1
    path.write_bytes(data)
