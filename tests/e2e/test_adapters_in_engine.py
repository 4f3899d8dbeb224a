"""With `actor.lora.sync=adapters` the engine computes what the actor does after every sync, and a wrong adapter is seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config import check, load_recipe, to_yaml
from megatron_rl.runtime.attempts import new_attempt, rank_environment
from tests.warm import run_ranks

from . import adapting
from .job import write_recipe

LORA = "actor.lora={rank: 12, alpha: 24, targets: [q_proj, v_proj, o_proj, up_proj, down_proj], sync: adapters}"


@pytest.mark.engine
def test_adapters_go_to_the_engine_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    recipe = check(load_recipe(write_recipe(tmp_path), (LORA, "checkpoint.every=0")))
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe))
    environment = {**rank_environment(0), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    outcome = run_ranks([sys.executable, str(adapting.__file__), str(run_dir)], 2, new_attempt(run_dir), environment)
    assert outcome.code == 0, outcome.message
    verdicts = json.loads((run_dir / "verdicts.json").read_text())
    assert [verdicts[name] for name in ("sync 1", "sync 2", "at last")] == ["good"] * 3
    assert "log-probs differ from the actor's" in verdicts["another value"]
    assert "vLLM has no layer for 5 of the actor's adapters; the first is model.layers.7" in verdicts["another name"]
    begin, first, second, last = (np.concatenate(scores) for scores in verdicts["scores"])
    assert np.abs(begin - first).mean() > 0.01  # far above what the check lets pass
    assert np.abs(first - second).mean() > 0.01
    assert np.array_equal(second, last)
