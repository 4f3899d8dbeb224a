"""Strict grading of mathematical answers, for evaluation: the form of the answer counts as well as its value.

In the spirit of the grader that PRIME evaluates with (that of PRM800K, Lightman et al. 2023): an integer must be given as an
integer, a fraction in lowest terms, tuples element by element in the same brackets. It goes without that grader's
fallbacks: any text after "answer is", percentages as fractions, 3.14 for pi, simplification of what should be a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

_TOLERANCE = Fraction(1, 10_000)  # relative, for gold decimals: PRIME's
_PAIRS = {"(": ")]", "[": ")]", "\\{": ("\\}",)}
_UNITS = (
    "degrees?|cm|mm|km|m|kg|g|inch(?:es)?|feet|foot|ft|yards?|miles?|meters?|centimeters?|kilometers?|seconds?|minutes?|hours?|days?|weeks?|"
    "months?|years?|liters?|dollars?|cents?|square|cubic|units?|mph|per"
)
_UNIT = re.compile(
    rf"(?<=[\d}})])\s*(?:(?:\\(?:text|mathrm|textrm|mbox)\s*\{{\s*(?:(?:{_UNITS})\b[\s./^23]*)+\}}|(?:{_UNITS})\b)(?:\^\{{?[23]\}}?)?\s*)+$"
)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:(?:\\times|\\cdot|\*)10\^\{?[+-]?\d+\}?|[eE][+-]?\d+)?")
_FRACTION = re.compile(r"([+-]?)(\d*)\\frac\{([+-]?\d+)\}\{(\d+)\}|([+-]?)()(\d+)/(\d+)")


def last_box(text: str) -> str | None:
    r"""What stands in the last `\boxed{}` (or `\fbox{}`); None where there is none, or it is not closed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    opening = re.compile(r"\\(?:boxed|fbox)\s*").match(text, start)
    assert opening is not None
    rest = text[opening.end() :]
    if not rest.startswith("{"):
        return None
    depth, index = 0, 0
    while index < len(rest):
        if rest[index] == "\\":  # a brace behind a backslash is a character
            index += 2
            continue
        depth += {"{": 1, "}": -1}.get(rest[index], 0)
        if depth == 0:
            return rest[1:index].strip()
        index += 1
    return None


def strictly_same(completion: str, gold: str) -> bool:
    r"""Whether the completion's last `\boxed{}` holds the gold answer in an acceptable form. Without deadline."""
    answer = last_box(completion)
    if answer is None:
        return False
    boxed = last_box(gold)
    target = normalize(gold if boxed is None else boxed)
    if not target:
        raise ValueError(f"the gold text {gold!r:.200} holds no answer")
    return _same(normalize(answer), target)


def normalize(text: str) -> str:
    """The answer without what carries no meaning: delimiters, spacing, sizes, thousands separators, units after a number."""
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = text.rstrip(".").strip()
    text = re.sub(r"\\(?:left|right|displaystyle|big|Big|bigg|Bigg)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(?=[\d{])", r"\\frac{\1}", text)  # \frac12, \frac1{19}, \frac{270}7
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<!\\)\\!\s*", "", text)  # 10,\!000
    text = re.sub(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])", " ", text)
    text = re.sub(r"\\?\$|\\?%", "", text).replace("\N{MINUS SIGN}", "-")
    text = re.sub(r"\^\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°", "", text)
    text = _UNIT.sub("", text.strip()).strip()
    text = re.sub(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?:\D|$))", "", text) if _thousands(text) else text
    named = re.fullmatch(r"\\(?:text|mathrm|textrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", text)
    if named is not None:
        text = named[1]
    elif (
        meant := re.fullmatch(r"[a-zA-Z](?:_\{?\w+\}?)?\s*(?:=|\\in(?![a-zA-Z]))([^=]*)", text, re.DOTALL)
    ) is not None:
        text = meant[1]
    text = re.sub(r"(?<![\d.])(\d+)\s+([1-9]\d*)/(\d+)", r"\1\\frac{\2}{\3}", text)  # 1 1/2 is not 11/2
    return re.sub(r"\s+", "", text)


