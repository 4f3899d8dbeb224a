"""Rewards on programs: the share of tests passed, and whether the program runs at all (GDPO, section 4.3)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, ClassVar

from pydantic import Field

from megatron_rl.base.messages import errors_named
from megatron_rl.base.typed_params import NonNegative
from megatron_rl.rewards.kinds import UNIT, PooledReward, SampleMapping, Score
from megatron_rl.rewards.registry import register_reward
from megatron_rl.rewards.sandbox import Limits, run_program
from megatron_rl.rewards.tool_parsers import json_lines
from megatron_rl.runtime.calls import call_pool, event_loop

# A block of any language, so that its end is not read as the start of another; code on one line is no block. The start of a
# Python block does not close one that was left open.
_FENCE = re.compile(
    r"```[^`\n]*```|```([^`\n]*)\n(.*?)(?:(?=```[ \t]*(?:python3?|py)\b[^`\n]*\n)|```)", re.DOTALL | re.IGNORECASE
)
_WHOLE, _DECIMAL = re.compile(r"[+-]?[0-9]+"), re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_PYTHON = ("python", "python3", "py")
_RUNS_KEPT = 4096  # reports of programs
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Tests:
    """Tests of one problem: standard input and output, or arguments and results of a function."""

    inputs: tuple[Any, ...]  # text; or with `function`, lists of arguments
    outputs: tuple[Any, ...]  # text; or with `function`, results
    function: str | None = None


@dataclass(frozen=True)
class ProgramReport:
    """Outcome of a program on the tests it was run on."""

    passed: int
    total: int
    clean: bool  # every run ended by itself, without an error


@dataclass(frozen=True)
class RunLimits:
    """Limits of the two rewards. A program runs only once for both where they are equal.

    Args:
        cpu_seconds: CPU time of one test, whole seconds; the time on the clock may be twice that, and a second.
        memory_mib: address space.
        total_seconds: time on the clock for all tests of one program; tests that would start later count as failed.
        max_tests: only the first so many tests; null: all.
    """

    cpu_seconds: Count = 4
    memory_mib: Count = 512
    total_seconds: NonNegative = 30.0
    max_tests: Count | None = None


@register_reward("code_pass_rate", RunLimits)
def code_pass_rate(limits: RunLimits) -> ProgramReward:
    """Share of the tests that the completion's program passes, in [0, 1] (GDPO, section 4.3).

    The program is the last fenced code block (`extract_code`); 0 without one. It runs in a sandbox, once per test.
    """
    return ProgramReward(lambda report: report.passed / report.total, limits)


@register_reward("code_bug", RunLimits)
def code_bug(limits: RunLimits) -> ProgramReward:
    """1 where the completion's program compiles, and runs on every test without an error, else 0 (GDPO, section 4.3).

    What it prints or returns does not matter. A run that exceeds a limit is an error, and so is a test that is not run.
    """
    return ProgramReward(lambda report: float(report.clean), limits)


def extract_code(completion: str) -> str | None:
    """The last fenced block that says it is Python, else the last that names no language; None without either."""
    unnamed = None
    for block in reversed(list(_FENCE.finditer(completion))):
        info, code = block.groups()
        if code is None:
            continue
        language = info.strip().lower().partition(" ")[0]
        if language in _PYTHON:
            return str(code)
        unnamed = code if unnamed is None and not language else unnamed
    return unnamed


def read_tests(source: object) -> Tests:
    """Tests as APPS, TACO, CodeContests and Eurus-2 store them: `{"inputs": [...], "outputs": [...], "fn_name": name}`.

    Args:
        source: that mapping, or its JSON text. Without `fn_name`, inputs and outputs are text (or lists of lines). With it,
            an input is the list of arguments, or text with one argument per line in JSON; an output is the result, or its
            JSON text.

    Raises:
        ValueError: not of this form, or no tests.
    """
    if isinstance(source, str):
        with errors_named("the tests are not JSON", ValueError, RecursionError):
            source = json.loads(source)
    if not isinstance(source, Mapping) or not all(isinstance(source.get(key), list) for key in ("inputs", "outputs")):
        raise ValueError("the tests must be a mapping with the lists `inputs` and `outputs`")
    inputs, outputs, function = source["inputs"], source["outputs"], source.get("fn_name")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"there are {len(inputs)} inputs and {len(outputs)} outputs; tests need both, and at least one"
        )
    if function is None:
        return Tests(tuple(map(_text, inputs)), tuple(map(_text, outputs)))
    return Tests(tuple(map(_arguments, inputs)), tuple(outputs), str(function))


def run_tests(code: str, tests: Tests, limits: Limits, total_seconds: float) -> ProgramReport:
    """Run a program on its tests, one run each. Tests left when `total_seconds` are up count as failed.

    Raises:
        SandboxError: the machine cannot confine programs.
    """
    deadline = time.monotonic() + total_seconds
    passed, clean = 0, True
    for case, expected in zip(tests.inputs, tests.outputs, strict=True):
        if time.monotonic() > deadline:
            clean = False
            break
        if tests.function is None:
            outcome = run_program(code, stdin=case, limits=limits)
            passed += outcome.status == "ok" and same_output(outcome.stdout, expected)
        else:
            outcome = run_program(code, function=tests.function, arguments=case, limits=limits)
            passed += outcome.status == "ok" and same_result(outcome.value, expected)
        clean = clean and outcome.status == "ok"
        if outcome.status == "syntax":
            break  # it fails every other test the same way
    return ProgramReport(passed, len(tests.inputs), clean)


def same_output(printed: str, expected: str) -> bool:
    """Whether two texts agree token by token. White space is ignored; decimals may differ by 1e-6, whole numbers not."""
    left, right = printed.split(), expected.split()
    return len(left) == len(right) and all(a == b or _close(a, b) for a, b in zip(left, right, strict=True))


def _close(printed: str, expected: str) -> bool:
    if _WHOLE.fullmatch(expected):
        return _DECIMAL.fullmatch(printed) is not None and Decimal(printed) == Decimal(expected)
    with contextlib.suppress(ValueError):
        return _same(float(printed), float(expected))
    return False


def same_result(value: object, expected: object) -> bool:
    """Whether a returned value is the expected one, both as JSON has them. Floats may differ by 1e-6; where a whole number is
    expected, the value is exactly that, as an integer or a float.

    Some data sets wrap every result in a list of one, or store it as JSON text: what is inside is accepted too.
    """
    if _same(value, expected):
        return True
    if isinstance(expected, str):
        with contextlib.suppress(ValueError, RecursionError):
            return _same(value, json.loads(expected))
        return False
    return isinstance(expected, list) and len(expected) == 1 and _same(value, expected[0])


def _same(value: object, expected: object) -> bool:
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(expected, int):
        return isinstance(value, int | float) and value == expected
    if isinstance(value, float) or isinstance(expected, float):
        if not (isinstance(value, int | float) and isinstance(expected, int | float)):
            return False
        with contextlib.suppress(OverflowError):  # a whole number beyond what a float can hold
            return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6)
        return False
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(_same(a, b) for a, b in zip(value, expected, strict=True))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in value)
    return bool(value == expected)


class ProgramReward(PooledReward):
    """`value` of what a completion's program does on the sample's tests; 0 where there is no program."""

    _runs: ClassVar[OrderedDict[bytes, asyncio.Task[ProgramReport]]] = OrderedDict()  # the latest; of the event loop

    def __init__(self, value: Callable[[ProgramReport], float], limits: RunLimits) -> None:
        super().__init__(
            lambda completion, sample: self.submit(completion, sample).result(),
            timeout_seconds=None,  # the sandbox has its own
            bounds=UNIT,
            check_sample=_tests_of,
        )
        self._value, self._total_seconds, self._max_tests = value, limits.total_seconds, limits.max_tests
        seconds = limits.cpu_seconds
        self._limits = Limits(cpu_seconds=seconds, wall_seconds=2 * seconds + 1, memory_mib=limits.memory_mib)

    def submit(self, completion: str, sample: SampleMapping) -> Future[Score]:
        return asyncio.run_coroutine_threadsafe(self._score(completion, sample), event_loop())

    async def _score(self, completion: str, sample: SampleMapping) -> Score:
        tests = _tests_of(sample)
        code = extract_code(completion)
        if code is None:
            return 0.0
        tests = Tests(tests.inputs[: self._max_tests], tests.outputs[: self._max_tests], tests.function)
        return self._value(await self._run(code, tests))

    def _run(self, code: str, tests: Tests) -> asyncio.Task[ProgramReport]:
        """The program's run on these tests, which takes one worker of the pool. Rewards with equal limits share it."""
        what = repr((code, tests, self._limits, self._total_seconds))  # tests can be megabytes: only a hash is kept
        key = hashlib.blake2b(what.encode(errors="surrogatepass"), digest_size=16).digest()
        run = self._runs.get(key)
        if run is None or (run.done() and (run.cancelled() or run.exception())):
            call = functools.partial(run_tests, code, tests, self._limits, self._total_seconds)
            run = self._runs[key] = asyncio.create_task(call_pool().run(call, None))
            while len(self._runs) > _RUNS_KEPT:
                self._runs.popitem(last=False)
        return run


def _tests_of(sample: SampleMapping) -> Tests:
    metadata = sample.get("metadata") or {}
    return read_tests(metadata["tests"] if "tests" in metadata else sample.get("answer"))


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: object) -> list[object]:
    if isinstance(value, list):
        return value
    with errors_named(f"an input of the function is no JSON: {value!r:.200}"):
        return [json.loads(line) for line in json_lines(str(value)) if line.strip()]
