"""`megatron_rl.planning.exact` in a process of its own, and the same with tensors that have content; prints JSON.

Called as `python -m tests.planning.counted CASES`. A case: `recipe`, `overrides`, `model` (its config.json), `world`,
`fused`, `content` (tensors on the CPU), and `ranks`: what these hold, only built, with the optimizer's bytes of all ranks of
their stage; null: all stages, with their passes. A string is a refusal.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict
from typing import Any


def cpu_attention(
    query: Any, key: Any, value: Any, is_causal: bool, scale: float | None, enable_gqa: bool = False, **_: Any
) -> Any:
    """The kernel that torch takes on a CPU; for tensors without content it would take another."""
    import torch

    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, is_causal, scale=scale)[0]


def no_card(*args: Any, **options: Any) -> None:
    """A product of Transformer Engine's, which where it is installed stands in Megatron-Core's router."""
    raise RuntimeError("Found no NVIDIA driver on your system")


def main() -> None:
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    from tests.imports import import_all

    import_all()
    import torch
    from megatron.core.transformer.moe import moe_utils

    torch.nn.functional.scaled_dot_product_attention = cpu_attention
    from megatron_rl.config import load_recipe
    from megatron_rl.models import registry
    from megatron_rl.planning import exact
    from tests.models.mixed import FAMILY

    registry.FAMILIES = (*registry.FAMILIES, FAMILY)

    found: list[Any] = []
    for case in json.loads(sys.argv[1]):
        where, model, world = torch.device("cpu") if case["content"] else exact.META, case["model"], case["world"]
        config = load_recipe(case["recipe"], case["overrides"])
        try:
            moe_utils.te_general_gemm = no_card if case.get("fused") else None
            if case["ranks"] is None:
                found.append(
                    [asdict(memory) for memory in exact.measure(config, model, world, fused=case["fused"], where=where)]
                )
                continue
            of_ranks = []
            for rank in case["ranks"]:
                with exact.built_rank(exact.with_plain_layers(config), model, rank, world, where) as (actor, _, _):
                    held = exact.state_of(actor)
                    of_ranks.append(
                        asdict(held)
                        | {"of_stage": [own for _, own in exact._optimizer_bytes(actor, held.optimizer_bytes)]}
                    )
            found.append(of_ranks)
        except ValueError as error:
            found.append(str(error))
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
