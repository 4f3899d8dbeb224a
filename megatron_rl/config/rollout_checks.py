"""Checks between the keys of `rollout`, and between them and the model, beside the layout."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.base.block_fp8 import BLOCK
from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.models import Model
from megatron_rl.models.fp8_weights import module_of, quantised_modules
from megatron_rl.models.gated_delta import GatedDelta

MOST_VERSIONS = 253  # after the first, of the weights that draw a rollout: see `rollout.exchange`


def check_rollout(config: Config, local_world_size: int | None) -> Iterator[str]:
    """Yields a sentence where engines would cross nodes, or where drafts would disturb what a replay goes by.

    `local_world_size`: processes on each node, where a launcher says so.
    """
    yield from _check_partial(config)
    yield from _check_like_lengths(config)
    if config.rollout.speculation is not None and config.actor.moe.routing_replay == "rollout":
        yield (
            "`rollout.speculation` drafts tokens, and the experts of those that are not drawn would be among those that "
            "`actor.moe.routing_replay` replays; set rollout.speculation=null"
        )
    engine = config.rollout.tensor_parallel
    if local_world_size is not None and local_world_size % engine:
        yield (
            f"`rollout.tensor_parallel` ({engine}) must divide the {local_world_size} processes of a node, so that what the "
            "ranks of an engine exchange in every layer stays within it; where a GPU then has too many weights, raise "
            "rollout.memory_fraction, or set rollout.fp8=blockwise"
        )


def _check_partial(config: Config) -> Iterator[str]:
    partial, trainer = config.rollout.partial, config.trainer
    if partial is None:
        return
    opened, most = partial.opened(trainer.prompts_per_step), (partial.max_staleness + 1) * trainer.prompts_per_step
    if not trainer.prompts_per_step <= opened <= most:
        yield (
            f"`rollout.partial.open_prompts` ({opened}) must be at least `trainer.prompts_per_step` "
            f"({trainer.prompts_per_step}) and, so that none waits longer than `max_staleness` "
            f"({partial.max_staleness}), at most {most}"
        )
    versions = partial.max_staleness * trainer.minibatches * trainer.epochs
    if versions > MOST_VERSIONS:
        yield (
            f"`rollout.partial.max_staleness` ({partial.max_staleness}) x trainer.minibatches {trainer.minibatches} x "
            f"trainer.epochs {trainer.epochs} = {versions} versions of the weights may draw a response, and at most "
            f"{MOST_VERSIONS} can; lower one"
        )
    refused = {
        "tasks.train has an agent: a conversation cannot be cut in a turn": any(
            task.agent is not None for task in config.tasks.train.values()
        ),
        "actor.moe.routing_replay is `rollout`: experts of tokens that are read again would be those of newer weights": (
            config.actor.moe.routing_replay == "rollout"
        ),
        "algorithm.resample_rounds replaces groups within a step, which would have to be drawn to their end": (
            config.algorithm.resample_rounds > 0
        ),
    }
    for reason in (reason for reason, is_on in refused.items() if is_on):
        yield f"`rollout.partial` does not go with this recipe: {reason}; set rollout.partial=null, or change that"


def _check_like_lengths(config: Config) -> Iterator[str]:
    if config.trainer.like_lengths == 1:
        return
    refused = {
        "with rollout.partial no step waits for its longest response": config.rollout.partial is not None,
        "with launch.generators lengths are known in other processes than those that save": (
            config.launch.generators is not None
        ),
        "algorithm.resample_rounds takes prompts until enough have a signal, and draws the next ones ahead": (
            config.algorithm.resample_rounds > 0
        ),
    }
    for reason in (reason for reason, is_on in refused.items() if is_on):
        yield f"`trainer.like_lengths` does not go with this recipe: {reason}; set trainer.like_lengths=1, or change that"


def check_rollout_machine(config: Config) -> Iterator[str]:
    """Yields a sentence per key of `rollout` that a GPU's kernels refuse; for a machine that has one."""
    if config.rollout.exact and config.model.dtype == "float32":
        yield (
            "`rollout.exact` multiplies with fewer digits than float32 has on a GPU (vLLM's kernel, in TF32), and "
            "`model.dtype` is float32; set model.dtype=bfloat16, or rollout.exact=false"
        )
    if config.rollout.fp8 != "none" and config.model.dtype == "float32":
        yield (
            "`rollout.fp8` needs activations in bf16 on a GPU, and `model.dtype` is float32; set model.dtype=bfloat16, or "
            "rollout.fp8=none"
        )


def check_rollout_model(rollout: RolloutConfig, model: Model) -> Iterator[str]:
    """Yields a sentence per key of `rollout` that the model's shape rules out."""
    if rollout.expert_parallel:
        yield from _check_experts(rollout, model.expert_count)
    if rollout.speculation is not None and isinstance(model.attention, GatedDelta):
        yield (
            f"`rollout.speculation`: the states of family `{model.family.name}`'s gated-delta layers cannot go back to "
            "before a draft that is not drawn; set it to null"
        )
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
