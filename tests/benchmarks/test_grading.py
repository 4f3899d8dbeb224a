"""The math reward on known right and wrong answers: how many it may get wrong. The whole table is in docs/rewards/math.md."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.grading import by_math_verify, cases_of, errors
from benchmarks.grading_cases import KINDS, RIGHT, WRONG, cases
from megatron_rl.rewards.maths_lenient import same_answer
from megatron_rl.rewards.maths_strict import strictly_same

TODO = cases(340, seed=1)  # other gold answers than the table's


@pytest.mark.parametrize(("grade", "strict"), [(same_answer, False), (strictly_same, True)], ids=["lenient", "strict"])
def test_known_answers_are_graded_as_they_are(grade: object, strict: bool) -> None:
    assert callable(grade)
    verdicts = [bool(grade(case.completion, case.gold)) for case in TODO]
    refused, accepted, found = errors(TODO, verdicts, strict)
    shown = [(case.gold, case.completion, case.truth) for case in found]
    assert refused.total() == 0, shown
    assert accepted.total() == 0, shown


def test_the_cases_tell_graders_apart() -> None:
    """math-verify alone refuses right answers and accepts wrong ones among them, so the bounds above are no formality."""
    some = [case for case in TODO if case.kind in ("integers", "money", "bases", "where it stands")]
    refused, accepted, _ = errors(some, [by_math_verify(case.completion, case.gold) for case in some], strict=False)
    assert refused.total() > 3
    assert accepted.total() > 3


def test_cases_are_a_function_of_the_seed_and_cover_every_kind() -> None:
    assert cases(300, seed=3) == cases(300, seed=3) != cases(300, seed=4)
    counts = Counter((case.kind, case.truth) for case in TODO)
    assert {kind for kind, truth in counts if truth == RIGHT} == {*KINDS, "where it stands"}
    assert {kind for kind, truth in counts if truth == WRONG} == {*KINDS, "where it stands"}
    assert len({(case.gold, case.completion) for case in TODO}) == len(TODO)


def test_gold_answers_of_a_file_and_what_is_wrong_for_them() -> None:
    made = cases_of([r"v = \boxed{1.87e6} m/s", r"\text{east}"], "mine")
    assert [case.truth for case in made].count(RIGHT) == 2
    assert all(same_answer(case.completion, case.gold) == (case.truth == RIGHT) for case in made)
