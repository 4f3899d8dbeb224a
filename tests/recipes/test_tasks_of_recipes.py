"""What a recipe's tasks ask for is what its rewards reward: the gold answer, written as the prompt says, gets full marks."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.rewards import make_reward
from megatron_rl.tasks.loading import load_task

ROOT = Path(__file__).parents[2]
GOLD_CALLS = [{"name": "add", "parameters": {"a": 1, "b": "two"}}]


class Characters:
    """A tokenizer with a chat template, as far as tasks need one."""

    chat_template = "the turns, one after the other"
    unk_token_id = unk_token = None

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in messages)

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {}


def calls_text(think: str) -> str:
    calls = "\n".join(json.dumps(call) for call in GOLD_CALLS)
    return f"{think}\n<tool_call>\n{calls}\n</tool_call>"


# recipe, what its prompt says about the form of the answer, a right response (from the gold answer), a wrong one
CASES = [
    ("shrinkage/knk-easy.yaml", "after 'Answer:'", "So.\nAnswer: {answer}", "{answer}"),
    ("shrinkage/knk-hard.yaml", "after 'Answer:'", "So.\nAnswer: {answer}", "Answer: nobody is"),
    ("shrinkage/countdown.yaml", "after 'Answer:'", "So.\nAnswer: {answer}", "Answer: 1"),
    ("shrinkage/gsm8k.yaml", 'after "####"', "So.\n#### {answer}", "#### 41"),
    ("shrinkage/math-1.5b.yaml", "\\boxed{}", "So \\boxed{{{answer}}}", "\\boxed{{41}}"),
    ("gdpo/math-7b.yaml", "\\boxed{}", "So \\boxed{{{answer}}}", "\\boxed{{41}}"),
    ("dgpo/7b.yaml", "\\boxed{}", "So \\boxed{{{answer}}}", "\\boxed{{41}}"),
    ("scale/qwen3-8b.yaml", "\\boxed{}", "So \\boxed{{{answer}}}", "\\boxed{{41}}"),
    ("shrinkage/maze.yaml", "<answer> </answer>", "<answer> UUUR </answer>", "<answer> UUUL </answer>"),
]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maze = "******\n*..E**\n*....*\n**.*.*\n**S..*\n******"
    sum_row = {"prompt": "How much is 6 times 7?", "answer": "42"}
    rows: dict[str, Mapping[str, Any]] = dict.fromkeys(("gsm8k", "dapo_math_17k", "deepscaler"), sum_row)
    rows |= {
        "maze": {"prompt": "Write it in <answer> </answer>.", "answer": maze},
        "toolrl": {"prompt": [{"role": "user", "content": "1?"}], "tool_calls": GOLD_CALLS, "needs_response": False},
    }
    for name, row in rows.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.chdir(ROOT)


@functools.cache
def made(name: str, params: str) -> Any:
    """Once for all cases: some start a process."""
    return make_reward(name, **json.loads(params))


def scores(recipe: str, response: str) -> tuple[str, dict[str, float]]:
    """The first training prompt of the recipe, and every reward but judge and length on a response to it."""
    config = load_recipe(ROOT / "recipes" / recipe)
    name, task = next(iter(config.tasks.train.items()))
    if task.size is not None:
        task.size = 1
    task.exclude = []
    [sample] = load_task(name, task, Characters())
    facts = {
        "prompt": sample.prompt,
        "answer": sample.answer,
        "tool_calls": sample.tool_calls,
        "needs_response": sample.needs_response,
        "metadata": sample.metadata,
        "finish_reason": "stop",
        "num_tokens": 100,
    }
    text = response.format(answer=sample.answer) if "{" in response and sample.tool_calls is None else response
    found = {
        column: float(made(reward.reward, json.dumps(reward.params))(text, facts))
        for column, reward in config.rewards.items()
        if reward.reward not in ("judge", "length")
    }
    return str(sample.prompt), found


@pytest.mark.parametrize(("recipe", "asked", "right", "wrong"), CASES)
def test_the_gold_answer_in_the_form_that_is_asked_for_is_right(
    recipe: str, asked: str, right: str, wrong: str
) -> None:
    prompt, good = scores(recipe, right)
    _, bad = scores(recipe, wrong)
    assert asked in prompt
    assert good == {"correct": 1.0}
    assert bad["correct"] <= 0.0


@pytest.mark.parametrize(
    ("recipe", "think", "best"),
    [
        ("awpo/qwen3-8b.yaml", "<think> so </think>", {"format": 1.0, "exec": 1.0}),
        ("awpo/qwen3-4b-2507.yaml", "so\n</think>", {"format": 1.0, "exec": 1.0}),
        ("gdpo/tools-1.5b.yaml", "<think> so </think>", {"format": 1.0, "correct": 3.0}),
    ],
)
def test_gold_calls_in_toolrls_tags_get_full_marks(recipe: str, think: str, best: dict[str, float]) -> None:
    assert scores(recipe, calls_text(think))[1] == best
    worst = scores(recipe, "add")[1]
    assert all(worst[column] < best[column] for column in best)


def test_the_houses_judge_counts_values_that_had_been_said() -> None:
    """Four calls have five values, of which two had not been said: a room that nobody named, and a code out of the air."""
    judge = make_reward("recipes/cpu/house_judge.py:judge")

    def turn(name: str, **arguments: object) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": json.dumps(arguments)}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    asked = {"role": "user", "content": "open ann's friend's room"}
    careful = [asked, turn("friend", of="ann"), {"role": "tool", "content": "bob"}, turn("find", who="bob")]
    careless = [*careful, {"role": "tool", "content": "attic"}, turn("read", room="cellar")]
    guessing = [*careless, {"role": "tool", "content": "47"}, turn("open", room="attic", code=46)]
    grades = [judge("", {"messages": messages}) for messages in (careful, careless, guessing, [asked])]
    assert grades == [1.0, pytest.approx(2 / 3), pytest.approx(3 / 5), 0.0]
