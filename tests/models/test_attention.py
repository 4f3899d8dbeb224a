"""Attention as an object of a family: nobody outside `models` knows its sizes by name, and another kind takes its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from megatron_rl.actor.build import transformer_config
from megatron_rl.config.actor import ActorConfig
from megatron_rl.config.published import published_config
from megatron_rl.models import Model, model_of
from megatron_rl.models.attention import GroupedQuery
from megatron_rl.models.experts import Experts
from megatron_rl.planning.activations import activation_bytes_per_token
from megatron_rl.planning.memory import cache_bytes_per_token

PACKAGE = Path(__file__).parents[2] / "megatron_rl"
SYMBOLS = {*GroupedQuery(1, 1, 1).dims, *Experts(1, 1, 1).dims}


def sizes_by_name(code: str) -> Iterator[str]:
    """The symbols of attention and experts that are looked up in something called `dims`."""
    for node in ast.walk(ast.parse(code)):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            where, key = node.value, node.slice
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            where, key = node.func.value, node.args[0]
        if isinstance(key, ast.Constant) and key.value in SYMBOLS and ast.unparse(where).rpartition(".")[2] == "dims":
            yield f"{ast.unparse(where)}: {key.value}"


@pytest.mark.parametrize("package", sorted({path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE / "models"}))
def test_sizes_of_attention_and_experts_are_asked_of_their_objects(package: Path) -> None:
    named = {path.name: list(sizes_by_name(path.read_text(encoding="utf-8"))) for path in package.glob("*.py")}
    assert not {name: found for name, found in named.items() if found}


def test_a_size_by_name_would_be_found() -> None:
    code = "def f(model):\n    return model.dims['kv'] + dims.get('experts', 0) + dims['hidden']"
    assert sorted(sizes_by_name(code)) == ["dims: experts", "model.dims: kv"]


@dataclass(frozen=True)
class Latent(GroupedQuery):
    """As far as it is asked here: a cache of latents, whole on every rank, and fewer numbers kept."""

    config_class: ClassVar[str] = "MLATransformerConfig"
    kept_numbers = 1000

    def cache_numbers(self, tensor: int) -> int:
        return 576


def test_another_attention_takes_its_place_in_the_plan_and_in_megatrons_configuration() -> None:
    model = model_of(published_config("Qwen3-8B") or {})
    attention = Latent(**vars(model.attention))
    latent = Model(model.family, replace(model.description, attention=attention))
    assert cache_bytes_per_token(latent, tensor=4, dtype_bytes=2) == 36 * 576 * 2
    kept = [activation_bytes_per_token(one, None, tensor=1, sequence=False) for one in (model, latent)]
    assert kept[0] - kept[1] == 2 * (model.attention.kept_numbers - 1000)
    built = transformer_config(latent.description, ActorConfig(), torch.float32)
    assert type(built).__name__ == "MLATransformerConfig"


def test_a_layout_that_attention_refuses_names_the_key_and_the_field() -> None:
    attention = GroupedQuery(heads=8, kv_heads=2, head_dim=4)
    [problem] = attention.problems(4, "actor.parallel.tensor")
    assert "`actor.parallel.tensor` (4): num_key_value_heads" in problem
    [problem] = attention.engine_problems(3, "rollout.tensor_parallel")
    assert "`rollout.tensor_parallel` (3): num_attention_heads" in problem
    with pytest.raises(ValueError, match="num_attention_heads"):
        attention.engine_slices(0, 3)
