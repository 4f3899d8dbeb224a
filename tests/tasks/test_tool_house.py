"""The generated house: requests whose gold ways lead to what they ask, an environment that pays for nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_rl.config.schema import TaskConfig, TasksConfig
from megatron_rl.rewards.tool_parsers import hermes_calls
from megatron_rl.tasks import check_tasks
from megatron_rl.tasks.demonstrations import make_writer
from megatron_rl.tasks.row_mapping import Item
from megatron_rl.tasks.sources import items_of
from megatron_rl.tasks.tool_house import ToolHouse


def items(size: int = 200, **params: Any) -> list[Item]:
    return list(items_of(TaskConfig(source="tool_house", size=size, params=params)))


def task_of(item: Item) -> dict[str, Any]:
    return {"metadata": item.metadata, "tools": item.tools, "tool_calls": item.tool_calls, "answer": item.answer}


def way(item: Item, calls: Sequence[Any], answer: str | None) -> tuple[list[str], dict[str, float]]:
    """What the house replies to these calls, and what they are worth with this last turn. None: a call that was cut."""
    house, task = ToolHouse(), task_of(item)
    assert house.reset(task) == item.tools
    replies = [house.call(call["name"], call["parameters"]) for call in calls]
    last = {"role": "tool", "content": ""} if answer is None else {"role": "assistant", "content": answer}
    turns = [{"role": "assistant", "tool_calls": [call]} for call in calls]
    worth: dict[str, Any] = house.reward(task, [{"role": "user"}, *turns, last])
    of_turns = worth.pop("turns")
    assert len(of_turns) == len(turns) + (answer is not None)
    assert sum(of_turns) == pytest.approx(worth["steps"], abs=1e-12)
    return replies, worth


def demonstrated(item: Item, name: str, **params: Any) -> list[Any]:
    said = make_writer("tool_house", params)(name, {**item.metadata, **task_of(item)})
    assert isinstance(said, list)
    return said


def test_the_gold_way_finds_each_value_in_the_reply_before_it() -> None:
    made = items(400, max_friends=2, digits=3)
    assert {len(item.tool_calls or ()) for item in made} == {2, 3, 4, 5}
    for item in made:
        calls, answer = item.tool_calls or [], str(item.answer)
        replies, worth = way(item, calls, answer)
        assert worth == {"success": 1.0, "steps": 1.0}
        first = str(item.prompt).split()[1].removesuffix("'s")
        known = [first, *replies]
        for number, call in enumerate(calls):
            for value in call["parameters"].values():
                assert str(value) in known[: number + 1], (item.prompt, calls)
                assert number == 0 or str(value) not in str(item.prompt)
        assert str(item.prompt).count("friend's") == sum(call["name"] == "friend" for call in calls)
        assert (replies[-1] == "open") if answer == "done" else (answer == f"code {replies[-1]}")


def test_whatever_leaves_the_gold_way_costs_its_steps_or_all() -> None:
    opens = next(item for item in items(opens=1.0, max_friends=0))
    find, read, door = opens.tool_calls or []
    wrong = {"name": "open", "parameters": {**door["parameters"], "code": 100}}
    elsewhere = {"name": "open", "parameters": {"room": "no such room", "code": 1}}
    assert way(opens, [find, read, door], None)[1] == {"success": 0.0, "steps": 3 / 4}
    assert way(opens, [find, read], "done")[1] == {"success": 0.0, "steps": 2 / 4}
    assert way(opens, [find, wrong], "done") == (
        [way(opens, [find], "")[0][0], "locked"],
        {"success": 0.0, "steps": 1 / 4},
    )
    assert way(opens, [find, wrong, read, door], "done")[0][-1] == "locked"  # for good
    assert way(opens, [find, wrong, read, door], "done")[1] == {"success": 0.0, "steps": 3 / 5}
    assert way(opens, [find, find, read, door], "done")[1] == {"success": 1.0, "steps": 4 / 5}
    assert way(opens, [find, read, door, elsewhere], "done")[0][-1] == "unknown"
    text = {"name": "open", "parameters": {**door["parameters"], "code": str(door["parameters"]["code"])}}
    assert way(opens, [find, read, text], "done")[0][-1] == "locked"  # a code is a number
    other = next(room for room in opens.metadata["house"]["read"] if room != door["parameters"]["room"])  # type: ignore[index]
    also = {"name": "open", "parameters": {"room": other, "code": opens.metadata["house"]["read"][other]}}  # type: ignore[index]
    assert way(opens, [find, read, door, also], "done")[1]["success"] == 0.0
    tells = next(item for item in items(opens=0.0, max_friends=0))
    calls = tells.tool_calls or []
    assert way(tells, calls, f" {tells.answer}\n")[1]["success"] == 1.0
    assert way(tells, calls, "code 100")[1] == {"success": 0.0, "steps": 2 / 3}


def test_each_turn_is_worth_the_steps_that_it_goes() -> None:
    item = next(item for item in items(opens=1.0, max_friends=0))
    find, read, door = item.tool_calls or []
    house, task = ToolHouse(), task_of(item)
    house.reset(task)
    for call in (find, find, read, door):
        house.call(call["name"], call["parameters"])
    spoken = [{"role": "assistant", "tool_calls": calls} for calls in ([find, find], [read, door])]
    turns = house.reward(task, [*spoken, {"role": "assistant", "content": "done"}])["turns"]
    assert turns == [1 / 5, 2 / 5, 1 / 5]


@pytest.mark.parametrize(
    ("name", "arguments", "reply"),
    [
        ("fly", {}, "error: the tools are friend, find, read, open"),
        ("find", {"whom": "ann"}, "error: find takes who"),
        ("find", {"who": "ann", "when": 1}, "error: find takes who"),
        ("find", {"who": ["ann"]}, "unknown"),
        ("read", {"room": "\ud800"}, "unknown"),
        ("open", {"room": {}, "code": 1}, "unknown"),
    ],
)
def test_a_call_that_makes_no_sense_has_a_reply_of_the_house_s_words(name: str, arguments: Any, reply: str) -> None:
    [item] = items(1)
    assert way(item, [{"name": name, "parameters": arguments}], "")[0] == [reply]


def test_demonstrations_are_the_gold_way_but_for_those_that_guess_the_code() -> None:
    made = items(200, digits=3)
    guessing = 0
    for number, item in enumerate(made):
        said = demonstrated(item, f"house/{number}", shortcut=0.7)
        assert said == demonstrated(item, f"house/{number}", shortcut=0.7)
        turns = [message for message in said if message["role"] == "assistant"]
        calls = [call for turn in turns[:-1] for call in hermes_calls(str(turn["content"])) or ()]
        replies, worth = way(item, calls, str(turns[-1]["content"]))
        assert [message["content"] for message in said if message["role"] == "tool"] == replies
        assert calls[0] == (item.tool_calls or [])[0]
        reads = any(call["name"] == "read" for call in calls)
        assert worth["success"] == (reads or worth["success"])
        guessing += not reads
        assert json.dumps(said) == json.dumps(demonstrated(item, f"house/{number}", shortcut=0.0)) or not reads
    assert 120 <= guessing <= 160


def test_its_parameters_are_checked_before_anything_is_made() -> None:
    def checked(**params: Any) -> None:
        check_tasks(TasksConfig(train={"house": TaskConfig(source="tool_house", size=3, params=params)}))

    checked(max_friends=3, digits=6)
    for params, message in (
        ({"friends": 1}, "min_friends"),
        ({"digits": 0}, "digits = 0"),
        ({"min_friends": 2}, "max_friends = 1"),
        ({"opens": 2.0}, "opens"),
    ):
        with pytest.raises(ValueError, match=message):
            checked(**params)
