"""Worker side of test_optimizers: engines replaced directly, without Lightning."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from harness import run_cases
from torch import Tensor, nn
from torch.optim import Optimizer
from toys import CONFIG, gap, whole_weights

from lightning_zeroladder.engine import groups
from lightning_zeroladder.engine.lifecycle import EngineSlot

Make = Callable[[list[nn.Parameter]], Optimizer]


def init_distributed() -> None:
    """Make the process group as the strategy does."""
    import deepspeed

    groups.use_cpu_accelerator()
    with groups.without_compiled_shm_op():
        deepspeed.init_distributed("gloo", verbose=False)


class Odd(nn.Module):
    """Sizes that divide by no number of ranks, one-element parameters, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.LayerNorm(5), nn.Linear(5, 1))
        self.scale = nn.Parameter(torch.ones(1))
        self.point = nn.Parameter(torch.full((1,), 0.1))  # deepspeed itself refuses 0-dimensional ones
        self.fixed = nn.Parameter(torch.full((3,), 0.25), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale + self.point + self.fixed.sum()


class Whole(nn.Module):
    """Gives stage 3 a module whose forward returns the loss, so that its hooks see every parameter used."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Odd()

    def forward(self, x: Tensor) -> Tensor:
        return ((self.model(x).float() - torch.sin(x[:, :1].float())) ** 2).mean()


class SignMomentum(Optimizer):
    """Lion's rule: the sign of an interpolated momentum."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                first, second = group["betas"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                update = average * first + param.grad * (1 - first)
                # tanh in place of sign: a rounding of a value near zero must not flip a whole step
                param.add_(torch.tanh(update * 100), alpha=-group["lr"])
                average.mul_(second).add_(param.grad, alpha=1 - second)


class Invented(Optimizer):
    """Keeps a tensor, a tensor of another dtype, a Python number, a number in a tensor, and a None."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["sum"] = torch.zeros_like(param)
                    state["hits"] = torch.zeros_like(param, dtype=torch.int16)
                    state["count"] = 0
                    state["decay"] = torch.tensor(1.0, dtype=torch.float64)
                    state["extra"] = None
                assert state["extra"] is None
                state["count"] += 1
                state["decay"] *= 0.9
                state["hits"] += 1
                state["sum"].mul_(0.8).add_(param.grad)
                # Every piece of state matters: one that is lost in a move shows in the next loss.
                rate = group["lr"] * (0.5 + float(state["decay"])) * (1 + 0.1 * state["count"])
                param.sub_(rate * state["sum"] / (1 + 0.1 * state["hits"].to(param.dtype)))


def _groups(params: list[nn.Parameter], **second: Any) -> list[dict[str, Any]]:
    middle = len(params) // 2
    return [{"params": params[:middle]}, {"params": params[middle:], **second}]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, eps=1e-4),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=3e-3, eps=1e-4, fused=True),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=3e-3, eps=1e-4, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.03),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, eps=1e-3),
    "adagrad-two-groups": lambda params: torch.optim.Adagrad(_groups(params, lr=2e-3), lr=1e-2, eps=1e-3),
    "adamw-two-groups": lambda params: torch.optim.AdamW(_groups(params, lr=1e-4, weight_decay=0.3), lr=3e-3, eps=1e-4),
    "sign-momentum": lambda params: SignMomentum(params, lr=1e-3),
    "invented": lambda params: Invented(params, lr=0.02),
}
"""Each eps is far above fp32 rounding: Adam with 1e-8 would turn roundings of tiny gradients into whole steps."""

ORDERS = {"0123210": (0, 1, 2, 3, 2, 1, 0), "313": (3, 1, 3), "230": (2, 3, 0)}
STEPS_PER_STAGE = 3


def config(stage: int, dtype: str) -> dict[str, Any]:
    made = copy.deepcopy(CONFIG)
    made["zero_optimization"]["stage"] = stage
    return {**made, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": dtype == "bf16"}}


class Walker:
    """A module, its optimizer and the slot that they train in."""

    def __init__(self, make: Make, dtype: str, model: Callable[[], nn.Module] = Whole) -> None:
        torch.manual_seed(5)
        self.dtype = dtype
        self.module = model()
        if dtype == "bf16":
            self.module.bfloat16()
        self.optimizer = make([param for param in self.module.parameters() if param.requires_grad])
        self.slot = EngineSlot(self.module, self.optimizer)
        self.losses: list[float] = []
        rank, count = torch.distributed.get_rank(), 64
        self.data = torch.randn(count, 4, 7, generator=torch.Generator().manual_seed(50 + rank))
        if dtype == "bf16":
            self.data = self.data.bfloat16()

    def builder(self, stage: int) -> Callable[[Optimizer | None], Any]:
        import deepspeed

        def build(optimizer: Optimizer | None) -> Any:
            engine, *_ = deepspeed.initialize(
                config=config(stage, self.dtype),
                model=self.module,
                model_parameters=[param for param in self.module.parameters() if param.requires_grad],
                optimizer=optimizer,
                dist_init_required=False,
            )
            return engine

        return build

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.slot.engine(self.data[len(self.losses)])
            self.slot.engine.backward(loss)
            self.slot.engine.step()
            self.losses.append(loss.item())

    def walk(self, order: tuple[int, ...], steps: int, after_take_down: Callable[[], None] = lambda: None) -> None:
        self.slot.build(self.builder(order[0]))
        self.train(steps)
        for stage in order[1:]:
            held = self.slot.hold()
            after_take_down()
            self.slot.resume(held, self.builder(stage))
            self.train(steps)


def traces(module: nn.Module) -> dict[str, Any]:
    """What DeepSpeed could leave on a module: attributes, hooks, the kind of container that holds the parameters."""
    seen: dict[str, Any] = {}
    for name, part in [*module.named_modules(), *module.named_parameters()]:
        seen[name + ":" + type(part).__name__] = sorted(vars(part))
        for key, value in vars(part).items():
            if key.endswith("_hooks") and value is not None:
                seen[f"{name}.{key}"] = len(value)
            if key == "_parameters":
                seen[f"{name}.{key}"] = type(value).__name__
        forward = getattr(part, "forward", None)
        if forward is not None:
            seen[f"{name}.forward"] = forward.__qualname__
    return seen


def _references(steps: int, make: Make, dtype: str, stages: Iterable[int]) -> list[Walker]:
    made = []
    for stage in stages:
        walker = Walker(make, dtype)
        walker.walk((stage,), steps)
        made.append(walker)
    return made


def walk_fp32(folder: Path, *, name: str) -> Any:
    """Train at every stage of each order; against one engine that is never replaced."""
    make = OPTIMIZERS[name]
    longest = max(len(order) for order in ORDERS.values()) * STEPS_PER_STAGE
    reference = _references(longest, make, "fp32", [1])[0]
    data: dict[str, Any] = {"reference": reference.losses, "orders": {}}
    for label, order in ORDERS.items():
        walker = Walker(make, "fp32")
        before, identities = traces(walker.module), [id(param) for param in walker.module.parameters()]
        leftovers: list[str] = []
        identical: list[bool] = []

        def look(
            walker: Walker = walker,
            before: dict[str, Any] = before,
            identities: list[int] = identities,
            leftovers: list[str] = leftovers,
            identical: list[bool] = identical,
        ) -> None:
            now = traces(walker.module)
            changed = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
            leftovers += [f"{key}: {before.get(key)} became {now.get(key)}" for key in changed]
            identical.append([id(param) for param in walker.module.parameters()] == identities)

        walker.walk(order, STEPS_PER_STAGE, look)
        walker.slot.take_down()
        look()
        data["orders"][label] = {
            "losses": walker.losses,
            "leftovers": leftovers,
            "identical": identical,
            "groups": [
                {key: value for key, value in group.items() if key == "lr"} for group in walker.optimizer.param_groups
            ],
            "group_sizes": [len(group["params"]) for group in walker.optimizer.param_groups],
        }
    return data


def walk_bf16(folder: Path, *, name: str) -> Any:
    """Train, visit other stages without a step, come back, train on: not a bit may differ from never having left."""
    make = OPTIMIZERS[name]
    data: dict[str, Any] = {}
    for label, order in {"0123210": ORDERS["0123210"], "313": ORDERS["313"], "2302": (2, 3, 0, 2)}.items():
        reference = _references(2 * STEPS_PER_STAGE, make, "bf16", order[:1])[0]
        walker = Walker(make, "bf16")
        walker.slot.build(walker.builder(order[0]))
        walker.train(STEPS_PER_STAGE)
        for stage in order[1:]:
            walker.slot.resume(walker.slot.hold(), walker.builder(stage))
        walker.train(STEPS_PER_STAGE)
        distance = gap(whole_weights(walker.module), whole_weights(reference.module))
        data[label] = {"losses": walker.losses, "reference": reference.losses, "gap": distance}
    return data


def walk_bf16_training(folder: Path, *, name: str) -> Any:
    """Train at every stage in bf16."""
    make = OPTIMIZERS[name]
    order = ORDERS["0123210"]
    fixed = _references(len(order) * STEPS_PER_STAGE, make, "bf16", (0, 1, 2, 3))
    walker = Walker(make, "bf16")
    walker.walk(order, STEPS_PER_STAGE)
    return {"losses": walker.losses, "fixed": [reference.losses for reference in fixed]}


CASES: dict[str, Callable[[Path], Any]] = {
    **{f"fp32-{name}": functools.partial(walk_fp32, name=name) for name in OPTIMIZERS},
    **{f"bf16-{name}": functools.partial(walk_bf16, name=name) for name in OPTIMIZERS},
    **{f"bf16-training-{name}": functools.partial(walk_bf16_training, name=name) for name in ("adamw", "invented")},
}


def run(payload: dict[str, Any]) -> dict[str, Any]:
    init_distributed()
    only = payload.get("only") or list(CASES)
    return run_cases({name: CASES[name] for name in only}, payload["folder"])
