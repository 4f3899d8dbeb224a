r"""Mathematical answers as text: finding them, normalising their writing, reading numbers and lists.

Both graders (`maths_lenient`, `maths_strict`) use these functions.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_PAIRS = {"(": ")]", "[": ")]", "\\{": ("\\}",)}
_PLAIN_UNITS = re.compile(
    "degrees?|cm|mm|km|m|kg|g|s|h|ft|mph|per|square|cubic|sq|cu|ml|l|lbs?|oz|hrs?|mins?|secs?", re.IGNORECASE
)
# Words behind a number that change what it says, and letters that are numbers.
_NOT_UNITS = re.compile(
    "or|and|to|not?|nor|but|than|least|most|about|approximately|hundred|thousand|million|billion|trillion|dozen|half|halves|"
    "thirds?|quarters?|squared|cubed|times|plus|minus|mod|pi|sin|cos|tan|sec|csc|cot|log|ln|exp|sqrt|if|for|where|base|i|j|e",
    re.IGNORECASE,
)
_TEXT_UNIT = re.compile(
    r"(?:(?<=[\d})])|(?<=\\pi))((?:\s*\\(?:text|mathrm|textrm|mbox|rm)\s*\{\s*[a-zA-Z][a-zA-Z\s./^23²³°·'-]*\}(?:\^\{?-?[23]\}?)?[\s/.]*){1,8})$"
)
_PLAIN_UNIT = re.compile(r"(?<=[\d})])(\s*[a-zA-Z]+(?:[\s/.]+[a-zA-Z]+)*\.?(?:\^\{?[23]\}?)?)$")
_WORD = re.compile(r"(?<!\\)\b[a-zA-Z]+")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?({'|'.join(_SCALES)})s?\b\s*([^{{}}]{{0,40}}\}})?")
_CHARACTERS = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{MIDDLE DOT}": r"\cdot ",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{INFINITY}": r"\infty ",
    "\N{LESS-THAN OR EQUAL TO}": r"\le ",
    "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{UNION}": r"\cup ",
    "\N{EMPTY SET}": r"\emptyset ",
    "\N{NO-BREAK SPACE}": " ",
}
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:(?:\\times|\\cdot|\*)10\^\{?[+-]?\d+\}?|[eE][+-]?\d+)?")
_FRACTION = re.compile(r"([+-]?)(\d*)\\frac\{([+-]?\d+)\}\{(\d+)\}|([+-]?)()(\d+)/(\d+)")
_DIGITS = r"[0-9][0-9A-F]*|[A-F]+[0-9][0-9A-F]*"
_NUMBER_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "sixteen")
_BASES = {word: str(base) for word, base in zip(_NUMBER_WORDS, (*range(2, 11), 12, 16), strict=True)}
_BASED = re.compile(rf"({_DIGITS})_\{{?(?:\\text\{{)?(\d+|{'|'.join(_BASES)})\}}*")
_NAMED = re.compile(r"([a-zA-Z](?:_\{?\w+\}?)?)(\([a-zA-Z]\))?\s*(?:=|\\in(?![a-zA-Z]))([^=]*)", re.DOTALL)
_DERIVATIVE = re.compile(
    r"\\frac\{d(\^\{?\d\}?)?(?:[a-zA-Z]|\\[a-zA-Z]+)\}\{d ?(?:[a-zA-Z]|\\[a-zA-Z]+)(\^\{?\d\}?)?\}"
)


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{}` (`\fbox{}`, `\framebox{}`); None without a closed one."""
    start = max(map(text.rfind, ("\\boxed", "\\fbox", "\\framebox")))
    if start < 0:
        return None
    opening = re.compile(r"\\(?:boxed|fbox|framebox)\s*").match(text, start)
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


def tidy(text: str) -> str:
    """An answer without delimiters, sizes, thousands separators, units after a number and degrees.

    Blanks and percent signs stay; `squeeze` removes the blanks.
    """
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = re.sub(r"\\?\$", "", text).strip().rstrip(".").strip()
    for character, command in _CHARACTERS.items():
        text = text.replace(character, command)
    text = re.sub(r"\\(?:left|right|displaystyle|big|Big|bigg|Bigg)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(?=[\d{])", r"\\frac{\1}", text)  # \frac12, \frac1{19}, \frac{270}7
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le", text)
    text = re.sub(r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge", text)
    text = re.sub(r"\\varnothing(?![a-zA-Z])|^\\\{\s*\\\}$", r"\\emptyset", text)
    text = re.sub(r"(?<!\\)\\!\s*", "", text)  # 10,\!000
    text = re.sub(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])", " ", text)
    text = re.sub(
        r"(\s\s)\s+", r"\1", text
    )  # what follows looks for blanks, comma, blanks, in time of their number cubed
    text = re.sub(r"\^\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°", "", text)
    text = re.sub(r"(?<=\d)\s*(?:\\text\s*\{\s*percent\s*\}|percent\b)", r"\\%", text)
    text = re.sub(
        r"\s*,?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*", ", ", text
    )
    text = _SCALE.sub(_as_power, text)
    text = _without_unit(_without_unit(text.strip()))
    text = re.sub(r"(?<=\d)(?:,|\{,\}| )(?=\d{3}(?:\D|$))", "", text) if _thousands(text) else text
    worded = re.fullmatch(r"\\(?:text|mathrm|textrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", text)
    if worded is not None:
        text = worded[1]
    elif (meant := _NAMED.fullmatch(text)) is not None:
        text = meant[3]
    return re.sub(r"(?<![\d.])(\d+)\s+([1-9]\d*)/(\d+)", r"\1\\frac{\2}{\3}", text).strip()  # 1 1/2 is not 11/2


