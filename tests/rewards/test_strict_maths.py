"""Strict grading: what it accepts, what it does not, and where the lenient grader differs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_rl.rewards import make_reward
from megatron_rl.rewards.isolation import IsolatedReward
from megatron_rl.rewards.maths import gold_text
from megatron_rl.rewards.maths_forms import elements, last_box, number, same_in_base, squeeze, tidy
from megatron_rl.rewards.maths_strict import same_form, strictly_same

RIGHT = [
    ("204", "204"),
    ("27", "27.0"),
    ("27.0", "27"),
    ("1,234", "1234"),
    (r"\$32{,}348", r"\$32,348"),
    ("10,000", r"10,\!000"),
    ("11111111100", r"11,\! 111,\! 111,\! 100"),
    (r"\frac9{19}", r"\frac{9}{19}"),
    (r"\frac{270}7", "270/7"),
    ("1 1/2", r"\frac{3}{2}"),
    ("\N{MINUS SIGN}5", "-5"),
    (r"x \in [0,1)", "[0,1)"),
    (r"\dfrac{1}{2}", "1/2"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    ("1.60", "1.6"),
    (r"7.25\times10^{22}", "7.25e22"),
    (r"7.2503 \times 10^{22}", "7.25e22"),
    (r"12\text{ cm}", "12"),
    ("10 square units", "10"),
    (r"90^\circ", "90"),
    (r"50\%", "50"),
    ("x = 5", "5"),
    ("2x+1", "y=2x+1"),
    (r"\text{East}", r"\text{east}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    ("[0, 1)", "[0,1)"),
    (r"(-\infty,1)\cup(3,\infty)", r"(-\infty, 1) \cup (3, \infty)"),
    ("3, 5", "5,3"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1\\2 \end{pmatrix}"),
    ("42", r"the answer is \boxed{42}"),
    ("42", "$42$"),
    ("204", r"or $\framebox{204}$ minutes"),
    (r"12 \text{ apples}", "12"),
    (r"5 \text{ m/s}", "5"),
    (r"5\text{ m/s}^2", "5"),
    (r"16\pi \mathrm{~cm}^2", r"16\pi"),
    ("12 apples", "12"),
    ("6,000 people", "6000"),
    (r"3 \text{ million people}", "3000000"),
    (r"1\,000", "1000"),
    ("1 000", "1000"),
    (r"3 \text{ and } 5", "5, 3"),
    (r"\varnothing", r"\emptyset"),
    ("4210_5", "4210_{5}"),
    (r"4210_{\text{five}}", "4210_{5}"),
    ("5 = k", "k = 5"),
    ("f(x) = 2x+1", "y=2x+1"),
    (r"c^{2} m (\gamma^2-1)", r"m c^{2}\left(\gamma^{2}-1\right)"),
    (r"a \cos t", r"\cos(t) a"),
]
WRONG = [
    ("28", "27"),
    ("-27", "27"),
    ("54/2", "27"),
    (r"3\cdot 9", "27"),
    (r"\sqrt{729}", "27"),
    ("2^3", "8"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    ("1 1/2", r"\frac{11}{2}"),
    (r"\frac2{38}", r"\frac1{19}"),
    (r"\frac{1}{0}", "1"),
    ("0.333", r"\frac{1}{3}"),
    ("0.50001", r"\frac12"),
    ("7.3e22", "7.25e22"),
    ("1.4142136", r"\sqrt{2}"),
    ("3.14", r"\pi"),
    ("0.5", r"50\%"),
    ("27 or 28", "27"),
    ("about 27", "27"),
    ("5, 5", "5"),
    ("1,1", "1,2"),
    ("1,2,3", "1,2"),
    ("(1,234)", "1234"),
    ("(2,1)", "(1,2)"),
    ("[0,1]", "[0,1)"),
    (r"\text{west}", r"\text{east}"),
    ("", "5"),
    ("9" * 5000, "3"),
    (r"27 \text{ or } 28", "27"),
    (r"3 \text{ million}", "3"),
    ("3 dozen", "3"),
    (r"5\mathrm{i}", "5"),
    ("2 7", "27"),
    ("y = 5", "x = 5"),
    ("-k = 5", "k = 5"),
    ("4210_6", "4210_5"),
    (r"555_{10}", "4210_5"),
    (r"\sin h", r"\sinh"),
    # What math-verify's parser reads as a function, a constant or 0, and so takes for the gold answer:
    (r"m c^{2}\left(\gamma^{2}-3\right)", r"m c^{2}\left(\gamma^{2}-1\right)"),
    (r"-\frac{d x}{d t}=k x-a", r"\frac{d x}{d t}=k x-a"),
]


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_the_gold_answer_in_another_writing_is_right(answer: str, gold: str) -> None:
    assert strictly_same(f"Therefore \\boxed{{{answer}}}.", gold)


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_another_value_or_an_unfinished_form_is_wrong(answer: str, gold: str) -> None:
    assert not strictly_same(f"Therefore \\boxed{{{answer}}}.", gold)


@pytest.mark.parametrize(
    "text",
    [
        "27",
        "The answer is 27.",
        r"\boxed{27",
        r"\boxed 27",
        r"\boxed{27} no, \boxed{26}",
        r"<think>\boxed{27}</think> 27",
    ],
)
def test_only_the_last_closed_box_counts(text: str) -> None:
    assert not strictly_same(text, "27")


def test_a_box_ends_at_its_own_brace() -> None:
    assert last_box(r"\boxed{\{1,\frac{1}{2}\}} and more}") == r"\{1,\frac{1}{2}\}"


@pytest.fixture(scope="module")
def strict() -> Iterator[IsolatedReward]:
    reward = make_reward("math", strict=True, timeout_seconds=30)
    assert isinstance(reward, IsolatedReward)
    yield reward
    reward.isolated.close()


def test_the_reward_grades_strictly(strict: IsolatedReward) -> None:
    assert strict(r"\boxed{x^2+2x+1}", {"answer": "(x+1)^2"}) == 1
    assert strict(r"The answer is 27.", {"answer": "27"}) == 0


def test_its_deadline_holds(strict: IsolatedReward) -> None:
    strict.isolated.timeout_seconds = 1.0
    before = strict.isolated.timeouts
    assert strict(r"\boxed{(x+1)^{9^{9^{9}}}}", {"answer": "(x+1)^{9^{9^{8}}}"}) == 0
    assert strict.isolated.timeouts == before + 1


@pytest.mark.parametrize(
    ("answer", "after", "text"),
    [("4 + 3 = 7\n#### 7", "####", "7"), (["7"], None, "7"), (["7", "8"], None, "7, 8"), (7, None, "7")],
)
def test_gold_answers_as_data_sets_store_them(answer: object, after: str | None, text: str) -> None:
    assert gold_text(answer, after) == text


def test_a_gold_answer_without_its_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="gold_after"):
        make_reward("math", gold_after="####")(r"\boxed{7}", {"answer": "7"})


def test_all_boxes_and_strict_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="boxes"):
        make_reward("math", strict=True, boxes="all")


def test_literals_are_read_as_they_are_written() -> None:
    """Blanks that part tokens stay, powers have a limit, and a unit is no factor."""
    assert [squeeze(text) for text in ("2 x", "1 2", r"\pi x", r"2 \pi")] == ["2x", "1 2", r"\pi x", r"2\pi"]
    for written in ("1e400", "1E400", r"1\times10^{400}"):
        assert number(written) == 10**400
        assert number(written.replace("400", "401")) is None
    assert elements("([1,2],3)") == ("()", ["[1,2]", "3"])
    assert elements("[1,2]),3") is None
    assert tidy("12 cm") == "12"
    assert [tidy(text) for text in ("3 xy", "2ab", "2abc")] == ["3 xy", "2ab", "2abc"]
    assert same_in_base("12", "12") is None  # numbers as others are
    assert same_in_base("12_5", "12") is True
    assert same_in_base("12_5", "12_6") is False
    assert same_form("5 = x", "x = 5.")  # a sentence's point is no part of the equation
