from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_zeroladder.costmodel.hardware import GPUS, gpu_named
from lightning_zeroladder.costmodel.job import Cluster, Model, RungSettings, Training, Transformer
from lightning_zeroladder.costmodel.peak import activation_bytes, memory_terms, peak_bytes
from lightning_zeroladder.costmodel.planning import Plan, make_plan
from lightning_zeroladder.costmodel.step_time import compute_s
from lightning_zeroladder.costmodel.traffic import StageSettings

MODEL = Model(13_000_000_000)
TRAINING = Training(micro_batch=4, sequence=4096, accumulate=8)
CLUSTER = Cluster(16, 8, 80 * 10**9, 400e12, 200e9, 40e9)


def names(plan: Plan) -> list[str]:
    return [row.name for row in plan.rows]


def test_the_13b_example() -> None:
    """13B parameters on two nodes of eight 80 GB GPUs, micro-batch 4 of 4,096 tokens, 8 micro-batches, 40 GB/s."""
    plan = make_plan(MODEL, TRAINING, CLUSTER, textbook=True)
    assert names(plan) == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert [row.state_bytes / 1e9 for row in plan.rows] == [208.0, 61.75, 37.375, 13.0]
    seconds = [row.time.communication_s for row in plan.rows]
    assert seconds == pytest.approx([1.3, 1.3, 5.85, 15.6], rel=1e-6)
    assert [row.time.compute_s for row in plan.rows] == pytest.approx([25.559] * 4, rel=1e-4)
    assert plan.rows[0].fits is False
    assert plan.choice is not None
    assert plan.rows[plan.choice].name in ("stage 1", "stage 2")


def test_the_installed_release_sends_more_than_the_textbook() -> None:
    plan = make_plan(MODEL, TRAINING, CLUSTER)
    seconds = {row.name: row.time.communication_s for row in plan.rows}
    assert seconds["stage 1"] / seconds["stage 1, reduced to owners"] == pytest.approx(1.5, rel=0.01)
    assert seconds["stage 2"] / seconds["stage 2, reduced to owners"] == pytest.approx(17 / 9, rel=0.01)


def test_every_term_of_the_peak_has_a_name_and_they_add_up() -> None:
    model = Model(7_000_000_000, shapes=Transformer(32, 4096, 32_000))
    rung = RungSettings(StageSettings(2))
    terms = {term.name: term.nbytes for term in memory_terms(model, TRAINING, CLUSTER, rung)}
    assert terms["weights"] == 14 * 10**9
    assert terms["gradients"] == 14 * 10**9 // 16
    assert terms["fp32 weights"] == 28 * 10**9 // 16
    assert terms["optimizer state"] == 56 * 10**9 // 16
    assert terms["fp32 gradients at the step"] == 28 * 10**9 // 16
    assert terms["communication buckets"] == 2 * 2 * 500_000_000
    # 34 bytes per element of the residual stream and block, and the logits in bf16 and fp32.
    assert terms["activations"] == 34 * 4 * 4096 * 4096 * 32 + 4 * 4096 * 32_000 * 6
    assert sum(terms.values()) == peak_bytes(model, TRAINING, CLUSTER, rung)


def test_checkpointing_keeps_the_input_of_each_block_and_one_block() -> None:
    model = Model(7_000_000_000, shapes=Transformer(32, 4096))
    stream = 4 * 4096 * 4096
    assert activation_bytes(model, TRAINING, checkpointed=True) == 2 * stream * 32 + 34 * stream
    assert activation_bytes(Model(1), TRAINING, checkpointed=False) is None
    assert activation_bytes(model, replace(TRAINING, activation_bytes=5), checkpointed=False) == 5


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_higher_stages_need_less_state(precision: str) -> None:
    training = replace(TRAINING, precision=precision)
    sizes = []
    for stage in range(4):
        terms = memory_terms(MODEL, training, CLUSTER, RungSettings(StageSettings(stage)))
        kept = {"weights", "gradients", "fp32 weights", "optimizer state"}
        sizes.append(sum(term.nbytes for term in terms if term.name in kept))
    assert sizes == sorted(sizes, reverse=True)


def test_where_nothing_fits_the_ladder_goes_on() -> None:
    model = Model(70_000_000_000, largest_layer=10**9, shapes=Transformer(80, 8192, 32_000))
    cluster = replace(CLUSTER, world_size=8)
    plan = make_plan(model, replace(TRAINING, micro_batch=1), cluster)
    assert [name for name in names(plan) if "stage 3" in name] == [
        "stage 3",
        "stage 3, activation checkpointing",
        "stage 3, activation checkpointing, optimizer on the host",
        "stage 3, activation checkpointing, optimizer and parameters on the host",
    ]
    assert plan.choice is not None
    assert plan.rows[plan.choice].name == "stage 3, activation checkpointing, optimizer on the host"
    assert any("is not counted" in reason for reason in plan.reasons)


def test_a_job_that_cannot_fit_says_what_is_missing() -> None:
    plan = make_plan(Model(500_000_000_000), Training(), replace(CLUSTER, world_size=8))
    assert plan.choice is None
    assert "No rung fits: even" in plan.reasons[0]
    assert "GB more than a GPU has" in plan.reasons[0]
    assert "tensor parallelism" in plan.reasons[1]


def test_one_gpu_has_nothing_to_shard() -> None:
    plan = make_plan(Model(10**9), Training(), replace(CLUSTER, world_size=1, per_node=1))
    assert names(plan) == ["stage 0"]
    assert plan.rows[0].time.communication_s == 0


def test_compute_counts_frozen_weights_without_their_gradients() -> None:
    training = Training(micro_batch=1, sequence=100)
    cluster = replace(CLUSTER, flops=1e12)
    assert compute_s(Model(10**9), training, cluster) == 6 * 10**9 * 100 / 1e12
    assert compute_s(Model(10**6, frozen=10**9), training, cluster) == (6 * 10**6 + 4 * 10**9) * 100 / 1e12


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"world_size": 12}, "gpus=12 is not a multiple of gpus_per_node=8"),
        ({"flops": 0.0}, "flops=0: must be above 0"),
        ({"across_bytes_per_s": -1.0}, "bandwidth=-1: must be above 0"),
        ({"memory_bytes": 0}, "hbm=0: must be above 0"),
    ],
)
def test_numbers_that_no_cluster_has(changes: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_plan(MODEL, TRAINING, replace(CLUSTER, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"optimizer": "adamx"}, "optimizer='adamx' is not known; known are adam"),
        ({"precision": "int4"}, "precision='int4' is not known"),
    ],
)
def test_numbers_that_no_training_has(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_plan(MODEL, replace(TRAINING, **changes), CLUSTER)


def test_gpus_have_names() -> None:
    assert gpu_named("H100") == GPUS["h100"]
    with pytest.raises(ValueError, match="gpu='tpu' is not known; known are v100"):
        gpu_named("tpu")
