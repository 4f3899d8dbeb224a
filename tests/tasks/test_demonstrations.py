"""Demonstrations: the working of a sum, and who shows it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.rewards.chain_sum import score_working
from megatron_rl.tasks.demonstrations import chain_sum_working, make_writer

FIELDS: dict[str, Any] = {"source_dataset": "chain_sum", "expression": "1 + 3 - 5 - 7", "answer": "-8"}


def test_the_working_is_written_step_by_step() -> None:
    assert make_writer("chain_sum_steps", {"share": 1.0})("s/0", FIELDS) == "1+3=4 4-5=-1 -1-7=-8#-8"
    assert make_writer("chain_sum_steps", {"share": 0.0})("s/0", FIELDS) == "#-8"


@pytest.mark.parametrize("expression", ["3 + -4", "-2 - -5 + 0", "12 - 999 + 1 - 1"])
def test_the_working_is_right(expression: str) -> None:
    steps = chain_sum_working(expression)
    assert all(eval(step.split("=")[0]) == int(step.split("=")[1]) for step in steps)
    assert steps[-1].endswith(f"={eval(expression)}")
    assert score_working(" ".join(steps), expression) == 1.0


def test_a_single_term_needs_no_working() -> None:
    assert chain_sum_working("7") == []


def test_the_share_is_drawn_per_sample_and_stays() -> None:
    write = make_writer("chain_sum_steps", {"share": 0.4})
    texts = [write(f"s/{i}", FIELDS) for i in range(5000)]
    assert texts == [write(f"s/{i}", FIELDS) for i in range(5000)]
    assert 0.37 < sum(len(text) > 3 for text in texts) / 5000 < 0.43
    other = make_writer("chain_sum_steps", {"share": 0.4, "seed": 1})
    assert texts != [other(f"s/{i}", FIELDS) for i in range(5000)]


def test_misspelled_or_misplaced() -> None:
    with pytest.raises(ValueError, match="did you mean 'chain_sum_steps'"):
        make_writer("chain_sum_step", {})
    with pytest.raises(ValueError, match=r"unknown parameter of .* 'shares'; did you mean 'share'"):
        make_writer("chain_sum_steps", {"shares": 0.4})
    with pytest.raises(ValueError, match=r"`share` must be at most 1; it is 1\.4"):
        make_writer("chain_sum_steps", {"share": 1.4})
    with pytest.raises(ValueError, match="takes no demonstration_params"):
        make_writer("column:text", {"share": 0.4})
    with pytest.raises(ValueError, match="chain_sum only"):
        make_writer("chain_sum_steps", {})("s/0", {**FIELDS, "source_dataset": "countdown"})


def test_a_column_has_a_text_or_the_messages_of_a_conversation() -> None:
    turns = [
        {"role": "assistant", "content": "Ready?"},
        {"role": "user", "content": "Yes."},
        {"role": "assistant", "content": "Go."},
    ]
    write = make_writer("column:shown", {})
    assert write("t/0", {"shown": "Go."}) == "Go."
    assert write("t/0", {"shown": turns}) == turns
    for wrong in (None, ["Go."], [{"content": "Go."}]):
        with pytest.raises(ValueError, match="'shown' must hold the demonstration's text, or the messages behind"):
            write("t/0", {"shown": wrong})
