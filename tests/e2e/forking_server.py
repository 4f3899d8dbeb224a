"""vLLM's OpenAI server, as `python -m vllm.entrypoints.openai.api_server` runs it, but its engine is a fork of it.

On a CPU vLLM starts the engine as a new process, because threads of OpenMP do not survive a fork; here there are none
(OMP_NUM_THREADS=1), and the new process would import everything once more.
"""

import multiprocessing
import runpy
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext

get_context = multiprocessing.get_context


def forking(method: str | None = None) -> BaseContext:
    if method != "spawn":
        return get_context(method)
    resource_tracker.ensure_running()  # as a spawn does: one of an engine's own would be killed with it
    return get_context("fork")


if __name__ == "__main__":
    multiprocessing.get_context = forking  # type: ignore[assignment]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
