"""A run that is killed while conversations of several sequences are open, with an environment that remembers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from megatron_rl.config.model import CreateModelConfig
from megatron_rl.resume_proof import starts
from megatron_rl.resume_proof.kills import Kill
from megatron_rl.resume_proof.proof import differences, prove, resolved, turns_of
from megatron_rl.weights.create import create_model
from tests.agents import talking
from tests.agents.test_engines import EXPERTS
from tests.models import tiny
from tests.warm import run_ranks

pytestmark = pytest.mark.engine
TURNS = 5  # of a conversation


def recipe(folder: Path) -> Path:
    """Two prompts a step, of each of which `moody` has two conversations that part; tensor parallel 2, experts replayed."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("what is 1+1?", "who are you?")))
    params = {"turns_each": 2, "parts": True, "remembers": True}
    agent = {
        "name": "tests.agents.talking:moody",
        "params": params,
        "max_turns": TURNS,
        "turn_tokens": 6,
        "sequences": 3,
    }
    create_model(folder / "model", CreateModelConfig(characters=talking.CHARACTERS, vocab_size=64), 3)
    (folder / "model" / "chat_template.jinja").write_text(talking.TEMPLATE)
    tiny.write(folder / "model", "qwen3_moe", **{**EXPERTS, "num_hidden_layers": 1})
    sections = {
        "run_dir": str(folder / "run"),
        "seed": 3,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "tasks": {"train": {"shop": {"source": "jsonl", "path": str(prompts), "chat": True, "agent": agent}}},
        "rewards": {"worth": {"reward": "agent", "params": {"column": "reward"}}},
        "rollout": {"tensor_parallel": 2, "group_size": 2, "max_prompt_tokens": 32, "max_tokens": 200, "cpu_cache_gib": 0.1},
        "actor": {
            "parallel": {"tensor": 2, "sequence": True},
            "moe": {"routing_replay": "rollout"},
            "tokens_per_microbatch": 512,
            "optimizer": {"lr": 0.01},
        },
        "trainer": {"steps": 2, "prompts_per_step": 2},
        "algorithm": {"preset": "grpo"},
        "logging": {"report": False, "samples_per_step": 100},
        "checkpoint": {"every": 1, "keep": 2},
        "launch": {"processes": 2},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return folder / "recipe.yaml"


def asked(run_dir: Path) -> Sequence[str]:
    return sorted((run_dir / "shop.txt").read_text().splitlines())


def test_a_run_that_is_killed_between_turns_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "run_ranks", run_ranks)
    made, straight = recipe(tmp_path), tmp_path / "straight"
    assert starts.start_anew("train", resolved(made, (), straight), straight) == 0
    turns = turns_of(straight)
    assert turns == 2 * 2 * TURNS
    proof = prove(made, (), tmp_path, [Kill("turn", turns + 13)], straight)
    assert proof.found == ["generate of step 2"]
    assert proof.differences == []
    killed = tmp_path / "killed"
    assert asked(killed) == asked(straight), "nothing is asked twice, and nothing is left out"
    said = (killed / "logs" / "attempt_2" / "rank_0.log").read_text()
    assert "conversations of step 2 in the journal" in said
    assert differences(straight, killed) == []
