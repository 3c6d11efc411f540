from __future__ import annotations

import sys
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry

import lightning_zeroladder
from lightning_zeroladder import ZeroAutoStrategy
from lightning_zeroladder.engine.optimizer_probe import probe_optimizer
from lightning_zeroladder.requirements_check import check_optimizer, check_trainer, shardable_stages


def trainer(**arguments) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **arguments)


def test_importing_the_package_registers_the_name():
    assert "zero_auto" in StrategyRegistry.available_strategies()
    assert isinstance(trainer(strategy="zero_auto").strategy, ZeroAutoStrategy)


def test_clipping_by_value_is_refused_and_by_norm_is_not():
    with pytest.raises(MisconfigurationException, match=r"clips by norm only.*'norm'"):
        check_trainer(trainer(gradient_clip_val=0.5, gradient_clip_algorithm="value"))
    check_trainer(trainer(gradient_clip_val=0.5, gradient_clip_algorithm="norm"))


@pytest.mark.parametrize(
    ("callback", "alternative"),
    [
        (BackboneFinetuning(), "requires_grad_"),
        (StochasticWeightAveraging(swa_lrs=1e-2), "saved checkpoints"),
        (GradientAccumulationScheduler({0: 2}), "accumulate_grad_batches"),
        (BatchSizeFinder(), "strategy='ddp'"),
        (LearningRateFinder(), "strategy='ddp'"),
    ],
)
def test_callbacks_that_cannot_work_are_refused_with_an_alternative(callback, alternative):
    with pytest.raises(MisconfigurationException, match=alternative) as caught:
        check_trainer(trainer(callbacks=[callback]))
    assert type(callback).__name__ in str(caught.value)


def test_weight_averaging_takes_stage_3_off_the_ladder():
    averaging = trainer(callbacks=[EMAWeightAveraging()])
    with pytest.warns(UserWarning, match="reads whole weights"):
        assert shardable_stages(averaging, (0, 1, 2, 3)) == (0, 1, 2)
    with pytest.raises(MisconfigurationException, match="stage 3 shards"):
        shardable_stages(averaging, (3,))
    assert shardable_stages(trainer(), (0, 3)) == (0, 3)


class TwoOptimizers(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


def test_several_optimizers_are_refused_before_anything_is_built():
    strategy = ZeroAutoStrategy()
    model = TwoOptimizers()
    strategy._lightning_module = model
    model.trainer = trainer()
    with pytest.raises(MisconfigurationException, match="returned 2 optimizers"):
        strategy._init_optimizers()


def matrix() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, 6))


@pytest.mark.parametrize(
    ("optimizer", "keys", "nbytes"),
    [
        (torch.optim.AdamW([matrix()]), ("exp_avg", "exp_avg_sq"), 8),
        (torch.optim.Adam([matrix()], amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), 12),
        (torch.optim.SGD([matrix()], lr=0.1), (), 0),
        (torch.optim.SGD([matrix()], lr=0.1, momentum=0.9), ("momentum_buffer",), 4),
        (torch.optim.Adagrad([matrix()]), ("sum",), 4),
        (torch.optim.RMSprop([matrix()], centered=True), ("grad_avg", "square_avg"), 8),
    ],
)
def test_the_probe_finds_what_an_optimizer_keeps_and_leaves_it_alone(optimizer, keys, nbytes):
    random_state = torch.get_rng_state()
    param = optimizer.param_groups[0]["params"][0]
    had_state = bool(optimizer.state)
    state = probe_optimizer(optimizer)
    assert state is not None
    assert (state.elementwise, state.other, state.bytes_per_parameter) == (keys, (), nbytes)
    assert torch.equal(param, torch.ones(4, 6))
    assert bool(optimizer.state) is had_state
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_probe_survives_a_scheduler_on_the_optimizer():
    param = matrix()
    optimizer = torch.optim.AdamW([param])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = probe_optimizer(optimizer)
    assert state is not None
    assert state.elementwise == ("exp_avg", "exp_avg_sq")
    assert torch.equal(param, torch.ones(4, 6))


def test_state_of_another_shape_is_refused_by_name_unless_the_stage_is_fixed():
    optimizer = torch.optim.Adafactor([matrix()])
    state = probe_optimizer(optimizer)
    assert state is not None
    assert state.other == ("col_var", "row_var")
    with pytest.raises(MisconfigurationException, match=r"Adafactor keeps 'col_var', 'row_var'"):
        check_optimizer(optimizer, state, (0, 1))
    check_optimizer(optimizer, state, (2,))


def test_the_other_lightning_package_is_named_with_what_to_write(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_lightning", object())
    with pytest.warns(UserWarning, match=r"`lightning` only: write `import lightning.pytorch as pl`"):
        lightning_zeroladder.register()
    monkeypatch.delitem(sys.modules, "pytorch_lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lightning_zeroladder.register()
