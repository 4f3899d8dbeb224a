"""Strict grading of mathematical answers, for evaluation: the form of the answer counts as well as its value.

In the spirit of the grader that PRIME evaluates with (that of PRM800K, Lightman et al. 2023): an integer must be given as an
integer, a fraction in lowest terms, tuples element by element in the same brackets. It goes without that grader's
fallbacks: any text after "answer is", percentages as fractions, 3.14 for pi, simplification of what should be a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from megatron_rl.rewards import maths_forms as forms
from megatron_rl.rewards.tool_parsers import after_thinking

_TOLERANCE = Fraction(1, 10_000)  # relative, for gold decimals: PRIME's


def strictly_same(completion: str, gold: str) -> bool:
    r"""Whether the completion's last `\boxed{}`, behind its thinking, holds the gold answer in an acceptable form.

    It has no deadline: call it in `Isolated`.
    """
    answer = forms.last_box(after_thinking(completion))
    return answer is not None and same_form(answer, gold_answer(gold))


def gold_answer(gold: str) -> str:
    r"""The content of the last `\boxed{}` of a gold text, or the text. ValueError where that holds nothing."""
    boxed = forms.last_box(gold)
    answer = gold if boxed is None else boxed
    if not normalize(answer):
        raise ValueError(f"the gold text {gold!r:.200} holds no answer")
    return answer


def normalize(text: str) -> str:
    return forms.squeeze(forms.without_percent(forms.tidy(text)))


def same_form(answer: str, gold: str) -> bool:
    """Whether an answer equals the gold one and is written in an acceptable form."""
    names = {name for name in (forms.named(answer), forms.named(gold)) if name is not None}
    if len(names) > 1:  # y = 5 for x = 5
        return False
    if forms.named(gold) is not None and forms.is_equation(forms.tidy(answer)):
        # -x = 5 for x = 5: the name is part of the answer
        return same_equation(answer, gold)
    answer, gold = normalize(answer), normalize(gold)
    if not answer:
        return False
    if answer.lower() == gold.lower():
        return True
    if len(answer) > 10 * len(gold) + 200:  # no answer in a comparable form is that long
        return False
    wanted, given = forms.elements(gold), forms.elements(answer)
    if (wanted is None) != (given is None):
        return False
    if wanted is not None and given is not None:
        kind, parts = wanted
        other, others = given
        if kind != other or len(parts) != len(others):
            return False
        return matched(others, parts, same_form) if kind in ("", "\\{\\}") else all(map(same_form, others, parts))
    return _same_value(answer, gold)


def matched(answers: Sequence[str], gold: Sequence[str], same: Callable[[str, str], bool]) -> bool:
    """Sets and bare lists: some order fits. Each answer is used once."""
    left = list(answers)
    for part in gold:
        found = next((answer for answer in left if same(answer, part)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _same_value(answer: str, gold: str) -> bool:
    if (in_base := forms.same_in_base(answer, gold)) is not None:
        return in_base
    target, value = forms.number(gold), forms.number(answer)
    if target is not None:
        if value is None:
            return False  # an expression that is still to be worked out, or words around a number
        if "frac" in answer or "/" in answer:
            return value == target and forms.is_reduced(answer)
        if "frac" not in gold and "/" not in gold and not re.fullmatch(r"[+-]?\d+(\.0*)?", gold):
            return abs(value - target) <= _TOLERANCE * abs(target)
        return value == target
    if value is not None and "." in answer:
        return False  # a decimal in place of an exact expression
    return same_expression(answer, gold, decimals=12, inequalities=False)


def same_equation(answer: str, gold: str) -> bool:
    """Whether two equations are equal, where the gold one gives the value of a variable."""
    wanted = forms.squeeze(re.sub(r"\\?\$", "", gold).strip().rstrip("."))
    return same_expression(normalize(answer), wanted, decimals=12, inequalities=False)


def same_expression(answer: str, gold: str, decimals: int, inequalities: bool) -> bool:
    """Compares by math-verify: equal as expressions. Both are squeezed; what it cannot read completely equals nothing.

    Args:
        decimals: at which decimal numbers are compared.
        inequalities: `0<x<1` equals the interval `(0,1)`.
    """
    import logging

    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs that its timeouts are off: ours is outside
    # Without its own removal of units, which takes the t of \cos t for one; without reading parts of what it cannot read.
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    extraction = LatexExtractionConfig(normalization_config=normalization)
    gold_forms, answer_forms = (
        parse(
            f"${forms.for_sympy(text)}$",
            [extraction],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
        for text in (gold, answer)
    )
    if not gold_forms or not answer_forms:
        return False
    return bool(
        verify(
            gold_forms,
            answer_forms,
            float_rounding=decimals,
            numeric_precision=max(15, decimals + 9),
            strict=True,
            allow_set_relation_comp=inequalities,
            timeout_seconds=None,
        )
    )
