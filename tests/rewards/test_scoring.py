"""From a `rewards` section to a table: restriction to tasks, columns on demand, errors with names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.schema import ConditionConfig, RewardConfig
from megatron_rl.data.sample import Sample
from megatron_rl.rewards import (
    RewardError,
    Scorer,
    check_rewards,
    condition_reward,
    list_rewards,
    make_reward,
)

CASES = json.loads((Path(__file__).parent / "golden.json").read_text("utf-8"))
OWN = """
from __future__ import annotations

from dataclasses import dataclass

@dataclass
class Mark:
    text: str

def shouting(mark="!"):
    return lambda completion, sample: completion.count(Mark(mark).text)

def parts():
    def score(completion, sample):
        return {"first": len(completion), "second": sample["num_tokens"]}
    score.columns = ("first", "second")
    return score

def undeclared():
    return lambda completion, sample: {"a": 1.0}

def broken():
    return lambda completion, sample: 1 / len(completion)

def endless():
    return lambda completion, sample: float("inf")

def text():
    return lambda completion, sample: "1.0"

def huge():
    return lambda completion, sample: 10**5000

def beyond(bounds=(0, 1), concurrent=False):
    def score(completion, sample):
        return float(completion or 1.5)
    score.bounds, score.concurrent = bounds, concurrent
    return score
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_rewards.py"
    path.write_text(OWN)
    return str(path)


def sample(task: str, index: int = 0, **fields: Any) -> Sample:
    return Sample(id=f"{task}/{index}", task=task, prompt="p", prompt_ids=[1], **fields)


def sums() -> Sample:
    return sample("sums", answer="-8", metadata={"source_dataset": "chain_sum", "expression": "1 + 3 - 5 - 7"})


def test_the_quick_start_columns() -> None:
    rewards = {
        "correct": RewardConfig(reward="puzzle", params={"after": "#", "partial": False}),
        "format": RewardConfig(reward="format", params={"pattern": "[^#]*#-?[0-9]+"}),
        "judge": RewardConfig(reward="chain_sum_steps", when_needed=True),
    }
    texts = ["1+3=4 4-5=-1 -1-7=-8#-8", "#-8", "#-8", "nothing"]
    reasons = ["stop", "stop", "length", "stop"]
    rows = Scorer(rewards).score(texts, [sums()] * 4, finish_reasons=reasons)
    assert rows == [
        {"correct": 1.0, "format": 1.0},
        {"correct": 1.0, "format": 1.0},
        {"correct": 0.0, "format": 0.0},
        {"correct": 0.0, "format": 0.0},
    ]
    rows = Scorer(rewards, needed=["judge"]).score(texts, [sums()] * 4, finish_reasons=reasons)
    assert [row["judge"] for row in rows] == [1.0, 0.0, 0.0, 0.0]
    assert list(rows[0]) == ["correct", "format", "judge"]


def test_a_reward_for_some_tasks_is_zero_elsewhere() -> None:
    rewards = {"steps": RewardConfig(reward="chain_sum_steps", tasks=["sums"])}
    texts = ["1+3=4 4-5=-1 -1-7=-8#-8"] * 2
    assert Scorer(rewards).score(texts, [sums(), sample("other")]) == [{"steps": 1.0}, {"steps": 0.0}]


def test_rewards_of_ones_own(own: str) -> None:
    rewards = {
        "loud": RewardConfig(reward=f"{own}:shouting", params={"mark": "?"}),
        "size": RewardConfig(reward=f"{own}:parts", tasks=["a"]),
    }
    rows = Scorer(rewards).score(["hm??", "?"], [sample("b"), sample("a")], num_tokens=[7, 9])
    assert rows == [
        {"loud": 2.0, "size.first": 0.0, "size.second": 0.0},
        {"loud": 1.0, "size.first": 1.0, "size.second": 9.0},
    ]
    assert Scorer(rewards).columns == ("loud", "size.first", "size.second")
    assert Scorer(rewards).score(["x"], [sample("b")], num_tokens=[1])[0].keys() == rows[0].keys()


