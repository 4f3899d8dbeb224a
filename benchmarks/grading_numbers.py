"""Gold answers that are one number, made by seed, and writings of them: right, right in value but not in form, and wrong."""

from __future__ import annotations

import random
from fractions import Fraction

RIGHT, VALUE, WRONG = "right", "right value", "wrong"  # VALUE: right for lenient grading, wrong for strict
Made = tuple[str, list[tuple[str, str]]]  # a gold answer and writings of it


def every(truth: str, *answers: str) -> list[tuple[str, str]]:
    return [(answer, truth) for answer in answers]


def integers(rng: random.Random) -> Made:
    n = rng.choice((1, -1)) * rng.randint(2, 10 ** rng.randint(1, 7))
    answers = every(RIGHT, f"{n}", f"{n}.", f"{n}.0", f"x = {n}", f"${n}$", f" {n} ", f"\\text{{{n}}}")
    if abs(n) >= 1000:
        grouped = f"{n:,}"
        answers += every(RIGHT, grouped, *(grouped.replace(",", mark) for mark in ("{,}", "\\,", ",\\!")))
    answers += every(
        VALUE, f"\\frac{{{2 * n}}}{{2}}", f"{n - 3} + 3", f"\\left({n}\\right)^{{1}}", f"x = {n - 1} + 1 = {n}"
    )
    answers += every(
        WRONG, f"{n + 1}", f"{-n}", f"{n}7", f"{n}, {n + 1}", f"{n} \\text{{ or }} {n + 1}", f"{n} \\pm 1", f"|{n}| + 1"
    )
    answers += every(WRONG, f"{n} 7", f"{n}.5", f"{n}^2 + 1", "", "?", f"[{n}, {n}]")
    return str(n), answers


def fractions(rng: random.Random) -> Made:
    q = Fraction(rng.randint(1, 40), rng.randint(2, 30))
    while q.denominator == 1:
        q = Fraction(rng.randint(1, 40), rng.randint(2, 30))
    a, b = q.numerator, q.denominator
    answers = every(
        RIGHT,
        f"\\frac{{{a}}}{{{b}}}",
        f"\\dfrac{{{a}}}{{{b}}}",
        f"{a}/{b}",
        f"\\tfrac{{{a}}}{{{b}}}",
        f"x=\\frac{{{a}}}{{{b}}}",
    )
    if a > b:
        answers += every(RIGHT, f"{a // b}\\frac{{{a % b}}}{{{b}}}", f"{a // b} {a % b}/{b}")
    decimal = f"{float(q):.6f}".rstrip("0")
    exact = Fraction(decimal) == q
    answers += [(decimal, RIGHT) if exact else (f"{float(q):.3f}", WRONG)]
    answers += every(VALUE, f"\\frac{{{3 * a}}}{{{3 * b}}}", f"{2 * a}/{2 * b}", f"\\frac{{1}}{{{b}}} \\cdot {a}")
    answers += every(
        WRONG,
        f"\\frac{{{a + 1}}}{{{b}}}",
        f"-\\frac{{{a}}}{{{b}}}",
        f"\\frac{{{b}}}{{{a}}}",
        f"\\frac{{{a}}}{{{b + 1}}}",
    )
    answers += every(
        WRONG,
        f"\\frac{{{a}}}{{0}}",
        f"\\frac{{{a}}}{{{b}}}, 1",
        f"{a}{b}",
        f"\\frac{{{a}}}{{{b}}} + 1",
        f"{float(q) + 0.01:.4f}",
    )
    return f"\\frac{{{a}}}{{{b}}}", answers


def decimals(rng: random.Random) -> Made:
    places = rng.randint(1, 3)
    gold = f"{rng.choice(('', '-'))}{rng.randint(0, 99)}.{rng.randint(1, 10**places - 1):0{places}d}"
    value = float(gold)
    answers = every(RIGHT, gold, f"{gold}0", f"y = {gold}", f"${gold}$", f"{gold}00.")
    if 0 < value < 1:
        answers += every(RIGHT, gold[1:])
    answers += every(VALUE, f"{gold} \\cdot 1", f"{2 * value:.{places}f}/2")
    wrong = (
        f"{1.05 * value + 0.05:.{places + 1}f}",
        f"{-value}",
        f"{10 * value:.{places}f}",
        f"{gold}7 + 1",
        f"{gold}, {gold}",
        f"{value + 1:.{places}f}",
    )
    return gold, answers + every(WRONG, *wrong, gold.replace(".", ""), f"{gold}.{gold[-1]}")


