"""Memory of forward and backward passes on a GPU, by arithmetic from the model's sizes and the recipe's layout. No torch.

Estimates: each says what it is made of, and tests hold them to within 10 % of what is counted on Megatron-Core's modules
(`exact`). Of one model on one card the sums were within 1 % of what was allocated (docs/gpu.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_rl.config.actor import ActorConfig, ParallelConfig
from megatron_rl.config.pipeline_split import stage_numbers
from megatron_rl.config.schema import Config
from megatron_rl.models import Model
from megatron_rl.models.experts import Experts
from megatron_rl.models.rules import Place, shard_shape
from megatron_rl.seams.fp8_sizes import bytes_per_number, weight_bytes


def activation_bytes_per_token(
    model: Model,
    experts: Experts | None,
    *,
    tensor: int,
    sequence: bool,
    expert_tensor: int = 1,
    dtype_bytes: int = 2,
    fp8: str | None = None,
) -> float:
    """Activations that one layer, dense or with `experts`, keeps of each packed token for its backward pass, per rank. An
    estimate.

    The accounting of Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, section 4), for
    gated feed-forwards, no dropout and fused attention, which keeps no scores. The inputs of both
    norms and of the two first matrices are whole on every tensor-parallel rank without sequence parallelism. Experts are
    taken as evenly loaded; they keep the tokens sent to them and what they compute. A rank's tokens, its 1/tensor of the
    sequence, go to `top_k` experts each; every rank of `expert_tensor` gets those of all of them. Where they go is kept in
    int32 and float32.

    In FP8 (`fp8`: the recipe) matrix products keep their inputs in one direction with its scales; all else stays as it is.
    The product after attention keeps attention's own output, but for `delayed`.
    """
    dims, split = model.dims, tensor if sequence else 1
    product = _product_width(dtype_bytes, fp8)
    attention: float = dtype_bytes * model.attention.kept_numbers
    attention += product * model.attention.output_numbers * (fp8 == "delayed")
    norms = 2 * dtype_bytes + product + (dtype_bytes if experts else product)  # the router reads the norm's output
    if experts:
        mlp = (_expert_bytes(model, experts, expert_tensor, dtype_bytes, product) + 12 * experts.count) / split
        mlp += (2 * dtype_bytes + product) * experts.shared / tensor
    else:
        mlp = (2 * dtype_bytes + product) * dims["ffn"] / tensor
    return norms * dims["hidden"] / split + attention / tensor + mlp


def _product_width(dtype_bytes: int, fp8: str | None) -> float:
    """Bytes of a number that a matrix product keeps of its input."""
    return dtype_bytes if fp8 is None else bytes_per_number(fp8)


def _expert_bytes(model: Model, experts: Experts, expert_tensor: int, dtype_bytes: float, product: float) -> float:
    """Bytes that the experts keep of each token; Transformer Engine's grouped ones. `product`: of a number that a product
    reads."""
    read = product * model.dims["hidden"] * expert_tensor
    kept = (2 * dtype_bytes + product) * experts.ffn + _unfused_bytes(model, experts, dtype_bytes)
    return experts.top_k * (read + kept)


def _is_fused(model: Model) -> bool:
    """Whether one kernel computes the gated activation, which then keeps its input alone."""
    return model.description.transformer["activation_func"] == "silu"


def _unfused_bytes(model: Model, experts: Experts, dtype_bytes: float) -> float:
    """Bytes that an activation of several operations (GPT-OSS) keeps of a token at one expert, beside its input and output:
    the clamped gate, its sigmoid, their product, the other half clamped, and that half plus one."""
    return 0 if _is_fused(model) else 5 * dtype_bytes * experts.ffn


def _moved_numbers(model: Model, experts: Experts, parallel: ParallelConfig) -> float:
    """Numbers per token that a mixture of experts is computing, beside what is kept: copies on their way to the experts and
    back, which Megatron-Core holds until the layer's end: permuted, received, gathered, experts' output, in order again."""
    shared, several = parallel.expert_tensor, experts.count > parallel.expert
    copies = 1 + shared + (parallel.expert > 1 and (several or shared > 1)) + several * shared * (1 + (shared > 1))
    return experts.top_k * model.dims["hidden"] * copies


def _kinds(model: Model) -> list[Experts | None]:
    """The kinds of feed-forwards in its layers."""
    share = model.expert_share
    return [None] * (share < 1) + [model.experts] * (share > 0)


def _of_layer(
    model: Model, experts: Experts | None, config: Config, dtype_bytes: int, fp8: str | None
) -> tuple[float, float]:
    """Bytes per token of a layer that is computed again: what it keeps until then, and what it keeps then."""
    parallel = config.actor.parallel
    sizes = {"tensor": parallel.tensor, "expert_tensor": parallel.expert_tensor, "dtype_bytes": dtype_bytes}
    everything = activation_bytes_per_token(model, experts, sequence=parallel.sequence, fp8=fp8, **sizes)
    kept = everything
    if config.actor.recompute == "full":  # each layer's input
        kept = dtype_bytes * model.dims["hidden"] / (parallel.tensor if parallel.sequence else 1)
    elif config.actor.recompute == "selective":
        kept = everything - _recomputed(model, experts, config, dtype_bytes, _product_width(dtype_bytes, fp8))
    return kept, everything


def activations(model: Model, config: Config, dtype_bytes: int) -> float:
    """Bytes on the stage that holds most, as a rule the first: it has as many micro-batches under way as there are stages.
    A layer that is being computed, and the output layer, take their own one after the other: without the latter's."""
    parallel, fp8 = config.actor.parallel, config.actor.fp8
    tokens = config.actor.tokens_per_microbatch / parallel.context
    split = parallel.tensor if parallel.sequence else 1
    stages = stage_numbers(model.dims["layers"], parallel.pipeline, parallel.virtual_pipeline)
    kinds = _kinds(model)
    sizes = {kind: _of_layer(model, kind, config, dtype_bytes, None if fp8 is None else fp8.recipe) for kind in kinds}

    def of_stage(layers: Sequence[int]) -> float:
        """Bytes per token of one micro-batch's activations in a stage of these layers, with its output."""
        mixtures = len(model.expert_layers.intersection(layers)) / len(layers)
        shares = {kind: mixtures if kind else 1 - mixtures for kind in kinds}
        recomputed, per_layer = (sum(shares[kind] * sizes[kind][column] for kind in kinds) for column in (0, 1))
        ends = 0.0  # what the first stage's layers in bf16 keep more
        if fp8 is not None and fp8.bf16_ends:
            more = _of_layer(model, kinds[0], config, dtype_bytes, None)[0] - sizes[kinds[0]][0]
            ends = fp8.bf16_ends * (1 + (len(stages) == 1)) * more
        again = len(layers)
        if config.actor.recompute == "full" and config.actor.recompute_layers is not None:
            again = min(again, config.actor.recompute_layers * parallel.virtual_pipeline)
        return (
            recomputed * again + per_layer * (len(layers) - again) + ends + dtype_bytes * model.dims["hidden"] / split
        )

    def peak(stage: int, layers: Sequence[int]) -> float:
        # 1F1B: a stage's layers for each of the micro-batches under way, one fewer on each later stage.
        batches: float = len(stages) - stage
        if parallel.virtual_pipeline > 1:  # interleaving: 1 + (p - 1) / (p v) times that (section 4.2.3)
            batches = len(stages) + (len(stages) - 1) / parallel.virtual_pipeline
        here = {model.experts if layer in model.expert_layers else None for layer in layers}
        once = max(_of_one_layer(model, kind, config, dtype_bytes, *sizes[kind]) for kind in here)
        return tokens * (of_stage(layers) * batches) + max(0.0, tokens * once - head_workspace(model, config))

    return max(peak(stage, layers) for stage, layers in enumerate(stages))


