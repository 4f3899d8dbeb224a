"""Predicted times beside published ones: NeMo-RL's GRPO steps and Megatron-Bridge's pre-training, as their tables give them.

python -m benchmarks.step_time [--json]

Tokens per second and GPU. What the tables do not say is assumed alike for all rows, see `rl` and `pretraining`. Rows marked
`held out` were not used to choose the shares in `megatron_rl/planning/time/hardware.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.config.actor import ActorConfig, FP8Config, MoEConfig, ParallelConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.published import published_config
from megatron_rl.config.schema import RolloutConfig, TrainerConfig
from megatron_rl.models import Model, model_of
from megatron_rl.models.hf_config import HFConfig
from megatron_rl.planning.components import GIB
from megatron_rl.planning.memory import make_plan
from megatron_rl.planning.time.generation import Decoding
from megatron_rl.planning.time.hardware import TABLES
from megatron_rl.planning.time.lengths import Lengths
from megatron_rl.planning.time.step import GENERATE, SYNC, Predictor, StepTime
from megatron_rl.planning.time.training import Training

PROMPT = 100  # tokens; the tables give the mean of prompt and response


def _decoder(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, head_dim: int = 128
) -> HFConfig:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }


def _mixture(decoder: HFConfig, experts: int, top_k: int, expert_ffn: int) -> HFConfig:
    sizes = {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": expert_ffn}
    return {**decoder, **sizes, "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}


# Models that are not in the package: Llama's sizes, and mixtures in the shape of ours. GPT-OSS: full attention in all layers,
# no biases. DeepSeek-V3: its cache is 512 numbers a token, its experts are 256 of which 9 (8 and the shared one), its
# attention has 128 heads without low ranks, and no layer is dense.
SIZES: dict[str, HFConfig] = {
    "Llama3.1-8B": _decoder(32, 4096, 14336, 32, 8, 128256),
    "Llama3-70B": _decoder(80, 8192, 28672, 64, 8, 128256),
    "Llama3.1-405B": _decoder(126, 16384, 53248, 128, 8, 128256),
    "GPT-OSS-120B": _mixture(_decoder(36, 2880, 2880, 64, 8, 201088, 64), 128, 4, 2880),
    "DeepSeek-V3": _mixture(_decoder(61, 7168, 18432, 128, 2, 129280), 256, 9, 2048),
}


def model(name: str) -> Model:
    known = SIZES.get(name) or published_config(name)
    assert known is not None
    return model_of(known)


@dataclass(frozen=True)
class Result:
    """A row: tokens per second and GPU."""

    name: str
    hardware: str
    gpus: int
    layout: str
    published: float
    predicted: float
    held_out: bool

    @property
    def error(self) -> float:
        """Of the time: predicted over published, minus 1."""
        return self.published / self.predicted - 1


# --------------------------------------------------------------------------------------------------------------- RL
@dataclass(frozen=True)
class RL:
    """A row of NeMo-RL's table. `total`: mean tokens of prompt and response, from tokens/s/GPU x GPUs x seconds; `lag`: steps
    between sampling and training; where there is one, `samplers` of the GPUs (None: half) sample while the others train, and
    the next batch's responses take the places of those that end."""

    model: str
    hardware: str
    gpus: int
    engine: int
    layout: tuple[int, int, int, int]  # tensor, context, expert, pipeline
    tokens_per_s: float
    seconds: float
    limit: int = 4096
    prompts: int = 64
    lag: int = 0
    fp8: bool = False
    held_out: bool = False
    samplers: int | None = None


