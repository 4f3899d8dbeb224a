"""Finds gold answers of `math` that would grade wrongly, before a run: sentences, and those that accept wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_rl.rewards.isolation import RewardProcessError
from megatron_rl.rewards.maths_forms import elements, is_prose, last_box, number
from megatron_rl.rewards.maths_strict import gold_answer, normalize

_LOOKED_AT = 200  # golds that are compared as expressions; each takes four comparisons
_NAMED = 5


def doubtful_golds(golds: Sequence[tuple[str, str]], same: Callable[[str, str], bool]) -> list[str]:
    r"""A warning for each kind of doubtful gold answer, with how many there are and the first of them by name.

    Args:
        golds: (sample id, gold text).
        same: the grader: completion and gold text to whether they agree.
    """
    prose: list[tuple[str, str]] = []
    compared: dict[str, str] = {}
    for key, gold in golds:
        if last_box(gold) is None and is_prose(gold):
            prose.append((key, gold))
        elif not _is_literal(normalize(gold_answer(gold))):
            compared.setdefault(gold, key)
    doubts = []
    if prose:
        doubts.append(
            f"{len(prose)} of {len(golds)} gold texts are sentences: lenient grading takes a number in them for the answer, "
            f"strict grading wants the whole text: {_named(prose)}; name the column with the answer alone, or set gold_after"
        )
    every = max(1, -(-len(compared) // _LOOKED_AT))
    looked_at = [(key, gold) for gold, key in compared.items()][::every]
    loose, refused = [], []
    for key, gold in looked_at:
        try:
            if not same(f"\\boxed{{{gold_answer(gold)}}}", gold):
                refused.append((key, gold))
            elif any(same(f"\\boxed{{{wrong}}}", gold) for wrong in wrong_answers(gold)):
                loose.append((key, gold))
        except RewardProcessError:  # the gold text cannot be read: the run would stop at the first response to it
            refused.append((key, gold))
    sampled = f"the {len(looked_at)} of {len(compared)} gold answers looked at"
    of = f"{len(looked_at)} gold answers" if every == 1 else sampled
    for bad, what in (
        (loose, "accept wrong answers (plus one, negated or doubled)"),
        (refused, "are refused when they are given themselves"),
    ):
        if bad:
            doubts.append(f"{len(bad)} of {of} that are expressions {what}: {_named(bad)}")
    return doubts


def wrong_answers(gold: str) -> list[str]:
    r"""Answers other than the gold one: plus one, negated, doubled; fewer where those could be equal to it."""
    answer = gold_answer(gold).replace("$", "")
    if "\\infty" in answer or "\\emptyset" in answer or "=" in answer:
        return [f"{answer}, 99"]
    negated = [] if "\\pm" in answer or "\\mp" in answer else [f"-({answer})", f"2({answer})"]
    return [f"{answer}+1", *negated]


def _is_literal(text: str) -> bool:
    """Whether a gold answer is a number, a list of numbers or a word, which are compared without algebra."""
    parts = elements(text)
    if parts is not None:
        return all(map(_is_literal, parts[1]))
    return number(text) is not None or text.isalpha()


def _named(golds: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(golds) - _NAMED} more" if len(golds) > _NAMED else ""
    return ", ".join(f"{key} ({gold!r:.60})" for key, gold in golds[:_NAMED]) + more
