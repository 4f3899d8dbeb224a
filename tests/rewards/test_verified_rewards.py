"""Maths and puzzles: verifiers of other packages, in a process of their own where they evaluate what a model wrote."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rewards import make_reward
from megatron_rl.rewards.isolation import Isolated, IsolatedReward, RewardProcessError
from megatron_rl.rewards.kinds import UNIT
from megatron_rl.rewards.puzzle import verify

SUM: dict[str, Any] = {"answer": "-8", "metadata": {"source_dataset": "chain_sum", "expression": "1 + 3 - 5 - 7"}}
COUNTDOWN: dict[str, Any] = {
    "answer": "94*4 - 61 - 6",
    "metadata": {"source_dataset": "countdown", "numbers": [6, 61, 94, 4], "target": 309},
}


@pytest.fixture(scope="module")
def maths() -> Iterator[IsolatedReward]:
    reward = make_reward("math", timeout_seconds=5)
    assert isinstance(reward, IsolatedReward)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def puzzle() -> Iterator[IsolatedReward]:
    reward = make_reward("puzzle", partial=True, timeout_seconds=2)
    assert isinstance(reward, IsolatedReward)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Isolated]:
    isolated = Isolated("builtins:eval", (), 2)
    yield isolated
    isolated.close()


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{3} no, \boxed{4}", "4", 1),
        (r"\boxed{\frac{1}{3}}", r"\frac{2}{6}", 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{[0,1)}", "[0,1)", 1),
        (r"\boxed{[0,1]}", "[0,1)", 0),
        (r"\boxed{12\text{ cm}}", "12", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"The answer is $\sqrt{8}$.", r"$2\sqrt{2}$", 1),
        ("The answer is 1,234.", 1234, 1),
        (r"\boxed{3.0 \times 10^8}", "3e8", 1),
        (r"\boxed{3.0e8}", "3e8", 1),
        (r"\boxed{9.9 \times 10^{-33}}", "4.5e-33", 0),
        (r"\boxed{0.0}", "1e-8", 0),
        (r"\boxed{0.0000027778}", "2.7778e-6", 1),
        (r"\boxed{32348}", r"\$32,\!348", 1),
        (r"\boxed{4}. The final answer is $5$", "4", 1),
        (r"\fbox{4}", "4", 1),
        (r"\boxed{8, 221}", "$221,$8$", 1),
        (r"\boxed{8, 221}", "$221$,$8$", 1),
        (r"\boxed{x_{0} \cos (t)+\sin (t)}", r"x_{0} \cos (t)+$ $\sin (t)", 1),
        (r"\boxed{13}", "12", 0),
        ("I do not know", "12", 0),
        ("", "12", 0),
        (r"\boxed{", "12", 0),
        (r"\boxed{\frac{1}{0}}", "12", 0),
    ],
)
def test_answers_are_compared_as_mathematics(
    completion: str, answer: Any, expected: float, maths: IsolatedReward
) -> None:
    assert maths(completion, {"answer": answer}) == expected


def test_the_values_of_right_and_wrong_are_parameters(maths: IsolatedReward) -> None:
    reward = make_reward("math", wrong=-1.0, require_stop=True)
    assert reward(r"\boxed{4}", {"answer": "4", "finish_reason": "length"}) == -1.0
    assert maths(r"\boxed{4}", {"answer": "4", "finish_reason": "length"}) == 1.0


def test_several_boxes_are_one_answer_or_a_set(maths: IsolatedReward) -> None:
    every = make_reward("math", boxes="all")
    assert isinstance(every, IsolatedReward)
    text = r"\boxed{3} and \boxed{4}"
    assert (maths(text, {"answer": "4"}), maths(text, {"answer": r"\{3, 4\}"})) == (1.0, 0.0)
    assert (every(text, {"answer": "4"}), every(text, {"answer": r"\{3, 4\}"})) == (0.0, 1.0)
    helper = every.isolated._helper
    every.close()
    assert helper is not None
    assert helper.poll() is not None, "the helper ends with the reward"


def test_the_deadline_holds_in_any_thread(maths: IsolatedReward) -> None:
    before = maths.isolated.timeouts
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(maths(r"\boxed{9^{9^{9^{9}}}}", {"answer": "12"})))
    start = time.monotonic()
    thread.start()
    thread.join(60)
    assert found == [0.0]
    assert time.monotonic() - start < 30
    assert maths.isolated.timeouts == before + 1
    assert maths(r"\boxed{12}", {"answer": "12"}) == 1.0  # and the next answer is scored by a fresh helper


def test_a_gold_answer_that_is_none_is_an_error(maths: IsolatedReward) -> None:
    with pytest.raises(RewardProcessError, match=r"the gold text .* holds no answer"):
        maths(r"\boxed{12}", {"answer": "$$"})
    with pytest.raises(ValueError, match="needs the sample's answer"):
        maths(r"\boxed{12}", {})


@pytest.mark.parametrize(
    ("params", "completion", "expected"),
    [
        ({}, "-8", 1),
        ({}, "the answer is -8", 0),
        ({"partial": True}, "the answer is -8", 2 / 16),
        ({"after": "#"}, "1+3=4#7#-8", 1),
        ({"after": "#"}, "#-8#", 0),
        ({"after": "#"}, "#-88", 0),
        ({"after": "#", "partial": True}, "#-88", 2 / 3),
        ({"after": "#"}, "-8", 0),
        ({"after": "#"}, "", 0),
    ],
)
def test_a_sum(params: dict[str, Any], completion: str, expected: float) -> None:
    assert make_reward("puzzle", **params)(completion, SUM) == pytest.approx(expected)


def test_a_response_that_was_cut_scores_nothing() -> None:
    cut = {**SUM, "finish_reason": "length"}
    assert make_reward("puzzle")("-8", cut) == 0.0
    assert make_reward("puzzle", require_stop=False)("-8", cut) == 1.0
    assert make_reward("puzzle")("-8", {**SUM, "finish_reason": "stop"}) == 1.0


def test_a_puzzle_nobody_can_score() -> None:
    with pytest.raises(ValueError, match=r"metadata\['source_dataset'\]"):
        make_reward("puzzle")("-8", {"answer": "-8"})
    with pytest.raises(ValueError, match="after must not be empty"):
        make_reward("puzzle", after="")


def test_an_unknown_dataset_is_an_error(puzzle: IsolatedReward) -> None:
    with pytest.raises(RewardProcessError, match="did you mean 'countdown'"):
        puzzle("1", {"answer": "1", "metadata": {"source_dataset": "countdow"}})


def test_countdown_in_its_own_process(puzzle: IsolatedReward) -> None:
    assert puzzle("94*4 - 61 - 6", COUNTDOWN) == 1.0
    assert puzzle("6 + 61", COUNTDOWN) == 0.05
    assert puzzle("", COUNTDOWN) == 0.01
    assert puzzle("9**9**9**9**9", COUNTDOWN) == 0.01  # no arithmetic of countdown's: not evaluated


def test_a_verifier_that_takes_too_long_is_stopped(puzzle: IsolatedReward) -> None:
    before = puzzle.isolated.timeouts
    metadata = {"source_dataset": "simple_integration", "variable": "x", "integrand": "x"}
    assert puzzle("9**9**9**9**9", {"answer": "x**2/2 + C", "metadata": metadata}) == 0.0
    assert puzzle.isolated.timeouts == before + 1


@pytest.mark.parametrize(
    ("numbers", "target", "answer"),
    [([2, 3], 8, "2**3"), ([7, 2], 3, "7//2"), ([5, 2, 2], 5, "5.2 - .2"), ([5, 2], 5.2, "5.2"), ([2, 3], 8, "2 ** 3")],
)
def test_countdown_takes_the_four_operations_only(
    numbers: list[int], target: float, answer: str, puzzle: IsolatedReward
) -> None:
    metadata = {"source_dataset": "countdown", "numbers": numbers, "target": target}
    assert puzzle(answer, {"answer": "0", "metadata": metadata}) == 0.01


@pytest.mark.parametrize(
    "attack",
    [
        '__import__("os").system("touch {path}")',
        '__import__("subprocess").run(["touch", "{path}"])',
        'open("{path}", "w")',
        '__import__("os").open("{path}", 66)',
        '__import__("os").fork()',
        '__import__("os").kill({pid}, 9)',
        '__import__("socket").socket()',
        '__import__("ctypes").CDLL(None).system(b"touch {path}")',
        '__import__("os").mkdir("{path}")',
        # Past Python's own functions and the audit hook before them, to the kernel:
        '__import__("os").mkfifo("{path}")',
        '__import__("cffi").FFI().dlopen(None).system(b"touch {path}")',
        '__import__("cffi").FFI().dlopen(None).creat(b"{path}", 438)',
        '__import__("_posixsubprocess").fork_exec([b"touch", b"{path}"], [b"/usr/bin/touch"], True, (), None, None, '
        "-1, -1, -1, -1, -1, -1, *__import__('os').pipe(), False, False, 0, None, None, None, -1, None, True)",
        '__import__("_socket").socket(2, 1)',
        '__import__("_thread").start_new_thread(open, ("{path}",))',
        "[0] * 10**12",
        '__import__("os")._exit(0)',
        '__import__("os").write(3, b\'{"value": 1.0}\\n\')',  # where the helper answers
    ],
)
def test_text_that_is_evaluated_can_do_nothing(
    attack: str, puzzle: IsolatedReward, evaluator: Isolated, tmp_path: Path
) -> None:
    path = tmp_path / "touched"
    text = attack.replace("{path}", str(path)).replace("{pid}", str(os.getpid()))
    assert puzzle(text, COUNTDOWN) == 0.01  # as any nonsense; it is not evaluated
    with contextlib.suppress(RewardProcessError):
        assert evaluator(text) == 0.0  # and this is what happens where it is
    assert not path.exists()
    assert evaluator("1 + 1") == 2.0


@pytest.mark.parametrize("text", ["2", "-1", "float('nan')", "1e999"])
def test_a_value_outside_the_bounds_ends_the_helper(text: str) -> None:
    isolated = Isolated("builtins:eval", (), 2, UNIT)
    assert isolated("True") == 1.0
    helper = isolated._helper
    with pytest.raises(RewardProcessError, match=r"no finite number in \[0, 1\]"):
        isolated(text)
    assert helper is not None
    assert helper.poll() is not None
    assert isolated("0.5") == 0.5
    isolated.close()


def test_a_list_is_read_not_evaluated(puzzle: IsolatedReward) -> None:
    """A text that is looked up earns nothing, and one that assigns changes no later score; literals have their credit."""
    import reasoning_gym

    for dataset in ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"):
        item = reasoning_gym.create_dataset(dataset, size=1, seed=11)[0]
        metadata = item["metadata"] | {"source_dataset": dataset}
        solutions = {"string_insertion": list(item["answer"]), "spiral_matrix": item["answer"].split()}
        rows = [row.split() for row in item["answer"].split("\n")]
        literal = repr(solutions.get(dataset, rows))
        for text, expected in (
            ("[[] for __builtins__['float'] in [id]]", 0),
            ("wrong", 0),
            ('[[] for __builtins__["str"] in [int]]', 0),
            ("entry['answer']", 0),
            ("[entry['answer']]", 0),
            ("entry['metadata']['solution']", 0),
            ("entry['metadata']['valid_answers'][0]", 0),
            ("oracle_answer", 0),
            ("[" * 300, 0),
            (literal, 0.5 if dataset == "n_queens" else 0.1),
            (item["answer"], 1),
        ):
            assert puzzle(text, {"answer": item["answer"], "metadata": metadata}) == expected, (dataset, text)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("x**2/2 + C", 1), ("x*x*0.5", 1), ("x**2", 0), ("Integral(x, x)", 0), ("sin(x).integrate(x)", 0)],
)
def test_an_integral_is_not_left_to_the_verifier(answer: str, expected: float, puzzle: IsolatedReward) -> None:
    metadata = {"source_dataset": "simple_integration", "variable": "x", "integrand": "x"}
    assert puzzle(answer, {"answer": "x**2/2 + C", "metadata": metadata}) == expected


def test_a_long_text_is_no_expression_and_that_is_seen_in_time(puzzle: IsolatedReward) -> None:
    """Not by running into the deadline: with names that end in digits, a careless pattern takes twice as long per name."""
    isolated: Isolated = puzzle.isolated
    timeouts = isolated.timeouts
    metadata = {"source_dataset": "simple_integration", "variable": "x", "integrand": "x"}
    assert puzzle("step1 " * 1000 + "!", {"answer": "x**2/2 + C", "metadata": metadata}) == 0
    assert isolated.timeouts == timeouts


@pytest.mark.parametrize(
    ("dataset", "gold", "answer", "expected"),
    [
        ("game_of_life_halting", "False", "True", 0),
        ("game_of_life_halting", "False", "no idea", 0),
        ("game_of_life_halting", "False", " false", 1),
        ("complex_arithmetic", "-5.0 + 20.0i", "nan", 0),
        ("complex_arithmetic", "-5.0 + 20.0i", "-5 + 20i", 1),
    ],
)
def test_verifiers_that_would_take_anything(dataset: str, gold: str, answer: str, expected: float) -> None:
    metadata = {"source_dataset": dataset, "result": (-5.0, 20.0)}
    assert verify(answer, {"question": "", "answer": gold, "metadata": metadata}) == expected


def test_a_helper_that_cannot_start_says_why() -> None:
    with pytest.raises(RewardProcessError, match="No module named 'no_such_module'"):
        Isolated("no_such_module:f", (), 1)(1)


def test_a_closed_helper_leaves_no_process() -> None:
    isolated = Isolated("operator:add", (), 5)
    assert isolated(2, 3) == 5.0
    helper = isolated._helper
    assert helper is not None
    isolated.close()
    assert helper.poll() is not None
    assert isolated(2, 4) == 6.0
    isolated.close()
