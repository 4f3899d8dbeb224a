from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron_rl.config import Config, load_recipe

RECIPE = {
    "run_dir": "runs/test",
    "model": {"create": {}, "dtype": "float32"},
    "tasks": {
        "train": {"sums": {"source": "reasoning_gym", "name": "chain_sum", "size": 10}},
        "eval": {"held_out": {"source": "reasoning_gym", "name": "chain_sum", "size": 5, "seed": 2}},
    },
    "rewards": {"correct": {"reward": "puzzle"}},
    "rollout": {"max_prompt_tokens": 32, "max_tokens": 48},
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a YAML file into a folder of its own, which is also the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(tree: object, name: str = "recipe.yaml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False))
        return path

    return write


@pytest.fixture
def recipe(write: Callable[..., Path]) -> Callable[..., Config]:
    """The recipe above with overrides."""
    path = write(RECIPE)
    return lambda *overrides: load_recipe(path, overrides)
