"""Checks between the keys of `rollout`, and between them and the model, beside the layout."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.base.block_fp8 import BLOCK
from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.models import Model
from megatron_rl.models.fp8_weights import module_of, quantised_modules


def check_rollout(config: Config, local_world_size: int | None) -> Iterator[str]:
    """Yields a sentence where engines would cross nodes.

    `local_world_size`: processes on each node, where a launcher says so.
    """
    engine = config.rollout.tensor_parallel
    if local_world_size is not None and local_world_size % engine:
        yield (
            f"`rollout.tensor_parallel` ({engine}) must divide the {local_world_size} processes of a node, so that what the "
            "ranks of an engine exchange in every layer stays within it; where a GPU then has too many weights, raise "
            "rollout.memory_fraction, or set rollout.fp8=blockwise"
        )


def check_rollout_machine(config: Config) -> Iterator[str]:
    """Yields a sentence per key of `rollout` that a GPU's kernels refuse; for a machine that has one."""
    if config.rollout.fp8 != "none" and config.model.dtype == "float32":
        yield (
            "`rollout.fp8` needs activations in bf16 on a GPU, and `model.dtype` is float32; set model.dtype=bfloat16, or "
            "rollout.fp8=none"
        )


def check_rollout_model(rollout: RolloutConfig, model: Model) -> Iterator[str]:
    """Yields a sentence per key of `rollout` that the model's shape rules out."""
    if rollout.expert_parallel:
        yield from _check_experts(rollout, model.expert_count)
    if rollout.fp8 != "none" and model.family.stacking is not None:
        yield f"`rollout.fp8` is not for stacked experts, which family `{model.family.name}` has; set it to none"
    elif rollout.fp8 != "none":
        yield from _check_fp8(rollout, model)


def _check_experts(rollout: RolloutConfig, experts: int) -> Iterator[str]:
    if not experts:
        yield "`rollout.expert_parallel` is true, but the model has no experts; set it to false"
    elif rollout.tensor_parallel == 1:
        yield (
            "`rollout.expert_parallel` spreads experts over an engine's processes, and `rollout.tensor_parallel` is 1; raise "
            "it, or set expert_parallel to false"
        )
    elif experts % rollout.tensor_parallel:
        yield (
            f"with `rollout.expert_parallel` the model's {experts} experts must be a multiple of `rollout.tensor_parallel` "
            f"({rollout.tensor_parallel})"
        )


def _check_fp8(rollout: RolloutConfig, model: Model) -> Iterator[str]:
    try:
        modules = quantised_modules(model, rollout.fp8_skip)
    except ValueError as error:
        yield f"`rollout.fp8_skip` {error}"
        return
    for rule in (rule for rule in model.parameters if rule.is_projection):
        named = (rule.at(layer, 0) for layer in rule.layers_of(model.dims["layers"]))
        if not any(module_of(of_layer.hf[0].name) in modules for of_layer in named):
            continue
        if rule.per_expert and rule.dim and model.dims["hidden"] % BLOCK:  # experts are stacked
            yield (
                f"`rollout.fp8=blockwise`: the model's hidden_size ({model.dims['hidden']}) is no multiple of {BLOCK}, a "
                "block's size; name mlp.experts in rollout.fp8_skip"
            )
        whole_parts = (rule.per_expert and rollout.expert_parallel) or not rule.is_cut
        ranks = 1 if whole_parts else rollout.tensor_parallel
        for tensor in rule.hf if ranks > 1 or len(rule.hf) > 1 else ():
            size = model.in_engine(ranks).dims[tensor.shape[rule.dim]] // ranks
            if size % BLOCK:
                share = f" on each of {ranks} ranks" if ranks > 1 else ""
                fewer = "lower rollout.tensor_parallel, or " if ranks > 1 else ""
                whole = "set rollout.expert_parallel=true, or " if rule.per_expert and ranks > 1 else ""
                yield (
                    f"`rollout.fp8=blockwise`: {module_of(tensor.name).rpartition('{layer}.')[2]} has {size} "
                    f"{'columns' if rule.dim else 'rows'}{share}, and blocks have {BLOCK}; {fewer}{whole}name it in "
                    "rollout.fp8_skip"
                )
                break
