"""`megatron-rl reward-model`: whole runs, their resume and export, and pairs that cannot be learned from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_rl.config import ConfigError, load_recipe
from megatron_rl.config.machine import Machine
from megatron_rl.data.sample import Sample
from megatron_rl.preflight.recipe import check_recipe
from megatron_rl.rewards import make_reward
from megatron_rl.tasks.preferences import conversations, pairs_of
from tests.actor.processes import spawn
from tests.conversion.convert import tensors
from tests.e2e.job import RECIPE, untimed
from tests.trainer.reward_runs import run_all

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a}-{b}", "margin": a / 10}
    for a in range(1, 6)
    for b in range(1, 6)
]


def write_recipe(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        **{key: RECIPE[key] for key in ("seed", "model", "launch")},
        "run_dir": str(folder / "run"),
        "tasks": {
            "train": {"pairs": {"source": "jsonl", "path": str(folder / "pairs.jsonl")}},
            "eval": {"held_out": {"source": "split", "of": "pairs", "hold_out": 5}},
        },
        "rollout": {"max_prompt_tokens": 8, "max_tokens": 8},
        "actor": {"tokens_per_microbatch": 64},
        "reward_model": {"epochs": 1.5, "batch_size": 7, "log_every": 1, "eval_every": 2, "optimizer": {"lr": 1e-2}},
        "checkpoint": {"every": 2, "keep": 9},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    write_recipe(folder, PAIRS)
    spawn(run_all, 2, str(folder))
    return folder


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [untimed(json.loads(line)) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ranks
def test_a_stopped_run_continues_bit_for_bit_and_at_another_layout(root: Path) -> None:
    want = rows(root / "straight")
    assert [row["step"] for row in want] == [1, 2, 3, 4, 5], "1.5 epochs of 20 pairs in batches of 7"
    assert [row["step"] for row in want if "eval/held_out/accuracy" in row] == [2, 4, 5]
    assert want[-1]["reward_model/loss"] < want[0]["reward_model/loss"]
    assert [row["step"] for row in rows(root / "stopped")] == [1, 2]
    assert rows(root / "continued") == want
    for own, expected in zip(rows(root / "elsewhere"), want, strict=True):
        assert own == pytest.approx(expected, rel=1e-4, abs=1e-6)
    exported, expected = tensors(root / "continued" / "export"), tensors(root / "straight" / "export")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())


@pytest.mark.ranks
def test_the_export_scores_the_held_out_pairs_as_the_run_did(root: Path) -> None:
    reward = make_reward("reward_model", path=str(root / "straight" / "export"))
    recipe = load_recipe(root / "recipe.yaml")
    from transformers import AutoTokenizer

    from megatron_rl.tasks import load_tasks

    tokenizer = AutoTokenizer.from_pretrained(root / "straight" / "export")
    held_out = load_tasks(recipe.tasks, tokenizer).eval["held_out"]
    margins = []
    for sample in held_out:
        chosen, rejected = (reward(str(sample.metadata[side]), sample.as_mapping()) for side in ("chosen", "rejected"))
        margins.append(float(chosen) - float(rejected))  # type: ignore[arg-type]
    last = rows(root / "straight")[-1]
    assert last["eval/held_out/margin"] == pytest.approx(sum(margins) / 5, rel=1e-5)
    assert last["eval/held_out/accuracy"] == sum(margin > 0 for margin in margins) / 5


# ---------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "1"}, "the pair's 'rejected' is missing"),
        ({"chosen": "1", "rejected": "1"}, "'chosen' and 'rejected' are the same"),
        ({"chosen": "", "rejected": "1"}, "the pair's 'chosen' must be text or a list of chat messages, not ''"),
        ({"chosen": [], "rejected": "1"}, "must be text or a list"),
        ({"chosen": 3, "rejected": "1"}, "must be text or a list"),
    ],
)
def test_a_pair_that_is_none_is_named_before_anything_starts(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    recipe = load_recipe(write_recipe(tmp_path, [PAIRS[0], {"prompt": "1+1=", **row}]))
    with pytest.raises(ConfigError, match=message) as caught:
        check_recipe(recipe, "reward-model", Machine(gpus=0))
    assert "pairs.jsonl, line 2" in str(caught.value)


def test_both_sides_of_the_longest_pair_must_fit_a_micro_batch(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, PAIRS), ["actor.tokens_per_microbatch=31"])
    with pytest.raises(ConfigError, match=r"must hold both sides of the longest pair, 2 x .* = 32"):
        check_recipe(recipe, "reward-model", Machine(gpus=0))
    recipe = load_recipe(write_recipe(tmp_path, PAIRS), ["reward_model.epochs=null"])
    with pytest.raises(ConfigError, match=r"`reward_model.steps` is 0: there is nothing to do"):
        check_recipe(recipe, "reward-model", Machine(gpus=0))


def test_a_reward_model_is_no_policy(root: Path, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, PAIRS), [f"model.path={root / 'straight' / 'export'}"])
    check_recipe(recipe, "reward-model", Machine(gpus=0))
    with pytest.raises(ConfigError, match="is a reward model: it gives a score, and generates nothing"):
        check_recipe(recipe, "sft", Machine(gpus=0))


QUESTION = {"role": "user", "content": "hello?"}
ANSWER, OTHER = {"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "go"}


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ([QUESTION], "hi", "go"),
        ([QUESTION], [ANSWER], [OTHER]),
        ([QUESTION], [QUESTION, ANSWER], [QUESTION, OTHER]),
        ("hello?", [QUESTION, ANSWER], [OTHER]),
        ([{**QUESTION, "name": None}], [{**QUESTION, "name": None}, ANSWER], [QUESTION, OTHER]),
    ],
)
def test_every_form_of_a_pair_is_the_same_conversation(prompt: Any, chosen: Any, rejected: Any) -> None:
    assert conversations(prompt, {"chosen": chosen, "rejected": rejected}) == (
        [QUESTION, ANSWER],
        [QUESTION, OTHER],
    )


def test_pairs_in_tokens() -> None:
    from tests.tasks.conftest import character_tokenizer

    tokenizer = character_tokenizer("abc?", unk_token="<unk>")
    sample = Sample("t/0", "t", "a?", [], metadata={"chosen": "b", "rejected": "abca", "margin": 2})
    [pair], dropped = pairs_of([sample], tokenizer, 6, "error", 99)
    assert (len(pair.chosen), len(pair.rejected), pair.margin, dropped) == (3, 6, 2.0, 0)
    with pytest.raises(ValueError, match=r"t/0: a conversation has 6 tokens, more than .* = 5"):
        pairs_of([sample], tokenizer, 5, "error", 99)
    short = Sample("t/1", "t", "a?", [], metadata={"chosen": "b", "rejected": "c"})
    assert pairs_of([sample, short], tokenizer, 5, "drop", 99)[1] == 1
    with pytest.raises(
        ValueError, match=r"t/0: token '\?' has number 6, and the model only those below vocab_size = 6"
    ):
        pairs_of([sample], tokenizer, 6, "error", 6)
    unknown = Sample("t/2", "t", "a?", [], metadata={"chosen": "x", "rejected": "y"})
    with pytest.raises(ValueError, match="t/2: 'chosen' and 'rejected' are the same tokens"):
        pairs_of([unknown], tokenizer, 6, "error", 99)
    for margin in (True, "1", float("inf")):
        bad = Sample("t/3", "t", "a?", [], metadata={"chosen": "b", "rejected": "c", "margin": margin})
        with pytest.raises(ValueError, match="t/3: the pair's 'margin' must be a finite number"):
            pairs_of([bad], tokenizer, 6, "error", 99)
