"""Lenient grading: the value counts, and a gold answer is read as a response is."""

from __future__ import annotations

import pytest

from megatron_rl.rewards.maths_lenient import same_answer


def boxed(answer: str) -> str:
    return f"Therefore \\boxed{{{answer}}}."


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("1.87e6", r"v = \boxed{1.87e6} m/s"),
        (r"1.87 \times 10^6", r"so $v = \boxed{1.87e6} \mathrm{~m} / \mathrm{s}$"),
        ("204", r"first $\boxed{3}$, then \(\boxed{204}\)."),
    ],
)
def test_a_gold_solution_s_last_box_is_the_gold_answer(answer: str, gold: str) -> None:
    assert same_answer(boxed(answer), gold)
    assert not same_answer(boxed("3"), gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("27.", "27"),
        (r"1\,000", "1000"),
        ("90°", "90"),
        ("12 dollars", "12"),
        (r"\varnothing", r"\emptyset"),
        ("0<x<1", "(0,1)"),
        (r"x \le 3", r"(-\infty,3]"),
        ("54/2", "27"),
        (r"\frac{2}{4}", r"\frac{1}{2}"),
        ("0.5", r"50\%"),
        (r"50\%", "0.5"),
        (r"\{27\}", "27"),
        ("[27, 20, 13]", "(27,20,13)"),
        ("x=5, y=2", "(5,2)"),
        ("0.0000027778", "2.7778e-6"),
        ("x = 28 - 1 = 27", "27"),
    ],
)
def test_the_same_value_in_another_form_is_right(answer: str, gold: str) -> None:
    assert same_answer(boxed(answer), gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("[27,27]", "27"),
        ("27, 27", "27"),
        (r"\{0,1\}", "(0,1)"),
        ("1,2,2", "1,2"),
        (r"-(\frac14, \frac1{27})", r"(\frac14, \frac1{27})"),
        (r"(\frac14, \frac1{27}) + 1", r"(\frac14, \frac1{27})"),
        (r"\hbar \omega(v+1 / 2)-\frac{E_{0}^{2} e^{2}}{2 m}+1", r"\hbar \omega(v+1 / 2)-\frac{E_{0}^{2} e^{2}}{2 m}"),
        (r"3 \text{ million}", "3"),
        (r"5\mathrm{i}", "5"),
        ("4210_6", "4210_5"),
        ("y = 5", "x = 5"),
        ("0.0", "1e-8"),
    ],
)
def test_another_value_is_wrong(answer: str, gold: str) -> None:
    assert not same_answer(boxed(answer), gold)


def test_what_stands_behind_the_thinking_is_the_answer() -> None:
    assert same_answer(r"<think>\boxed{28}</think>\boxed{27}", "27")
    assert not same_answer(r"<think>\boxed{27}</think>I do not know", "27")
    assert same_answer(r"<think>no end \boxed{27}", "27")


def test_without_a_box_math_verify_looks_for_the_answer() -> None:
    assert same_answer("So it is $27$.", "27")
    assert not same_answer("So it is $27$.", "28")


def test_all_boxes_of_a_text_are_one_answer_where_that_is_asked_for() -> None:
    both = r"\boxed{1} or \boxed{2}"
    assert same_answer(both, both, boxes="all")
    assert not same_answer(both, "2", boxes="all")
    assert same_answer(both, "2")


def test_small_numbers_need_further_decimals_only_below_a_thousandth() -> None:
    assert same_answer(boxed("0.0015004"), "0.0015")
    assert not same_answer(boxed("0.00015004"), "0.00015")


def test_capital_gamma_before_a_bracket_is_the_function() -> None:
    assert same_answer(boxed(r"\Gamma(5)"), "24")
    assert not same_answer(boxed(r"5\Gamma"), "24")
