"""What forward and backward passes take on a GPU, by arithmetic from the model's sizes and the recipe's layout. No torch.

Estimates: each says what it is made of, and tests hold them to within 10 % of what is counted on Megatron-Core's modules
(`exact`). None of them has been measured on a GPU.
"""

from __future__ import annotations

import math

from megatron_rl.config.actor import ParallelConfig
from megatron_rl.config.schema import Config
from megatron_rl.config.stages import stage_layers
from megatron_rl.models import Model
from megatron_rl.models.rules import Dims


def activation_bytes_per_token(
    model: Model, *, tensor: int, sequence: bool, expert_tensor: int = 1, dtype_bytes: int = 2
) -> float:
    """Activations that one layer keeps of each packed token for its backward pass, per rank. An estimate.

    The accounting of Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, section 4), for
    gated feed-forwards, grouped-query attention, no dropout and fused attention, which keeps no scores. The inputs of both
    norms and of the two first matrices are whole on every tensor-parallel rank without sequence parallelism. Experts are
    taken as evenly loaded; they keep the tokens sent to them and what they compute. A rank's tokens, its 1/tensor of the
    sequence, go to `top_k` experts each; every rank of `expert_tensor` gets those of all of them. Where they go is kept in
    int32 and float32.
    """
    dims, split = model.dims, tensor if sequence else 1
    hidden, q, kv = dims["hidden"], dims["q"], dims["kv"]
    attention = (2 * q + 2 * kv + (q + kv if model.description.transformer["qk_layernorm"] else 0)) / tensor
    mlp = _expert_numbers(dims, expert_tensor) / split if dims["experts"] else 3 * dims["ffn"] / tensor
    return dtype_bytes * (4 * hidden / split + attention + mlp) + 12 * dims["experts"] / split


def _expert_numbers(dims: Dims, expert_tensor: int) -> float:
    """That the experts keep of each token; Transformer Engine's grouped ones."""
    return dims["top_k"] * (dims["hidden"] * expert_tensor + 3 * dims["expert_ffn"])


def _moved_numbers(dims: Dims, parallel: ParallelConfig) -> float:
    """Of each token that a mixture of experts is computing, beside what is kept: copies on their way to the experts and
    back, which Megatron-Core holds until the layer's end: permuted, received, gathered, experts' output, in order again."""
    if not dims["experts"]:
        return 0
    shared, several = parallel.expert_tensor, dims["experts"] > parallel.expert
    copies = 1 + shared + (parallel.expert > 1 and (several or shared > 1)) + several * shared * (1 + (shared > 1))
    return dims["top_k"] * dims["hidden"] * copies


def _layer_bytes_per_token(model: Model, parallel: ParallelConfig, dtype_bytes: int) -> float:
    sizes = {"tensor": parallel.tensor, "expert_tensor": parallel.expert_tensor, "dtype_bytes": dtype_bytes}
    return activation_bytes_per_token(model, sequence=parallel.sequence, **sizes)


def activations(model: Model, config: Config, dtype_bytes: int) -> float:
    """Bytes on the stage that holds most, as a rule the first: it has as many micro-batches under way as there are stages.
    A layer that is being computed, and the output layer, take their own one after the other: without the latter's."""
    parallel = config.actor.parallel
    tokens = config.actor.tokens_per_microbatch / parallel.context
    split = parallel.tensor if parallel.sequence else 1
    per_layer = _layer_bytes_per_token(model, parallel, dtype_bytes)
    stages = stage_layers(model.dims["layers"], parallel.pipeline, parallel.virtual_pipeline)
    kept = per_layer
    if config.actor.recompute == "full":  # each layer's input
        kept = dtype_bytes * model.dims["hidden"] / split
    elif config.actor.recompute == "selective":
        kept = per_layer - _recomputed(model, config, dtype_bytes)

    def of_stage(layers: int) -> float:
        """Bytes per token of one micro-batch's activations in a stage of so many layers, with its output."""
        again = layers
        if config.actor.recompute == "full" and config.actor.recompute_layers is not None:
            again = min(layers, config.actor.recompute_layers * parallel.virtual_pipeline)
        return kept * again + per_layer * (layers - again) + dtype_bytes * model.dims["hidden"] / split

    # 1F1B: a stage's layers for each of the micro-batches under way, one fewer on each later stage.
    under_way = max(of_stage(count) * (len(stages) - stage) for stage, count in enumerate(stages))
    if parallel.virtual_pipeline > 1:  # interleaving: 1 + (p - 1) / (p v) times that (section 4.2.3)
        under_way = of_stage(max(stages)) * (len(stages) + (len(stages) - 1) / parallel.virtual_pipeline)
    # Beside what a layer keeps: two gradients, tokens gathered from all ranks, and experts' copies or a feed-forward's two.
    beside = model.dims["hidden"] * (2 / split + (split > 1))
    if model.dims["experts"]:
        beside += _moved_numbers(model.dims, parallel) / split
    else:
        beside += 2 * model.dims["ffn"] / parallel.tensor
    once = dtype_bytes * beside
    if config.actor.recompute_layers is None:  # else the last layers, with which a backward pass begins, are kept
        once += per_layer - kept
    return tokens * under_way + max(0.0, tokens * once - head_workspace(model, config))


