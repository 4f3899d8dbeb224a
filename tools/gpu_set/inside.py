"""The steps that run in the GPU set's own Python, beside stand-ins for the driver: `python -m tools.gpu_set.inside`.

Each returns its figures, or raises. No kernel runs: configurations are vLLM's own for eight H100, models and layers are
built on tensors without content.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megatron_rl.config import Config, load_recipe
from megatron_rl.config.published import published_config
from megatron_rl.models import HFConfig, Model, model_of
from megatron_rl.runtime import device
from megatron_rl.runtime.attempts import rank_environment
from megatron_rl.weights.layouts import EngineLayout

ROOT = Path(__file__).parents[2]
# Of FP8 attention: vLLM deletes them after loading (quantization/kv_cache.py), before the sync looks.
DELETED = ("q_scale", "k_scale", "v_scale", "prob_scale")
EXACT = ("scale/qwen3-8b", "scale/qwen3-30b-a3b")
# Of vLLM's modules: what they compute with. An unquantized method multiplies by `linear_batch_invariant`.
OPERATIONS = {
    *(f"{layer}: UnquantizedLinearMethod" for layer in ("QKVParallelLinear", "RowParallelLinear", "GateLinear")),
    *("MergedColumnParallelLinear: UnquantizedLinearMethod", "ParallelLMHead: UnquantizedEmbeddingMethod"),
    *("VocabParallelEmbedding: UnquantizedEmbeddingMethod", "Attention: TritonAttentionImpl"),
    "RMSNorm: megatron_rl.seams.vllm_exact._norm",
    "RotaryEmbedding: megatron_rl.seams.vllm_exact._rotate",
    "SiluAndMul: megatron_rl.seams.vllm_exact._swiglu",
    "MoERunner: megatron_rl.seams.vllm_exact._mix",
    # Inside the last and the rotation, which call none of them.
    "RoutedExperts: UnquantizedFusedMoEMethod",
    "UnquantizedFusedMoEMethod: vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.forward_cuda",
    "ApplyRotaryEmb: vllm.model_executor.layers.rotary_embedding.common.forward_cuda",
}
FOLDERS = ("scale", "gdpo", "dgpo", "awpo", "shrinkage")


class Wrong(Exception):
    """What a step found."""


def _check_gpu() -> Any:
    spec = importlib.util.spec_from_file_location("check_gpu", ROOT / "requirements" / "check_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files() -> str:
    """Versions are the lock's, and no package has overwritten files of another."""
    check = _check_gpu()
    packages = list(distributions())
    problems = check.unlocked(packages, check.locked(check.LOCK.read_text())) + check.overwritten(packages)
    if problems:
        raise Wrong("; ".join(problems))
    return f"{len(packages)} packages"


def imports() -> str:
    """Every compiled part that an engine or the actor imports loads, Transformer Engine's too."""
    check = _check_gpu()
    names = ("torch", *check.ENGINE_IMPORTS, *check.DRIVER_IMPORTS, *check.LINKED, "transformer_engine_torch")
    problems = check.unimportable(names)
    if problems:
        raise Wrong("; ".join(problems))
    return f"{len(names)} modules"


def forks() -> str:
    """What ranks import, in one process: it may leave nothing behind that keeps forks of it from being ranks."""
    os.environ.update({"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"} | rank_environment(gpus=8))
    from megatron_rl.runtime import fork_server
    from megatron_rl.trainer.rank import imports as of_ranks

    with pretended_card():
        of_ranks.import_all()
    if torch.cuda.is_initialized():
        raise Wrong("the imports have started CUDA")
    if why := fork_server.in_the_way():
        raise Wrong(why)
    return f"{len(sys.modules)} modules"


