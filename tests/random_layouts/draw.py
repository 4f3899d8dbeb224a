"""A number becomes a case: a small model of odd sizes, a batch, and a layout of up to 8 ranks that no check refuses.

Numbers go through every family, and with each through every way of dividing it, so that none comes by luck alone; the rest is
drawn. What a check refuses is drawn again, and counted: `python -m tests.random_layouts --refused`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import yaml

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
# Those that read images, kinds of `seeing`: numbers from `FIRST_SEEING` on.
SEEING = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
FIRST_SEEING = 1_000_000
MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_5_moe", "qwen3_vl_moe")
GROUPED = ("deepseek_v3", "glm4_moe")  # whose routers have biases, and choose among groups of experts
DIVISIONS = ("tensor", "pipeline", "context", "sequence", "expert", "data", "virtual", "expert_tensor")
TRIES = 300
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

    @property
    def alone(self) -> Case:
        """The same in one process, in one micro-batch, without anything that should change no number."""
        return replace(self, world=1, cut=Cut(), actor={}, tokens=4096)


def draw(number: int) -> Case:
    """The case of a number.

    Raises:
        LookupError: `TRIES` draws were all refused.
    """
    family, division = wanted(number)
    rng = np.random.default_rng(number)
    for _ in range(TRIES):
        case = attempt(number, rng, family, division)
        if divides(case, division) and (family in FAMILIES or _possible(case)) and not refusals(case):
            return case
    raise LookupError(f"{family} by {division}: all of {TRIES} draws were refused")


def wanted(number: int) -> tuple[str, str]:
    """Family and division of a number: all that are possible come in turn, and families change with every number."""
    families = [*(FAMILIES if number < FIRST_SEEING else SEEING)]
    order = [
        (family, DIVISIONS[(turn + place) % len(DIVISIONS)])
        for turn in range(len(DIVISIONS))
        for place, family in enumerate(families)
    ]
    possible = [one for one in order if one not in IMPOSSIBLE]
    return possible[number % len(possible)]


def divides(case: Case, division: str) -> bool:
    cut = case.cut
    if division == "data":
        return case.world > cut.tensor * cut.pipeline * cut.context
    return getattr(cut, division) > (1 if division != "sequence" else False)


def attempt(number: int, rng: np.random.Generator, family: str, division: str) -> Case:
    """One draw, which a check may refuse. `division`: what the layout has for certain."""

    def one_of[T](*choices: T) -> T:
        return choices[int(rng.integers(len(choices)))]

    world, sizes = one_of(2, 2, 2, 3, 4, 4, 4, 6, 8), _sizes(rng, family)
    cut, mixture = _cut(rng, world, division, family in MIXTURES), family in MIXTURES
    group_size, groups = int(rng.integers(2, 5)), int(rng.integers(2, 6))
    if family in SEEING:
        group_size, groups = 1, 4  # of `seeing.batch`
    replicas = world // (cut.tensor * cut.pipeline * cut.context)
    while groups // 2 * group_size < replicas and family in FAMILIES:
        groups += 1
    actor: dict[str, Any] = {"recompute": one_of("none", "none", "selective", "full")}
    if actor["recompute"] == "selective":
        actor["recompute_modules"] = [*one_of(("mlp", "moe"), ("core_attn",), ("mlp", "moe", "core_attn"))]
    elif actor["recompute"] == "full":
        actor["recompute_layers"] = one_of(None, 1)
    actor["overlap"] = one_of(None, None, True)
    lora = int(rng.integers(1, 5)) if rng.random() < 0.2 else 0
    return Case(
        number,
        family,
        sizes,
        world,
        cut,
        _cut(rng, world, one_of(*DIVISIONS), mixture) if rng.random() < 0.3 else None,
        actor,
        one_of(64, 96, 4096),
        groups,
        group_size,
        one_of("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
        one_of(False, True),
        lora,
        bool(lora and mixture and rng.random() < 0.5),
        one_of("none", "none", "old_log_probs", "rollout") if mixture else "none",
        family in GROUPED and not lora and rng.random() < 0.5,
        family in SEEING and rng.random() < 0.3,
    )


def _cut(rng: np.random.Generator, world: int, division: str, mixture: bool) -> Cut:
    """Each prime factor of the world goes to a dimension, the first to the one that is wanted."""
    sizes: Counter[str] = Counter()
    primes = [p for p in (2, 3) for _ in range(3) if world % p == 0 and world % p ** (_ + 1) == 0]
    rng.shuffle(primes)
    first = {"sequence": "tensor", "virtual": "pipeline"}.get(division, division)
    parts: dict[str, int] = dict.fromkeys(("tensor", "pipeline", "context", "data"), 1)
    for place, prime in enumerate(primes):
        chosen = first if place == 0 and first in parts else str(rng.choice([*parts]))
        parts[chosen] *= prime
    stage = world // parts["pipeline"]
    if mixture:
        pairs = [(e, t) for e in range(1, stage + 1) for t in range(1, stage + 1) if stage % (e * t) == 0]
        index = {"expert": 0, "expert_tensor": 1}.get(division)
        pairs = [pair for pair in pairs if index is None or pair[index] > 1] or [(1, 1)]
        sizes["expert"], sizes["expert_tensor"] = pairs[int(rng.integers(len(pairs)))]
    virtual = int(rng.integers(2, 4)) if division == "virtual" or rng.random() < 0.3 else 1
    sequence = division == "sequence" or (division != "tensor" and rng.random() < 0.7)
    return Cut(
        parts["tensor"],
        bool(sequence and parts["tensor"] > 1),
        parts["pipeline"],
        virtual if parts["pipeline"] > 1 else 1,
        parts["context"],
        sizes["expert"] or 1,
        sizes["expert_tensor"] or 1,
        bool(rng.random() < 0.7),
    )


def _sizes(rng: np.random.Generator, family: str) -> dict[str, Any]:
    """Of config.json. Heads and layers that many layouts divide, all else odd."""
    if family in SEEING:
        heads, kv_heads = (int(n) for n in rng.choice([(2, 2), (4, 2), (4, 4), (6, 3), (6, 6)]))
        return {
            "num_hidden_layers": int(rng.integers(2, 9)),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": 32 * heads,  # the sections of rotary positions are of heads of 32
            "intermediate_size": 12 * int(rng.integers(2, 6)),
            "vocab_size": int(rng.integers(40, 90)),
            "tie_word_embeddings": bool(rng.random() < 0.4),
        }
    heads, kv_heads = (int(n) for n in rng.choice([(4, 2), (4, 4), (2, 2), (6, 3), (6, 6), (8, 4)]))
    sizes: dict[str, Any] = {
        "num_hidden_layers": int(rng.integers(2, 7)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family == "deepseek_v3" else kv_heads,
        "hidden_size": int(rng.choice([24, 48, 72])),
        "intermediate_size": 12 * int(rng.integers(2, 6)),
        "vocab_size": int(rng.integers(29, 90)),
        "tie_word_embeddings": bool(rng.random() < 0.4),
    }
    if family in ("qwen3", "qwen3_moe", "mistral"):
        sizes["head_dim"] = int(rng.choice([8, 12, 16]))
    if family.startswith("qwen3_5"):
        keys = int(rng.choice([2, 4, 6]))
        sizes |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * int(rng.integers(1, 3))}
    experts = int(rng.choice([4, 6, 8, 12]))
    if family in GROUPED:
        sizes |= {"n_routed_experts": 2 * experts, "n_group": 2, "topk_group": int(rng.integers(1, 3))}
        sizes |= {"num_experts_per_tok": int(rng.integers(2, 4)), "first_k_dense_replace": int(rng.integers(0, 2))}
    elif family in MIXTURES:
        sizes |= {"num_local_experts" if family == "gpt_oss" else "num_experts": experts}
        # Of one expert the normalised weight is 1, without a gradient, and Megatron-Core refuses it.
        sizes |= {"num_experts_per_tok": int(rng.integers(2, 4))}
    return sizes


@cache
def _described(family: str, sizes: str) -> dict[str, Any]:
    if family in SEEING:
        config = seeing.configuration(family, **of_seeing(yaml.safe_load(sizes))).to_dict()
    else:
        config = tiny.configuration(family, **yaml.safe_load(sizes)).to_dict()
    return {**config, "architectures": [EVERY[family]]}


def of_seeing(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """As `seeing` names them."""
    return {"tied" if name == "tie_word_embeddings" else name: value for name, value in sizes.items()}


def described(case: Case) -> dict[str, Any]:
    """What config.json says, as far as the checks read it."""
    return _described(case.family, yaml.safe_dump(case.sizes))


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


# ------------------------------------------------------------------------------------------------------------ overrides
def overridden(case: Case, overrides: Mapping[str, str]) -> Case:
    """A case of which some things are others: `world=2`, `cut.tensor=1`, `then=null`, `sizes.num_hidden_layers=2`."""
    for key, text in overrides.items():
        name, _, inner = key.partition(".")
        value, section = yaml.safe_load(text), getattr(case, name)
        if inner and isinstance(section, dict):
            value = {**section, inner: value}
        elif inner:
            value = replace(section or Cut(), **{inner: value})
        case = replace(case, **{name: value})
    return case


def overrides_of(case: Case) -> dict[str, str]:
    """What `overridden` needs to make this case of its number's."""
    found, drawn = dict[str, str](), draw(case.number)
    before, after = _flat(drawn), _flat(case)
    for name in ("actor", "sizes"):  # of which something is gone
        if not (removed := getattr(drawn, name)).keys() <= getattr(case, name).keys():
            before = {key: value for key, value in before.items() if key not in {f"{name}.{k}" for k in removed}}
            after = {f"{name}": {}, **after}
    for name, value in after.items():
        if name not in before or before[name] != value:
            found[name] = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    return found


