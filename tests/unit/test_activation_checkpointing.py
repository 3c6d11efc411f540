"""Recomputing blocks changes nothing but what is kept."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_zeroladder.engine.activation_checkpointing import ActivationCheckpointing, repeated_blocks

WIDTH = 8


class Block(nn.Module):
    def __init__(self, norm: str = "layer") -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm == "batch" else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        if norm == "spectral":
            self.up = spectral_norm(self.up)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor, *, debug: float = 1.0) -> tuple[Tensor, Tensor]:
        self.calls += 1
        hidden = torch.dropout(torch.relu(self.up(self.norm(x))), 0.3, self.training)
        return x + self.gain * self.down(hidden), hidden.mean() * debug


class Stack(nn.Module):
    def __init__(self, norm: str = "layer", depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.embed(x), torch.zeros(())
        for block in self.blocks:
            x, extra = block(x, debug=0.5)  # also an argument of torch.utils.checkpoint.checkpoint
            total = total + extra
        return self.head(x).square().mean() + total


def train(model: Stack, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(5, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {**model.state_dict(), "random": torch.get_rng_state()}


@pytest.fixture(params=["layer", "batch", "spectral"])
def model(request: pytest.FixtureRequest) -> Stack:
    torch.manual_seed(0)
    return Stack(request.param)


def test_results_state_and_random_numbers_are_the_same_to_the_last_bit(model: Stack) -> None:
    plain = copy.deepcopy(model)
    ActivationCheckpointing(model).switch(True)
    losses, state = train(model)
    plain_losses, plain_state = train(plain)
    assert losses == plain_losses
    assert list(state) == list(plain_state)
    for name, value in state.items():
        assert torch.equal(value, plain_state[name]), name
    assert [block.calls for block in model.blocks] == [2 * block.calls for block in plain.blocks]


def kept_elements(model: Stack) -> int:
    """Elements that autograd keeps from a forward pass, as hooks outside the blocks see it."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += 0 if isinstance(tensor, nn.Parameter) else tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.ones(64, 4))
    return kept


def test_less_is_kept_for_backward() -> None:
    model = Stack(depth=8)
    checkpointing = ActivationCheckpointing(model)
    before = kept_elements(model)
    checkpointing.switch(True)
    assert kept_elements(model) < before / 10
    checkpointing.switch(False)
    assert kept_elements(model) == before


def test_it_comes_off_without_a_trace(model: Stack) -> None:
    own = functools.partial(Block.forward, model.blocks[0])  # set on the instance by its owner
    model.blocks[0].forward = own
    before = [dict(vars(part)) for part in model.modules()]
    checkpointing = ActivationCheckpointing(model)
    for _ in range(2):
        checkpointing.switch(True)
        checkpointing.switch(True)
        assert all("forward" in vars(block) for block in model.blocks)
        checkpointing.switch(False)
    assert [dict(vars(part)) for part in model.modules()] == before
    assert model.blocks[0].forward is own
    checkpointing.switch(False)
    assert [dict(vars(part)) for part in model.modules()] == before


def test_nothing_is_recomputed_without_gradients() -> None:
    model = Stack()
    ActivationCheckpointing(model).switch(True)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert [block.calls for block in model.blocks] == [1, 1, 1]


def test_copies_run_their_own_blocks() -> None:
    model = Stack()
    ActivationCheckpointing(model).switch(True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(2, 4)).backward()
        assert [block.calls for block in twin.blocks] == [2, 2, 2]
        assert [block.calls for block in model.blocks] == [0, 0, 0]


def test_the_signature_of_a_block_stays() -> None:
    model = Stack()
    before = inspect.signature(model.blocks[0].forward)
    ActivationCheckpointing(model).switch(True)
    assert inspect.signature(model.blocks[0].forward) == before


# Which blocks ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh()) for _ in range(4))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def test_the_stack_is_found_and_not_what_repeats_inside_it() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(3)), "head": nn.Linear(WIDTH, 10**4)})
    assert repeated_blocks(model) == list(model["layers"])
    assert ActivationCheckpointing(model).what == "3 x Layer"


def test_blocks_of_plain_containers() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    assert repeated_blocks(model) == list(model)


def test_a_class_inside_itself_is_not_recomputed_twice() -> None:
    inner = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(nn.Sequential(*inner[:2]), nn.Sequential(*inner[2:]))
    assert repeated_blocks(model) == []


def test_one_layer_applied_again_and_again_is_wrapped_once() -> None:
    shared, model = Block(), Stack()
    model.blocks = nn.ModuleList([shared] * 3)
    model.extra = nn.ModuleList([Layer(), Layer()])
    assert repeated_blocks(model) == list(model.extra)
    checkpointing = ActivationCheckpointing(model, ("Block",))
    assert checkpointing.what == "1 x Block"
    checkpointing.switch(True)
    model(torch.ones(2, 4)).backward()
    assert shared.calls == 6


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), Stack(depth=1)]
)
def test_nothing_to_recompute_is_said(model: nn.Module) -> None:
    checkpointing = ActivationCheckpointing(model)
    assert "no block of the model repeats" in str(checkpointing.unavailable)
    checkpointing.switch(True)
    assert all("forward" not in vars(part) for part in model.modules())


def test_named_classes_are_taken_and_unknown_ones_refused() -> None:
    assert ActivationCheckpointing(Stack(depth=1), ("Block", "Sequential")).what == "1 x Block, 1 x Sequential"
    with pytest.raises(MisconfigurationException, match=r"no part of the model is of class Blok.*Block"):
        ActivationCheckpointing(Stack(), ("Blok",))


class Switched(Stack):
    """Has the switch of Hugging Face's models."""

    supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.is_gradient_checkpointing = False
        self.options: dict[str, bool] | None = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool] | None = None) -> None:
        self.is_gradient_checkpointing, self.options = True, gradient_checkpointing_kwargs

    def gradient_checkpointing_disable(self) -> None:
        self.is_gradient_checkpointing = False


def test_a_models_own_switch_is_preferred() -> None:
    model = nn.ModuleDict({"model": Switched()})
    checkpointing = ActivationCheckpointing(model)
    assert checkpointing.what == "1 x Switched"
    checkpointing.switch(True)
    assert model["model"].is_gradient_checkpointing
    takes_early_stop = "early_stop" in inspect.signature(torch.utils.checkpoint.checkpoint).parameters  # torch 2.9
    assert model["model"].options == {"use_reentrant": False} | ({"early_stop": False} if takes_early_stop else {})
    assert all("forward" not in vars(part) for part in model.modules())
    checkpointing.switch(False)
    assert not model["model"].is_gradient_checkpointing


def test_a_model_that_recomputes_already_is_left_alone() -> None:
    model = Switched()
    model.gradient_checkpointing_enable()
    checkpointing = ActivationCheckpointing(model)
    assert checkpointing.unavailable == "the model recomputes activations already"
    checkpointing.switch(True)
    checkpointing.switch(False)
    assert model.is_gradient_checkpointing


def test_named_blocks_go_before_the_switch() -> None:
    model = Switched()
    ActivationCheckpointing(model, ("Block",)).switch(True)
    assert not model.is_gradient_checkpointing
    assert all("forward" in vars(block) for block in model.blocks)