def e_notation(rng: random.Random) -> Made:
    mantissa, power = f"{rng.randint(10, 999) / 100:g}", rng.choice((1, -1)) * rng.randint(3, 30)
    gold = rng.choice(
        (
            f"{mantissa}e{power}",
            f"{mantissa} \\times 10^{{{power}}}",
            f"v = \\boxed{{{mantissa}e{power}}} \\mathrm{{~m/s}}",
        )
    )
    answers = every(
        RIGHT,
        f"{mantissa}e{power}",
        f"{mantissa}E{power}",
        f"{mantissa} \\times 10^{{{power}}}",
        f"{mantissa}\\cdot 10^{{{power}}}",
    )
    answers += every(
        RIGHT, f"{mantissa} \\times 10^{{{power}}} \\text{{ m/s}}", f"x = {mantissa} \\times 10^{{{power}}}"
    )
    other = f"{float(mantissa) * 1.5:g}"
    answers += every(
        WRONG,
        f"{mantissa}e{power + 1}",
        f"{mantissa} \\times 10^{{{-power}}}",
        mantissa,
        f"{other}e{power}",
        f"-{mantissa}e{power}",
    )
    return gold, answers + every(WRONG, f"{mantissa} \\times 10^{{{power - 1}}}", "0", f"{mantissa} \\times {power}")


def percentages(rng: random.Random) -> Made:
    p = rng.randint(1, 99)
    answers = every(RIGHT, f"{p}\\%", f"{p}%", f"{p}", f"{p} \\text{{ percent}}", f"{p} percent", f"{p}.0\\%")
    answers += every(VALUE, f"{p / 100:g}")
    return f"{p}\\%", answers + every(
        WRONG, f"{p + 1}\\%", f"-{p}\\%", f"{p}0\\%", f"{(p + 1) / 100:g}", f"{p}\\%, {p + 1}\\%", f"{100 * p}"
    )


_COUNTED = ("apples", "students", "hours", "marbles", "dollars", "pages", "people")
_MEASURED = ("cm", "m/s", "km/h", "kg", "mL", "square feet", "m^2")


def units(rng: random.Random) -> Made:
    n, thing, unit = rng.randint(2, 900), rng.choice(_COUNTED), rng.choice(_MEASURED)
    gold = rng.choice((f"{n}", f"{n}", f"{n} \\text{{ {unit}}}", f"{n} {thing}"))
    answers = every(
        RIGHT,
        f"{n} \\text{{ {thing}}}",
        f"{n}\\text{{ {unit}}}",
        f"{n} \\mathrm{{~{unit.partition(' ')[0]}}}",
        f"{n} {thing}",
        f"{n}",
        f"x = {n} \\text{{ {thing}}}",
    )
    answers += every(
        RIGHT, f"{n}^\\circ", f"{n}°", f"{n} cm", f"{n} \\text{{ cm}}^2", f"{n} \\text{{ {thing} per hour}}"
    )
    answers += every(
        WRONG,
        f"{n + 1} \\text{{ {thing}}}",
        f"{n} \\text{{ million}}",
        f"{n} \\text{{ or }} {n + 1} \\text{{ {thing}}}",
        f"\\text{{{thing}}}",
    )
    return gold, answers + every(
        WRONG,
        f"-{n} {thing}",
        f"{n}0 cm",
        f"{n} \\text{{ hundred {thing}}}",
        f"{n}i",
        f"{n} \\mathrm{{i}}",
        f"{n} dozen",
    )


def money(rng: random.Random) -> Made:
    cents = rng.randint(100, 999_999)
    plain = f"{cents // 100}.{cents % 100:02d}"
    grouped = f"{cents // 100:,}.{cents % 100:02d}"
    answers = every(
        RIGHT, f"\\${plain}", f"${plain}", plain, f"\\${grouped}", f"{plain} \\text{{ dollars}}", f"{grouped} dollars"
    )
    more = cents + max(100, cents // 20)
    wrong = f"{more // 100}.{more % 100:02d}"
    return f"\\${grouped}", answers + every(
        WRONG,
        f"\\${wrong}",
        wrong,
        f"-\\${plain}",
        str(cents) if cents % 100 else f"{cents}1",
        f"\\${plain} \\text{{ or }} \\${wrong}",
    )
