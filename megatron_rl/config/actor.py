"""The recipe's section `actor`: layout, optimizer, precision, memory and speed of what is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.config.keys import Count, CountOrNone, NonNegative, Positive, Ranks, Section, Tokens, key

Schedule = Literal["constant", "linear", "cosine"]


@dataclass
class ParallelConfig(Section):
    tensor: Ranks = key(1)
    pipeline: Ranks = key(
        1,
        "stages. Layers that do not divide over them: the stages between the first and the last hold as many as "
        "the fullest has to, the first and the last share the rest (94 over 8: 11, six times 12, 11; 5 over 4: 2, "
        "1, 1, 1)",
    )
    virtual_pipeline: Ranks = key(
        1,
        "model chunks per pipeline stage. Layers that do not divide over all chunks: with embedding and output layer "
        "counted as one each (94 over 8 x 4: 2, thirty times 3, 2), or stages whose chunks are alike",
    )
    context: Ranks = key(
        1,
        "context parallelism: this many ranks share the tokens of each sequence, so each holds 1/context of a "
        "micro-batch's activations",
    )
    expert: Ranks = key(
        1,
        "expert parallelism: ranks that a layer's experts are spread over. `expert` × `expert_tensor` must divide "
        "the ranks of a pipeline stage, tensor × context × data",
    )
    expert_tensor: Ranks = key(
        1,
        "ranks that each expert's matrices are cut over, independent of `tensor`: "
        "[layouts-evidence.md](layouts-evidence.md#the-layouts-of-recipesscale)",
    )
    sequence: bool = key(False, "sequence parallelism; needs `tensor` > 1")

    @property
    def splits_gradients(self) -> bool:
        """Whether a micro-batch's gradient is whole on no rank before the reduction over ranks."""
        return self.sequence or max(self.pipeline, self.context, self.expert, self.expert_tensor) > 1


@dataclass
class OptimizerConfig(Section):
    lr: Positive = key(1e-6)
    min_lr: NonNegative = key(0.0, "where `linear` and `cosine` end")
    schedule: Schedule = key("constant", "over all optimizer steps of the run")
    warmup_steps: Annotated[int, Field(ge=0)] = key(0, "optimizer steps of linear warm-up")
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = key([0.9, 0.95])
    eps: Positive = key(1e-8)
    weight_decay: NonNegative = key(0.0, "decoupled, as in AdamW; of all parameters, norms and biases included")
    clip_grad: NonNegative = key(1.0, "largest gradient norm")
    distributed: bool = key(True, "Megatron's DistributedOptimizer: state sharded over data-parallel ranks")
    moments: Literal["float32", "bfloat16"] = key(
        "float32",
        "dtype of Adam's two moments between updates; `bfloat16` (Transformer Engine, bf16 models, `distributed`) is 8 "
        "instead of 12 bytes of state per parameter. Within an update they are fp32 in either case",
    )
    device: Literal["gpu", "cpu"] = key(
        "gpu",
        "where the state is and the update is computed. `cpu` (with `distributed`): the GPU has none of the state; gradients "
        "go to the host and new weights come back: [gpu.md](gpu.md#the-optimizer-on-the-cpu)",
    )


@dataclass
class FP8Config(Section):
    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = key(
        "blockwise", "compute capability from 8.9, 8.9, 9.0, 10.0"
    )
    format: Literal["e4m3", "hybrid"] = key("e4m3", "with `hybrid` gradients are e5m2, which `delayed` needs")
    param_gather: bool = key(
        False, "keep the parameters themselves in FP8; not with `mxfp8`, and with `actor.optimizer.distributed` only"
    )
    bf16_ends: CountOrNone = key(
        0, "so many layers at the beginning and as many at the end of the model compute in bf16; not with `delayed`"
    )


Recomputed = Literal["layernorm", "core_attn", "mlp", "moe", "moe_act"]


