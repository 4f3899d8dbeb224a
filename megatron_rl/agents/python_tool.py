"""The environment `python` of the agent `tools`: it runs what the policy writes, in the sandbox of the code rewards."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Literal

from megatron_rl.agents.failures import InfrastructureFailed
from megatron_rl.data.sample import Message
from megatron_rl.rewards.code import Count
from megatron_rl.rewards.sandbox import Limits, ProgramResult, SandboxError, run_program
from megatron_rl.runtime.calls import call_pool
from megatron_rl.tasks.python_maths import TOOL

# Runs in the sandbox: the cells one after the other, all but the last without a word. It imports nothing that takes time.
_HARNESS = """
import _ast, io, sys
def run(code, names):
    try:
        tree = compile(code, "code", "exec", _ast.PyCF_ONLY_AST)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, "code", "exec"), names)
        if last is not None:
            value = eval(compile(_ast.Expression(last.value), "code", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:
        line, where = getattr(error, "lineno", None), error.__traceback__
        while where is not None:
            line = where.tb_lineno if where.tb_frame.f_code.co_filename == "code" else line
            where = where.tb_next
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        print(type(error).__name__ + (f": {said}" if said else "") + (f" (line {line})" if line else ""))
names = {"__name__": "__main__"}
if SEED is not None:
    import random
    random.seed(SEED)
for code in CELLS[:-1]:
    sys.stdout = io.StringIO()
    run(code, names)
sys.stdout = sys.__stdout__
run(CELLS[-1], names)
"""


class PythonTool:
    """A Python that the policy calls by the tool `python`, with `code`; the reply is what it prints, and the value of a last
    line that is an expression. It has the standard library, no network and no files but its own.

    Its reward has a column `ran`, the share of the calls whose program came to an end, by itself or by an exception; what the
    answer is worth is for other rewards to say. Programs take turns, one per processor, and their waiting does not count
    against `tool_seconds`.

    Args:
        state: `fresh`: every call is a program of its own; `kept`: names live on through a conversation, for which the
            programs of its earlier calls run again before each one.
        cpu_seconds: CPU time of a call, whole seconds; the time on the clock may be twice that, and a second.
        memory_mib: address space.
    """

    inline = True  # it has deadlines of its own

    def __init__(
        self, state: Literal["fresh", "kept"] = "fresh", cpu_seconds: Count = 4, memory_mib: Count = 512
    ) -> None:
        self._keeps = state == "kept"
        self._seconds = cpu_seconds
        self._limits = Limits(
            cpu_seconds=cpu_seconds, wall_seconds=2 * cpu_seconds + 1, memory_mib=memory_mib, output_mib=1
        )

    def reset(self, task: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
        """The prompt's tools. A prompt without any has to say itself how a call is written."""
        tools, seed = task.get("tools"), task.get("seed")
        self._cells: list[str] = []
        self._seed = seed if isinstance(seed, int) else 0
        self._calls = self._ran = 0
        return tools if isinstance(tools, list) else []

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        self._calls += 1
        code = arguments.get("code")
        if name != TOOL or set(arguments) != {"code"} or not isinstance(code, str):
            return f"error: the tool is {TOOL}, with code"
        cells = [*self._cells, code]
        text = "".join(cells)
        seeded = self._seed if "random" in text else None  # importing it takes a quarter of a short program's time
        program = f"SEED, CELLS = {seeded!r}, {cells!r}\n{_HARNESS}"
        running = call_pool().submit(functools.partial(run_program, program, limits=self._limits), None)
        try:
            result = await asyncio.wrap_future(running)
        except SandboxError as error:
            raise InfrastructureFailed(str(error)) from error
        if result.status == "ok":
            self._ran += 1
            self._cells = cells if self._keeps else []
        return self._reply(result)

    def reward(self, task: Mapping[str, object], messages: Sequence[Message]) -> dict[str, float]:
        return {"ran": self._ran / self._calls if self._calls else 0.0}

    def _reply(self, result: ProgramResult) -> str:
        if result.status == "ok":
            return result.stdout.rstrip() or "nothing was printed"
        if result.status == "time":
            return f"error: it took more than {self._seconds} s"
        if result.status == "disk":
            return "error: its files are too large"
        return f"error: {result.error.strip().splitlines()[-1] if result.error.strip() else 'the program crashed'}"
