r"""Known right and wrong answers to gold answers that are made by seed: integers, fractions, units, intervals, and so on.

Each kind makes a gold answer and writes it in ways that are right, right in value but not in form, and wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import grading_numbers as numbers
from benchmarks.grading_numbers import RIGHT, VALUE, WRONG, Made, every


@dataclass(frozen=True)
class Case:
    kind: str
    gold: str
    completion: str
    truth: str  # RIGHT, VALUE or WRONG


def _tuples(rng: random.Random) -> Made:
    values = rng.sample(range(-20, 21), rng.randint(2, 4))
    text = ", ".join(map(str, values))
    half = ", ".join([*map(str, values[:-1]), f"\\frac{{{2 * values[-1]}}}{{2}}"])
    answers = every(
        RIGHT,
        f"({text})",
        f"({text.replace(' ', '')})",
        f"\\left({text}\\right)",
        f"\\left( {text} \\right)",
        f"$({text})$",
    )
    answers += every(VALUE, f"({half})")
    answers += every(
        WRONG,
        f"({', '.join(map(str, values[::-1]))})",
        f"({text}, 1)",
        f"({', '.join(map(str, values[:-1]))})",
        f"\\{{{text}\\}}",
    )
    changed = ", ".join(map(str, [*values[:-1], values[-1] + 1]))
    answers += every(WRONG, f"({changed})", f"-({text})", f"({text}) + 1", f"({text}), ({changed})")
    return f"({text})", answers + (every(WRONG, f"[{text}]") if len(values) == 2 else [])


def _intervals(rng: random.Random) -> Made:
    a = rng.randint(-20, 10)
    b = a + rng.randint(1, 15)
    left, right = rng.choice("(["), rng.choice(")]")
    low, high = (("\\le" if left == "[" else "<"), ("\\le" if right == "]" else "<"))
    answers = every(
        RIGHT,
        f"{left}{a},{b}{right}",
        f"{left}{a}, {b}{right}",
        f"\\left{left}{a}, {b}\\right{right}",
        f"x \\in {left}{a},{b}{right}",
    )
    answers += every(VALUE, f"{a} {low} x {high} {b}")
    flipped = "(" if left == "[" else "["
    answers += every(
        WRONG,
        f"{flipped}{a},{b}{right}",
        f"{left}{a},{b + 1}{right}",
        f"{left}{a - 1},{b}{right}",
        f"{left}{b},{a}{right}",
    )
    return f"{left}{a},{b}{right}", answers + every(
        WRONG, f"\\{{{a},{b}\\}}", f"{a} {low} x", f"{left}{a},\\infty)", f"{a}", f"{a} {low} x {high} {b + 1}"
    )


def _sets(rng: random.Random) -> Made:
    values = rng.sample(range(-30, 31), rng.randint(2, 4))
    text, other = ", ".join(map(str, values)), ", ".join(map(str, values[::-1]))
    bare = rng.random() < 0.5
    answers = every(
        RIGHT,
        *(
            (text, other)
            if bare
            else (f"\\{{{text}\\}}", f"\\left\\{{{other}\\right\\}}", f"\\{{{text.replace(' ', '')}\\}}")
        ),
    )
    answers += every(RIGHT if bare else VALUE, other.replace(", ", ","))
    answers += every(RIGHT, f"{', '.join(map(str, values[:-1]))} \\text{{ and }} {values[-1]}") if bare else []
    answers += every(
        WRONG,
        f"{text}, 99",
        f"\\{{{text}, 99\\}}",
        ", ".join(map(str, values[1:])),
        f"{text}, {values[0]}",
        f"{values[0] + 50}, {', '.join(map(str, values[1:]))}",
    )
    return (text if bare else f"\\{{{text}\\}}"), answers + every(WRONG, str(values[0]), "\\emptyset", f"({text}) + 1")


def _expressions(rng: random.Random) -> Made:
    a, b = rng.sample(range(2, 12), 2)
    shape = rng.randrange(4)
    if shape == 0:
        gold = f"(x+{a})(x-{b})"
        answers = every(
            RIGHT,
            f"x^2 + {a - b}x - {a * b}".replace("+ -", "- "),
            f"(x-{b})(x+{a})",
            f"\\left(x+{a}\\right)\\left(x-{b}\\right)",
        )
        return gold, answers + every(
            WRONG,
            f"(x-{a})(x+{b})",
            f"x^2 - {a * b}",
            f"(x+{a})(x-{b})+1",
            f"-(x+{a})(x-{b})",
            f"2(x+{a})(x-{b})",
            f"(x+{a})",
            f"{a}",
        )
    if shape == 1:
        root = rng.choice((2, 3, 5, 6, 7))
        gold = f"{a}\\sqrt{{{root}}}"
        answers = every(
            RIGHT,
            gold,
            f"\\sqrt{{{a * a * root}}}",
            f"{a} \\cdot \\sqrt{root}",
            f"\\sqrt{{{root}}} \\cdot {a}",
            f"{a}\\sqrt{{{root}}}\\text{{ cm}}",
        )
        return gold, answers + every(
            WRONG,
            f"{a + 1}\\sqrt{{{root}}}",
            f"\\sqrt{{{a * root}}}",
            f"-{gold}",
            f"{gold} + 1",
            f"{a * root**0.5:.3f}",
            f"{a * a * root}",
            f"{gold}, {a}",
        )
    if shape == 2:
        gold = f"\\frac{{{a}\\pi}}{{{b + 11}}}"
        answers = every(
            RIGHT,
            gold,
            f"\\frac{{{a}}}{{{b + 11}}}\\pi",
            f"{a}\\pi/{b + 11}",
            f"\\frac{{{a} \\pi}}{{{b + 11}}} \\text{{ radians}}",
        )
        return gold, answers + every(
            WRONG,
            f"\\frac{{{a + 1}\\pi}}{{{b + 11}}}",
            f"\\frac{{{a}}}{{{b + 11}}}",
            f"-{gold}",
            f"{gold}+1",
            f"{a * 3.14159 / (b + 11):.3f}",
        )
    gold = f"{a}\\sin(x) + {b}\\cos x"
    answers = every(RIGHT, f"{b}\\cos(x) + {a}\\sin(x)", f"{a} \\sin x + {b} \\cos x", f"f(x) = {gold}")
    return gold, answers + every(
        WRONG,
        f"{a}\\cos x + {b}\\sin x",
        f"{a}\\sin x - {b}\\cos x",
        f"{gold} + 1",
        f"-({gold})",
        f"{a} + {b}",
        f"{a}\\sin x",
    )


def _physics(rng: random.Random) -> Made:
    k, p = rng.randint(2, 9), rng.randint(2, 4)
    gold, other = rng.choice(
        (
            (f"{k} m c^{{2}}\\left(\\gamma^{{{p}}}-1\\right)", f"{k} c^{{2}} m (\\gamma^{p} - 1)"),
            (
                f"\\hbar \\omega(v+1 / {k})-\\frac{{E_{{0}}^{{{p}}}}}{{2 m}}",
                f"\\hbar \\omega (v + \\frac{{1}}{{{k}}}) - \\frac{{E_0^{p}}}{{2m}}",
            ),
            (f"\\frac{{d x}}{{d t}}={k} x-a^{p}", f"\\frac{{dx}}{{dt}} = -a^{p} + {k}x"),
            (f"{k}\\Gamma e^{{-\\gamma t^{p}}}", f"e^{{-\\gamma t^{p}}} {k} \\Gamma"),
        )
    )
    answers = every(RIGHT, gold, other, f" {gold} ")
    sides = gold.split("=")
    return gold, answers + every(
        WRONG,
        f"{gold}+1",
        f"-{gold}",
        "=".join([*sides[:-1], f"2({sides[-1]})"]),
        gold.replace(f"{k}", f"{k + 1}", 1),
        "0",
        f"{k}",
    )


def _equations(rng: random.Random) -> Made:
    a, b = rng.randint(2, 9), rng.randint(1, 9)
    gold = rng.choice((f"y = {a}x + {b}", f"{a}x + y = {b}"))
    if gold[0] == "y":
        answers = every(RIGHT, gold, f"y={a}x+{b}", f"y = {b} + {a}x", f"{a}x+{b}")
        wrong = (f"y = {a + 1}x + {b}", f"y = -{a}x + {b}", f"-y = {a}x + {b}", f"x = {a}y + {b}", f"y = {a}x", f"{a}")
    else:
        answers = every(RIGHT, gold, f"y + {a}x = {b}", f"{2 * a}x + 2y = {2 * b}", f"{a}x + y - {b} = 0")
        wrong = (
            f"{a}x + y = {b + 1}",
            f"{a}x - y = {b}",
            f"{a + 1}x + y = {b}",
            f"{b}",
            f"y + {a} = {b}x",
            f"{a}x + y",
        )
    return gold, answers + every(WRONG, *wrong)


def _matrices(rng: random.Random) -> Made:
    a, b, c, d = rng.sample(range(-9, 10), 4)
    gold = f"\\begin{{pmatrix}} {a} & {b} \\\\ {c} & {d} \\end{{pmatrix}}"
    answers = every(
        RIGHT, gold, f"\\begin{{pmatrix}}{a}&{b}\\\\{c}&{d}\\end{{pmatrix}}", gold.replace("pmatrix", "bmatrix")
    )
    wrong = [
        f"\\begin{{pmatrix}} {w} & {x} \\\\ {y} & {z} \\end{{pmatrix}}"
        for w, x, y, z in ((a + 1, b, c, d), (a, c, b, d), (a, b, c, -d if d else 1), (-a - 1, b, c, d))
    ]
    return gold, answers + every(WRONG, *wrong, f"({a}, {b}, {c}, {d})", f"{a}", f"2{gold}", f"{gold} + 1")


def _bases(rng: random.Random) -> Made:
    base = rng.randint(3, 9)
    digits = "".join(str(rng.randrange(1, base)) for _ in range(rng.randint(3, 5)))
    answers = every(RIGHT, f"{digits}_{base}", f"{digits}_{{{base}}}", digits, f"{digits}_{{\\text{{{_NAMES[base]}}}}}")
    wrong = (
        f"{digits}_{{{base + 1}}}",
        f"{digits[::-1]}1_{base}",
        f"1{digits}_{{{base}}}",
        f"{int(digits, base)}",
        f"{int(digits, base)}_{{10}}",
        f"-{digits}_{base}",
    )
    return f"{digits}_{{{base}}}", answers + every(WRONG, *wrong)


_NAMES = dict(zip(range(3, 10), ["three", "four", "five", "six", "seven", "eight", "nine"], strict=True))


def _choices(rng: random.Random) -> Made:
    gold, other = rng.sample("ABCDE", 2)
    answers = every(
        RIGHT, gold, f"\\text{{{gold}}}", f"\\textbf{{{gold}}}", f"\\text{{({gold})}}", f"({gold})", f"{gold}."
    )
    wrong = (
        other,
        f"\\text{{{other}}}",
        f"{gold}, {other}",
        f"{gold} \\text{{ or }} {other}",
        f"\\text{{({other})}}",
        "ABCDE",
        "",
    )
    return rng.choice((gold, f"\\text{{{gold}}}", f"\\text{{({gold})}}")), answers + every(WRONG, *wrong)


_WORDS = ("east", "west", "even", "odd", "Monday", "Friday", "yes", "no", "blue", "Alice", "isosceles", "increasing")


def _words(rng: random.Random) -> Made:
    gold, other = rng.sample(_WORDS, 2)
    answers = every(
        RIGHT, f"\\text{{{gold}}}", gold, f"\\text{{{gold.capitalize()}}}", f"\\mathrm{{{gold}}}", f"\\textbf{{{gold}}}"
    )
    return f"\\text{{{gold}}}", answers + every(
        WRONG,
        f"\\text{{{other}}}",
        other,
        f"\\text{{not {gold}}}",
        f"\\text{{{gold} or {other}}}",
        f"\\text{{{gold}}}, \\text{{{other}}}",
        "1",
    )


KINDS: dict[str, Callable[[random.Random], Made]] = {
    "integers": numbers.integers,
    "fractions": numbers.fractions,
    "decimals": numbers.decimals,
    "e-notation": numbers.e_notation,
    "percentages": numbers.percentages,
    "units": numbers.units,
    "money": numbers.money,
    "tuples": _tuples,
    "intervals": _intervals,
    "sets and lists": _sets,
    "expressions": _expressions,
    "physics": _physics,
    "equations": _equations,
    "matrices": _matrices,
    "bases": _bases,
    "choices": _choices,
    "words": _words,
}


def _where_it_stands(rng: random.Random) -> Iterator[Case]:
    """An integer in a box, in several, behind thinking, cut off, or in a sentence."""
    n = rng.randint(-500, 500)
    texts = [
        (f"So \\boxed{{{n + 1}}}? No: \\boxed{{{n}}}.", RIGHT),
        (f"<think>\\boxed{{{n + 1}}}</think>\\boxed{{{n}}}", RIGHT),
        (f"\\fbox{{{n}}} it is", RIGHT),
        (f"\\boxed{{{n}}} since {n - 1} + 1 = {n}, not {n + 1}", RIGHT),
        (f"The answer is ${n}$.", VALUE),
        (f"So the final answer is {n}.", VALUE),
        (f"So \\boxed{{{n}}}? No: \\boxed{{{n + 1}}}.", WRONG),
        (f"<think>\\boxed{{{n}}}</think>I do not know.", WRONG),
        (f"<think>\\boxed{{{n}}}</think>\\boxed{{{n + 1}}}", WRONG),
        (f"\\boxed{{{n}", WRONG),
        (f"The answer is ${n + 1}$.", WRONG),
        ("I do not know.", WRONG),
    ]
    for text, truth in texts:
        yield Case("where it stands", str(n), text, truth)


def cases(count: int, seed: int = 0) -> list[Case]:
    """About `count` distinct cases, the kinds in turn; a function of both arguments."""
    rng = random.Random(f"grading, seed {seed}")
    made: dict[tuple[str, str], Case] = {}
    while len(made) < count:
        fresh = [
            Case(kind, gold, f"Therefore \\boxed{{{answer}}}.", truth)
            for kind, make in KINDS.items()
            for gold, answers in [make(rng)]
            for answer, truth in answers
        ]
        for case in (*fresh, *_where_it_stands(rng)):
            made.setdefault((case.gold, case.completion), case)
    return list(made.values())[:count]
