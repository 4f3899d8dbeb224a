"""vLLM's table of models: what it looks up of a class before an engine starts. Written for 0.32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from megatron_rl.seams import replaced


@contextlib.contextmanager
def inspected_here() -> Iterator[None]:
    """While entered, vLLM imports a class to look at it in this process.

    It starts another Python for that, which takes 10 s and more of a processor on each rank until its cache in the home
    folder knows the class: an import might use CUDA before an engine's process is forked. Ours are forked before.
    """
    from vllm.model_executor.models import registry

    with replaced(registry, "_run_in_subprocess", _call, "fn"):
        yield


def _call[T](function: Callable[[], T]) -> T:
    return function()
