"""What is used of DeepSpeed's and Lightning's internals. A failure here means that a release changed them."""

from __future__ import annotations

import importlib
import inspect

import deepspeed
import deepspeed.comm.comm
import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torchmetrics import MeanMetric, Metric

from lightning_zeroladder.checkpoint import native
from lightning_zeroladder.checkpoint.pickles import opaque
from lightning_zeroladder.engine import lifecycle, observe, shards
from lightning_zeroladder.engine.groups import replace_backend, without_compiled_shm_op


@pytest.mark.parametrize(
    ("wrapper", "attributes"),
    [
        (FP16_UnfusedOptimizer, ["fp16_groups", "fp32_groups", "loss_scale_config"]),
        (FP16_Optimizer, ["fp16_groups", "fp32_groups_flat", "loss_scale_config"]),
        (DeepSpeedZeroOptimizer, ["bit16_groups", "single_partition_of_fp32_groups", "loss_scaler"]),
        (BF16_Optimizer, ["bf16_groups", "fp32_groups_flat_partition"]),
        (DeepSpeedZeroOptimizer_Stage3, ["fp16_groups", "fp32_partitioned_groups_flat", "grad_position"]),
    ],
)
def test_each_optimizer_wrapper_has_the_lists_its_layout_reads(wrapper, attributes):
    source = inspect.getsource(wrapper)
    for attribute in attributes:
        assert f"self.{attribute}" in source
    assert wrapper.__name__ in shards._LAYOUTS


def test_fp32_weights_are_published_by_deepspeeds_own_methods():
    for wrapper in (DeepSpeedZeroOptimizer, BF16_Optimizer):
        assert callable(wrapper.update_lp_params)
    for name in ("checkpoint_event_prologue", "checkpoint_event_epilogue"):
        assert callable(getattr(DeepSpeedZeroOptimizer_Stage3, name))
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3)
    for name in ("fp16_partitioned_groups_flat", "fp16_partitioned_groups", "unflatten"):
        assert f"self.{name} = " in source


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        (
            DeepSpeedEngine._common_checkpoint_state,
            ["module=", "buffer_names=", "optimizer=", "param_shapes=", "frozen_param_shapes=", "shared_params="],
        ),
        (
            DeepSpeedEngine._common_checkpoint_state,
            [
                "frozen_param_fragments=",
                "global_steps=",
                "global_samples=",
                "dp_world_size=",
                "ds_config=",
                "ds_version=",
            ],
        ),
        (
            DeepSpeedZeroOptimizer.state_dict,
            ["BASE_OPTIMIZER_STATE", "SINGLE_PARTITION_OF_FP32_GROUPS", "GROUP_PADDINGS", "PARAM_SLICE_MAPPINGS"],
        ),
        (DeepSpeedZeroOptimizer_Stage3._rigid_state_dict, ["OPTIMIZER_STATE_DICT", "FP32_FLAT_GROUPS", "ZERO_STAGE"]),
        (FP16_UnfusedOptimizer.state_dict, ["fp32_groups", "OPTIMIZER_STATE_DICT", "cur_scale"]),
        (FP16_Optimizer.state_dict, ["fp32_groups_flat", "OPTIMIZER_STATE_DICT"]),
    ],
)
def test_checkpoints_are_laid_out_as_they_are_read(method, keys):
    source = inspect.getsource(method)
    for key in keys:
        assert key in source


def test_the_stages_have_the_names_that_checkpoints_of_early_python_3_11_are_read_by():
    assert {stage.name: stage.value for stage in ZeroStageEnum} == native._STAGES


@pytest.mark.parametrize("stage", ZeroStageEnum)
def test_a_stage_is_read_in_each_way_that_pythons_write_it(stage):
    module = "__builtin__"  # as protocol 2 calls builtins
    enum = type(opaque("deepspeed.runtime.zero.config", "ZeroStageEnum"))
    by_name = opaque(module, "getattr", enum, stage.name, called=True)
    by_value = opaque("deepspeed.runtime.zero.config", "ZeroStageEnum", stage.value, called=True)
    for written in (by_name, by_value, stage.value):
        assert native._stage({"zero_stage": written}) == stage


def test_the_files_of_a_checkpoint_have_the_names_that_are_looked_for():
    source = inspect.getsource(DeepSpeedEngine._get_ckpt_name) + inspect.getsource(
        DeepSpeedEngine._get_rank_zero_ckpt_name
    )
    for part in ("zero_pp_rank_", "_mp_rank_", "_model_states.pt", "_optim_states.pt"):
        assert part in source


def test_the_slice_mappings_of_stages_1_and_2_can_be_made_again():
    assert callable(DeepSpeedZeroOptimizer._create_param_mapping)


def test_fragments_of_stages_1_and_2_say_where_they_are():
    assert {"lp_fragment_address", "hp_fragment_address"} <= set(tensor_fragment.__dataclass_fields__)
    assert set(fragment_address.__dataclass_fields__) == {"numel", "start"}


