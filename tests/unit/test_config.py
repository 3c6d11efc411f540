from __future__ import annotations

import copy

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_zeroladder import ZeroAutoStrategy
from lightning_zeroladder.config import check_config, reconcile_accumulation, rung_config
from lightning_zeroladder.ladder import Rung


def test_a_stage_outside_the_ladder_is_refused_naming_both():
    with pytest.raises(MisconfigurationException, match=r"stage=3, but stages=\(0, 1\)"):
        check_config({"zero_optimization": {"stage": 3}}, (0, 1))


def test_a_stage_that_the_ladder_tries_is_ignored_with_a_word():
    with pytest.warns(UserWarning, match="stage=2 in the DeepSpeed config is ignored"):
        check_config({"zero_optimization": {"stage": 2}}, (0, 1, 2, 3))


@pytest.mark.parametrize("key", ["mics_shard_size", "mics_hierarchical_params_gather"])
def test_removed_keys_are_refused_with_the_alternative(key):
    with pytest.raises(MisconfigurationException, match=f"{key}.*removed.*zero_hpz_partition_size"):
        check_config({"zero_optimization": {key: 2}}, (0, 1))


def test_equal_accumulation_is_accepted_and_another_names_both_values():
    config = {"gradient_accumulation_steps": 4, "a": 1}
    reconcile_accumulation(config, 4)
    assert config == {"a": 1}
    with pytest.raises(MisconfigurationException, match=r"gradient_accumulation_steps=2.*accumulate_grad_batches=4"):
        reconcile_accumulation({"gradient_accumulation_steps": 2}, 4)


def test_a_rung_gets_a_config_of_its_own():
    base = {"zero_optimization": {"reduce_bucket_size": 7, "stage": 1}, "bf16": {"enabled": True}}
    before = copy.deepcopy(base)
    config = rung_config(base, Rung(3, (("reduce_bucket_size", 5),)), manual_optimization=False)
    assert config["zero_optimization"] == {"reduce_bucket_size": 5, "stage": 3}
    assert config["zero_optimization"] is not base["zero_optimization"]
    assert base == before


@pytest.mark.parametrize(("stage", "overlap"), [(0, False), (1, False), (2, True), (3, False)])
def test_manual_optimization_leaves_the_boundary_to_the_caller(stage, overlap):
    config = rung_config({"zero_optimization": {"overlap_comm": True}}, Rung(stage), manual_optimization=True)
    assert config["managed_gradient_accumulation"] is False
    assert config["zero_optimization"]["overlap_comm"] is overlap


def test_a_callers_dict_is_never_changed_and_serves_twice():
    given = {"zero_allow_untested_optimizer": True, "zero_optimization": {"reduce_bucket_size": 5}}
    before = copy.deepcopy(given)
    ZeroAutoStrategy(config=given)
    ZeroAutoStrategy(config=given)
    assert given == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": ()}, "stages"),
        ({"stages": (4,)}, "4"),
        ({"steps_per_rung": 1}, "steps_per_rung"),
        ({"steps_per_rung": 5, "warmup_steps": 5}, "warmup_steps"),
        ({"headroom": 1.0}, "headroom"),
        ({"memory_limit_bytes": -1}, "memory_limit_bytes"),
        ({"stage": 2}, r"stages=\(2,\)"),
        ({"decision": "nowhere/report.json"}, "nowhere/report.json"),
        ({"config": "nowhere/ds.json"}, "nowhere/ds.json"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        ZeroAutoStrategy(**arguments)


def test_arguments_of_the_parent_reach_the_config():
    strategy = ZeroAutoStrategy(reduce_bucket_size=123, offload_optimizer=True)
    assert strategy.config["zero_optimization"]["reduce_bucket_size"] == 123
    assert strategy.config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
