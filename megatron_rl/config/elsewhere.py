"""The names here of verl's, NeMo-RL's and TRL's keys: the table elsewhere.yaml, and words of it for messages and docs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from megatron_rl.base.messages import leaves

_ACTOR = "actor_rollout_ref."
_OF_ACTOR = ("actor.", "rollout.", "ref.", "model.")
FRAMEWORKS = {"verl": "verl", "nemo": "NeMo-RL", "trl": "TRL"}


@dataclass(frozen=True)
class Row:
    """One meaning.

    Attributes:
        here: our keys; none where there is no counterpart.
        says: how it is converted, or why there is none.
        same: the value is the same there.
        verl, nemo, trl: the names there.
    """

    here: tuple[str, ...]
    says: str = ""
    verl: tuple[str, ...] = ()
    nemo: tuple[str, ...] = ()
    trl: tuple[str, ...] = ()
    same: bool = False

    def names(self) -> Iterator[tuple[str, str]]:
        """Framework and name of each."""
        for framework in FRAMEWORKS:
            for name in getattr(self, framework):
                yield framework, name


@cache
def rows() -> tuple[Row, ...]:
    """The table, elsewhere.yaml."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(
        Row(
            tuple(row.get("here", "").split()),
            row.get("says", ""),
            tuple(f"{_ACTOR}{name}" if name.startswith(_OF_ACTOR) else name for name in row.get("verl", "").split()),
            tuple(row.get("nemo", "").split()),
            tuple(row.get("trl", "").split()),
            row.get("same", False),
        )
        for row in table
    )


# Names that several libraries share, or that people write from memory.
_ALSO = {
    "trainer.batch_size": "trainer.prompts_per_step",
    "batch_size": "trainer.prompts_per_step",
    "train_batch_size": "trainer.prompts_per_step",
    "lr": "actor.optimizer.lr",
    "actor.lr": "actor.optimizer.lr",
    "trainer.lr": "actor.optimizer.lr",
    "trainer.num_epochs": "trainer.steps",
    "trainer.save_every": "checkpoint.every",
    "num_gpus": "launch.processes",
    # Names of earlier versions.
    "algorithm.weight": "algorithm.surrogate",
    "algorithm.drop_no_signal_groups": "algorithm.drop_zero_variance_groups",
    "algorithm.signal_rewards": "algorithm.zero_variance_rewards",
    "algorithm.overlong.max_length": "rollout.max_tokens",
    "actor.logprob_chunk_tokens": "actor.logits_mib",
    "logging.samples_every": "logging.samples_per_step",
}
# Values of earlier versions that are refused now, and what is written instead.
_EARLIER = {("actor.lora.rank", 0): "; without adapters it is `actor.lora: null`"}


def find(key: str) -> tuple[str, str, Row] | None:
    """Framework, name there and row of a key from elsewhere; None for others.

    The key is whole, or lacks its first sections, or lies in a section that the table has as a whole.
    """
    for row in rows():
        for framework, name in row.names():
            if name == key or (name.endswith(f".{key}") and "." in key):
                return framework, name, row
    for framework in FRAMEWORKS:
        if (row_here := row_of(framework, key)) is not None:
            return framework, key, row_here
    return None


def row_of(framework: str, name: str) -> Row | None:
    """The row of a whole name of one framework, or of the section that it is in."""
    for row in rows():
        if any(name == known or name.startswith(f"{known}.") for known in getattr(row, framework)):
            return row
    return None


def remedy(key: str, value: object) -> str:
    """The text that follows the refusal of a value that earlier versions took: what is written in its place."""
    return _EARLIER.get((key, value), "") if isinstance(value, int) else ""


def hint(key: str, value: object) -> str | None:
    """The name here, in a sentence, of an unknown key that comes, or has one within its value, from elsewhere."""
    if key in _ALSO:
        return f"that is `{_ALSO[key]}` here"
    inner = [f"{key}.{name}" for name, _ in leaves(value)] if isinstance(value, Mapping) else [key]
    for name in inner:
        if (found := find(name)) is not None:
            framework, whole, row = found
            theirs = f"{FRAMEWORKS[framework]}'s `{whole}`"
            more = f"; `megatron-rl migrate FILE` writes the recipe of a whole {FRAMEWORKS[framework]} configuration"
            if not row.here:
                return f"{theirs} has no counterpart: {row.says}{more}"
            said = f" ({row.says})" if row.says else ""
            return f"{theirs} is {' and '.join(f'`{one}`' for one in row.here)} here{said}{more}"
    return None