def _flat(case: Case) -> dict[str, Any]:
    flat = dict[str, Any]()
    for own in dataclasses.fields(case):
        value = getattr(case, own.name)
        inner = value if isinstance(value, dict) else vars(value) if isinstance(value, Cut) else None
        flat |= {own.name: value} if inner is None else {f"{own.name}.{key}": part for key, part in inner.items()}
    return flat


def command(case: Case) -> str:
    """What runs it again."""
    return " ".join(
        ("python -m tests.random_layouts", str(case.number), *(f"'{k}={v}'" for k, v in overrides_of(case).items()))
    )


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the greatest steps first, as far as the checks let them pass."""
    cut, steps = case.cut, list[Case]()
    if case.then is not None:
        steps.append(replace(case, then=None))
    for name in ("context", "pipeline", "tensor", "expert", "expert_tensor"):
        size, freed = getattr(cut, name), {"virtual": 1} if name == "pipeline" else {}
        freed |= {"sequence": False} if name == "tensor" else {}
        if size > 1:
            rest = replace(cut, **{name: 1, **freed})
            dense = name in ("context", "pipeline", "tensor")
            steps += [replace(case, cut=rest, world=case.world // size if dense else case.world)]
    model = cut.tensor * cut.pipeline * cut.context
    if (replicas := case.world // model) > 1:
        steps.append(replace(case, world=case.world // replicas))
    steps += [
        replace(case, actor={}),
        replace(case, replay="none"),
        replace(case, lora=0, lora_experts=False),
        replace(case, biases=False),
        replace(case, frozen=False),
        replace(case, cut=replace(cut, virtual=1)),
        replace(case, cut=replace(cut, sequence=False)),
        replace(case, cut=replace(cut, distributed=True)),
        replace(case, tokens=4096),
        replace(case, decay=False, aggregation="token-mean"),
        replace(case, groups=2, group_size=2) if case.family in FAMILIES else case,
        replace(case, sizes={**case.sizes, "tie_word_embeddings": False}),
        *(
            replace(case, sizes={**case.sizes, "num_hidden_layers": n})
            for n in range(1, case.sizes["num_hidden_layers"])
        ),
    ]
    for step in steps:
        if step != case and _possible(step) and not refusals(step):
            yield step


def _possible(case: Case) -> bool:
    """Whether the world divides so; no check of a model asks that."""
    cuts = [cut for cut in (case.cut, case.then) if cut is not None]
    fits = all(
        case.world % (cut.tensor * cut.pipeline * cut.context) == 0
        and (case.world // cut.pipeline) % (cut.expert * cut.expert_tensor) == 0
        for cut in cuts
    )
    most = max(case.world // math.prod((cut.tensor, cut.pipeline, cut.context)) for cut in cuts)
    return fits and case.groups // 2 * case.group_size >= most