@dataclass
class MoEConfig(Section):
    """Mixtures of experts. The router computes in fp32 and has no auxiliary loss; with Transformer Engine all experts of a
    rank are one grouped matrix product, and routing and permutation are fused kernels."""

    dispatcher: Literal["alltoall", "deepep"] = key(
        "alltoall",
        "what brings tokens to their experts: NCCL's all-to-all, or DeepEP's kernels (GPU; package `deep_ep`), made for "
        "experts on several nodes. `deepep` needs `expert` × `expert_tensor` > 1",
    )
    routing_replay: Literal["none", "old_log_probs", "rollout"] = key(
        "none",
        "a token's experts in the updates: those that the router chooses; those that it chose for the old log-probs; those "
        "that the engine chose, for the old log-probs too",
    )
    bias_update_rate: Annotated[float, Field(ge=0, le=1)] = key(
        0.0,
        "how much every update moves the biases by which a router chooses experts (DeepSeek-V3's, GLM-4.5's): up for "
        "experts with fewer tokens than the mean, down for those with more; 0: they stay",
    )


@dataclass
class LoRAConfig(Section):
    """Only adapters beside linear layers are trained: [lora.md](lora.md)."""

    rank: Count = key(meaning="of the adapters")
    alpha: Positive | None = key(None, "what an adapter adds is scaled by `alpha` / `rank`; null: by 1")
    targets: list[str] = key(
        ["all-linear"],
        "which linear layers have one, by the names of Hugging Face's modules: q_proj, k_proj, v_proj, o_proj, gate_proj, "
        "up_proj, down_proj; `all-linear`: all of them",
    )
    experts: bool = key(False, "the experts' linear layers are among them")
    dropout: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "share of the adapters' inputs that updates leave out at random, and they alone: [lora.md](lora.md#dropout)",
    )
    path: str | None = key(
        None,
        "what training begins with: a PEFT folder, as a run's `adapter/` is, of `model.path` and of this rank, alpha and "
        "targets; null: fresh adapters",
    )
    sync: Literal["merged", "adapters"] = key(
        "merged",
        "what the engine gets: `merged`, the whole model with the adapters in its matrices; `adapters`, only these, which "
        "vLLM adds beside the model that it has read from `model.path`: [lora.md](lora.md#adapters-in-the-engine)",
    )

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


@dataclass
class ActorConfig(Section):
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tokens_per_microbatch: Tokens = key(
        8192,
        "packed tokens in one forward pass, per data-parallel rank (its context-parallel ranks share them); must "
        "hold the longest sequence",
    )
    logits_mib: Count = key(64, "MiB of float32 logits that exist at once, on each rank")
    recompute: Literal["none", "selective", "full"] = key(
        "none",
        "what is computed again in the backward pass instead of kept: parts of every layer (`recompute_modules`), or "
        "whole layers (`recompute_layers`); with either, every block of a vision tower",
    )
    recompute_modules: list[Recomputed] = key(
        ["mlp", "moe"],
        "`selective`: which parts. `mlp`: dense feed-forwards; `moe`: router, exchange of tokens and experts; "
        "`core_attn`: attention scores, which fused attention never keeps. With Transformer Engine also `moe_act`: the "
        "experts' activation only; `layernorm`: the norm before experts",
    )
    recompute_layers: Count | None = key(
        None, "`full`: the first so many layers of each model chunk; null: all. Of the others everything is kept"
    )
    overlap: bool | None = key(
        None,
        "data-parallel communication under computation: gradients are summed while the backward pass goes on, weights "
        "gathered in the next forward pass; null: on a GPU, unless `logging.gradient_variance_every` measures",
    )
    moe: MoEConfig = field(default_factory=MoEConfig)
    lora: LoRAConfig | None = key(None, "the section below; null: no adapters, every parameter is trained")
    freeze_vision_tower: bool = key(
        False, "models that read images: the tower stays as it is, without gradients and optimizer state"
    )
    offload: bool = key(False, "GPU: gradients and optimizer state leave the device while the engine generates")
    offload_weights: bool = key(
        False,
        "GPU, with `offload`: the weights leave too, once the engine has them, which leaves room for a larger share "
        "(`rollout.memory_fraction`)",
    )
    fp8: FP8Config | None = key(None, "GPU with Transformer Engine: the section below")