ROWS = (
    RL("Llama3.1-8B", "h100", 16, 1, (1, 1, 1, 2), 1581, 92.8),
    RL("Llama3.1-8B", "h100", 16, 1, (1, 1, 1, 2), 2478, 64.8, lag=1, held_out=True),
    RL("Llama3.1-8B", "h100", 16, 1, (1, 1, 1, 2), 3052, 53.0, lag=1, fp8=True, held_out=True),
    RL("Llama3.1-8B", "gb200", 8, 1, (1, 1, 1, 1), 3359, 91.0),
    RL("Llama3.1-8B", "gb200", 8, 1, (1, 1, 1, 1), 4463, 71.1, lag=1, held_out=True),
    RL("Qwen3-32B", "h100", 32, 4, (4, 1, 1, 4), 571, 376, held_out=True),
    RL("Qwen3-32B", "h100", 64, 4, (4, 1, 1, 4), 538, 200, lag=1),
    RL("Qwen3-32B", "gb200", 16, 1, (2, 1, 1, 1), 1127, 381),
    RL("Qwen3-32B", "gb200", 32, 1, (2, 1, 1, 1), 1025, 210, lag=1, held_out=True),
    RL("Qwen3-30B-A3B", "h100", 32, 2, (1, 1, 8, 1), 1102, 192),
    RL("Qwen3-30B-A3B", "h100", 32, 2, (1, 1, 8, 2), 1414, 152, lag=1, held_out=True),
    RL("Qwen3-30B-A3B", "h100", 192, 2, (1, 1, 8, 1), 1025, 34.5, lag=8, held_out=True, samplers=64),
    RL("Qwen3-30B-A3B", "gb200", 16, 1, (1, 1, 16, 1), 1910, 221, held_out=True),
    RL("Qwen3-235B-A22B", "h100", 128, 16, (2, 2, 16, 8), 58.9, 395, 8192, 16),
    RL("Qwen3-235B-A22B", "h100", 256, 16, (2, 2, 16, 8), 37.4, 312, 8192, 16, held_out=True),
    RL("Qwen3-235B-A22B", "h100", 256, 8, (4, 1, 16, 8), 58.7, 231, 8192, 16, lag=1),
    RL("Qwen3-235B-A22B", "gb200", 64, 8, (2, 2, 16, 4), 163, 286, 8192, 16),
    RL("DeepSeek-V3", "h100", 256, 32, (1, 1, 16, 16), 12.1, 134, 1536, 16, held_out=True),
    RL("DeepSeek-V3", "h100", 512, 32, (1, 1, 16, 16), 12.8, 64.1, 1536, 16, lag=1, held_out=True),
    RL("DeepSeek-V3", "h100", 512, 16, (1, 1, 16, 16), 14.1, 59.2, 1536, 16, lag=1, fp8=True, held_out=True),
    RL("DeepSeek-V3", "gb200", 128, 32, (1, 1, 16, 8), 30.2, 108, 1536, 16, held_out=True),
)


