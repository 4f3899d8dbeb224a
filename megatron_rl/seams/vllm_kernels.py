"""vLLM on a machine without Triton: its C++ functions in place of Triton's kernels. Written for 0.32.

As a worker starts, vLLM looks for the kernels at every name in every module that has been imported: 0.17 CPU seconds of a
rank, for six thousand modules of which one thousand are vLLM's. Nobody else holds its kernels.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

from megatron_rl.seams import replaced

REBIND = ("_rebind_kernels", "overrides")  # of vllm.triton_utils.dispatcher


@contextlib.contextmanager
def looked_for_in_vllm_only() -> Iterator[None]:
    """Around the start of an engine."""
    from vllm.triton_utils import dispatcher

    name, parameters = REBIND
    rebind = getattr(dispatcher, name)

    def rebind_in_vllm(overrides: object) -> None:
        own = {name: module for name, module in sys.modules.items() if name.startswith("vllm.")}
        dispatcher.sys = SimpleNamespace(modules=own)
        try:
            rebind(overrides)
        finally:
            dispatcher.sys = sys

    with replaced(dispatcher, name, rebind_in_vllm, parameters):
        yield
