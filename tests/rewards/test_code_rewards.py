"""The share of tests a program passes, and whether it runs at all."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.sample import Sample
from megatron_rl.rewards import Scorer, make_reward
from megatron_rl.rewards.code import extract_code, read_tests, same_output, same_result

DOUBLE = {"inputs": ["1\n", "2\n", "30\n", "-4\n"], "outputs": ["2\n", "4\n", "60\n", "-8\n"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"], [[1], [2]]], "outputs": [3, "ab", [1, 2]]}


def block(code: str, language: str = "python") -> str:
    return f"I think so:\n```{language}\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("code", "passed", "clean", "seconds"),
    [
        ("print(2 * int(input()))", 1, 1, 8),
        ("n = int(input())\nprint(2 * abs(n))", 3 / 4, 1, 8),
        ("n = int(input())\nprint(2 * n)\nassert n > 0", 3 / 4, 0, 8),
        ("print(2 * int(input())", 0, 0, 8),
        ("print('hello')", 0, 1, 8),
        ("", 0, 1, 8),
        ("import time; time.sleep(99)", 0, 0, 2),
    ],
)
def test_programs_that_print(code: str, passed: float, clean: float, seconds: int) -> None:
    params = {"cpu_seconds": 1, "total_seconds": seconds}
    sample = {"metadata": {"tests": DOUBLE}}
    start = time.monotonic()
    assert make_reward("code_pass_rate", **params)(block(code), sample) == passed
    assert make_reward("code_bug", **params)(block(code), sample) == clean
    assert time.monotonic() - start < 10  # each of the four tests has three seconds


@pytest.mark.parametrize(
    ("code", "passed", "clean"),
    [
        ("def add(a, b):\n    return a + b", 1, 1),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", 1, 1),
        ("def add(a, b):\n    return int(a) + int(b)", 1 / 3, 0),
        ("def sub(a, b):\n    return a - b", 0, 0),
    ],
)
def test_programs_that_are_called(code: str, passed: float, clean: float) -> None:
    sample = {"answer": json.dumps(ADD)}
    assert make_reward("code_pass_rate")(block(code), sample) == pytest.approx(passed)
    assert make_reward("code_bug")(block(code), sample) == clean


def test_no_program_scores_nothing() -> None:
    for name in ("code_pass_rate", "code_bug"):
        assert make_reward(name)("print(2 * int(input()))", {"metadata": {"tests": DOUBLE}}) == 0.0


def test_the_last_block_is_the_program() -> None:
    assert extract_code(block("a = 1") + block("b = 2", "py") + block("echo", "bash")) == "b = 2\n"
    assert extract_code(block("a = 1") + block("Output: 1", "")) == "a = 1\n"  # what it prints is no program
    assert extract_code(block("a = 1", "") + block("b = 2", "")) == "b = 2\n"
    assert extract_code("```python\nnot closed") is None


def test_blocks_of_other_languages_do_not_hide_the_program() -> None:
    for before in (block("1 2", "text"), block("int main() {}", "c++"), "take ```a + b```\nhere:\n"):
        assert extract_code(before + block("print(1)")) == "print(1)\n"
        assert extract_code(before) is None
    assert extract_code("```text\nnot closed\n" + block("print(1)")) == "print(1)\n"


def test_only_the_first_tests() -> None:
    reward = make_reward("code_pass_rate", max_tests=2)
    assert reward(block("print(2 * abs(int(input())))"), {"metadata": {"tests": DOUBLE}}) == 1.0


def test_two_rewards_run_the_program_once() -> None:
    # Each of the four tests takes 0.8 s, so running them anew would take 3.2 s.
    code = "import time; time.sleep(0.8); print(2 * int(input()))"
    rewards = {name: RewardConfig(reward=name, params={"cpu_seconds": 2}) for name in ("code_pass_rate", "code_bug")}
    sample = Sample(id="a/0", task="a", prompt="p", prompt_ids=[1], metadata={"tests": DOUBLE})
    start = time.monotonic()
    assert Scorer(rewards).score([block(code)], [sample]) == [{"code_pass_rate": 1.0, "code_bug": 1.0}]
    first = time.monotonic() - start
    assert Scorer(rewards).score([block(code)], [sample]) == [{"code_pass_rate": 1.0, "code_bug": 1.0}]
    assert time.monotonic() - start - first < 3
    assert first > 3.2


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2 3", True),
        ("1.0000001", "1.0", True),
        ("1.1", "1.0", False),
        ("10000000", "10000001", False),
        ("1.0", "1", True),
        ("nan", "nan", True),
        ("YES", "Yes", False),
        ("1.5", "INF", False),
        ("", "", True),
        ("1", "", False),
    ],
)
def test_outputs(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (3, 3, True),
        (3, [3], True),
        ([3], [[3]], True),
        ("5", "5", True),
        (5, "5", True),
        ([1, 2], "[1, 2]", True),
        (True, True, True),
        (True, 1, False),
        (1, True, False),
        (1.0, 1, True),
        (0.1 + 0.2, 0.3, True),
        ({"a": [0.30000000001]}, {"a": [0.3]}, True),
        (None, None, True),
        (None, 0, False),
        ([1, 2], [2, 1], False),
        ("x", "[", False),
        (10**400, 1.5, False),
        (1e20, 10**20 + 1, False),
        (1e20, 10**20, True),
        (1000000.0, 1000001, False),
        (2.9999999, 3, False),
        (3, 2.9999999, True),
    ],
)
def test_results(value: Any, expected: Any, same: bool) -> None:
    assert same_result(value, expected) is same


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("{", "the tests are not JSON"),
        (None, "must be a mapping with the lists"),
        ({"inputs": []}, "must be a mapping with the lists"),
        ({"inputs": [], "outputs": []}, "at least one"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "there are 1 inputs and 2 outputs"),
        ({"inputs": ["{"], "outputs": [1], "fn_name": "f"}, "an input of the function is no JSON"),
    ],
)
def test_tests_that_are_none(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(tests)


def test_input_and_output_may_be_lists_of_lines_or_numbers() -> None:
    tests = read_tests({"inputs": [["2", 3], 4], "outputs": [[], ["a"]]})
    assert (tests.inputs, tests.outputs, tests.function) == (("2\n3", "4"), ("", "a"), None)


def test_arguments_may_be_text() -> None:
    given = ['1\n"a\u2028b"']  # JSON allows the separator within a text
    assert read_tests({"inputs": given, "outputs": ["2"], "fn_name": "f"}).inputs == ([1, "a\u2028b"],)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"cpu_seconds": 1.5}, "`cpu_seconds` must be an integer, not 1.5"),
        ({"cpu_seconds": 0}, "`cpu_seconds` must be at least 1; it is 0"),
        ({"max_tests": 0}, "`max_tests` must be at least 1; it is 0"),
        ({"total_seconds": -1}, "`total_seconds` must be at least 0; it is -1"),
    ],
)
def test_bad_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward("code_bug", **params)