def test_stage_3_names_partitions_and_their_rank():
    source = inspect.getsource(deepspeed.runtime.zero.partition_parameters)
    for attribute in ("ds_numel", "ds_tensor", "ds_zero_partition_rank"):
        assert f"param.{attribute} = " in source


@pytest.mark.parametrize("name", lifecycle._COUNTERS)
def test_the_engine_counts_under_these_names(name):
    assert f"self.{name} = " in inspect.getsource(DeepSpeedEngine.__init__)


def test_the_loss_scalers_keep_these_values():
    scaler = DynamicLossScaler(2.0**16, 1000, 1, 2, False)
    assert all(hasattr(scaler, name) for name in lifecycle._SCALER_STATE)
    config = LossScaleConfig(torch.float16, True, 1.0, None)
    assert all(hasattr(config, name) for name in ("cur_scale", "cur_iter", "last_overflow_iter"))


def test_an_engine_says_where_it_stands_in_a_window():
    source = inspect.getsource(DeepSpeedEngine)
    for name in ("_unmanaged_backward_count", "_running_engine_step", "managed_gradient_accumulation", "micro_steps"):
        assert name in source


def test_module_level_state_that_keeps_engines_alive():
    assert isinstance(parameter_offload.FWD_MODULE_STACK, list)
    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    cached = [
        cell.cell_contents
        for method in vars(coordinator).values()
        for cell in getattr(method, "__closure__", None) or ()
        if hasattr(cell.cell_contents, "cache_clear")
    ]
    assert len(cached) == 1


def test_the_backend_is_one_object_that_can_be_exchanged():
    class Backend:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def all_reduce(self, tensor: object) -> None:
            self.calls.append("all_reduce")

        def get_rank(self) -> int:
            return 5

    spans: list[str] = []

    class Span:
        def __enter__(self) -> None:
            spans.append("in")

        def __exit__(self, *_: object) -> None:
            spans.append("out")

    backend = Backend()
    original = replace_backend(backend)
    try:
        observer = observe.BackendObserver(Span)
        observer.start()
        deepspeed.comm.comm.cdb.all_reduce(None)
        assert deepspeed.comm.comm.cdb.get_rank() == 5
        assert (backend.calls, spans) == (["all_reduce"], ["in", "out"])
        observer.stop()
        assert deepspeed.comm.comm.cdb is backend
        observer.stop()
    finally:
        replace_backend(original)


def test_the_shm_op_is_off_only_inside():
    table = deepspeed.ops.__compatible_ops__
    before = dict(table)
    with without_compiled_shm_op():
        assert table["deepspeed_shm_comm"] is False
    assert table == before
    assert "__compatible_ops__" in inspect.getsource(importlib.import_module("deepspeed.comm.torch").build_shm_op)


@pytest.mark.parametrize(
    "name",
    [
        "_auto_select_batch_size",
        "_format_config",
        "_init_config_if_needed",
        "_init_deepspeed_distributed",
        "_init_optimizers",
        "_initialize_deepspeed_inference",
        "_initialize_deepspeed_train",
        "_set_deepspeed_activation_checkpointing",
        "_setup_model_and_optimizer",
        "load_checkpoint",
        "save_checkpoint",
        "model_sharded_context",
        "setup_distributed",
        "setup_environment",
    ],
)
def test_lightnings_strategy_still_has_what_is_overridden_or_called(name):
    assert callable(getattr(DeepSpeedStrategy, name))


def test_the_training_loop_shares_a_sigterm_before_each_batch():
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert source.count("self._broadcast_sigterm_tensor()") == 1
    inside = inspect.getsource(_TrainingEpochLoop._broadcast_sigterm_tensor)
    assert "torch.distributed.broadcast(sigterm_tensor, src=0)" in inside
    assert "except Exception" in inside  # a rank that is called away there goes on to its micro-batch


def test_the_loop_of_manual_optimization_counts_steps_where_they_are_rewound():
    assert "_on_before_step" in inspect.getsource(_ManualOptimization.on_run_start)
    assert "self.optim_step_progress" in inspect.getsource(_ManualOptimization._on_before_step)


def test_logged_values_are_metrics_with_the_states_that_are_put_back():
    assert issubclass(_ResultMetric, Metric)
    metric = MeanMetric()
    assert set(metric._defaults) == {"mean_value", "weight"}
    assert all(hasattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache"))


def test_deepspeed_caches_process_groups_in_private_upper_case_names():
    from deepspeed.utils import groups

    assert {"_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"} <= set(vars(groups))


def test_torch_can_abort_a_process_group():
    from torch.distributed import distributed_c10d

    assert callable(distributed_c10d._abort_process_group)


def test_stages_1_and_2_keep_the_forward_weights_in_one_piece_per_rank():
    source = inspect.getsource(DeepSpeedZeroOptimizer)
    assert all(name in source for name in ("self.parallel_partitioned_bit16_groups", "self.real_dp_process_group"))
