# ruff: noqa: E402
"""What `rollout.exact` computes with on a GPU, in Triton's interpreter on a CPU: the actor's side and vLLM's engine's.

Started once, with a folder as its argument. Writes `found.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_BATCH_INVARIANT": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.backends import backends
from triton.runtime import interpreter

backends["cpu"] = SimpleNamespace(driver=None)  # else vLLM has no Triton on a CPU

from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers import linear, vocab_parallel_embedding

from megatron_rl.base import exact_rows as exact
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.schema import Config
from megatron_rl.modules import exact_layers
from megatron_rl.runtime import distributed
from megatron_rl.seams import vllm_invariant
from tests.exact import calls

HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 32, 16


def create_dot(builder: object, a: Any, b: Any, d: Any, *_: object) -> Any:
    """numpy's product rounds a row otherwise in another place; in float64 that is lost when it is rounded to float32. And of
    bfloat16 the interpreter would multiply the bits."""

    def wide(handle: Any) -> np.ndarray:
        values = handle.data
        if handle.dtype.scalar == tl.bfloat16:
            values = interpreter._convert_float(values, tl.bfloat16, tl.float32, None).view(np.float32)
        return values.astype(np.float64)

    return interpreter.TensorHandle((wide(a) @ wide(b) + d.data).astype(np.float32), d.dtype.scalar)


class Engine:
    """vLLM's attention of one layer, with its cache: sequences in pages in another order, read in steps."""

    def __init__(self, lengths: list[int], dtype: torch.dtype) -> None:
        pages = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(pages)).to(torch.int32)
        self.table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        for row, (own, count) in enumerate(zip(order.split(pages), pages, strict=True)):
            self.table[row, :count] = own
        self.cache = torch.randn(sum(pages), KV_HEADS, PAGE, 2 * WIDTH).to(dtype)
        self.seen = [0] * len(lengths)

    def step(self, parts: dict[int, tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """Queries, keys and values of the next tokens of some sequences -> their outputs."""
        rows, counts = list(parts), [len(query) for query, _, _ in parts.values()]
        slots = []
        for row, count in zip(rows, counts, strict=True):
            places = torch.arange(self.seen[row], self.seen[row] + count)
            slots.append(self.table[row, places // PAGE].long() * PAGE + places % PAGE)
            self.seen[row] += count
        query, key, value = (torch.cat(sides) for sides in zip(*parts.values(), strict=True))
        impl = calls.implementation(HEADS, KV_HEADS, WIDTH)
        impl.do_kv_cache_update(calls.LAYER, key, value, self.cache, torch.cat(slots))
        keys = [self.seen[row] for row in rows]
        return list(calls.attend_as_the_engine(query, self.cache, self.table[rows], counts, keys).split(counts))


def attention_differs(dtype: torch.dtype) -> float:
    """Between the actor's attention over whole sequences, and the engine's: prompts in parts, then token by token."""
    lengths = [45, 33, 3]
    sides = [torch.randn(sum(lengths), heads, WIDTH).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    whole = vllm_invariant.attend(*sides, offsets, offsets, max(lengths), WIDTH**-0.5).split(lengths)
    parts = [tuple(side.split(lengths)[row] for side in sides) for row in range(3)]
    engine, gave = Engine(lengths, dtype), [list[Tensor]() for _ in lengths]
    for begin, end in ((0, 20), (20, 31), (31, 32), (32, 33), (33, 45)):
        now: dict[int, Any] = {
            row: tuple(side[begin:end] for side in parts[row]) for row in (2, 0, 1) if lengths[row] > begin
        }
        for row, out in zip(now, engine.step(now), strict=True):
            gave[row].append(out)
    return max(float((torch.cat(out) - of_actor).abs().max()) for out, of_actor in zip(gave, whole, strict=True))


def products_differ(dtype: torch.dtype) -> float:
    """Between `exact.linear` of many rows, and the engine's linear and output layers' of a few."""
    on_gpu = SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False, is_cpu=lambda: False)
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((70, 96), (100, 96), (100,)))
    layer: Any = SimpleNamespace(weight=weight)
    worst = 0.0
    for module, method in (
        (linear, linear.UnquantizedLinearMethod()),
        (vocab_parallel_embedding, vocab_parallel_embedding.UnquantizedEmbeddingMethod()),
    ):
        with mock.patch.object(module, "current_platform", on_gpu):
            for given in (bias, None):
                whole = exact.linear(x, weight, given)
                for rows in (slice(0, 1), slice(3, 9), slice(17, 70)):
                    worst = max(worst, float((method.apply(layer, x[rows], given) - whole[rows]).abs().max()))
    return worst


def actors_differ(folder: Path) -> dict[str, float]:
    """Between an actor that computes so, and a plain one: log-probs, and the gradient's norm."""
    from megatron_rl.actor.actor import Actor
    from megatron_rl.algorithms.metrics import Metrics
    from megatron_rl.data.batch import TokenBatch
    from megatron_rl.weights.create import create_model

    create_model(folder / "model", CreateModelConfig(layers=1, hidden_size=64, heads=4, ffn_size=64), seed=0)
    found: list[tuple[Tensor, float]] = []
    config = Config(run_dir=str(folder / "run"))
    config.model.dtype = "float32"
    grid = distributed.initialize(config.actor.parallel, timeout_minutes=2)
    for config.rollout.exact in (False, True):
        actor = Actor(config, grid, folder / "model")
        actor.start_optimizer(config.actor.optimizer, 1)
        batch = TokenBatch.continuations([([2, 3], [*range(4, 40)]), ([5], [6, 7, 8])])
        micro_batches = actor.micro_batches(batch)
        [(log_probs, _)] = actor.log_probs(micro_batches, temperature=1.0)
        update = actor.update(micro_batches, lambda number, scores, entropy: (-scores.sum(), Metrics()), 1.0)
        found.append((log_probs, update.grad_norm))
    (plain, norm), (exactly_computed, exact_norm) = found
    return {
        "log-probs": float((plain - exactly_computed).abs().max()),
        "gradient": abs(exact_norm / norm - 1),
        "same bits": float((plain == exactly_computed).float().mean()),
    }


def main(folder: Path) -> None:
    torch.manual_seed(0)
    interpreter.InterpreterBuilder.create_dot = create_dot
    batch_invariant.num_compute_units = lambda index: 4
    torch.cuda.get_device_capability = lambda device: (9, 0)
    exact_layers.device = SimpleNamespace(has_gpu=lambda: True, device=lambda: torch.device("cpu"))
    found: dict[str, Any] = {"actor": actors_differ(folder)}  # first: it makes the operations those of a GPU
    for dtype in (torch.float32, torch.bfloat16):
        found[str(dtype)] = {
            "unsteady": exact.check_machine(vllm_invariant.attend_from, None, dtype),
            "attention": attention_differs(dtype),
            "products": products_differ(dtype),
        }
    exact.gpu_linear = torch.nn.functional.linear
    found["unsteady with torch's products"] = exact.check_machine(vllm_invariant.attend_from)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
