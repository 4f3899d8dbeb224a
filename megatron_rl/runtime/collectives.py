"""The collectives of this process, as torch's flight recorder has them: Megatron-Core's, vLLM's and ours.

`runtime.spawn.rank_environment` turns it on; it cannot be turned on after torch is imported.
"""

from __future__ import annotations

import json
import re
from typing import Any

# gloo's and torch's words for it
_GAVE_UP = re.compile(
    r"Timed out waiting \d+ms|Timed out after \d+ seconds waiting|wait timeout after \d+ms|"
    r"Watchdog caught collective operation timeout"
)


def recent(count: int) -> tuple[list[str], str | None]:
    """The newest collectives, oldest first, for example `all_gather 71 of [0, 1], float32 [2, 8], waiting`; and the oldest
    that this rank has entered and not left."""
    entries = _entries()
    waiting = next((_describe(entry, config) for entry, config in entries if not entry["retired"]), None)
    return [_describe(entry, config) for entry, config in entries[-count:]], waiting


def _entries() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every collective that is remembered, with the groups there are; in the order in which they were entered."""
    from torch._C import _distributed_c10d as c10d

    found = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # NCCL's are in a recorder of their own
        if hasattr(c10d, name):
            trace = json.loads(getattr(c10d, name)())
            for entry in trace.get("entries", []):  # what both have counts once
                found[entry["time_created_ns"], entry["profiling_name"]] = (entry, trace.get("pg_config", {}))
    return [found[key] for key in sorted(found)]


def _describe(entry: dict[str, Any], groups: dict[str, Any]) -> str:
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    ranks = groups.get(entry["process_group"][0], {}).get("ranks", "")
    sizes = ", ".join(
        f"{dtype.lower()} {size}" for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    )
    parts = [f"{name} {number}" + (f" of {ranks}" if ranks else ""), sizes, "" if entry["retired"] else "waiting"]
    return ", ".join(part for part in parts if part)


def gave_up(error: BaseException | str) -> bool:
    """Whether an exception, or a log, says that a collective or the search for the other ranks waited past its deadline."""
    return bool(_GAVE_UP.search(str(error)))