def _recomputed(model: Model, config: Config, dtype_bytes: int) -> float:
    """Of `activation_bytes_per_token`, what selective recomputation does not keep. An estimate.

    Fused attention keeps no scores (`core_attn`), and Transformer Engine fuses every norm but the one before experts with the
    matrix product after it: `mlp` computes both again.
    """
    dims, parallel, modules = model.dims, config.actor.parallel, set(config.actor.recompute_modules)
    split = parallel.tensor if parallel.sequence else 1
    if not dims["experts"]:
        return dtype_bytes * (3 * dims["ffn"] / parallel.tensor + dims["hidden"] / split) if "mlp" in modules else 0
    numbers = float(dims["hidden"]) if "layernorm" in modules else 0
    if "moe" in modules:
        numbers += _expert_numbers(dims, parallel.expert_tensor)
    elif "moe_act" in modules:
        numbers += dims["top_k"] * dims["expert_ffn"]
    return dtype_bytes * numbers / split


def check_workspace(model: Model, config: Config, data_parallel: int, dtype_bytes: int) -> float:
    """The actor's forward pass over the rollouts of the sync check."""
    rollouts = math.ceil(config.rollout.sync_check_rollouts / data_parallel)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    return _forward_workspace(model, config, min(config.actor.tokens_per_microbatch, rollouts * longest), dtype_bytes)


def forward_workspace(model: Model, config: Config, dtype_bytes: int) -> float:
    """The actor's forward pass over a micro-batch, for log-probs alone."""
    return _forward_workspace(model, config, config.actor.tokens_per_microbatch, dtype_bytes)


def _forward_workspace(model: Model, config: Config, tokens: int, dtype_bytes: int) -> float:
    """A forward pass alone: three hidden states and a feed-forward, or the output layer with its hidden states."""
    dims, parallel = model.dims, config.actor.parallel
    split = parallel.tensor if parallel.sequence else 1
    if dims["experts"]:
        ffn = (_expert_numbers(dims, parallel.expert_tensor) + _moved_numbers(dims, parallel)) / split
    else:
        ffn = 3 * dims["ffn"] / parallel.tensor + dims["hidden"] * (split > 1)
    layer = dtype_bytes * (3 * dims["hidden"] / split + ffn) + 12 * dims["experts"] / split
    tile = min(config.actor.logits_mib * 2**20, tokens * dims["vocab"] * 4 / parallel.tensor)
    head = 2 * dtype_bytes * tokens * dims["hidden"] / parallel.context + tile * (1 if dtype_bytes == 4 else 1.5)
    return max(tokens / parallel.context * layer, head)


def head_workspace(model: Model, config: Config) -> float:
    """A tile of logits in fp32 and bf16, the gradient of the hidden states in fp32, and the tensor of the output matrix's
    shape that autograd wants (actor/head.py)."""
    tokens, hidden = config.actor.tokens_per_microbatch, model.dims["hidden"]
    rows = model.dims["vocab"] / config.actor.parallel.tensor
    tile = min(config.actor.logits_mib * 2**20, tokens * rows * 4)
    return tile * 1.5 + tokens * hidden * 4 + rows * hidden * 2