def _of_one_layer(
    model: Model, experts: Experts | None, config: Config, dtype_bytes: int, kept: float, per_layer: float
) -> float:
    """Bytes per token while a layer is computed backwards, beside what it keeps until then: two gradients, tokens gathered
    from all ranks, experts' copies or a feed-forward's two, and what is computed again."""
    parallel = config.actor.parallel
    split = parallel.tensor if parallel.sequence else 1
    beside = model.dims["hidden"] * (2 / split + (split > 1))
    if experts:
        # Without one kernel for the activation: the gradient of its weighted output in fp32, and those of its two halves.
        unfused = 0 if _is_fused(model) else 4 * experts.top_k * experts.ffn
        beside += (_moved_numbers(model, experts, parallel) + unfused) / split
    else:
        beside += 2 * model.dims["ffn"] / parallel.tensor
    # With `recompute_layers` the last layers, with which a backward pass begins, are kept.
    return dtype_bytes * beside + (per_layer - kept if config.actor.recompute_layers is None else 0)


def _recomputed(model: Model, experts: Experts | None, config: Config, dtype_bytes: int, product: float) -> float:
    """The part of `activation_bytes_per_token` that selective recomputation does not keep. An estimate.

    Fused attention keeps no scores (`core_attn`), and Transformer Engine fuses every norm but the one before experts with the
    matrix product after it: `mlp` computes both again. `product`: bytes of a number that a matrix product reads.
    """
    dims, parallel, modules = model.dims, config.actor.parallel, set(config.actor.recompute_modules)
    split = parallel.tensor if parallel.sequence else 1
    if not experts:
        ffn = (2 * dtype_bytes + product) * dims["ffn"] / parallel.tensor
        return ffn + product * dims["hidden"] / split if "mlp" in modules else 0
    again = dtype_bytes * float(dims["hidden"]) if "layernorm" in modules else 0
    if "moe" in modules:
        again += _expert_bytes(model, experts, parallel.expert_tensor, dtype_bytes, product)
    elif "moe_act" in modules:
        again += experts.top_k * (product * experts.ffn + _unfused_bytes(model, experts, dtype_bytes))
    return again / split


