"""Checks between the keys of `actor`, beside the layout; and of the adapters that a recipe begins with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.base.plugins import read_text
from megatron_rl.config.actor import OptimizerConfig
from megatron_rl.config.schema import Config
from megatron_rl.config.supervised_checks import supervised_stage
from megatron_rl.models import Model
from megatron_rl.models.lora import peft_modules, targets_of


def check_actor(config: Config, command: str) -> Iterator[str]:
    """Yields a sentence per combination of keys that Megatron-Core or Transformer Engine refuses, or that does nothing."""
    actor, parallel = config.actor, config.actor.parallel
    if actor.moe.dispatcher == "deepep" and parallel.expert * parallel.expert_tensor == 1:
        yield (
            "`actor.moe.dispatcher=deepep` exchanges tokens between ranks, and every rank has all experts whole; raise "
            "`actor.parallel.expert`, or set dispatcher=alltoall"
        )
    if actor.recompute == "selective" and not actor.recompute_modules:
        yield "`actor.recompute=selective` needs `actor.recompute_modules`, which is empty; name one, or set recompute=none"
    for key, optimizer in optimizers(config):
        if optimizer.moments == "bfloat16" and not (optimizer.distributed and config.model.dtype == "bfloat16"):
            yield (
                f"`{key}.moments=bfloat16` needs {key}.distributed=true and model.dtype=bfloat16 (they are "
                f"{str(optimizer.distributed).lower()} and {config.model.dtype}); set them, or moments=float32"
            )
        if optimizer.device == "cpu" and not optimizer.distributed:
            yield f"`{key}.device=cpu` needs {key}.distributed=true; set it, or device=gpu"
        if optimizer.device == "cpu" and optimizer.moments != "float32":
            yield f"`{key}.moments={optimizer.moments}` is for an optimizer on the GPU; set it to float32, or device=gpu"
        if optimizer.device == "cpu" and actor.fp8 is not None and actor.fp8.param_gather:
            yield f"`{key}.device=cpu` knows no parameters in FP8; set actor.fp8.param_gather=false, or device=gpu"
    key, stage = supervised_stage(config, command)
    if command != "evaluate" and stage.wanted and stage.optimizer.distributed != actor.optimizer.distributed:
        yield (
            f"`{key}.optimizer.distributed` is {str(stage.optimizer.distributed).lower()}, and gradients are summed as "
            f"actor.optimizer.distributed ({str(actor.optimizer.distributed).lower()}) says; set both alike"
        )
    if actor.offload_weights and not actor.offload:
        yield (
            "`actor.offload_weights` without `actor.offload` leaves on the device what is larger, gradients and optimizer "
            "state; set actor.offload=true, or offload_weights=false"
        )
    if actor.fp8 is not None and actor.fp8.format == "e4m3" and actor.fp8.recipe == "delayed":
        yield (
            "`actor.fp8.recipe=delayed` knows no scale before its first backward pass, where e4m3 rounds most of the "
            "gradient to 0; set actor.fp8.format=hybrid"
        )
    if actor.fp8 is not None and actor.fp8.bf16_ends and actor.fp8.recipe == "delayed":
        yield "`actor.fp8.bf16_ends` cannot go with recipe=delayed, whose scales span all layers; set it to 0"
    yield from _check_fp8(config)
    yield from _check_lora(config, command)
    if actor.overlap and config.logging.gradient_variance_every:
        yield (
            "`logging.gradient_variance_every` needs gradients that are not summed over ranks yet; set it to 0, or "
            "`actor.overlap` to null or false"
        )


def _check_lora(config: Config, command: str) -> Iterator[str]:
    """Yields a sentence per key that `actor.lora` rules out; `models.lora.check_lora` has what depends on the model."""
    lora, kl = config.actor.lora, config.algorithm.kl
    if lora is None:
        return
    if not lora.targets:
        yield "`actor.lora.targets` is empty: no adapter would be trained; name linear layers, or all-linear"
    if lora.experts and config.actor.parallel.expert_tensor > 1:
        yield "`actor.lora.experts` needs whole experts on every rank; set actor.parallel.expert_tensor=1"
    if lora.sync == "adapters" and config.rollout.fp8 != "none":
        yield "`actor.lora.sync=adapters` is not for weights in FP8; set it to merged, or rollout.fp8=none"
    if lora.sync == "adapters" and config.rollout.sync == "whole":
        yield "`rollout.sync` has no effect with `actor.lora.sync=adapters`, which always go whole; set it to sliced"
    if config.actor.freeze_vision_tower:
        yield "`actor.freeze_vision_tower` has no effect with `actor.lora`, which trains adapters only; set it to false"
    if config.actor.fp8 is not None and config.actor.fp8.param_gather:
        yield "`actor.fp8.param_gather` is for parameters that are trained; with `actor.lora` set it to false"
    if command == "train" and config.sft.wanted and (kl.coef or kl.reward_coef):
        yield (
            "`sft.steps` before RL trains the adapters, and the reference policy of `algorithm.kl` is the model without "
            "them; fine-tune first (megatron-rl sft) and set model.path to its export, with sft.steps=0"
        )


def _check_fp8(config: Config) -> Iterator[str]:
    fp8, actor = config.actor.fp8, config.actor
    again = actor.recompute_modules if actor.recompute == "selective" else []
    if fp8 is not None and fp8.recipe == "delayed":
        for name in sorted({"layernorm", "moe_act"} & set(again)):
            yield (
                f"`actor.recompute_modules` has {name}, for which a product keeps its input as it comes; with "
                "`actor.fp8.recipe=delayed` Transformer Engine cannot; leave it out, or take recipe=blockwise"
            )
    if fp8 is None or not fp8.param_gather:
        return
    if fp8.recipe == "mxfp8":
        yield (
            "`actor.fp8.param_gather` does not go with `actor.fp8.recipe=mxfp8`: Megatron-Core's buffers cannot hold its "
            "parameters; set param_gather to false, or recipe to blockwise or tensorwise"
        )
    if not config.actor.optimizer.distributed:
        yield (
            "`actor.fp8.param_gather` needs `actor.optimizer.distributed`: the plain optimizer knows no parameters in FP8; "
            "set one of them to the other's value"
        )


def optimizers(config: Config) -> tuple[tuple[str, OptimizerConfig], ...]:
    """Key and section of each."""
    return (
        ("actor.optimizer", config.actor.optimizer),
        ("sft.optimizer", config.sft.optimizer),
        ("reward_model.optimizer", config.reward_model.optimizer),
    )


def check_actor_machine(config: Config) -> Iterator[str]:
    """Yields a sentence per key of `actor` that needs a GPU; for a machine without one."""
    actor = config.actor
    if actor.fp8 is not None:
        yield "`actor.fp8` needs a GPU with Transformer Engine and this machine has no GPU; set actor.fp8=null"
    if actor.offload:
        yield "`actor.offload` moves state off a GPU and this machine has none; set actor.offload=false"
    if actor.moe.dispatcher == "deepep":
        yield "`actor.moe.dispatcher=deepep` needs GPUs and this machine has none; set it to alltoall"
    for key, optimizer in optimizers(config):
        if optimizer.moments != "float32":
            yield f"`{key}.moments=bfloat16` needs Transformer Engine and so a GPU; set it to float32 here"
        if optimizer.device == "cpu":
            yield f"`{key}.device=cpu` keeps the optimizer off a GPU and this machine has none; set it to gpu here"
    if actor.recompute == "selective":
        for name in sorted({"layernorm", "moe_act"} & set(actor.recompute_modules)):
            yield f"`actor.recompute_modules` has {name}, which needs Transformer Engine and so a GPU; leave it out here"


def check_actor_model(config: Config, model: Model) -> Iterator[str]:
    """Yields a sentence per key of `actor` that the model's shape rules out."""
    actor, experts, dims = config.actor, model.experts, model.dims
    if actor.recompute == "selective" and actor.recompute_modules:
        here = {"layernorm", "core_attn", *["moe", "moe_act"] * bool(experts), *["mlp"] * (model.expert_share < 1)}
        if not here & set(actor.recompute_modules):
            yield (
                f"`actor.recompute_modules` ({', '.join(actor.recompute_modules)}) names nothing that this model has; it has "
                f"{', '.join(sorted(here))}"
            )
    if actor.moe.routing_replay != "none" and not experts:
        yield f"`actor.moe.routing_replay={actor.moe.routing_replay}` is for experts, and the model has none; set it to none"
    if actor.moe.dispatcher == "deepep" and not experts:
        yield "`actor.moe.dispatcher=deepep` is for experts, and the model has none; set it to alltoall"
    if actor.moe.bias_update_rate:
        if not model.has_expert_biases:
            yield "`actor.moe.bias_update_rate` is for routers with biases, and the model has none; set it to 0"
        elif actor.lora is not None:
            yield "`actor.moe.bias_update_rate` changes what `actor.lora` leaves as it is: the model itself; set it to 0"
    most = dims["layers"] // actor.parallel.pipeline
    if actor.fp8 is not None and actor.fp8.bf16_ends > most:
        yield (
            f"`actor.fp8.bf16_ends` ({actor.fp8.bf16_ends}) must be at most {most}, the model's {dims['layers']} layers over "
            f"{actor.parallel.pipeline} pipeline stages"
        )


