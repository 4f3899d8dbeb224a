"""A generated task of several turns: a house whose facts only its tools tell, and requests that need several of them.

    request   open ann's friend's room
    friend    {"of": "ann"}                   -> bob
    find      {"who": "bob"}                  -> attic
    read      {"room": "attic"}               -> 47
    open      {"room": "attic", "code": 47}   -> open
    answer    done

Every value after the first call is known only from a reply, and a door whose code was wrong once stays locked, so guessing
does not pay. `ToolHouse` is the environment; an agent that runs tools calls it (`megatron_rl.agents.tool_loop`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from megatron_rl.config.keys import Share
from megatron_rl.data.sample import Call, Message
from megatron_rl.tasks.row_mapping import Item
from megatron_rl.tasks.tool_world import check_ranges, function_schema

ROOMS = ("kitchen", "hall", "attic", "cellar", "study", "bath")
PEOPLE = ("ann", "bob", "eve", "ida", "tom", "max")
OPENED, LOCKED, DONE = "open", "locked", "done"
_PARAMETERS: Mapping[str, Mapping[str, str]] = {  # of each tool: name and JSON type
    "friend": {"of": "string"},
    "find": {"who": "string"},
    "read": {"room": "string"},
    "open": {"room": "string", "code": "integer"},
}
_DOES = {
    "friend": "tells who somebody's friend is",
    "find": "tells the room that somebody is in",
    "read": "tells a door's code",
    "open": "opens a door; a wrong code locks it for good",
}


@dataclass(frozen=True)
class HouseParams:
    """How long the way to an answer is.

    Args:
        min_friends, max_friends: so many times a request asks for somebody's friend; each is one more call that depends on
            the one before.
        opens: share of the requests that want a door opened; the others want to know its code.
        digits: of a code.
    """

    min_friends: int = 0
    max_friends: int = 1
    opens: Share = 0.5
    digits: int = 2

    def __post_init__(self) -> None:
        check_ranges(self, ("min_friends", 0, 3), ("max_friends", self.min_friends, 3), ("digits", 1, 6))


def make_item(params: HouseParams, rng: random.Random) -> Item:
    """`answer` is the text of the last turn, `tool_calls` are the calls before it in order, and `metadata.house` has what the
    tools know."""
    codes = rng.sample(range(10 ** (params.digits - 1), 10**params.digits), len(ROOMS))
    circle = rng.sample(PEOPLE, len(PEOPLE))  # of friends: a friend's friend is never the one who was asked about
    house: dict[str, dict[str, object]] = {
        "friend": dict(zip(circle, [*circle[1:], circle[0]], strict=True)),
        "find": dict(zip(PEOPLE, rng.sample(ROOMS, len(ROOMS)), strict=True)),
        "read": dict(zip(ROOMS, codes, strict=True)),
    }
    person = first = rng.choice(PEOPLE)
    friends = rng.randint(params.min_friends, params.max_friends)
    opens = rng.random() < params.opens
    calls: list[Call] = []
    for _ in range(friends):
        calls.append({"name": "friend", "parameters": {"of": person}})
        person = str(house["friend"][person])
    calls.append({"name": "find", "parameters": {"who": person}})
    room = house["find"][person]
    calls.append({"name": "read", "parameters": {"room": room}})
    code = house["read"][str(room)]
    if opens:
        calls.append({"name": "open", "parameters": {"room": room, "code": code}})
    whose = first + "'s" + " friend's" * friends
    return Item(
        prompt=f"open {whose} room" if opens else f"tell {whose} code",
        answer=DONE if opens else f"code {code}",
        tool_calls=calls,
        tools=schemas(params),
        metadata={"source_dataset": "tool_house", "house": house},
    )


def schemas(params: HouseParams) -> list[dict[str, object]]:
    """The tools as chat templates take them; the one that tells friends only where requests speak of them."""
    return [
        function_schema(name, _DOES[name], {key: {"type": kind} for key, kind in parameters.items()}, parameters)
        for name, parameters in _PARAMETERS.items()
        if name != "friend" or params.max_friends
    ]


class ToolHouse:
    """One house while a conversation goes on in it: what its tools answer, and what has been done."""

    inline = True  # its methods only compute

    def reset(self, task: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
        """A task's house, all doors closed; returns the task's tools."""
        metadata, tools = task.get("metadata"), task.get("tools")
        if not (isinstance(metadata, dict) and "house" in metadata and isinstance(tools, list)):
            raise ValueError("the environment tool_house is for tasks of the source tool_house")
        self._house: Mapping[str, Mapping[str, object]] = metadata["house"]
        self._calls: list[Call] = []
        self._doors: dict[str, str] = {}  # those that were tried
        return tools

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """A tool's reply: a name, a number, `open` or `locked`; or what is wrong with the call, in words of the house's own
        (arguments may hold characters that the model's tokenizer does not know)."""
        self._calls.append({"name": name, "parameters": dict(arguments)})
        wanted = _PARAMETERS.get(name)
        if wanted is None:
            return f"error: the tools are {', '.join(_PARAMETERS)}"
        if arguments.keys() != wanted.keys():
            return f"error: {name} takes {', '.join(wanted)}"
        if name != "open":
            [value] = arguments.values()
            return str(self._house[name].get(value, "unknown") if isinstance(value, str) else "unknown")
        room, code = arguments["room"], arguments["code"]
        if not isinstance(room, str) or room not in self._house["read"]:
            return "unknown"
        right = code == self._house["read"][room]
        if self._doors.get(room) != LOCKED:
            self._doors[room] = OPENED if right else LOCKED
        return self._doors[room]

    def reward(self, task: Mapping[str, object], messages: Sequence[Message]) -> dict[str, float | list[float]]:
        """`success`: 1 where the whole request is fulfilled, and nothing else was done to doors; `steps`: how far the gold
        way was gone, its last turn included, as a share of its steps or of those that were taken, whichever are more;
        `turns`: the same share, turn by turn."""
        gold = task["tool_calls"]
        assert isinstance(gold, list)
        last = messages[-1]
        said = last.get("content") if last["role"] == "assistant" and not last.get("tool_calls") else None
        opens = [call["parameters"]["room"] for call in gold if call["name"] == "open"]
        wanted = dict.fromkeys(opens, OPENED)
        fulfilled = self._doors == wanted and isinstance(said, str) and (bool(opens) or said.strip() == task["answer"])
        steps = iter(enumerate(self._calls))
        right = [next((number for number, made in steps if made == call), -1) for call in gold]  # -1: it was not made
        done = sum(each >= 0 for each in right) + fulfilled
        number, turns = 0, list[int]()
        for message in messages:
            if message["role"] == "assistant":
                calls = len(cast(list[object], message.get("tool_calls") or []))
                turns.append(sum(number <= call < number + calls for call in right))
                number += calls
        if fulfilled:
            turns[-1] += 1
        way = 1 + max(len(gold), len(self._calls))
        return {"success": float(fulfilled), "steps": done / way, "turns": [each / way for each in turns]}
