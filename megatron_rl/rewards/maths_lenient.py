"""Lenient grading of mathematical answers, for training: the value counts, not the form. math-verify compares expressions."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from megatron_rl.rewards import maths_forms as forms
from megatron_rl.rewards.maths_strict import gold_answer, matched, same_expression, same_form
from megatron_rl.rewards.tool_parsers import after_thinking

_DECIMALS = 6  # at which decimal numbers are compared
_UNORDERED = ("", "\\{\\}")
_POWER = re.compile(r"(?<=\d)[eE]([+-]?\d+)")  # 7e37, as Minerva writes it: LaTeX has 7 times e times 37 there
_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt|pm|cup|cap|in|neq?)(?![a-zA-Z])|matrix|=")


def same_answer(completion: str, gold: str, boxes: str = "last") -> bool:
    r"""Whether a completion's final answer equals the gold one. It has no deadline: call it in `Isolated`.

    The gold answer is what stands in the last `\boxed{}` of the gold text, or the text itself; the completion's is what
    stands in its last box. Where it has no box behind its thinking, or the gold text is prose, math-verify looks
    for the answer.

    Args:
        boxes: `last`, or `all`: several boxes of a text are one answer, a set, as math-verify reads them.
    """
    completion = after_thinking(completion)
    if boxes == "all":
        return _by_extraction(completion, gold)
    gold_text, boxed = gold_answer(gold), forms.last_box(completion)
    if boxed is None:
        return _by_extraction(completion[max(0, completion.rfind("\\boxed")) :], gold_text)
    if forms.is_prose(gold_text):
        return same_form(boxed, gold_text) or _by_extraction(f"\\boxed{{{boxed}}}", gold_text)
    return same_value(boxed, gold_text)


def same_value(answer: str, gold: str) -> bool:
    """Whether two answers are equal: in strict grading, as numbers, element by element, or as expressions."""
    if same_form(answer, gold):
        return True
    if len({name for name in (forms.named(answer), forms.named(gold)) if name is not None}) > 1:  # y = 5 for x = 5
        return False
    if forms.named(gold) is not None and forms.is_equation(forms.tidy(answer)):
        return False  # compared already
    answer, gold = forms.tidy(answer), forms.tidy(gold)
    if not answer or len(answer) > 20 * len(gold) + 1000:  # longer than any writing of it
        return False
    elements, gold_elements = forms.elements(answer), forms.elements(gold)
    if elements is not None and gold_elements is not None:
        return _same_elements(elements, gold_elements)
    if (numbers := _same_number(forms.squeeze(answer), forms.squeeze(gold))) is not None:
        return numbers
    if elements is not None and elements[0] == "\\{\\}" and len(elements[1]) == 1:
        return same_value(elements[1][0], gold)
    # A list for a single answer, or the other way round, unless one of them is written as a relation or a union.
    if (elements is None) != (gold_elements is None) and not _RELATION.search(gold if elements is not None else answer):
        return False
    return same_expression(forms.squeeze(answer), forms.squeeze(gold), _decimals(gold), inequalities=True)


def _same_elements(elements: tuple[str, list[str]], gold_elements: tuple[str, list[str]]) -> bool:
    """Sets and bare lists in any order, others in theirs. A set is no tuple; a pair's brackets may make it an interval."""
    (kind, answers), (gold_kind, golds) = elements, gold_elements
    if len(answers) != len(golds):
        return False
    if kind in _UNORDERED and gold_kind in _UNORDERED:
        return matched(answers, golds, same_value)
    if "\\{\\}" in (kind, gold_kind):
        return False
    if len(golds) == 2 and kind != gold_kind and kind and gold_kind:
        return False
    return all(map(same_value, answers, golds))


def _same_number(answer: str, gold: str) -> bool | None:
    """Whether two squeezed literals are the same number; None where one is none. A percentage is either number it may be."""
    if (in_base := forms.same_in_base(answer, gold)) is not None:
        return in_base
    value, target = forms.number(forms.without_percent(answer)), forms.number(forms.without_percent(gold))
    if value is None or target is None:
        return None
    readings = [value]
    if "%" in answer and "%" not in gold:
        readings.append(value / 100)
    elif "%" in gold and "%" not in answer:
        readings.append(value * 100)
    return any(_close(reading, target, answer + gold) for reading in readings)


def _close(value: Fraction, target: Fraction, written: str) -> bool:
    if value == target or "." not in written:
        return value == target
    places = _DECIMALS + _further_decimals(target)
    return round(value, places) == round(target, places)


def _decimals(gold: str) -> int:
    value = forms.number(forms.squeeze(forms.without_percent(gold)))
    return _DECIMALS + (0 if value is None else _further_decimals(value))


def _further_decimals(value: Fraction) -> int:
    """How many decimals a small number needs besides the usual ones, at which it is as good as zero."""
    size = abs(value)
    if not 0 < size < Fraction(1, 1000):
        return 0
    return -math.floor(math.log10(size.numerator) - math.log10(size.denominator))


def _by_extraction(completion: str, gold: str) -> bool:
    """Compares by math-verify, which looks for the answer in the texts."""
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs that its timeouts are off: ours is outside
    plain = forms.tidy(gold)
    value = forms.number(forms.squeeze(forms.without_percent(plain)))
    marked = (gold if value is None else _POWER.sub(r" \\times 10^{\1}", plain)).replace("\\$", "")  # no delimiter
    whole = f"${marked.replace('$', '')}$"
    if marked.count("$") % 2 or not any(mark in marked for mark in ("$", "\\boxed", "\\(", "\\[")):
        marked = whole
    # Some gold answers have $ in their middle, where it delimits nothing.
    target = parse(marked, parsing_timeout=None) or parse(whole, parsing_timeout=None)
    if not target:
        raise ValueError(f"math-verify finds no answer in the gold text {gold!r:.200}")
    given, more = parse(completion, parsing_timeout=None), 0 if value is None else _further_decimals(value)
    return bool(
        verify(target, given, float_rounding=_DECIMALS + more, numeric_precision=15 + more, timeout_seconds=None)
    )