@pytest.mark.parametrize("case", [case for case in CASES if "condition" in case["fn"]], ids=lambda case: case["id"])
def test_conditions_agree_with_the_reference(case: dict[str, Any]) -> None:
    given = case["kwargs"]
    if case["fn"] == "condition_reward":
        pairs = zip(given["r_k"], given["r_l"], strict=True)
        assert [condition_reward(value, gate, given["threshold"]) for value, gate in pairs] == case["expected"]
    else:
        reward = make_reward("length", limit=given["limit"])
        lengths = [reward("", {"num_tokens": length}) for length in given["length"]]
        pairs = zip(lengths, given["gate_reward"], strict=True)
        assert [condition_reward(value, gate, 1.0) for value, gate in pairs] == case["expected"]


def test_a_reward_conditioned_on_another(own: str) -> None:
    rewards = {
        "short": RewardConfig(reward="length", params={"limit": 4}, condition=ConditionConfig(column="correct")),
        "correct": RewardConfig(reward="format", params={"pattern": "yes.*"}, weight=0.0),
        "size": RewardConfig(reward=f"{own}:parts", condition=ConditionConfig(column="short", at_least=0.5)),
    }
    rows = Scorer(rewards).score(["yes", "yes and so on", "no"], [sums()] * 3, num_tokens=[3, 9, 2])
    assert [row["short"] for row in rows] == [1.0, 0.0, 0.0]
    assert [row["correct"] for row in rows] == [1.0, 1.0, 0.0]
    assert [row["size.first"] for row in rows] == [3.0, 0.0, 2.0]  # the gate is the raw value, not the conditioned one


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (
            {"column": "corect"},
            r"rewards\.short\.condition\.column: unknown reward column 'corect'; did you mean 'correct'",
        ),
        ({"column": "short"}, "cannot depend on itself"),
        ({"column": "judge"}, "not always computed"),
    ],
)
def test_a_condition_that_cannot_be_met(condition: dict[str, Any], message: str) -> None:
    rewards = {
        "short": RewardConfig(reward="length", params={"limit": 4}, condition=ConditionConfig(**condition)),
        "correct": RewardConfig(reward="math"),
        "judge": RewardConfig(reward="chain_sum_steps", when_needed=True),
    }
    with pytest.raises(ValueError, match=message):
        check_rewards(rewards)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"the reward 'own' failed on sample a/3: ZeroDivisionError"),
        ("endless", r"'own' is inf on sample a/3, not a finite number"),
        ("text", r"'own' is '1\.0' on sample a/3, not a finite number"),
        ("huge", r"'own' is a number of 16610 bits on sample a/3, not a finite number"),
        ("beyond", r"'own' is 1\.5 on sample a/3, outside its bounds \[0, 1\]"),
        ("undeclared", r"'own' returns \['a'\] on sample a/3, but it declares one number"),
    ],
)
def test_a_reward_that_fails_names_the_sample(name: str, message: str, own: str) -> None:
    with pytest.raises(RewardError, match=message):
        Scorer({"own": RewardConfig(reward=f"{own}:{name}")}).score([""], [sample("a", 3)])


def test_bounds_hold_in_threads_too_but_for_rounding(own: str) -> None:
    scorer = Scorer({"own": RewardConfig(reward=f"{own}:beyond", params={"concurrent": True})})
    assert scorer.score(["0", "1.0000000000000002"], [sample("a", i) for i in range(2)])[0] == {"own": 0.0}
    with pytest.raises(RewardError, match=r"outside its bounds \[0, 1\]"):
        scorer.score(["-0.1"], [sample("a", 3)])
    for bounds in (0.5, [1, 0], ["0", "1"], [0, float("nan")], [False, True]):
        with pytest.raises(ValueError, match="bounds = "):
            make_reward(f"{own}:beyond", bounds=bounds)


