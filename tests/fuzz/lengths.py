"""Long texts of one repeated piece, for every function that reads what a model wrote: time in proportion to the length.

    python -m tests.fuzz.lengths --seconds 600 [--seed 1]

A pattern that tries a run of blanks from each of its blanks takes seconds for what takes a thousandth of one otherwise,
and the trainer waits. `tests/rewards/test_lengths.py` runs the pieces of `PIECES` through all functions.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from itertools import chain

from megatron_rl.rewards import (
    code,
    judge,
    make_reward,
    maths_forms,
    maths_strict,
    pairwise,
    puzzle,
    rubric,
    tool_parsers,
)
from tests.fuzz import completions
from tests.fuzz.loop import run

LENGTH = 40_000  # characters
PER_CHARACTER = 5e-6  # seconds of CPU time
AT_LEAST = 0.05
TOO_MUCH = 2.0  # growth: 8 where time is quadratic in the length, 64 where it is cubic

FUNCTIONS: dict[str, Callable[[str], object]] = {
    **{
        function.__name__: function
        for function in (
            *(maths_forms.last_box, maths_forms.tidy, maths_forms.named, maths_forms.is_equation, maths_forms.squeeze),
            *(maths_forms.without_percent, maths_forms.elements, maths_forms.number),
            *(maths_forms.is_prose, maths_forms.for_sympy, maths_strict.normalize, maths_strict.gold_answer),
            *(
                judge.read_score,
                pairwise.read_verdict,
                code.extract_code,
                tool_parsers.load_json,
                tool_parsers.json_lines,
            ),
            *(tool_parsers.after_thinking, tool_parsers.parse_tool_calls, tool_parsers.toolrl_calls),
            *(tool_parsers.hermes_calls, tool_parsers.llama_calls),
        )
    },
    "style": lambda text: pairwise.difference(text, "a"),
    "same_in_base": lambda text: maths_forms.same_in_base(text, "4210_5"),
    "same_output": lambda text: code.same_output(text, text),
    "rubric": lambda text: rubric.grade(text, completions.TOOLS["tool_calls"], text),
    **{f"puzzle {name}": (lambda text, name=name: puzzle._is_plain(name, text, "x")) for name in puzzle._EVALUATED},
    **{
        f"{name} {params}": (lambda text, reward=make_reward(name, **params), sample=sample: reward(text, sample))
        for name, params, sample, _ in completions.REWARDS
    },
}
ENDS = ["", "!", "}", "1"]
PIECES = [
    *(
        " ",
        "\n",
        "\t\n",
        "\\ ",
        "\\,",
        "1 ",
        "a ",
        "1\\ ",
        ", ",
        "{",
        "}",
        "(",
        "[",
        "\\{",
        "\\boxed{",
        "\\text{a",
        "\\text{ a }",
    ),
    *(
        "1 million ",
        "\\frac",
        "\\frac{1",
        "^{",
        "x1 ",
        "x_1=",
        "- ",
        "* ",
        "**a",
        "__",
        "```",
        "```python\n",
        "[[A",
        "#",
        "1.",
    ),
    *(
        "\\\\",
        "$",
        "%",
        "~",
        "or ",
        "\n- ",
        "<think>",
        '{"score": ',
        '{"',
        '"\\',
        "9",
        "1,000",
        "\u0661",
        "\\!",
        "1/2 ",
    ),
]


def seconds(function: Callable[[str], object], text: str, tries: int) -> float:
    """CPU time of the fastest of several calls; of one where it is far above what a busy machine adds."""
    found = float("inf")
    for _ in range(tries):
        start = time.process_time()
        with contextlib.suppress(ValueError, RecursionError):
            function(text)
        found = min(found, time.process_time() - start)
        if found > 1:
            break
    return found


def growth(function: Callable[[str], object], piece: str, end: str = "", length: int = LENGTH) -> float:
    """How many times as long each character takes as in a text of an eighth of the length: 1 where time is in proportion.

    Asked only where the time is above `AT_LEAST` and `PER_CHARACTER`. Both texts are timed on the same machine, so one that
    is slow or busy is no fault; a text that is short is not timed as closely. The first call imports: it has a second try.
    """
    text = piece * (length // len(piece)) + end
    bound = AT_LEAST + PER_CHARACTER * len(text)
    if seconds(function, text, 1) < bound or (slow := seconds(function, text, 3)) < bound:
        return 1.0
    short = piece * (length // 8 // len(piece)) + end
    return slow / len(text) / (seconds(function, short, 3) / len(short))


def try_case(number: int) -> None:
    """A piece of one to three scraps, with a beginning and an end, through all functions; longer and longer."""
    rng = random.Random(number)
    scraps = list(chain(PIECES, (one for one in completions.PIECES + completions.LATEX if len(one) < 30)))
    piece, end = "".join(rng.choices(scraps, k=rng.randint(1, 3))), rng.choice(ENDS + scraps)
    for name, function in FUNCTIONS.items():
        for length in (1_000, 8_000, LENGTH):  # what is cubic in the length is seen before it takes hours
            found = growth(function, piece, end, length)
            assert found < TOO_MUCH, f"{name}: {found:.1f} x as long per character of {piece!r} x {length} + {end!r}"


if __name__ == "__main__":
    run(try_case, "lengths")
