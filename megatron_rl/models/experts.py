"""Mixtures of experts as an object of a family: their weights and their sizes. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_rl.models.rules import INPUT_NORM, MLP_NORM, Rule, Sharding, layer_rule

# Before experts there is nothing to fuse it into: Transformer Engine's checkpoints have it under its own name, the local
# layer spec's under the fused one.
MOE_NORMS = (INPUT_NORM, replace(MLP_NORM, saved=MLP_NORM.megatron[:1]))
# Experts are modules of their own (SequentialMLP), or numbered weights of one module (TEGroupedMLP).
MOE = (
    layer_rule("mlp.router.weight", Sharding.REPLICATED, ("mlp.gate.weight", ("experts", "hidden"))),
    layer_rule(
        ("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"),
        Sharding.GATED,
        ("mlp.experts.{expert}.gate_proj.weight", ("expert_ffn", "hidden")),
        ("mlp.experts.{expert}.up_proj.weight", ("expert_ffn", "hidden")),
        engine="mlp.experts.routed_experts.w13_weight",
    ),
    layer_rule(
        ("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"),
        Sharding.ROW,
        ("mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn")),
        engine="mlp.experts.routed_experts.w2_weight",
    ),
)
# One more feed-forward, which every token goes to, weighed by a sigmoid of its own gate.
SHARED_EXPERT = (
    layer_rule(
        "mlp.shared_experts.linear_fc1.weight",
        Sharding.GATED,
        ("mlp.shared_expert.gate_proj.weight", ("shared_ffn", "hidden")),
        ("mlp.shared_expert.up_proj.weight", ("shared_ffn", "hidden")),
        engine="mlp.shared_expert.gate_up_proj.weight",
    ),
    layer_rule(
        "mlp.shared_experts.linear_fc2.weight",
        Sharding.ROW,
        ("mlp.shared_expert.down_proj.weight", ("hidden", "shared_ffn")),
    ),
    layer_rule(
        "mlp.shared_experts.gate_weight",
        Sharding.REPLICATED,
        ("mlp.shared_expert_gate.weight", ("one", "hidden")),
    ),
)


def in_layers(rules: Iterable[Rule], layers: range | tuple[int, ...]) -> tuple[Rule, ...]:
    """The rules as weights of these layers alone. The family says the same to Megatron-Core: `moe_layer_freq`, a list."""
    return tuple(replace(rule, layers=layers) for rule in rules)


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: `count` gated feed-forwards of `ffn` numbers, of which a token goes to `top_k`; and, where
    `shared` is not 0, one of that many numbers that all tokens go to. With `biases` experts' matrices have some. `field`
    is config.json's name of `count`."""

    count: int
    top_k: int
    ffn: int
    shared: int = 0
    biases: bool = False
    field: str = "num_experts"

    @property
    def dims(self) -> dict[str, int]:
        """Sizes by the symbols of its rules."""
        sizes = {"experts": self.count, "expert_ffn": self.ffn}
        return {**sizes, "shared_ffn": self.shared} if self.shared else sizes

    def softmax_routing(self, normalised: bool = True) -> dict[str, bool | int | str]:
        """Megatron's fields of layers in which a softmax weighs a token's experts. `normalised`: so that these add up to 1.

        Raises:
            ValueError: a token goes to more experts than there are.
        """
        if self.top_k > self.count:
            raise ValueError(f"config.json: num_experts_per_tok = {self.top_k}: the model has {self.count} experts")
        return {
            "num_moe_experts": self.count,
            "moe_ffn_hidden_size": self.ffn,
            "moe_router_topk": self.top_k,
            # Softmax over the chosen experts alone is softmax over all, renormalised over the chosen.
            "moe_router_pre_softmax": not normalised,
            "moe_router_score_function": "softmax",
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
        }

    def numbers(self, hidden: int) -> int:
        """Numbers in the matrices of a layer, without the shared ones."""
        return 3 * self.count * self.ffn * hidden

    def touched(self, tokens: float) -> float:
        """The share of them that so many evenly spread tokens go to."""
        return 1 - (1 - self.top_k / self.count) ** tokens