_ABOUT = "adapter_config.json"
_MOST_BYTES, _SAMPLE = 2**24, 2**16
# What PEFT's adapters may have beside two plain matrices; where it is none of these, they do not.
_BEYOND = (
    *("use_dora", "use_rslora", "bias", "lora_bias", "fan_in_fan_out", "modules_to_save", "target_parameters"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "exclude_modules"),
)
_WITHOUT: tuple[object, ...] = (None, False, "none", [], {})


def check_adapter(config: Config, model: Model) -> Iterator[str]:
    """Yields a sentence per reason why the adapters in `actor.lora.path` are not those of this recipe.

    Their tensors' names and shapes are compared when they are loaded.
    """
    lora, kl = config.actor.lora, config.algorithm.kl
    if lora is None or lora.path is None:
        return
    if config.model.path is None:
        yield "`actor.lora.path` has adapters of a model that exists; set `model.path` to it instead of `model.create`"
        return
    if kl.coef or kl.reward_coef:
        yield (
            "`actor.lora.path` begins with trained adapters, and the reference policy of `algorithm.kl` is the model without "
            "any; set model.path to their run's export, with actor.lora.path=null"
        )
    file = Path(lora.path) / _ABOUT
    try:
        about = json.loads(read_text(file, _MOST_BYTES))
    except FileNotFoundError:
        yield f"`actor.lora.path`: {lora.path} has no {_ABOUT}; it must be a PEFT folder, as a run's adapter/ is"
        return
    except (ValueError, RecursionError, OSError) as error:
        yield f"`actor.lora.path`: {file} cannot be read: {error}"
        return
    if not isinstance(about, dict) or about.get("peft_type") != "LORA":
        yield f"`actor.lora.path`: {file} does not describe LoRA's adapters"
        return
    for name in _BEYOND:
        if name == "target_parameters" and _are_matrices(about.get(name)):
            continue  # of layers beside experts: `models.lora.peft_config`
        if about.get(name) not in _WITHOUT:
            yield f"`actor.lora.path`: {file} has {name} = {about[name]!r}; adapters here are two matrices, and nothing else"
    for key, own, theirs in (
        ("rank", lora.rank, about.get("r")),
        ("alpha", lora.scale * lora.rank, about.get("lora_alpha")),
    ):
        if own != theirs:
            yield f"`actor.lora.{key}` is {own:g}, and that of the adapters in {lora.path} is {theirs}; set it to theirs"
    modules = peft_modules(about)
    if modules is not None and modules != set(wanted := targets_of(lora, model)):
        yield (
            f"`actor.lora.targets` are {', '.join(wanted)}, and those of the adapters in {lora.path} are "
            f"{', '.join(sorted(modules))}; set them alike"
        )
    base = about.get("base_model_name_or_path")
    if isinstance(base, str) and not _is_same_model(Path(base), Path(config.model.path)):
        yield (
            f"`actor.lora.path`: the adapters in {lora.path} belong to {base:.200}, which is not the model in "
            f"{config.model.path}; set model.path to theirs (or, where it is the same under another name, "
            f"base_model_name_or_path in {_ABOUT})"
        )


def _are_matrices(parameters: object) -> bool:
    """Whether these are all weights of modules, and no tensor that has several experts' in it."""
    return isinstance(parameters, list) and all(str(name).endswith(".weight") for name in parameters)


def _is_same_model(theirs: Path, ours: Path) -> bool:
    """Compares two models by the weights' sizes and ends, or, where the adapters' model is not on this machine, by the
    folders' names."""
    try:
        is_here = theirs.is_dir()
    except (OSError, ValueError):  # a name that is too long
        is_here = False
    return _looks(theirs) == _looks(ours) if is_here else theirs.name == ours.name


def _looks(folder: Path) -> list[tuple[str, int, bytes]]:
    fingerprints = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            begin, size = file.read(_SAMPLE), os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _SAMPLE))
            fingerprints.append((path.name, size, begin + file.read()))
    return fingerprints


def parameters_in_fp8(config: Config) -> bool:
    """Whether the actor's parameters are themselves in FP8, and not only their products."""
    return config.actor.fp8 is not None and config.actor.fp8.param_gather