def named(text: str) -> str | None:
    """The variable that an answer is given for: x in `x = 5`. A function's name says nothing: None for `f(x) = 2x`."""
    found = _NAMED.fullmatch(text.strip().strip("$"))
    return None if found is None or found[2] else re.sub(r"[{}]", "", found[1])


def is_equation(text: str) -> bool:
    """Whether a tidy answer still has an equals sign (`tidy` removes that of a mere name)."""
    return re.search(r"(?<![<>!\\])=", text) is not None


def squeeze(text: str) -> str:
    r"""A text without the blanks that separate nothing. `2 7` is not 27, and `\sin h` not the hyperbolic sine."""
    return re.sub(r"(\\[a-zA-Z]+|\d)\s+(?=([a-zA-Z]|\d)?)|\s+", _blank, text)


def _blank(found: re.Match[str]) -> str:
    before, after = found[1] or "", found[2] or ""
    parts = (before.isdigit() and after.isdigit()) or (len(before) > 1 and after.isalpha())
    return before + " " if parts else before


def without_percent(text: str) -> str:
    return re.sub(r"\\?%", "", text)


def _as_power(found: re.Match[str]) -> str:
    rest = (found[2] or "").rstrip("}").strip()
    return f" \\times 10^{{{_SCALES[found[1]]}}}" + (f"\\text{{ {rest}}}" if rest else "")


def _without_unit(text: str) -> str:
    r"""A number's unit or the things it counts, at the end: `12 \text{ apples}`, `5 m/s`, `3 cm^2`."""
    if (unit := _TEXT_UNIT.search(text)) is not None:
        words = _WORD.findall(re.sub(r"\\(?:text|mathrm|textrm|mbox|rm)\s*\{", " ", unit[1]))
        if not any(map(_NOT_UNITS.fullmatch, words)):
            return text[: unit.start(1)].strip()
    elif (unit := _PLAIN_UNIT.search(text)) is not None:
        words = _WORD.findall(unit[1])
        # 12x and 2ab are products: a word of three letters counts behind a number alone, with a blank between.
        alone = unit[1][0].isspace() and re.fullmatch(r"[+-]?[\d,.\s]+", text[: unit.start(1)]) is not None
        known = all(_PLAIN_UNITS.fullmatch(word) or (len(word) > 2 and alone) for word in words)
        if known and not any(map(_NOT_UNITS.fullmatch, words)):
            return text[: unit.start(1)].strip()
    return text


def _thousands(text: str) -> bool:
    """Whether the commas or blanks of a text are those of one number: 1,234,567 and not (1,234)."""
    return re.fullmatch(r"[+-]?\d{1,3}(?:(?:(?:,|\{,\})\d{3})+|(?: \d{3})+)(?:\.\d+)?\s*(?:\\?%)?", text) is not None


def elements(text: str) -> tuple[str, list[str]] | None:
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
    items, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth < 0:
            return None
        if character == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    return [*items, text[start:]] if depth == 0 else None


def number(text: str) -> Fraction | None:
    """The value of a squeezed literal: an integer, a decimal, scientific notation, a fraction or a mixed number."""
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


def is_reduced(text: str) -> bool:
    """Whether a literal fraction is in lowest terms, and no integer."""
    found = _FRACTION.fullmatch(text)
    assert found is not None
    above, below = (found[3], found[4]) if found[3] else (found[7], found[8])
    return math.gcd(int(above), int(below)) == 1 and int(below) > 1


def same_in_base(answer: str, gold: str) -> bool | None:
    """Whether two squeezed numbers, one of them with its base as index, are the same digits in the same base.

    Where only one names the base, the digits decide: the question gives it. None where neither does, or one is no number.
    """
    given, wanted = _based(answer), _based(gold)
    if given is None or wanted is None or (given[1] is None and wanted[1] is None):
        return None
    bases = {base for _, base in (given, wanted) if base is not None}
    return given[0] == wanted[0] and len(bases) == 1


def _based(text: str) -> tuple[str, str | None] | None:
    if re.fullmatch(_DIGITS, text):
        return text, None
    found = _BASED.fullmatch(text)
    return None if found is None else (found[1], _BASES.get(found[2], found[2]))


def is_prose(text: str) -> bool:
    """Whether a gold text is sentences with an answer somewhere in them, not the answer itself."""
    bare = re.sub(r"\$[^$]*\$|\\(?:text|mathrm|textrm|textbf|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+", " ", text)
    words = re.findall(r"[a-zA-Z]{2,}", bare)
    return len(words) >= 12 or (len(words) >= 4 and re.search(r"[.!?]\s+\S|\n", text.strip()) is not None)


def for_sympy(text: str) -> str:
    r"""A squeezed expression, rewritten where math-verify's parser would misread it.

    The parser reads `\gamma` as the gamma function or Euler's constant, `\Pi` as pi, `E` as e, and a derivative as 0 (x is no
    function of t there).
    """
    text = _DERIVATIVE.sub(lambda found: f"\\mathit{{slope{re.sub('[^a-z0-9]', '', found[0].lower())}}}", text)
    return re.sub(
        r"\\(?:text|mathrm|mathit|mathbb|operatorname|mbox|begin|end)\{[^{}]*\}|\\[a-zA-Z]+|(?<![\d.])E", _named, text
    )


def _named(found: re.Match[str]) -> str:
    token = found[0]
    if token == "\\Gamma" and found.string[found.end() : found.end() + 1] == "(":
        return token  # the function
    return {
        "\\gamma": "\\mathit{smallgamma}",
        "\\Gamma": "\\mathit{biggamma}",
        "\\Pi": "\\mathit{bigpi}",
        "E": "\\mathit{bige}",
    }.get(token, token)
