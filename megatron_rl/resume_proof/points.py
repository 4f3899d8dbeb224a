"""Parts of a step in which kills come. Imports no torch, so that the command's help needs none."""

from __future__ import annotations

from collections.abc import Mapping

# Phases of a step; a turn of a conversation, once the first engine has recorded it; and two of a writer: while it writes, and
# at the rename that makes a checkpoint current.
POINTS: Mapping[str, tuple[str, ...]] = {
    "generation": ("generate",),
    "turn": ("turn",),
    "reward": ("reward",),
    "training": ("estimate", "old_log_prob", "update"),
    "sync": ("sync", "sync_check"),
    "save": ("checkpoint", "write", "rename"),
}
