"""A generated task whose numbers nobody works out in the head, and a Python that does.

    request   a is 47 times 83 plus 12. b is a mod 97. what is b times a?
    python    {"code": "a=47*83+12;b=a%97;b*a"}    -> 222129
    answer    222129

The agent `tools` makes the call, by its environment `python` (`megatron_rl.agents.python_tool`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron_rl.tasks.row_mapping import Item
from megatron_rl.tasks.tool_world import check_ranges, function_schema

TOOL = "python"
_OPERATORS = {"times": "*", "plus": "+", "minus": "-", "mod": "%"}
_NAMES = "abcdef"


@dataclass(frozen=True)
class MathsParams:
    """How long the way to an answer is.

    Args:
        min_names, max_names: so many numbers are named before the question, each by a sum of numbers and of those before.
        min_terms, max_terms: terms of a sum.
        digits: of a number that is written out, at most.
    """

    min_names: int = 1
    max_names: int = 2
    min_terms: int = 2
    max_terms: int = 3
    digits: int = 2

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("min_names", 0, len(_NAMES)),
            ("max_names", self.min_names, len(_NAMES)),
            ("min_terms", 2, 6),
            ("max_terms", self.min_terms, 6),
            ("digits", 1, 6),
        )


def make_item(params: MathsParams, rng: random.Random) -> Item:
    """`answer` is the number as text, `tool_calls` the one call that finds it, and the prompt's tools are that of Python."""
    values: dict[str, int] = {}
    sentences, code = list[str](), list[str]()
    for name in _NAMES[: rng.randint(params.min_names, params.max_names)]:
        words, expression = _sum(params, rng, values)
        sentences.append(f"{name} is {words}.")
        code.append(f"{name}={expression}")
        values[name] = _value(expression, values)
    words, expression = _sum(params, rng, values)
    program = ";".join([*code, expression])
    return Item(
        prompt=" ".join([*sentences, f"what is {words}?"]),
        answer=str(_value(expression, values)),
        tool_calls=[{"name": TOOL, "parameters": {"code": program}}],
        tools=[schema()],
        metadata={"source_dataset": "python_maths"},
    )


def schema() -> dict[str, object]:
    """The tool as chat templates take it."""
    does = "runs Python and tells what it prints, and the value of its last line"
    return function_schema(TOOL, does, {"code": {"type": "string"}}, ["code"])


def _sum(params: MathsParams, rng: random.Random, values: dict[str, int]) -> tuple[str, str]:
    """A sum in words, and in Python. It has the latest named number in it, if there is one, and divides by no name."""
    terms = rng.randint(params.min_terms, params.max_terms)
    latest = rng.randrange(terms) if values else -1
    words, expression = "", ""
    for position in range(terms):
        operator = rng.choice([*_OPERATORS]) if position else ""
        if position == latest and operator == "mod":
            operator = "times"
        named = position == latest or (values and operator != "mod" and rng.random() < 0.25)
        number = rng.randrange(10 ** (rng.randint(1, params.digits) - 1), 10**params.digits)
        term = ([*values][-1] if position == latest else rng.choice([*values])) if named else str(number)
        words += f" {operator} {term}" if position else term
        expression += f"{_OPERATORS[operator]}{term}" if position else term
    return words, expression


def _value(expression: str, values: dict[str, int]) -> int:
    """The value by Python's own rules, of numbers, names and the four operators that `_sum` writes."""
    return int(eval(expression, {"__builtins__": {}}, values))
