"""Small models whose weights are numbers, cut by hand as Megatron-Core and vLLM cut them, not by the plan's own rules."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_rl.config.actor import ParallelConfig
from megatron_rl.models import Model, family_for
from megatron_rl.models.rules import Place, shard_shape, shard_slices
from megatron_rl.weights.layouts import ActorLayout

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 2,
    "max_position_embeddings": 128,
    "vocab_size": 75,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
DELTA = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 3,
    "full_attention_interval": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": SIZES,
    "Qwen3ForCausalLM": SIZES,
    "Qwen3MoeForCausalLM": SIZES | MOE,
    "LlamaForCausalLM": SIZES,
    "MistralForCausalLM": SIZES | {"sliding_window": None},
    "Qwen3_5ForCausalLM": SIZES | DELTA,
    "Qwen3_5MoeForCausalLM": SIZES | MOE | DELTA | {"shared_expert_intermediate_size": 16},
    "GptOssForCausalLM": SIZES
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_scaling": {**YARN, "rope_theta": 1e4},
    },
}
WHOLE = (
    "norm",
    "mlp.gate.weight",
    "correction_bias",
    "mlp.router.",
    "o_proj.bias",
    "shared_expert_gate.",
)  # on all ranks
ROWS = ("o_proj.weight", "mlp.down_proj.weight", "shared_expert.down_proj.weight", "linear_attn.out_proj.weight")


def model_of(architecture: str, **changes: Any) -> Model:
    config = {"architectures": [architecture], **CONFIGS[architecture], **changes}
    family = family_for(config)
    return Model(family, family.describe(config))


class Weights:
    """Whole tensors in which every number is another one, by Hugging Face name."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tensors: dict[str, np.ndarray] = {}
        count = 1  # 0 is padding
        for rule in model.weights():
            for tensor in rule.hf:
                shape = tensor.sizes(model.dims)
                self.tensors[tensor.name] = np.arange(count, count + np.prod(shape)).reshape(shape)
                count += int(np.prod(shape))

    # ------------------------------------------------------------------------------- what a rank of the actor holds
    def of_actor(
        self, layout: ActorLayout, parallel: ParallelConfig, rank: int
    ) -> dict[tuple[int, int, int], np.ndarray]:
        """By (rule, layer, local expert): Megatron's parameters on a rank, as `models.load` fills them."""
        model, found = self.model, {}
        stage, inner = divmod(rank, layout.world // parallel.pipeline)
        for index, rule in enumerate(model.family.rules):
            if rule.is_output and model.description.tied:
                if parallel.pipeline == 1:
                    continue
                rule = model.family.embedding
                here = stage == parallel.pipeline - 1
            else:
                here = rule.place is Place.LAYER or stage == (
                    0 if rule.place is Place.EMBEDDING else parallel.pipeline - 1
                )
            if not here:
                continue
            layers = filter(rule.is_in, layout.layers[stage]) if rule.per_layer else (-1,)
            experts = model.expert_count // parallel.expert if rule.per_expert else 1
            tp = parallel.expert_tensor if rule.per_expert else parallel.tensor
            for layer in layers:
                for local in range(experts):
                    expert = inner // parallel.expert_tensor % parallel.expert * experts + local
                    named = rule.at(layer, expert)
                    parts = [
                        self.tensors[named.hf[piece.tensor].name].take(range(piece.start, piece.stop), rule.dim)
                        for piece in shard_slices(rule, model.dims, inner % tp, tp)
                    ]
                    value = np.zeros(shard_shape(rule, model.dims, tp), int)
                    whole = np.concatenate(parts, rule.dim) if parts else value[:0]
                    value[tuple(slice(size) for size in whole.shape)] = whole
                    found[index, layer, local if rule.per_expert else 0] = value
        return found

    # ------------------------------------------------------------------------------- what a rank of an engine needs
    def of_engine(self, tp: int, place: int, expert_parallel: bool) -> dict[str, np.ndarray]:
        """vLLM's parameters on a rank, -1 where they are padding."""
        dims, tensors = self.model.dims, self.tensors
        is_gpt_oss = self.model.family.name == "gpt_oss"
        found: dict[str, np.ndarray] = {}

        def cut(name: str, dim: int) -> np.ndarray:
            return np.split(tensors[name], tp, dim)[place]

        def kv(name: str) -> np.ndarray:
            heads = tensors[name].reshape(dims["kv_heads"], dims["head_dim"], *tensors[name].shape[1:])
            copies = max(1, tp // dims["kv_heads"])
            mine = np.split(np.repeat(heads, copies, 0), tp)[place]
            return mine.reshape(-1, *tensors[name].shape[1:])

        def mixed(name: str) -> np.ndarray:
            """Of queries, keys and values one after the other."""
            keys = dims["gd_key"]
            parts = np.split(tensors[name], [keys, 2 * keys])
            return np.concatenate([np.split(part, tp)[place] for part in parts])

        for name, value in tensors.items():
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                padded = np.full((-(-len(value) // 64) * 64, value.shape[1]), -1)
                padded[: len(value)] = value
                found[name] = np.split(padded, tp)[place]
            elif any(part in name for part in WHOLE):
                found[name] = value
            elif name.endswith(ROWS):
                found[name] = cut(name, 1)
            elif name.endswith((".sinks", ".dt_bias", ".A_log")):
                found[name] = cut(name, 0)
            elif name.endswith(".conv1d.weight"):
                found[name] = mixed(name)
            elif name.endswith(".in_proj_qkv.weight"):
                both = [mixed(name), cut(name.replace("_qkv", "_z"), 0)]
                found[name.replace("_qkv", "_qkvz")] = np.concatenate(both)
            elif name.endswith(".in_proj_b.weight"):
                both = [cut(name, 0), cut(name.replace("_b", "_a"), 0)]
                found[name.replace("_b", "_ba")] = np.concatenate(both)
            elif ".q_proj." in name:
                k, v = name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")
                found[name.replace("q_proj", "qkv_proj")] = np.concatenate([cut(name, 0), kv(k), kv(v)])
            elif name.endswith(("mlp.gate_proj.weight", "shared_expert.gate_proj.weight")):
                both = [cut(name, 0), cut(name.replace("gate_proj", "up_proj"), 0)]
                found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(both)
        for layer in sorted(self.model.expert_layers):
            prefix = f"model.layers.{layer}.mlp.experts."
            split = 1 if expert_parallel else tp
            every = np.arange(self.model.expert_count)
            numbers = np.split(every, tp)[place] if expert_parallel else every
            at = 0 if expert_parallel else place

            def part(number: int, name: str, dim: int) -> np.ndarray:
                return np.split(tensors[f"{prefix}{number}.{name}"], split, dim)[at]  # noqa: B023

            for kind in ("weight", "bias") if is_gpt_oss else ("weight",):
                both = [[part(number, f"{half}_proj.{kind}", 0) for number in numbers] for half in ("gate", "up")]
                w13 = np.concatenate(both, 1)
                if is_gpt_oss:  # row by row
                    w13 = np.stack(both, 2).reshape(w13.shape)
                found[f"{prefix}routed_experts.w13_{kind}"] = w13
            found[prefix + "routed_experts.w2_weight"] = np.stack(
                [part(number, "down_proj.weight", 1) for number in numbers]
            )
            if is_gpt_oss:  # which the ranks' outputs have once when they are added up
                biases = np.stack([tensors[f"{prefix}{number}.down_proj.bias"] for number in numbers])
                found[prefix + "routed_experts.w2_bias"] = biases if at == 0 else np.full_like(biases, -1)
        return {in_gpt_oss(name) if is_gpt_oss else name: value for name, value in found.items()}


def in_gpt_oss(name: str) -> str:
    return name.replace("self_attn", "attn").replace("embed_tokens", "embedding")
