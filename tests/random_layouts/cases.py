"""A case: a small model of odd sizes, a batch, and a layout of up to 8 ranks; its recipe, and what checks say against it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from megatron_rl.config.actor import LoRAConfig, OptimizerConfig, ParallelConfig
from megatron_rl.config.actor_checks import check_actor, check_actor_machine
from megatron_rl.config.model_checks import check_model
from megatron_rl.config.schema import Config
from megatron_rl.models import model_of
from tests.models import seeing, tiny

# Variants of `tiny`, one of each family at least, and the architecture that a folder of it names.
FAMILIES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "llama3": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
}
# Those that read images, kinds of `seeing`.
SEEING = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_5_moe", "qwen3_vl_moe")
GROUPED = ("deepseek_v3", "glm4_moe")  # whose routers have biases, and choose among groups of experts
DIVISIONS = ("tensor", "pipeline", "context", "sequence", "expert", "data", "virtual", "expert_tensor")
# Refused whatever else is drawn: no such case comes.
EVERY = FAMILIES | SEEING
IMPOSSIBLE = {(family, name) for family in EVERY if family not in MIXTURES for name in ("expert", "expert_tensor")}
IMPOSSIBLE |= {(family, "tensor") for family in MIXTURES}  # experts need sequence parallelism beside it
IMPOSSIBLE |= {("gpt_oss", "context"), ("gpt_oss", "expert_tensor"), *((family, "context") for family in SEEING)}


@dataclass(frozen=True)
class Cut:
    """How a model is divided. What the world has beyond it is data-parallel."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    distributed: bool = True


@dataclass(frozen=True)
class Case:
    number: int
    family: str
    sizes: dict[str, Any]  # of config.json, beside `tiny`'s
    world: int = 1
    cut: Cut = Cut()
    then: Cut | None = None  # a checkpoint is written after the first batch, and the second is learned here
    actor: dict[str, Any] = field(default_factory=dict)  # keys of the recipe's `actor`, as what is computed again
    tokens: int = 4096  # of a micro-batch
    groups: int = 3
    group_size: int = 4
    aggregation: str = "seq-mean-token-mean"
    decay: bool = False
    lora: int = 0
    lora_experts: bool = False
    replay: str = "none"
    biases: bool = False  # are updated
    frozen: bool = False  # the tower of a model that reads images
    bucket: int = (
        0  # elements of the gradients that are summed at once, where sums overlap; 0: as many as Megatron-Core has
    )

    @property
    def alone(self) -> Case:
        """The same in one process, in one micro-batch, without anything that should change no number."""
        return replace(self, world=1, cut=Cut(), actor={}, tokens=4096, bucket=0)


def divides(case: Case, division: str) -> bool:
    cut = case.cut
    if division == "data":
        return case.world > cut.tensor * cut.pipeline * cut.context
    return getattr(cut, division) > (1 if division != "sequence" else False)


@cache
def _described(family: str, sizes: str) -> dict[str, Any]:
    if family in SEEING:
        config = seeing.configuration(family, **of_seeing(json.loads(sizes))).to_dict()
    else:
        config = tiny.configuration(family, **json.loads(sizes)).to_dict()
    return {**config, "architectures": [EVERY[family]]}


def of_seeing(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """As `seeing` names them."""
    return {"tied" if name == "tie_word_embeddings" else name: value for name, value in sizes.items()}


def described(case: Case) -> dict[str, Any]:
    """What config.json says, as far as the checks read it."""
    return _described(case.family, json.dumps(case.sizes))


def config_of(case: Case, run_dir: str = "run", cut: Cut | None = None) -> Config:
    """The recipe of a case, at its layout or at `cut`. Steps are proportional to gradients: `actor.layouts.LINEAR_ADAM`."""
    cut, config = cut or case.cut, Config(run_dir=run_dir)
    config.model.dtype = "float32"
    config.actor.parallel = ParallelConfig(
        tensor=cut.tensor,
        pipeline=cut.pipeline,
        virtual_pipeline=cut.virtual,
        context=cut.context,
        expert=cut.expert,
        expert_tensor=cut.expert_tensor,
        sequence=cut.sequence,
    )
    config.actor.optimizer = OptimizerConfig(
        lr=100.0,
        eps=100.0,
        betas=[0.9, 0.95],
        weight_decay=1e-4 if case.decay else 0.0,
        clip_grad=0.5,
        distributed=cut.distributed,
    )
    config.sft.optimizer.distributed = config.reward_model.optimizer.distributed = cut.distributed
    config.actor.tokens_per_microbatch, config.actor.logits_mib = case.tokens, 1
    config.actor.moe.routing_replay, config.actor.moe.bias_update_rate = case.replay, 0.01 * case.biases
    config.actor.freeze_vision_tower = case.frozen
    if case.lora:
        config.actor.lora = LoRAConfig(rank=case.lora, alpha=1.5 * case.lora, experts=case.lora_experts)
    for key, value in case.actor.items():
        setattr(config.actor, key, value)
    config.trainer.minibatches, config.rollout.temperature = 2, 0.8
    config.rollout.max_prompt_tokens, config.rollout.max_tokens = 12, 40
    return config


def refusals(case: Case) -> list[str]:
    """What the recipe's checks say against a case."""
    try:
        model_of(described(case))
    except ValueError as error:  # of which `check_model` says nothing where a configuration is given to it
        return [str(error)]
    said = list[str]()
    for cut in filter(None, (case.cut, case.then)):
        config = config_of(case, cut=cut)
        said += [*check_actor(config, "train"), *check_actor_machine(config), *check_model(config, described(case))]
    return said


def possible(case: Case) -> bool:
    """Whether the world divides so; no check of a model asks that."""
    cuts = [cut for cut in (case.cut, case.then) if cut is not None]
    fits = all(
        case.world % (cut.tensor * cut.pipeline * cut.context) == 0
        and (case.world // cut.pipeline) % (cut.expert * cut.expert_tensor) == 0
        for cut in cuts
    )
    most = max(case.world // math.prod((cut.tensor, cut.pipeline, cut.context)) for cut in cuts)
    return fits and case.groups // 2 * case.group_size >= most
