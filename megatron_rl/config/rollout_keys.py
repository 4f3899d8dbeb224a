"""The section `rollout` of a recipe, see `schema`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.config.keys import Count, PositiveShare, Ranks, Section, Steps, Tokens, key

LEAST_TEMPERATURE = 0.01  # vLLM draws at this one where it is asked for less, but for 0


@dataclass
class PartialConfig(Section):
    """Partial rollouts: a step opens more prompts than it trains on, and generation pauses once it has its groups. What is
    not done waits, with its tokens, log-probs and versions, and goes on under the next weights."""

    chunk_tokens: Tokens = key(
        meaning="new tokens that every open response draws before the step looks whether it has its groups"
    )
    open_prompts: Count | None = key(
        None,
        "prompts with an open group, waiting ones among them; null: 2 × `trainer.prompts_per_step`",
    )
    max_staleness: Annotated[int, Field(ge=1, le=200)] = key(
        4,
        "weight syncs between a response's first token and its training, at most",
    )

    def opened(self, prompts_per_step: int) -> int:
        """`open_prompts`, or what stands for null."""
        return self.open_prompts or 2 * prompts_per_step


@dataclass
class SpeculationConfig(Section):
    """Drafts: guesses of the next tokens by earlier responses to the same prompt, that one pass of the engine's model
    verifies. What is drawn is the same without them."""

    tokens: Annotated[int, Field(ge=1, le=32)] = key(4, "of a draft, at most")
    below: Count = key(
        64,
        "sequences that an engine decodes together, above which nothing is drafted: a pass that has enough to do takes "
        "longer with drafts in it",
    )


@dataclass
class RolloutConfig(Section):
    tensor_parallel: Ranks = key(1, "processes per engine; processes / this many engines share the prompts")
    expert_parallel: bool = key(
        False,
        "mixtures of experts: each process of an engine holds whole experts, its share of them; false: a slice of every one. "
        "Attention is cut over the processes either way",
    )
    fp8: Literal["none", "blockwise"] = key(
        "none",
        "`blockwise`: the engine draws with weights in FP8 (e4m3, one scale per 128 × 128 block) and, on a GPU, activations "
        "rounded to FP8 as they come ([gpu.md](gpu.md#rollouts-in-fp8)). Embedding, output layer, norms and routers stay in "
        "bf16. `algorithm.correction.weight` is then `token` where the recipe does not set it",
    )
    fp8_skip: list[str] = key(
        [],
        "further modules that stay in bf16: patterns (`*`: any characters) of whole names, such as `model.layers.0.*`, "
        "`*.self_attn.*`, `*.mlp.experts`",
    )
    group_size: Annotated[int, Field(ge=1, le=1e5)] = key(8, "rollouts per prompt")
    max_prompt_tokens: Tokens = key(512)
    max_tokens: Tokens = key(512, "new tokens per rollout")
    exact: bool = key(
        False,
        "engine and actor compute with the same operations, each token by itself: the log-probs recorded while drawing are "
        "the actor's old ones bit for bit ([mismatch.md](mismatch.md#exactly-none); not run on a GPU)",
    )
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=2)] = key(
        1.0, "of training rollouts and the actor's log-probs"
    )
    too_long: Literal["error", "drop"] = key("error", "prompts above the limit: an error, or left out")
    memory_fraction: PositiveShare = key(0.6, "GPU: share of the device's memory for the engine while it is awake")
    cpu_cache_gib: Annotated[float, Field(ge=0.001, le=1e6)] = key(1.0, "CPU: KV cache per process")
    max_concurrent: Count = key(512, "sequences decoded together by one engine")
    async_scheduling: bool = key(
        True,
        "GPU: vLLM prepares a batch while the device computes the previous one; false: to find out whether a hang lies there",
    )
    partial: PartialConfig | None = key(
        None,
        "long responses go on in later steps: the section below. `algorithm.correction.weight` is then `token` by "
        "default",
    )
    sync: Literal["sliced", "whole"] = key(
        "sliced",
        "how weights get into the engines: each process gets its own slice, or every tensor whole. Where the engine keeps a "
        "weight in an unknown way they go whole, and the log says so",
    )
    sync_check_every: Steps = key(
        1, "steps between comparisons of log-probs after a weight sync; also before the first step"
    )
    sync_check_rollouts: Count = key(4, "rollouts compared")
    sync_tolerance: Annotated[float, Field(gt=0, le=1e6)] | None = key(
        None,
        "largest mean difference of a log-prob; the 99th percentile may be 10 times it. null: 3e-5 in fp32; in bf16 "
        "0.05, with experts 0.1; with `fp8` or `actor.fp8` 0.2",
    )
    speculation: SpeculationConfig | None = key(
        None, "drafts: the section below; null: every pass of the engine draws one token of a sequence"
    )