@pytest.mark.parametrize("name", list_rewards())
def test_every_reward_declares_its_bounds(name: str) -> None:
    server = {"urls": "http://127.0.0.1:9/v1", "model": "m"}
    needed: dict[str, dict[str, Any]] = {
        "format": {"pattern": "x"},
        "length": {"limit": 1},
        "judge": {**server, "unanswered": "neutral", "neutral": -1.0},
        "pairwise": {**server, "position": "A"},
        "reward_model": {**server, "squash": "sigmoid"},
        "teacher": server,
    }
    special = {
        "agent": (-math.inf, math.inf),
        "judge": (-1, 1),
        "pairwise": (-2, 2),
        "style": (-1, 1),
        "teacher": (-math.inf, math.inf),
        "tool_correctness": (-3, 3),
        "tool_outcome": (0, 2),
    }
    assert make_reward(name, **needed.get(name, {})).bounds == special.get(name, (0, 1))


def test_lists_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="1 samples for 2 completions"):
        Scorer({}).score(["a", "b"], [sums()])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"reward": "puzle"}, r"rewards\.x: unknown reward 'puzle'; did you mean 'puzzle'\?"),
        ({"reward": "puzzle", "params": {"partiall": 1}}, r"unknown parameter 'partiall'; did you mean 'partial'"),
        ({"reward": "puzzle", "params": {"partial": 1}}, r"`partial` must be true or false, not 1"),
        (
            {"reward": "puzzle", "params": {"timeout_seconds": 0}},
            r"`timeout_seconds` must be at least 0\.01; it is 0",
        ),
        ({"reward": "format"}, r"the parameter 'pattern' is missing"),
        ({"reward": "format", "params": {"pattern": "("}}, r"is no regular expression"),
        ({"reward": "length", "params": {"limit": -1}}, r"`limit` must be at least 0; it is -1"),
        ({"reward": "length", "params": {"limit": 9, "unit": "words"}}, r"must be one of tokens, characters"),
        ({"reward": "tool_correctness", "params": {"matching": "best"}}, r"must be one of greedy, optimal"),
        ({"reward": "math", "params": {"wrong": "-1"}}, r"`wrong` must be a number, not '-1'"),
        ({"reward": "no_such_package:reward"}, r"cannot load the reward .*No module named"),
        ({"reward": "math:no_such_name"}, r"math has no function 'no_such_name'"),
        ({"reward": "/nowhere/rewards.py:x"}, r"cannot load the reward .*No such file"),
    ],
)
def test_a_recipe_with_a_mistake(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rewards({"x": RewardConfig(**config)})


def test_a_reward_may_take_any_parameters(tmp_path: Path) -> None:
    path = tmp_path / "any.py"
    path.write_text("def worth(first, **params):\n    return lambda completion, sample: first + sum(params.values())\n")
    name = f"{path}:worth"
    [row] = Scorer({"any": RewardConfig(reward=name, params={"first": 1, "b": 2.5})}).score(["x"], [sums()])
    assert row["any"] == 3.5
    with pytest.raises(ValueError, match="the parameter 'first' is missing"):
        make_reward(name, b=1)


def test_concurrent_rewards_keep_the_order_and_stop_at_an_error(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\n"
        "def slow():\n"
        "    def score(completion, sample):\n"
        "        time.sleep(0.1 * (completion == '0'))\n"
        "        return float(completion)\n"
        "    score.concurrent = True\n"
        "    return score\n"
    )
    scorer = Scorer({"slow": RewardConfig(reward=f"{path}:slow")})
    rows = scorer.score([str(i) for i in range(20)], [sample("a", i) for i in range(20)])
    assert [row["slow"] for row in rows] == list(range(20))
    with pytest.raises(RewardError, match="failed on sample a/1: ValueError"):
        scorer.score(["0", "x", "2"], [sample("a", i) for i in range(3)])


def test_every_name_of_the_contract_is_there() -> None:
    wanted = {"tool_format", "tool_correctness", "tool_exec", "math", "length", "puzzle", "format", "chain_sum_steps"}
    wanted |= {"code_pass_rate", "code_bug"}
    assert wanted <= set(list_rewards())
    assert callable(make_reward("tool_format", strict=False))
