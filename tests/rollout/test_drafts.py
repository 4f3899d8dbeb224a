"""What is guessed of a response's next tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_rl.rollout import drafts as drafts_module
from megatron_rl.rollout.drafts import Drafts

PROMPT = [1, 2, 3, 4, 5, 6]


def guess(drafts: Drafts, name: str, drawn: Sequence[int], index: int = 0, together: int = 1) -> list[int]:
    """Of a new request of prompt `name`, after its first pass."""
    drafts.begin(f"{name}{index}", (name, index), PROMPT)
    return drafts.guess(f"{name}{index}", drawn, together)


def test_a_guess_is_what_came_after_the_same_tokens_in_the_prompt() -> None:
    drafts = Drafts(tokens=2, below=8)
    assert guess(drafts, "a", [9, 2, 3, 4]) == [5, 6]
    assert drafts.guess("a0", [8], together=1) == [], "nothing like it came before"


def test_a_group_s_rollouts_guess_for_each_other_and_others_do_not() -> None:
    drafts = Drafts(tokens=3, below=8)
    guess(drafts, "a", [7, 8, 9, 10, 11, 12])
    assert guess(drafts, "a", [7, 8, 9], index=1) == [10, 11, 12]
    assert guess(drafts, "b", [7, 8, 9]) == []


def test_the_longest_context_decides_and_of_equal_ones_the_latest() -> None:
    drafts = Drafts(tokens=1, below=8)
    guess(drafts, "a", [20, 21, 22, 7, 8, 9, 50])
    guess(drafts, "a", [30, 31, 32, 7, 8, 9, 60], index=1)
    assert guess(drafts, "a", [20, 21, 22, 7, 8, 9], index=2) == [50], "six tokens in common"
    assert guess(drafts, "a", [7, 8, 9], index=3) == [60]


def test_a_later_turn_goes_on_with_what_the_earlier_one_said() -> None:
    drafts = Drafts(tokens=2, below=8)
    guess(drafts, "a", [7, 8, 9, 10, 11])
    drafts.end("a0", drawn=5)
    drafts.begin("next", ("a", 0), [*PROMPT, 7, 8, 9, 10, 11, 30])
    assert drafts.guess("next", [7, 8, 9], together=1) == [10, 11]
    drafts.end_step()
    assert guess(drafts, "a", [11, 30, 7]) == [8, 9], "the whole conversation is remembered"


def test_the_last_step_with_a_prompt_is_remembered() -> None:
    drafts = Drafts(tokens=2, below=8)
    guess(drafts, "a", [7, 8, 9, 10, 11])
    drafts.end_step()
    guess(drafts, "other", [1])
    drafts.end_step()  # a step without the prompt
    assert guess(drafts, "a", [7, 8, 9]) == [10, 11]
    drafts.guess("a0", [12], together=1)
    drafts.end_step()
    assert guess(drafts, "a", [7, 8, 9]) == [12], "the first step's have gone"


def test_nothing_is_guessed_while_many_responses_are_drawn_together_or_of_a_request_that_only_scores() -> None:
    drafts = Drafts(tokens=2, below=8)
    assert guess(drafts, "a", [2, 3, 4], together=9) == []
    assert drafts.guess("a0", [], together=8) == [5, 6]
    assert drafts.guess("a score", [2, 3, 4], together=1) == []


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_module, "_REMEMBERED", 2 * len(PROMPT) + 5)
    drafts = Drafts(tokens=1, below=8)
    for name in ("a", "b", "c"):
        guess(drafts, name, [7, 8])
        drafts.end_step()
    assert [guess(drafts, name, [7]) for name in ("a", "b", "c")] == [[], [8], [8]]


def test_counts_are_taken_once() -> None:
    drafts = Drafts(tokens=2, below=8)
    guess(drafts, "a", [7])
    drafts.guess("a0", [8, 9, 10], together=9)  # too many for drafts
    drafts.guess("a0", [11, 12], together=8)
    drafts.verified(drafted=4, accepted=3)
    drafts.end("a0", drawn=6)
    assert drafts.take_counts() == {"drafted": 4, "accepted": 3, "drawn": 6, "drawn_below": 3}
    assert not drafts.take_counts()