def check_workspace(model: Model, config: Config, data_parallel: int, dtype_bytes: int) -> float:
    """The actor's forward pass over the rollouts of the sync check."""
    rollouts = math.ceil(config.rollout.sync_check_rollouts / data_parallel)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    return _forward_workspace(model, config, min(config.actor.tokens_per_microbatch, rollouts * longest), dtype_bytes)


def forward_workspace(model: Model, config: Config, dtype_bytes: int) -> float:
    """The actor's forward pass over a micro-batch, for log-probs alone."""
    return _forward_workspace(model, config, config.actor.tokens_per_microbatch, dtype_bytes)


def _forward_workspace(model: Model, config: Config, tokens: int, dtype_bytes: int) -> float:
    """A forward pass alone: three hidden states and feed-forward or attention, or the output layer with its hidden states."""
    dims, parallel = model.dims, config.actor.parallel
    split = parallel.tensor if parallel.sequence else 1
    attention = model.attention.most_kept_numbers / parallel.tensor
    layer = dtype_bytes * (3 * dims["hidden"] / split + attention)
    for experts in _kinds(model):
        if experts:
            numbers = _expert_bytes(model, experts, parallel.expert_tensor, 1, 1) + _moved_numbers(
                model, experts, parallel
            )
            ffn, chosen = numbers / split, 12 * experts.count / split
        else:
            gathered = split > 1 and config.actor.fp8 is None  # in FP8 they are gone when the product is there
            ffn, chosen = 3 * dims["ffn"] / parallel.tensor + dims["hidden"] * gathered, 0.0
        layer = max(layer, dtype_bytes * (3 * dims["hidden"] / split + ffn) + chosen)
    tile = min(config.actor.logits_mib * 2**20, tokens / parallel.context * dims["vocab"] * 4 / parallel.tensor)
    head = 2 * dtype_bytes * tokens * dims["hidden"] / parallel.context + tile * (1 if dtype_bytes == 4 else 1.5)
    return max(tokens / parallel.context * layer, head)


def head_workspace(model: Model, config: Config) -> float:
    """A tile of logits in fp32 and bf16, the gradient of the hidden states in fp32, and the tensor of the output matrix's
    shape that autograd wants (actor/head.py)."""
    tokens, hidden = config.actor.tokens_per_microbatch / config.actor.parallel.context, model.dims["hidden"]
    rows = model.dims["vocab"] / config.actor.parallel.tensor
    tile = min(config.actor.logits_mib * 2**20, tokens * rows * 4)
    return tile * 1.5 + tokens * hidden * 4 + rows * hidden * 2


def fp8_weights(model: Model, actor: ActorConfig, stage: int) -> tuple[int, int]:
    """Numbers in the matrices that FP8 products read, on a rank of a stage, and their bytes in FP8; 0 without `actor.fp8`."""
    if actor.fp8 is None:
        return 0, 0
    parallel, ends, stages = actor.parallel, actor.fp8.bf16_ends, actor.parallel.pipeline
    layers = stage_numbers(model.dims["layers"], stages, parallel.virtual_pipeline)[stage]
    layers = layers[ends * (stage == 0) : max(0, len(layers) - ends * (stage == stages - 1))]
    numbers = size = 0
    for rule in model.family.rules:
        if rule.place is not Place.LAYER or not rule.is_projection:
            continue
        copies = sum(map(rule.is_in, layers)) * (model.expert_count // parallel.expert if rule.per_expert else 1)
        rows, columns = shard_shape(rule, model.dims, parallel.expert_tensor if rule.per_expert else parallel.tensor)
        numbers += copies * rows * columns
        size += copies * weight_bytes(rows, columns, actor.fp8.recipe)
    return numbers, size
