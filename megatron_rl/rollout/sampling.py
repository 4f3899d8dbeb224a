"""How responses are drawn, and with which seed: the same for every engine, in this process or behind an endpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Temperature 0 is greedy decoding."""

    temperature: float
    top_p: float
    max_tokens: int


def rollout_seed(
    seed: int, step: int, sample_id: str, index: int, turn: int = 0, tree_place: Sequence[int] = ()
) -> int:
    """The seed of one turn of a rollout: a function of what it is, not of where, when or with what it is sampled.

    Args:
        tree_place: of a turn in a conversation that has parted, instead of its number.
    """
    where = ".".join(map(str, tree_place)) or str(turn or "")
    key = "/".join([f"{seed}/{step}/{sample_id}/{index}", *([where] if where else [])]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 2  # vLLM takes signed 64-bit seeds