def rl(row: RL) -> tuple[float, StepTime]:
    """Seconds of a step; and the prediction of its phases, with a lag on the GPUs that train.

    Assumed of every row: 32 responses a prompt, 512 in an optimizer step, all scored before it; packed up to the limit;
    a reference policy; whole layers computed again, but for 8B; a vLLM that prepares a batch after the last; an engine has
    60 % of the memory, 90 % on GPUs of its own; lengths with a spread of 0.6; whole tensors are gathered in the sync.
    """
    tensor, context, expert, pipeline = row.layout
    total = row.tokens_per_s * row.gpus * row.seconds / (row.prompts * 32)
    lengths = Lengths.log_normal(total - PROMPT, row.limit - PROMPT, spread=0.6, prompt=PROMPT)
    config = Config(
        run_dir="",
        actor=ActorConfig(
            parallel=ParallelConfig(tensor, pipeline, 1, context, expert, sequence=tensor > 1),
            tokens_per_microbatch=row.limit,
            recompute="none" if row.model == "Llama3.1-8B" else "full",
            fp8=FP8Config() if row.fp8 else None,
            offload=row.lag == 0,
        ),
        rollout=RolloutConfig(
            tensor_parallel=row.engine,
            fp8="blockwise" if row.fp8 else "none",
            group_size=32,
            max_prompt_tokens=PROMPT,
            max_tokens=row.limit - PROMPT,
            async_scheduling=False,
            memory_fraction=0.6 if row.lag == 0 else 0.9,
            sync="whole",
        ),
        trainer=TrainerConfig(prompts_per_step=row.prompts, minibatches=max(1, row.prompts * 32 // 512)),
        algorithm=AlgorithmConfig(),
    )
    config.algorithm.kl.coef = 0.01
    config.algorithm.correction.weight = "token"  # needs all old log-probs before the first update
    sizes, hardware = model(row.model), TABLES[row.hardware]
    samplers = 0 if row.lag == 0 else row.samplers or row.gpus // 2
    plan = make_plan(config, sizes, row.gpus - samplers, hardware.memory_gib * GIB)
    step = Predictor(sizes, hardware, lengths).of(config, plan)
    if row.lag == 0:
        return step.total, step
    responses = row.prompts * 32 * row.engine / samplers
    config.rollout.max_concurrent = max(1, round(responses * row.lag))  # of so many batches at a time
    engine = Decoding(sizes, config.rollout, hardware, plan.cache_tokens, plan.state_tokens)
    samples = _steady_seconds(engine, responses, lengths) + step.seconds[SYNC]
    return max(samples, step.total - step.seconds[GENERATE]), step


def _steady_seconds(engine: Decoding, responses: float, lengths: Lengths) -> float:
    """`responses` of an engine that always has more to draw, as where a batch begins before the last one ends."""
    places, prompts = engine.places(lengths), responses / engine.rollout.group_size
    prompt = engine.prompt_seconds(prompts * lengths.prompt, prompts * lengths.prompt**2 / 2)
    return prompt + responses * lengths.mean / places * engine.step_seconds(places, lengths.prompt + lengths.remaining)


def rl_results() -> Iterator[Result]:
    for row in ROWS:
        seconds, step = rl(row)
        layout = f"engines of {row.engine}, " + " ".join(
            f"{name}{size}" for name, size in zip(("TP", "CP", "EP", "PP"), row.layout, strict=True) if size > 1
        )
        mode = f", {row.lag} off" if row.lag else ""
        name = f"{row.model}{', FP8' if row.fp8 else ''}{mode}"
        yield Result(
            name,
            row.hardware,
            row.gpus,
            layout.strip(),
            row.tokens_per_s,
            step.tokens / seconds / row.gpus,
            row.held_out,
        )


# ------------------------------------------------------------------------------------------------------ pre-training
@dataclass(frozen=True)
class Pretraining:
    """A row of Megatron-Bridge's table, on H100."""

    model: str
    gpus: int
    layout: tuple[int, int, int, int, int]  # tensor, pipeline, context, virtual pipeline, expert
    tokens_per_s: float
    length: int = 4096
    fp8: bool = True
    held_out: bool = False


PRETRAINING = (
    Pretraining("Llama3.1-8B", 8, (1, 1, 1, 1, 1), 14451, 8192),
    Pretraining("Llama3-70B", 64, (4, 8, 1, 5, 1), 1664, 8192, held_out=True),
    Pretraining("Llama3.1-405B", 1024, (8, 8, 2, 8, 1), 328, 8192),
    Pretraining("Qwen3-30B-A3B", 16, (1, 1, 1, 1, 16), 8960, held_out=True),
    Pretraining("Qwen3-235B-A22B", 256, (2, 8, 1, 4, 32), 1712),
    Pretraining("GPT-OSS-120B", 64, (1, 4, 1, 1, 8), 5824, fp8=False, held_out=True),
)


def pretraining(row: Pretraining) -> tuple[float, Training]:
    """Seconds of an optimizer step, and its layout.

    Assumed of every row: one sequence in a micro-batch, 64 micro-batches; nothing computed again; FP8 with a scale per
    tensor; DeepEP; experts evenly loaded; tensor-parallel communication under matrix products.
    """
    tensor, pipeline, context, virtual, expert = row.layout
    actor = ActorConfig(
        parallel=ParallelConfig(tensor, pipeline, virtual, context, expert, sequence=tensor > 1),
        tokens_per_microbatch=row.length,
        fp8=FP8Config(recipe="tensorwise") if row.fp8 else None,
        moe=MoEConfig(dispatcher="deepep"),
    )
    hardware = TABLES["h100"]
    made = Training(model(row.model), actor, row.gpus, hardware, imbalance=1.0, tensor_overlap=hardware.overlap)
    pairs = row.length**2 / 2
    cost = (
        made.passes(64, row.length, pairs, train=True) + made.optimizer() + made.data_communication(row.length, pairs)
    )
    return cost.seconds, made


def pretraining_results() -> Iterator[Result]:
    for row in PRETRAINING:
        seconds, made = pretraining(row)
        layout = " ".join(
            f"{name}{size}" for name, size in zip(("TP", "PP", "CP", "VP", "EP"), row.layout, strict=True) if size > 1
        )
        rate = 64 * row.length * made.data_parallel / seconds / row.gpus
        name = f"{row.model}{'' if row.fp8 else ', bf16'}"
        yield Result(name, "h100", row.gpus, layout or "data parallel", row.tokens_per_s, rate, row.held_out)


def lines(title: str, rows: Iterable[Result]) -> list[str]:
    """A table in Markdown."""
    found = [
        f"| {title} | GPUs | layout | published | predicted | error of the time | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = " | ".join(f"{rate:,.0f}" if rate > 100 else f"{rate:.1f}" for rate in (row.published, row.predicted))
        which = "held out" if row.held_out else ""
        found.append(
            f"| {row.name} | {row.gpus} {row.hardware} | {row.layout} | {rates} | {row.error:+.0%} | {which} |"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {"RL steps": list(rl_results()), "pre-training": list(pretraining_results())}
    if args.json:
        print(json.dumps({name: [vars(row) | {"error": row.error} for row in rows] for name, rows in found.items()}))
        return
    print("\n\n".join("\n".join(lines(title, rows)) for title, rows in found.items()))


if __name__ == "__main__":
    main()