# -------------------------------------------------------------------------------------------------------------- engines
@contextmanager
def pretended_card() -> Iterator[None]:
    """While entered, the package and Triton take this machine for one with H100s, as vLLM does by the stand-in for NVML."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    with (
        patch.object(device, "has_gpu", lambda: True),
        patch.object(device, "is_hopper", lambda: True),
        patch.object(CudaDriver, "is_active", staticmethod(lambda: True)),
        patch.object(CudaDriver, "get_current_target", lambda driver: GPUTarget("cuda", 90, 32)),
        patch.object(torch.cuda, "get_device_name", lambda number: "NVIDIA H100 80GB HBM3"),
    ):
        yield


def recipes(only: list[str]) -> Iterator[tuple[str, Config, HFConfig, Model]]:
    """Every recipe for GPUs that has an engine: name, recipe, the model's config.json, the model.

    Raises:
        Wrong: a recipe's model is none of the published ones that the package knows.
    """
    for path in sorted(path for folder in FOLDERS for path in (ROOT / "recipes" / folder).glob("[!_]*.yaml")):
        name = f"{path.parent.name}/{path.stem}"
        if only and name not in only:
            continue
        config = load_recipe(path, [])
        if config.model.path is None or not config.rewards:
            continue  # for a CPU, with a model of its own
        published = published_config(Path(config.model.path).name)
        if published is None:
            raise Wrong(f"{name}: {config.model.path} is no published model that is known")
        yield name, config, published, model_of(published)


def vllm_config(config: Config, hf_config: HFConfig, model: Model, folder: str, extra: dict[str, object]) -> Any:
    """vLLM's whole configuration of a recipe's engine, by the options that the engine is started with."""
    from megatron_rl.rollout import environment, vllm_engine

    environment.prepare(config.rollout.exact)
    from vllm import EngineArgs
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # a process of vLLM's would find no card for its Triton
    (Path(folder) / "config.json").write_text(json.dumps(dict(hf_config)))
    images = 1 if model.description.vision is not None else None
    options = vllm_engine.llm_options(config, folder, hf_config, model, images)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(config.rollout.tensor_parallel))
    # The model's folder has no tokenizer here.
    return EngineArgs(**options, skip_tokenizer_init=True, **extra).create_engine_config()


def configurations(only: list[str], extra: dict[str, object]) -> str:
    """vLLM accepts the options of every recipe, and makes a Hopper's configuration of them."""
    done = []
    with pretended_card(), tempfile.TemporaryDirectory() as folder:
        for name, config, hf_config, model in recipes(only):
            found = vllm_config(config, hf_config, model, folder, extra)
            graphs = found.compilation_config.cudagraph_mode.name
            print(f"{name}: tensor {config.rollout.tensor_parallel}, graphs {graphs}", flush=True)
            if graphs != "FULL_AND_PIECEWISE" or not found.use_v2_model_runner:
                raise Wrong(f"{name}: graphs {graphs}, second runner {found.use_v2_model_runner}")
            done.append(name)
    if not done:
        raise Wrong("no recipe was tried")
    return f"{len(done)} recipes"


def models(only: list[str], extra: dict[str, object]) -> str:
    """vLLM's CUDA models have the parameters, in the shapes, that the plan of the weight sync writes."""
    from megatron_rl.seams import vllm as seam

    seen: dict[tuple[object, ...], str] = {}
    with pretended_card(), tempfile.TemporaryDirectory() as folder:
        for name, config, hf_config, model in recipes(only):
            rollout = config.rollout
            kind = (Path(str(config.model.path)).name, rollout.tensor_parallel, rollout.expert_parallel, rollout.fp8)
            if kind in seen:
                continue
            seen[kind] = name
            built = _meta_model(vllm_config(config, hf_config, model, folder, extra), rollout.tensor_parallel)
            wanted, found = EngineLayout.of(rollout).parameters(model), seam.loaded_shapes(built)
            found = {own: shape for own, shape in found.items() if own.rpartition(".")[2] not in DELETED}
            if wanted != found:
                own = min(own for own in wanted | found if wanted.get(own) != found.get(own))
                raise Wrong(f"{name}: {own} is {found.get(own)} in vLLM and {wanted.get(own)} in the plan")
            in_place = _written_in_place(built)
            print(f"{name}: {len(found)} parameters, tensor {kind[1]}, {in_place[True]} layers in place", flush=True)
            if rollout.fp8 == "none" and in_place[False]:
                raise Wrong(f"{name}: the sync would not write {in_place[False]} layers in place")
    if not seen:
        raise Wrong("no recipe was tried")
    return f"{len(seen)} engines"


def exact(only: list[str], extra: dict[str, object]) -> str:
    """With `rollout.exact` vLLM's CUDA models compute with our operations, or its batch-invariant ones, everywhere."""
    from megatron_rl.config.exact_checks import FAMILIES

    done = []
    with pretended_card(), tempfile.TemporaryDirectory() as folder:
        for name, config, hf_config, model in recipes(only or list(EXACT)):
            config.rollout.exact, config.rollout.tensor_parallel = True, 1
            if model.family.name not in FAMILIES:
                raise Wrong(f"{name} is of family {model.family.name}")
            found = vllm_config(config, hf_config, model, folder, extra)
            if found.use_v2_model_runner or found.compilation_config.cudagraph_mode.name != "NONE":
                raise Wrong(f"{name}: second runner {found.use_v2_model_runner}, {found.compilation_config}")
            kinds = _made_exact(_meta_model(found, 1), model)
            if strange := set(kinds) - OPERATIONS:
                raise Wrong(f"{name}: {sorted(strange)}")
            print(f"{name}: {dict(kinds)}", flush=True)
            done.append(name)
    return f"{len(done)} models"


