# ruff: noqa: E402
"""What a H100 is told to compute with `rollout.exact`: the kernels, compiled for it without a card.

Started once, with a folder as its argument. Writes `found.json`: of each kernel, for the ways in which engine and actor call
it, how many different sequences of floating-point instructions there are.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_BATCH_INVARIANT": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=None)  # else vLLM has no Triton on a CPU
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.determinism import batch_invariant_configs as configs

del backends["cpu"]

from megatron_rl.base import exact_rows as exact
from megatron_rl.seams import vllm_invariant
from tests.exact.calls import attend_as_the_engine

FLOATING = re.compile(
    r"\b((?:fma|mul|add|sub|ex2|lg2|max|min|mma|wgmma|cvt|div|rcp|neg|shfl)(?:\.[a-z0-9_:]+)*\.b?f(?:32|16)(?:x2)?(?:\.[a-z0-9_]+)*)"
)
TUNED = (12288, 2048)  # by vLLM, of weights on Hopper
KEYS = 300


class Instructions:
    """Compiles what is launched meanwhile, in place of launching it."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ...]] = []
        run = JITFunction.run

        def compile_only(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
            compiled = run(kernel, *arguments, warmup=True, **options)
            self.found.append(tuple(FLOATING.findall(compiled.asm["ptx"])))
            return compiled

        JITFunction.run = compile_only

    def different(self, calls: Iterator[None]) -> int:
        self.found.clear()
        for _ in calls:
            pass
        assert all("mma" in " ".join(found) for found in self.found), "the pattern sees products"
        return len(set(self.found))


def products(rows_of_weight: int, width: int) -> Iterator[None]:
    weight = torch.empty(rows_of_weight, width, dtype=torch.bfloat16)
    for rows in (1, 2, 16, 40, 128, 4096, 5001):
        yield exact.linear(torch.empty(rows, width, dtype=torch.bfloat16), weight)


def attention(heads: int, kv_heads: int, width: int) -> Iterator[None]:
    for queries in (1, 299, KEYS):
        query, key = (
            torch.empty(size, dtype=torch.bfloat16) for size in ((queries, heads, width), (KEYS, kv_heads, width))
        )
        offsets = torch.tensor([0, queries]), torch.tensor([0, KEYS])
        yield vllm_invariant.attend(query, key, key, *offsets, KEYS, width**-0.5)
        for page in (16, 32, 64, 128):
            cache = torch.empty(-(-KEYS // page), kv_heads, page, 2 * width, dtype=torch.bfloat16)
            table = torch.arange(len(cache), dtype=torch.int32)[None]
            yield attend_as_the_engine(query, cache, table, [queries], [KEYS])


def main(folder: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    batch_invariant.num_compute_units = lambda index: 132
    instructions = Instructions()
    configs._TUNED_MATMUL_CONFIGS_FOR_DEVICE = configs._BATCH_INVARIANT_MATMUL_TUNED_CONFIGS["hopper"]
    configs._TUNED_MATMUL_CONFIGS_RESOLVED = True
    exact.gpu_linear = batch_invariant.linear_batch_invariant
    found = {"as vLLM has tuned it": instructions.different(products(*TUNED))}
    vllm_invariant.use()
    for shape in (TUNED, (6144, 4096), (1000, 96)):
        found[f"product {shape}"] = instructions.different(products(*shape))
    for heads in ((32, 8, 128), (28, 4, 128), (14, 2, 64)):
        found[f"attention {heads}"] = instructions.different(attention(*heads))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
