"""Steps that measure: updates and offload of an 8B-shaped stack, decoding, a weight sync. On a CPU a small shape shows that
they run; its figures say nothing about a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.build import DTYPES
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.schema import Config
from megatron_rl.models import model_of, read_hf_config
from megatron_rl.models.registry import created_config
from megatron_rl.planning.time.hardware import TABLES
from megatron_rl.planning.time.training import Training
from megatron_rl.rollout.engine import Request, drain
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.sync import make_sync
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.runtime import device
from megatron_rl.selftest.bench import SHAPE, Bench, Figures, sequences
from megatron_rl.selftest.bench import update as step
from megatron_rl.weights.files import MadeWeights

# Qwen3-8B's layers, 8 of its 36; with its output layer tied to the embedding, so that training it fits into 80 GB.
_8B = CreateModelConfig(
    layers=8,
    hidden_size=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn_size=12288,
    vocab_size=151936,
    max_positions=8192,
    tie_embeddings=True,
)
# Dense bf16 FLOP/s by NVIDIA's data sheets.
_PEAKS = {table.name.upper(): table.bf16 for table in TABLES.values()}
_PEAKS |= {"H100 PCIe": 756e12, "H100 NVL": 835e12, "A100": 312e12}
_ROUNDS = 3


def of_card(card: str, names: Iterable[str]) -> str | None:
    """The longest of the names that the card's contains: B200 is in GB200, too."""
    return max((name for name in names if name.upper() in card.upper()), key=len, default=None)


class RandomWeights(MadeWeights):
    """Weights made where they are needed: nothing of their size goes over a disk."""

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = list(self.shape(name))
        shape[dim] = stop - start
        if len(shape) == 1:
            return torch.ones(shape, device=device.device())
        return torch.randn(shape, device=device.device(), dtype=torch.bfloat16) * 0.02


def _shape(bench: Bench) -> CreateModelConfig:
    return _8B if bench.gpu else replace(SHAPE, max_positions=1024, tie_embeddings=True)


def _tokens(bench: Bench, vocab: int) -> list[np.ndarray]:
    return sequences(vocab, (4096,) * 4 if bench.gpu else (128,) * 4)


def _actor(bench: Bench, *overrides: str) -> tuple[Actor, Config]:
    folder = bench.model(_shape(bench), weights=False)
    config = bench.recipe(folder, "run", "actor.tokens_per_microbatch=16384", *overrides)
    return Actor(config, bench.grid, folder, RandomWeights(model_of(read_hf_config(folder)), "BF16", folder)), config


def flops(shape: CreateModelConfig, lengths: list[int]) -> float:
    """FLOPs of one update, without what recomputation adds: matrix products with weights, and causal attention."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.ffn_size)
    products = 6 * (shape.layers * layer + shape.vocab_size * shape.hidden_size) * sum(lengths)
    return products + 6 * shape.layers * queries * sum(length**2 for length in lengths)


def predicted_seconds(card: str, shape: CreateModelConfig, config: Config, lengths: list[int]) -> float | None:
    """Seconds of an update by `plan`'s arithmetic, all tokens in one micro-batch; None for a card that it has no table of."""
    if (name := of_card(card, TABLES)) is None:
        return None
    training = Training(model_of(created_config(shape)), config.actor, 1, TABLES[name])
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return (training.passes(1, sum(lengths), pairs, train=True) + training.optimizer()).seconds


def update(bench: Bench) -> Figures:
    """Optimizer steps on 16,384 packed tokens, after one that warms up; the fastest."""
    shape = _shape(bench)
    actor, config = _actor(bench)
    actor.start_optimizer(config.actor.optimizer, 10)
    tokens = _tokens(bench, shape.vocab_size)
    seconds = []
    for _ in range(1 + _ROUNDS):
        device.synchronize()
        begin = time.perf_counter()
        step(actor, tokens)
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    best, count = min(seconds[1:]), sum(map(len, tokens))
    figures: Figures = {"update s": best, "tokens/s": count / best}
    if bench.gpu:
        figures["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        card, lengths = torch.cuda.get_device_name(), [len(ids) for ids in tokens]
        if (name := of_card(card, _PEAKS)) is not None:
            figures["MFU of bf16's peak"] = flops(shape, lengths) / best / _PEAKS[name]
        predicted = predicted_seconds(card, shape, config, lengths)
        if predicted is not None:
            figures["predicted s"] = predicted
    return figures


def offload(bench: Bench) -> Figures:
    """The optimizer's state to the host and back, copies that overlap waited for; the second time, when buffers are there."""
    actor, config = _actor(bench)
    actor.start_optimizer(config.actor.optimizer, 10)
    step(actor, _tokens(bench, _8B.vocab_size))
    gigabytes = sum(tensor.nbytes for tensor in actor.optimizer_state()) / 1e9
    figures: Figures = {"GB": gigabytes}
    for _ in range(2):
        for name, move in (("to the host", actor.offload), ("back", actor.onload)):
            device.synchronize()
            begin = time.perf_counter()
            move()
            device.synchronize()
            figures[f"GB/s {name}"] = gigabytes / (time.perf_counter() - begin)
    return figures


def decode(bench: Bench) -> Figures:
    """A weight sync into an engine of the same shape, then answers of fixed length, without and with seeds of their own."""
    count, length = (256, 512) if bench.gpu else (8, 32)
    limits = ("rollout.max_prompt_tokens=128", f"rollout.max_tokens={length}", f"rollout.max_concurrent={count}")
    actor, config = _actor(bench, *limits)
    engine = VllmEngine(config, bench.grid, Path(str(config.model.path)))
    sync = make_sync(config, bench.grid, actor, engine, print)
    figures: Figures = {}
    for _ in range(2):  # the first loads kernels
        begin = time.perf_counter()
        sync.push()
        device.synchronize()
        figures["sync s"] = time.perf_counter() - begin
    size = sum(tensor.numel() for _, tensor in actor.iter_hf_weights()) * DTYPES[config.model.dtype].itemsize
    figures["sync GB/s"] = size / 1e9 / float(figures["sync s"])
    prompts = sequences(_shape(bench).vocab_size, (128,) * count * 2)
    for name, own in (("greedy", prompts[:count]), ("seeds of their own", prompts[count:])):
        sampling = Sampling(0.0 if name == "greedy" else 1.0, 1.0, length)
        begin = time.perf_counter()
        engine.submit(
            [Request(("", i), ids.tolist(), sampling, None if name == "greedy" else i) for i, ids in enumerate(own)]
        )
        drawn = sum(len(completion.ids) for completion in drain(engine))
        figures[f"tokens/s, {name}"] = drawn / (time.perf_counter() - begin)
    engine.shutdown()
    return figures
