"""What `rollout.exact` covers; it is refused beside anything else, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.schema import Config
from megatron_rl.models import Model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
MOST_RANKS = 2


def check_exact(config: Config, model: Model) -> Iterator[str]:
    """Yields a sentence per part of a recipe in which engine and actor would not compute the same numbers."""
    if not config.rollout.exact:
        return
    key, parallel, ranks = "`rollout.exact`", config.actor.parallel, config.actor.parallel.tensor
    if ranks != config.rollout.tensor_parallel:
        yield (
            f"{key} cuts every sum alike in engine and actor, and `rollout.tensor_parallel` "
            f"({config.rollout.tensor_parallel}) is not `actor.parallel.tensor` ({ranks}); make them equal"
        )
    elif ranks > MOST_RANKS:
        yield (
            f"{key}: the sum of two ranks has no order, that of `actor.parallel.tensor` ({ranks}) has one in the engine and "
            f"another in the actor; set it and `rollout.tensor_parallel` to {MOST_RANKS} or 1"
        )
    for name in ("pipeline", "context", "expert", "expert_tensor"):
        if (size := getattr(parallel, name)) > 1:
            yield f"{key} was not tried with `actor.parallel.{name}` ({size}); set it to 1"
    if model.experts is not None and ranks > 1 and not config.rollout.expert_parallel:
        yield f"{key} adds up whole experts, as the actor has them: set rollout.expert_parallel=true"
    if model.experts is not None and config.actor.moe.routing_replay != "none":
        yield (
            f"`actor.moe.routing_replay` ({config.actor.moe.routing_replay}) is for experts that engine and actor choose "
            f"differently, and with {key} they choose the same; set it to none"
        )
    described = model.description.transformer
    unlike = {
        "actor.fp8": config.actor.fp8 is not None,
        "actor.lora": config.actor.lora is not None,  # the engine multiplies by the sum, the actor adds the products
        "rollout.fp8": config.rollout.fp8 != "none",
        "rollout.speculation": config.rollout.speculation is not None,
        "rollout.partial": config.rollout.partial is not None,  # old tokens are newer weights' when they are scored
    }
    for name in (name for name, is_on in unlike.items() if is_on):
        yield f"{key} does not cover `{name}`: set {name}={'none' if name == 'rollout.fp8' else 'null'}, or exact to false"
    if model.family.name not in FAMILIES or model.description.rope.kind == "yarn" or described["add_bias_linear"]:
        yield (
            f"{key} has the operations of {', '.join(FAMILIES)} (without YaRN, and without biases but of query, key and "
            f"value), and the model is of family {model.family.name}; set it to false"
        )
