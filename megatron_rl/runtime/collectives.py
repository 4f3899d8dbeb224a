"""The collectives of this process, as torch's flight recorder has them: Megatron-Core's, vLLM's and this package's.

`runtime.attempts.rank_environment` turns it on; it cannot be turned on after torch is imported.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megatron_rl.base.messages import shorten

if TYPE_CHECKING:
    from megatron_rl.seams.torch_dist import Collective

# gloo's and torch's words for it
_GAVE_UP = re.compile(
    r"Timed out waiting \d+ms|Timed out after \d+ seconds waiting|wait timeout after \d+ms|"
    r"Watchdog caught collective operation timeout"
)


def recent(count: int) -> tuple[list[str], str | None]:
    """The newest collectives, oldest first, for example `all_gather 71 of [0, 1], float32 [2, 8], waiting`; and the oldest
    that this rank has entered and not left."""
    from megatron_rl.seams.torch_dist import recorded_collectives

    entries = recorded_collectives()
    waiting = next((_describe(*entry) for entry in entries if not entry[0]["retired"]), None)
    return [_describe(*entry) for entry in entries[-count:]], waiting


def _describe(entry: Collective, ranks: str) -> str:
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    sizes = ", ".join(
        f"{dtype.lower()} {size}" for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    )
    # A heartbeat has 4096 bytes, and a group a thousand ranks, or a collective as many tensors.
    whose = f" of {shorten(ranks)}" if ranks else ""
    parts = [f"{name} {number}{whose}", shorten(sizes), "" if entry["retired"] else "waiting"]
    return ", ".join(part for part in parts if part)


def gave_up(error: BaseException | str) -> bool:
    """Whether an exception or a log reports that a collective or the rendezvous timed out."""
    return bool(_GAVE_UP.search(str(error)))
