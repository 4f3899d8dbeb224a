"""The generated tool-calling task: requests that mean their gold calls, and demonstrations that fulfil them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.schema import TaskConfig, TasksConfig
from megatron_rl.rewards import make_reward
from megatron_rl.tasks import check_tasks, load_task
from megatron_rl.tasks.demonstrations import make_writer
from megatron_rl.tasks.row_mapping import Item
from megatron_rl.tasks.sources import items_of
from megatron_rl.tasks.tool_world import TOOLS

BY_NAME = {tool.name: tool for tool in TOOLS}


def items(size: int = 200, seed: int = 1, **params: Any) -> list[Item]:
    return list(items_of(TaskConfig(source="tool_world", size=size, seed=seed, params=params)))


def sample(item: Item) -> dict[str, Any]:
    return {"tool_calls": item.tool_calls, "needs_response": item.needs_response, "metadata": item.metadata}


def understood(request: str) -> list[dict[str, Any]]:
    """The calls a request means, read from its words alone."""
    calls = []
    for part in request.split(" and "):
        tool = next(tool for tool in TOOLS if part.startswith(tool.asks))
        pattern, rest = "", part.removeprefix(tool.asks)
        for parameter in tool.parameters:
            pattern += f"(?:{re.escape(parameter.phrase).replace(re.escape('{}'), '([^ ]+)')})?"
        match = re.fullmatch(pattern, rest)
        assert match is not None
        values: dict[str, Any] = {}
        for parameter, said in zip(tool.parameters, match.groups(), strict=True):
            if said is not None:
                number = parameter.type == "int"
                values[parameter.name] = eval(said) if number else said == "on" if parameter.type == "bool" else said
        calls.append({"name": tool.name, "parameters": values})
    return calls


def test_a_request_means_its_gold_calls() -> None:
    made = items(400, min_calls=1, max_calls=3, plain=0.0, max_terms=5)
    assert all(understood(str(item.prompt)) == item.tool_calls for item in made)
    assert {len(item.tool_calls or ()) for item in made} == {1, 2, 3}


def test_where_the_tool_is_not_listed_a_plain_answer_is_right() -> None:
    made = items(400, plain=0.25)
    plain = [item for item in made if not item.tool_calls]
    assert 70 < len(plain) < 130
    for item in made:
        listed = item.metadata["names"].split()
        assert len(listed) == 4
        assert [tool["function"]["name"] for tool in item.tools or ()] == listed
        needed = [call["name"] for call in understood(str(item.prompt))]
        assert all((name in listed) == bool(item.tool_calls) for name in needed)
        assert item.needs_response == (item.answer is not None) == (not item.tool_calls)


def test_the_working_leads_to_the_numbers() -> None:
    for item in items(200, min_terms=2, max_terms=4, max_calls=1, plain=0.0):
        steps = re.findall(r"(\S+)=(\S+)", item.metadata["rationale"])
        numbers = [
            value for call in item.tool_calls or () for value in call["parameters"].values() if type(value) is int
        ]
        assert all(eval(left) == int(right) for left, right in steps)
        assert not numbers or int(steps[-1][1]) == numbers[0]


def test_knobs() -> None:
    for item in items(50, tools=2, parameters=1, min_calls=2, max_calls=2, min_terms=1, max_terms=1, plain=0.0):
        assert len(item.tool_calls or ()) == len(item.tools or ()) == 2
        assert all(len(call["parameters"]) == 1 for call in item.tool_calls or ())
        assert not re.search(r"\d[+-]", str(item.prompt))


def test_items_depend_on_seed_and_index_alone() -> None:
    assert items(20) == items(40)[:20]
    one, other = ({item.prompt for item in items(300, seed=seed, min_terms=3)} for seed in (1, 2))
    assert len(one & other) < 30


def test_demonstrations_score_the_most_but_for_the_sloppy_ones() -> None:
    rewards = [
        (make_reward("tool_format"), 1.0),
        (make_reward("tool_correctness"), 3.0),
        (make_reward("tool_outcome"), 2.0),
    ]
    made = items(400, max_terms=3)
    fields = [{**item.metadata, "tool_calls": item.tool_calls, "answer": item.answer} for item in made]
    write = make_writer("tool_world", {"working": 0.4})
    texts = [write(f"t/{i}", field) for i, field in enumerate(fields)]
    for item, text in zip(made, texts, strict=True):
        assert [reward(text, sample(item)) for reward, _ in rewards] == [most for _, most in rewards]
    assert 120 < sum("<think></think>" not in text for text in texts) < 200
    sloppy = make_writer("tool_world", {"working": 0.4, "sloppy": 0.3})
    formed = [rewards[0][0](sloppy(f"t/{i}", fields[i]), sample(made[i])) for i in range(400)]
    assert 0.6 < formed.count(1.0) / 400 < 0.8
    assert make_reward("rubric")(make_writer("tool_world", {"working": 1.0})("t/0", fields[0]), sample(made[0])) == 1.0


def test_templates_can_name_the_tools(printable: PreTrainedTokenizerFast) -> None:
    config = TaskConfig(source="tool_world", size=1, params={"tools": 2, "plain": 0}, prompt="{signatures}: {prompt}")
    check_tasks(TasksConfig(train={"t": config}))
    (loaded,) = load_task("t", config, printable)
    listed = [re.escape(name) for name in loaded.metadata["names"].split()]
    assert re.match(rf"{listed[0]}\(\w+:.*\) {listed[1]}\(\w+:.*\): ", str(loaded.prompt))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"size": None}, "size: is missing"),
        ({"params": {"tool": 3}}, r"params: .*unknown parameter of tool_world 'tool'; did you mean 'tools'"),
        ({"params": {"tools": 9}}, "params: tools = 9, must be a whole number from 1 to 8"),
        ({"params": {"tools": 2, "max_calls": 3}}, "max_calls = 3, must be a whole number from 1 to 2"),
        ({"params": {"plain": 2}}, "`plain` must be at most 1; it is 2"),
        ({"params": {"tools": 8}}, "with all 8 tools listed none is missing; set plain to 0"),
        ({"name": "chain_sum"}, "name: has no effect with source: tool_world"),
        ({"source": "bars", "params": {"bar": 3}}, r"t\.params: unknown parameter of bars 'bar'; did you mean 'bars'"),
        (
            {"demonstrations": "tool_world", "demonstration_params": {"sloppy": 2}},
            "`sloppy` must be at most 1; it is 2",
        ),
    ],
)
def test_a_generated_task_with_a_mistake(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tasks(TasksConfig(train={"t": TaskConfig(**{"source": "tool_world", "size": 5, **keys})}))
