"""Any element-wise optimizer's state survives any order of stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import outcome, run_ranks
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_zeroladder.engine.optimizer_probe import probe_optimizer
from lightning_zeroladder.requirements_check import check_optimizer

TOLERANCE = 1e-6
"""Losses are below 2: a few fp32 roundings."""

NAMES = [
    "adamw",
    "adamw-fused",
    "adam-amsgrad",
    "sgd",
    "sgd-momentum",
    "rmsprop",
    "adagrad",
    "adagrad-two-groups",
    "adamw-two-groups",
    "sign-momentum",
    "invented",
]
RATES = {"adagrad-two-groups": [1e-2, 2e-3], "adamw-two-groups": [3e-3, 1e-4]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("optimizers")
    payload = {"folder": str(folder / "cases")}
    return run_ranks("optimizer_cases:run", payload, ranks=2, timeout_s=280, tmp_path=folder)


def apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ["0123210", "313", "230"])
def test_fp32_losses_are_those_of_an_engine_never_replaced(
    results: list[dict[str, Any]], name: str, order: str
) -> None:
    for data in outcome(results, f"fp32-{name}"):
        walked = data["orders"][order]["losses"]
        assert len(walked) == 3 * len(order)
        assert walked[0] != walked[3]
        assert apart(walked, data["reference"][: len(walked)]) <= TOLERANCE


@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_on_the_module_and_parameters_stay_themselves(results: list[dict[str, Any]], name: str) -> None:
    for data in outcome(results, f"fp32-{name}"):
        for label, order in data["orders"].items():
            assert order["leftovers"] == []
            assert order["identical"] == [True] * len(label)
            assert sum(order["group_sizes"]) == 10
            if name in RATES:
                assert [group["lr"] for group in order["groups"]] == RATES[name]
                assert order["group_sizes"] == [5, 5]


@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ["0123210", "313", "2302"])
def test_bf16_state_comes_back_bit_for_bit(results: list[dict[str, Any]], name: str, order: str) -> None:
    for data in outcome(results, f"bf16-{name}"):
        assert data[order]["losses"] == data[order]["reference"]
        assert data[order]["gap"] == 0.0


@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["adamw", "invented"])
def test_bf16_walk_deviates_no_more_than_fixed_stages_do(results: list[dict[str, Any]], name: str) -> None:
    for data in outcome(results, f"bf16-training-{name}"):
        among = max(apart(a, b) for a in data["fixed"] for b in data["fixed"])
        assert min(apart(data["losses"], fixed) for fixed in data["fixed"]) <= max(among, TOLERANCE)


def test_adafactor_is_refused_by_the_names_of_its_state() -> None:
    optimizer = torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(4, 6))])
    state = probe_optimizer(optimizer)
    with pytest.raises(MisconfigurationException, match=r"Adafactor keeps 'col_var', 'row_var'"):
        check_optimizer(optimizer, state, (0, 1, 2, 3))
    check_optimizer(optimizer, state, (2,))  # one stage moves nothing


def test_adafactor_is_refused_where_its_first_group_is_a_bias() -> None:
    params = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4, 6))]
    optimizer = torch.optim.Adafactor(params)
    with pytest.raises(MisconfigurationException, match="col_var"):
        check_optimizer(optimizer, probe_optimizer(optimizer), (0, 3))
