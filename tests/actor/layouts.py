"""What one layout makes of one batch: run by every rank, saved by the first."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.config.actor import OptimizerConfig, ParallelConfig
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch, TrainBatch
from megatron_rl.models.rope import scaled
from megatron_rl.trainer.minibatch import minibatches
from megatron_rl.weights.create import create_model
from tests.models import seeing, tiny

SHAPE = CreateModelConfig(layers=6, hidden_size=64, heads=4, kv_heads=2, head_dim=16, ffn_size=96, vocab_size=61)
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
# With eps far above every gradient, Adam's step is proportional to the gradient (times its momentum): it neither blows up
# the rounding of gradients near 0 to whole learning rates, as it does at 1e-8, nor hides a gradient's size as that would.
LINEAR_ADAM = OptimizerConfig(lr=100.0, eps=100.0, betas=[0.9, 0.95], weight_decay=1e-4, clip_grad=0.5)

BIASED = ("deepseek_v3", "glm4_moe")  # variants of `tiny` whose experts are chosen by biases, which updates move


@dataclass(frozen=True)
class Layout:
    name: str
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    sequence: bool = False
    distributed: bool = True
    tokens_per_microbatch: int = 96
    modes: tuple[str, ...] = ("seq-mean-token-mean",)
    tied: bool = False  # input and output embeddings are one tensor, on two pipeline stages; and the scaling is yarn
    section: dict[str, Any] = field(default_factory=dict)  # of the recipe's `algorithm`
    experts: bool = False  # a mixture of experts
    expert: int = 1  # ranks that the experts are spread over
    expert_tensor: int = 1  # ranks that each expert is cut over
    dtype: str = "float32"
    replay: bool = False  # of the experts that tokens went to when the old log-probs were computed
    given: bool = False  # experts of all tokens, as an engine would give them
    dropped: bool = False  # a fault: the last token of one response counts for nothing
    images: bool = False  # a model with a vision tower, and prompts with images
    variant: str = ""  # the model is this one of `tiny`
    deepstack: bool = False  # a model that reads images, whose tower feeds the decoder's first layers too
    actor: dict[str, Any] = field(default_factory=dict)  # further keys of the recipe's `actor`
    measured: bool = False  # the variance of the first update's gradient

    @property
    def model(self) -> str:
        if self.variant:
            return f"model-{self.variant}"
        if self.images or self.deepstack:
            return f"model-deepstack-{self.experts}" if self.deepstack else "model-images"
        return "model-experts" if self.experts else f"model-{self.tied}"


# Where a layout's gradients are wrong in Megatron-Core, and no run comes to: docs/upstream.md.
AVOIDED = (
    ("tensor_parallel.cross_entropy", "_VocabParallelCrossEntropy", "apply"),
    ("transformer.multi_token_prediction", "MTPLossAutoScaler", "apply"),
    ("transformer.attention", "CrossAttention", "__init__"),
    ("transformer.moe.moe_utils", "MoEAuxLossAutoScaler", "apply"),
    ("distributed.fsdp.mcore_fsdp_adapter", "FullyShardedDataParallel", "__init__"),
)


def refuse_what_is_avoided() -> None:
    """From here on, this process raises AssertionError where it comes to one of `AVOIDED`, or where a model is given a
    padding mask, which Megatron-Core cuts over the global tensor-parallel group."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    for module, name, method in AVOIDED:
        setattr(getattr(importlib.import_module(f"megatron.core.{module}"), name), method, _raise)
    prepare = GPTModel._preprocess

    def prepared(*args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return prepare(*args, **kwargs) if padding_mask is None else _raise()

    GPTModel._preprocess = prepared


def _raise(*_: object, **__: object) -> None:
    raise AssertionError("Megatron-Core's gradients are wrong here in some layouts: docs/upstream.md")


def one_of_each_family() -> dict[str, bool]:
    """The first of `tiny`'s variants of every family, and whether it is a mixture of experts."""
    import transformers

    first: dict[str, str] = {}
    for variant, (config, _) in tiny.VARIANTS.items():
        first.setdefault(config, variant)
    configs = {variant: getattr(transformers, name)(**tiny.VARIANTS[variant][1]) for name, variant in first.items()}
    return {variant: "num_experts_per_tok" in config.to_dict() for variant, config in configs.items()}


def make_models(root: Path, layers: int | None = None) -> None:
    """`layers`: of the dense models and the experts', which are then made alone. By default these have 6 and 4."""
    for tied in (False, True):
        shape = CreateModelConfig(
            **{**vars(SHAPE), "layers": layers or SHAPE.layers, "tie_embeddings": tied, "init_std": 0.15}
        )
        create_model(root / f"model-{tied}", shape, seed=5)
    scaling = {"factor": 64, "original_max_position_embeddings": 16, "rope_type": "yarn"}
    config = root / "model-True" / "config.json"
    config.write_text(json.dumps(scaled(json.loads(config.read_text()), scaling)))
    (root / "model-experts").mkdir()
    tiny.write(root / "model-experts", "qwen3_moe", **({"num_hidden_layers": layers} if layers else {}))
    if layers:
        return
    seeing.write(root / "model-images", tied=True)
    for experts, kind in ((False, "qwen3_vl"), (True, "qwen3_vl_moe")):
        seeing.write(root / f"model-deepstack-{experts}", kind=kind)
    for variant in one_of_each_family():
        tiny.write(root / f"model-{variant}", variant)


def make_batch(
    seed: int = 0, groups: int = 6, group_size: int = 4, given: bool = False, parted: bool = False
) -> TrainBatch:
    """Random rollouts of very different lengths, with advantages of both signs and engine log-probs that are off.

    Args:
        given: with experts that the engine chose, at random, too.
        parted: every second rollout has two or three sequences.
    """
    rng = np.random.default_rng(seed)
    count = groups * group_size
    prompts = [rng.integers(2, 61, size=rng.integers(2, 12)) for _ in range(groups)]
    responses = [rng.integers(2, 61, size=rng.integers(1, 40)) for _ in range(count)]
    pairs = [(prompts[i // group_size], responses[i]) for i in range(count)]
    sequences = in_parts(pairs, range(0, count, 2)) if parted else TokenBatch.continuations(pairs)
    if given:  # of 4 layers, 3 of 8 each: `tiny`'s
        scores = np.random.default_rng(seed).random((sum(sequences.lengths), 4, 8))
        ends = np.cumsum(sequences.lengths)
        parts = np.split(scores.argsort(axis=2)[..., :3].astype(np.uint8), ends[:-1])
        sequences.experts = dict(enumerate(parts))
    return TrainBatch(
        sequences=sequences,
        rollout_logprobs={i: rng.normal(-5.3, 0.3, size=len(responses[i])).astype(np.float32) for i in range(count)},
        advantages=_spread(rng.normal(size=count), [len(ids) for ids in responses]),
        group=np.arange(count) // group_size,
    )


def in_parts(pairs: Sequence[tuple[np.ndarray, np.ndarray]], rows: Iterable[int]) -> TokenBatch:
    """Prompts and responses; those in `rows` as rollouts whose further sequences begin with the prompt and what was drawn
    before, which is given, or with an other's prompt: the second with the one, the third with the other."""
    lengths, tokens, masks, parts = (
        list[int](),
        dict[int, np.ndarray](),
        dict[int, np.ndarray](),
        dict[int, list[int]](),
    )
    for row, (prompt, response) in enumerate(pairs):
        pieces = np.array_split(response, min(3, len(response))) if row in set(rows) else [response]
        contexts = [prompt, np.concatenate([prompt, pieces[0]]), pairs[row - 1][0]][: len(pieces)]
        sequences = [np.concatenate(both) for both in zip(contexts, pieces, strict=True)]
        drawn = [
            np.arange(len(sequence)) >= len(context) for sequence, context in zip(sequences, contexts, strict=True)
        ]
        tokens[row], masks[row] = np.concatenate(sequences), np.concatenate(drawn)
        lengths.append(len(tokens[row]))
        if len(pieces) > 1:
            parts[row] = [len(sequence) for sequence in sequences]
    return TokenBatch(lengths, tokens, masks, sequence_lengths=parts)


def _spread(per_rollout: np.ndarray, lengths: list[int]) -> dict[int, np.ndarray]:
    return {row: np.full(length, per_rollout[row], dtype=np.float32) for row, length in enumerate(lengths)}


def seeing_batch(folder: Path) -> TrainBatch:
    """Sequences with images and without, as four groups."""
    sequences, rng = seeing.batch(folder), np.random.default_rng(0)
    sampled = {row: int(mask.sum()) for row, mask in sequences.loss_mask.items()}
    return TrainBatch(
        sequences=sequences,
        rollout_logprobs={i: rng.normal(-5.3, 0.3, size=count).astype(np.float32) for i, count in sampled.items()},
        advantages=_spread(rng.normal(size=len(sequences)), [sampled[row] for row in range(len(sequences))]),
        group=np.arange(len(sequences)),
    )


def run_layouts(root: str, layouts: list[Layout]) -> None:
    """One rank of every layout in turn."""
    refuse_what_is_avoided()
    for layout in layouts:
        result = _run(Path(root), layout)
        if result is not None:
            torch.save(result, Path(root) / f"{layout.name}.pt")


def measure_alone(root: str, layouts: list[Layout]) -> None:
    """The variance that one process finds over the parts of a layout's gradient: `<name> measured alone.pt`."""
    for layout in layouts:
        parts = {mode: result["parts"] for mode, result in torch.load(Path(root) / f"{layout.name}.pt").items()}
        alone = replace(
            layout, tensor=1, pipeline=1, virtual=1, context=1, sequence=False, expert=1, expert_tensor=1, actor={}
        )
        torch.save(_run(Path(root), alone, parts), Path(root) / f"{layout.name} measured alone.pt")


def _run(root: Path, layout: Layout, parts: dict[str, list[list[int]]] | None = None) -> dict[str, Any] | None:
    from megatron.core import parallel_state

    from megatron_rl.runtime import distributed

    config = Config(run_dir=str(root / "run"))
    config.model.dtype = layout.dtype
    config.actor.parallel = ParallelConfig(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual,
        context=layout.context,
        sequence=layout.sequence,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
    )
    config.actor.optimizer = OptimizerConfig(**{**vars(LINEAR_ADAM), "distributed": layout.distributed})
    config.actor.tokens_per_microbatch = layout.tokens_per_microbatch
    config.actor.moe.routing_replay = "rollout" if layout.given else "old_log_probs" if layout.replay else "none"
    config.actor.moe.bias_update_rate = 0.01 if layout.variant in BIASED else 0.0
    for key, value in layout.actor.items():
        setattr(config.actor, key, value)
    config.actor.logits_mib = 1
    config.trainer.minibatches = 2
    config.rollout.temperature = 0.8
    config.rollout.max_tokens = 40
    grid = distributed.initialize(config.actor.parallel, timeout_minutes=2)
    folder = root / layout.model
    actor = Actor(config, grid, folder)
    result = {mode: _updates(config, actor, folder, mode, layout, (parts or {}).get(mode)) for mode in layout.modes}
    parallel_state.destroy_model_parallel()
    return result if grid.is_main else None


def _updates(
    config: Config, actor: Actor, folder: Path, mode: str, layout: Layout, parts: list[list[int]] | None
) -> dict[str, Any]:
    """Two optimizer steps from the folder's weights, by the trainer's own update; `parts`: the first's micro-batches."""
    from megatron_rl.algorithms import make_algorithm
    from megatron_rl.runtime.step_timer import StepTimer
    from megatron_rl.trainer.learner import Learner

    algorithm = make_algorithm(
        {"preset": "grpo", "aggregation": mode, **layout.section}, max_tokens=config.rollout.max_tokens
    )
    actor.load_hf(folder)
    actor.keep_reference()
    actor.start_optimizer(config.actor.optimizer, 2)
    batch = seeing_batch(folder) if layout.images or layout.deepstack else make_batch(given=layout.given, parted=True)
    if layout.dropped:
        batch.sequences.loss_mask[3][-1] = False
        for per_token in (batch.rollout_logprobs, batch.advantages):
            per_token[3] = per_token[3][:-1]
    learner = Learner(config, actor, algorithm, StepTimer())
    choices = _choices(learner, [*batch.sequences.tokens.values()]) if layout.given else None
    first = minibatches(batch.group, config.trainer.minibatches)[0]
    with mock.patch.object(actor, "shares", _first_as(actor.shares, first, parts)):
        found = _parts(actor, batch.sequences.lengths, first)
        metrics = learner.update(batch, None, measure_variance=layout.measured)
    weights = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
    variance = {name: metrics.pop(name) for name in [*metrics] if name.startswith("gradient/")}
    return {"metrics": metrics, "weights": weights, "variance": variance, "parts": found, "choices": choices}


def _choices(learner: Any, sequences: list[np.ndarray]) -> list[Tensor]:
    """Returns the experts that each token is routed to, after a check that replaying them gives the same log-probs."""
    scored = learner.score(sequences)
    for again, before in zip(scored.again(scored.experts), scored.log_probs, strict=True):
        np.testing.assert_allclose(again, before, rtol=0, atol=1e-6)
    return [torch.from_numpy(chosen) for chosen in scored.experts]


def _parts(actor: Actor, lengths: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
    """Rows of the parts that a minibatch's gradient is measured in, where ranks have shares of it only."""
    by_place = [list(itertools.chain(*micros)) for micros in zip(*actor.shares(lengths, rows), strict=True)]
    count = actor.grid.pp if actor.config.parallel.virtual_pipeline > 1 else 1
    return [list(itertools.chain(*by_place[at : at + count])) for at in range(0, len(by_place), count)]


def _first_as(
    shares: Callable[..., list[list[list[int]]]], first: Sequence[int], parts: list[list[int]] | None
) -> Callable[..., list[list[list[int]]]]:
    """Shares whose micro-batches of the rows `first` are `parts`, where there are any."""

    def changed(lengths: Sequence[int], rows: Sequence[int]) -> list[list[list[int]]]:
        return [parts] if parts is not None and list(rows) == list(first) else shares(lengths, rows)

    return changed


def distance(own: Tensor, want: Tensor) -> float:
    """Of two tensors, relative to the second's size."""
    return float((own.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