def _thousands(text: str) -> bool:
    """Whether the commas of a text are those of one number: 1,234,567 and not (1,234)."""
    return re.fullmatch(r"[+-]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?", text) is not None


def _same(answer: str, gold: str) -> bool:
    if not answer:
        return False
    if answer.lower() == gold.lower():
        return True
    if len(answer) > 10 * len(gold) + 200:  # no answer in a comparable form is that long
        return False
    wanted, given = _elements(gold), _elements(answer)
    if (wanted is None) != (given is None):
        return False
    if wanted is not None and given is not None:
        kind, parts = wanted
        other, others = given
        if kind != other or len(parts) != len(others):
            return False
        return _matched(others, parts) if kind in ("", "\\{\\}") else all(map(_same, others, parts))
    return _same_value(answer, gold)


def _matched(answers: Sequence[str], gold: Sequence[str]) -> bool:
    """Sets and bare lists: some order fits. Each answer is used once."""
    left = list(answers)
    for part in gold:
        found = next((answer for answer in left if _same(answer, part)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _elements(text: str) -> tuple[str, list[str]] | None:
    r"""(brackets, elements) of a tuple, interval, set or bare list; None for a single answer."""
    brackets = ""
    inner = text
    for opening, closings in _PAIRS.items():
        for closing in closings:
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
                brackets, inner = opening + closing, text[len(opening) : -len(closing)]
    parts = _split(inner)
    if parts is None:  # the outer brackets do not belong together: (1,2)\cup(3,4)
        brackets, parts = "", _split(text)
    if parts is None or (len(parts) == 1 and brackets != "\\{\\}"):
        return None
    return brackets, parts


def _split(text: str) -> list[str] | None:
    """Parts between the commas outside all brackets; None where brackets do not match."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth < 0:
            return None
        if character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]] if depth == 0 else None


def _same_value(answer: str, gold: str) -> bool:
    target, value = _number(gold), _number(answer)
    if target is not None:
        if value is None:
            return False  # an expression that is still to be worked out, or words around a number
        if "frac" in answer or "/" in answer:
            return value == target and _reduced(answer)
        if "frac" not in gold and "/" not in gold and not re.fullmatch(r"[+-]?\d+(\.0*)?", gold):
            return abs(value - target) <= _TOLERANCE * abs(target)
        return value == target
    if value is not None and "." in answer:
        return False  # a decimal in place of an exact expression
    return _same_expression(answer, gold)


def _number(text: str) -> Fraction | None:
    """The value of a literal: an integer, a decimal, scientific notation, a fraction or a mixed number of integers."""
    if len(text) > 100:
        return None
    if _NUMBER.fullmatch(text):
        mantissa, _, power = re.sub(r"(?:\\times|\\cdot|\*)10\^\{?([+-]?\d+)\}?", r"e\1", text).lower().partition("e")
        if power and abs(int(power)) > 400:
            return None
        return Fraction(mantissa) * Fraction(10) ** int(power or 0)
    if (found := _FRACTION.fullmatch(text)) is not None:
        sign, whole, above, below = (part or "" for part in (found.groups()[:4] if found[3] else found.groups()[4:]))
        if int(below) == 0 or (whole and (above.startswith(("+", "-")) or int(above) >= int(below))):
            return None
        value = int(whole or 0) + Fraction(int(above), int(below))
        return -value if sign == "-" else value
    return None


def _reduced(text: str) -> bool:
    found = _FRACTION.fullmatch(text)
    assert found is not None
    above, below = (found[3], found[4]) if found[3] else (found[7], found[8])
    return math.gcd(int(above), int(below)) == 1 and int(below) > 1


def _same_expression(answer: str, gold: str) -> bool:
    """By math-verify: equal as expressions, exactly."""
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    wanted, given = (
        parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
        for text in (gold, answer)
    )
    if not wanted or not given:
        return False
    return bool(verify(wanted, given, float_rounding=12, strict=True, timeout_seconds=None))
