"""A number becomes a case that no check refuses.

Numbers go through every family, and with each through every way of dividing it, so that none comes by luck alone; the rest is
drawn. What a check refuses is drawn again, and counted: `python -m tests.random_layouts --refused`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .cases import (
    DIVISIONS,
    EVERY,
    FAMILIES,
    GROUPED,
    IMPOSSIBLE,
    MIXTURES,
    SEEING,
    Case,
    Cut,
    divides,
    possible,
    refusals,
)

TRIES = 300


@dataclass(frozen=True)
class Luck:
    """What numbers from `first` on are drawn from."""

    first: int
    families: Sequence[str]
    worlds: Sequence[int] = (2, 2, 2, 3, 4, 4, 4, 6, 8)
    layers: tuple[int, int] = (2, 7)  # as all of these: from the first to below the second
    layers_seeing: tuple[int, int] = (2, 9)  # some of theirs on a first virtual stage need 8
    groups: tuple[int, int] = (2, 6)
    group_size: tuple[int, int] = (2, 5)
    continued: float = 0.3  # share of cases with a checkpoint that another layout goes on from
    buckets: Sequence[int] = (0,)


# Two of these take less than one of the others (2.3 s for 5.2, two cores): what they leave out says little of layouts.
SMALL = Luck(
    *(2_000_000, [*EVERY]),
    worlds=[2] * 20 + [3] * 4 + [4] * 12 + [6] * 2 + [8] * 2,
    layers=(1, 5),
    groups=(2, 4),
    group_size=(2, 4),
    continued=0.05,
    buckets=(600, 0, 6000),  # a real model's gradients have dozens
)
# Of two ranks mostly, and a few rollouts: every run of the tests has 200 of them.
TINY = replace(
    SMALL,
    first=3_000_000,
    worlds=[2] * 9 + [4],
    groups=(2, 3),
    group_size=(2, 3),
    continued=0.03,
    buckets=(600, 0),
)
RANGES = (Luck(0, [*FAMILIES]), Luck(1_000_000, [*SEEING]), SMALL, TINY)


def draw(number: int) -> Case:
    """The case of a number.

    Raises:
        LookupError: `TRIES` draws were all refused.
    """
    family, division = wanted(number)
    rng = np.random.default_rng(number)
    for _ in range(TRIES):
        case = attempt(number, rng, family, division)
        fits = (family in FAMILIES and number < SMALL.first) or possible(case)  # of whom it was not asked at first
        if divides(case, division) and fits and not refusals(case):
            return case
    raise LookupError(f"{family} by {division}: all of {TRIES} draws were refused")


def luck_of(number: int) -> Luck:
    return next(luck for luck in reversed(RANGES) if number >= luck.first)


def wanted(number: int) -> tuple[str, str]:
    """Family and division of a number: all that are possible come in turn, and families change with every number."""
    order = [
        (family, DIVISIONS[(turn + place) % len(DIVISIONS)])
        for turn in range(len(DIVISIONS))
        for place, family in enumerate(luck_of(number).families)
    ]
    possible = [one for one in order if one not in IMPOSSIBLE]
    return possible[number % len(possible)]


def attempt(number: int, rng: np.random.Generator, family: str, division: str) -> Case:
    """One draw, which a check may refuse. `division`: what the layout has for certain."""

    def one_of[T](*choices: T) -> T:
        return choices[int(rng.integers(len(choices)))]

    luck = luck_of(number)
    world, sizes = one_of(*luck.worlds), _sizes(rng, family, luck.layers_seeing if family in SEEING else luck.layers)
    cut, mixture = _cut(rng, world, division, family in MIXTURES), family in MIXTURES
    group_size, groups = int(rng.integers(*luck.group_size)), int(rng.integers(*luck.groups))
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
        _cut(rng, world, one_of(*DIVISIONS), mixture) if rng.random() < luck.continued else None,
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
        luck.buckets[number // 7 % len(luck.buckets)] if actor["overlap"] else 0,
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


def _sizes(rng: np.random.Generator, family: str, layers: tuple[int, int]) -> dict[str, Any]:
    """Of config.json. Heads and layers that many layouts divide, all else odd."""
    if family in SEEING:
        heads, kv_heads = (int(n) for n in rng.choice([(2, 2), (4, 2), (4, 4), (6, 3), (6, 6)]))
        return {
            "num_hidden_layers": int(rng.integers(*layers)),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": 32 * heads,  # the sections of rotary positions are of heads of 32
            "intermediate_size": 12 * int(rng.integers(2, 6)),
            "vocab_size": int(rng.integers(40, 90)),
            "tie_word_embeddings": bool(rng.random() < 0.4),
        }
    heads, kv_heads = (int(n) for n in rng.choice([(4, 2), (4, 4), (2, 2), (6, 3), (6, 6), (8, 4)]))
    sizes: dict[str, Any] = {
        "num_hidden_layers": int(rng.integers(*layers)),
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