def _made_exact(model: torch.nn.Module, described: Model) -> Counter[str]:
    """How often a module of vLLM's that computes by itself does it with which function, once the model was made exact."""
    from vllm.v1.sample.sampler import Sampler

    from megatron_rl.modules.exact_layers import rotary_table
    from megatron_rl.seams.vllm_exact import make_exact

    sampler = Sampler(logprobs_mode="processed_logprobs")
    runner = SimpleNamespace(sampler=sampler, get_model=lambda: model)
    make_exact(SimpleNamespace(model_runner=runner, device="cpu"), rotary_table(described), [8, 8], False)
    logits = torch.randn(3, 16)
    drawn, log_probs = sampler.topk_topp_sampler(logits, {}, None, None)
    if drawn.shape != (3,) or not torch.allclose(log_probs, logits.log_softmax(dim=-1)):
        raise Wrong(f"the sampler gives {drawn} and {log_probs}")
    kinds = Counter[str]()
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        replaced: Any = getattr(layer, "_forward_method", vars(layer).get("forward"))
        if replaced is not None:
            function = getattr(replaced, "func", replaced)
            kinds[f"{type(layer).__name__}: {function.__module__}.{function.__name__}"] += 1
        elif hasattr(layer, "impl"):
            kinds[f"{type(layer).__name__}: {type(layer.impl).__name__}"] += 1
        elif method is not None and next(layer.parameters(recurse=False), None) is not None:
            kinds[f"{type(layer).__name__}: {type(method).__name__}"] += 1
    return kinds


def _written_in_place(model: torch.nn.Module) -> Counter[bool]:
    """How many of vLLM's layers compute with what is loaded as it is, and how many with something made of it."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from megatron_rl.seams import vllm as seam

    layers = [layer for layer in model.modules() if next(layer.parameters(recurse=False), None) is not None]
    return Counter(seam._loads_in_place(layer, get_layerwise_info(layer).restore_metadata[0]) for layer in layers)


def _meta_model(config: Any, tensor: int) -> torch.nn.Module:
    """vLLM's model of the first rank, on tensors without content, in a world that torch pretends."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from megatron_rl.seams.torch_meta import fake_world

    make = parallel_state.init_model_parallel_group

    def silent(*arguments: Any, **options: Any) -> Any:
        """A group without NCCL and without the channel on which its ranks would wait for one another."""
        return make(*arguments, **{**options, "use_message_queue_broadcaster": False, "use_device_communicator": False})

    told = (
        ExpertMapManager.get_compressed_map_string
    )  # for a line of the log it reads a tensor, which has no content here
    os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"  # shared experts would ask the driver for a stream
    parallel_state.init_model_parallel_group = silent
    ExpertMapManager.get_compressed_map_string = lambda _: ""
    try:
        with fake_world(0, tensor), set_current_vllm_config(config):
            parallel_state.init_distributed_environment(tensor, 0, "env://", 0, "nccl")
            parallel_state.initialize_model_parallel(tensor)
            # A gated norm asks for the card that it is to lie on.
            here = patch.object(torch.cuda, "current_device", lambda: torch.device("meta"))
            with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"), here:
                model: torch.nn.Module = initialize_model(vllm_config=config)
            record_metadata_for_reloading(model)
            parallel_state.destroy_model_parallel()
            parallel_state._WORLD = None
            return model
    finally:
        parallel_state.init_model_parallel_group = make
        ExpertMapManager.get_compressed_map_string = told


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("step", choices=("files", "imports", "forks", "configurations", "models", "exact", "layers"))
    parser.add_argument("--only", nargs="*", default=[], metavar="FOLDER/RECIPE")
    parser.add_argument("--option", metavar="NAME", help="also give vLLM this option, which it should not know")
    args = parser.parse_args()
    extra: dict[str, object] = {args.option: 1} if args.option else {}
    try:
        if args.step in ("configurations", "models", "exact"):
            said = {"configurations": configurations, "models": models, "exact": exact}[args.step](args.only, extra)
        elif args.step == "layers":
            from .layers import layers

            said = layers(args.only)
        else:
            said = {"files": files, "imports": imports, "forks": forks}[args.step]()
    except Wrong as error:
        print(f"wrong: {error}")
        return 1
    print(f"found: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
