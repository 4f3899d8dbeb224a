"""Partial rollouts: which groups a step trains on, what waits for the next step, and its bytes in a checkpoint.

Open responses are drawn in chunks of `rollout.partial.chunk_tokens`. After each chunk a pure function of the groups'
lengths (`trained_groups`) says whether generation pauses, so neither engines nor their speed decide what is trained on. A
chunk's seed belongs to the rollout and to the place of the chunk's first token in it: a token depends on where its chunk
begins, and on the weights, but not on the step in which it is drawn.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.data.rollout import Rollout, Rollouts, Segment
from megatron_rl.data.sample import Sample
from megatron_rl.rollout.engine import Completion, Failure, Request
from megatron_rl.rollout.episode import MakeEpisode, drawn_rollout
from megatron_rl.rollout.exchange import flatten, sizes_of, unflatten
from megatron_rl.rollout.sampling import Sampling, rollout_seed
from megatron_rl.runtime.distributed import ProcessGrid

WAITING = "waiting.npz"  # a checkpoint's file


@dataclass(frozen=True)
class Waiting:
    """The groups that are open between two steps, the oldest first: some rollouts of each may be finished."""

    rollouts: Rollouts
    opened: tuple[int, ...] = ()  # the step that each group was opened in
    positions: tuple[int, ...] = ()  # of their prompts in the order of the training prompts
    # Positions that were taken, and whose prompts were still open from an epoch before: they are opened once they are not.
    postponed: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.opened)

    @classmethod
    def none(cls, group_size: int) -> Waiting:
        return cls(Rollouts.unbegun([], group_size))

    def of_groups(self, chosen: Sequence[int]) -> Waiting:
        opened, positions = ([values[i] for i in chosen] for values in (self.opened, self.positions))
        return replace(
            self, rollouts=self.rollouts.of_prompts(chosen), opened=tuple(opened), positions=tuple(positions)
        )


def is_open(facts: np.ndarray, max_tokens: int) -> np.ndarray:
    """bool [rows]: those that go on: cut at the end of a chunk, not at the limit of all."""
    return facts["truncated"] & (facts["length"] < max_tokens)


def next_positions(
    sample_ids: Callable[[int], str], position: int, postponed: Sequence[int], is_there: set[str], count: int
) -> tuple[list[int], list[int], int]:
    """The next `count` positions whose prompts are not open: those that were postponed first; those that are postponed from
    here on; and the position behind all that were taken. `is_there`: ids of the prompts that are open."""
    taken, later, seen, rest = list[int](), list[int](), set(is_there), list(postponed)
    while len(taken) < count:
        if rest:
            place = rest.pop(0)
        else:
            place, position = position, position + 1
        sample_id = sample_ids(place)
        (later if sample_id in seen else taken).append(place)
        seen.add(sample_id)
    return taken, [*later, *rest], position


class ChunkedTurn:
    """An `Episode`: the next tokens of a rollout, at most `tokens` of them.

    `begun`: what was drawn of it before; None: nothing. `step`: the one that opened it.
    """

    def __init__(
        self, sample: Sample, index: int, sampling: Sampling, tokens: int, seed: int, step: int, begun: Rollout | None
    ) -> None:
        self._sample, self._index, self._sampling = sample, index, sampling
        self._begun = begun or Rollout(sample.id, index, [Segment(np.asarray(sample.prompt_ids, dtype=np.int64))], "")
        length = self._begun.length
        self._limit = min(tokens, sampling.max_tokens - length)
        self._seed = rollout_seed(seed, step, sample.id, index, turn=length)

    def first(self) -> Request:
        sampling, tokens = replace(self._sampling, max_tokens=self._limit), self._begun.tokens.tolist()
        return Request((self._sample.id, self._index), tokens, sampling, self._seed, images=self._sample.images)

    def advance(self, completion: Completion) -> Rollout:
        drawn = drawn_rollout(self._sample, self._index, completion)
        return replace(drawn, segments=[*self._begun.segments, drawn.segments[1]])

    def unanswered(self, failure: Failure) -> bool:
        return False


def chunks(
    sampling: Sampling, tokens: int, seed: int, opened: Mapping[str, int], begun: Mapping[tuple[str, int], Rollout]
) -> MakeEpisode:
    """Episodes of a chunk each. `opened`: steps by sample id; `begun`: of this rank's engine, by sample id and index."""
    return lambda sample, index: ChunkedTurn(
        sample, index, sampling, tokens, seed, opened[sample.id], begun.get((sample.id, index))
    )


# ------------------------------------------------------------------------------------------------------- checkpoints
def pack(grid: ProcessGrid, waiting: Waiting) -> bytes | None:
    """A file's content, on rank 0: what waits, whichever ranks have it. Every rank calls it."""
    arrays = gathered(grid, waiting.rollouts)
    if arrays is None:
        return None
    names = ("opened", "positions", "postponed")
    return npz(arrays | {name: np.array(getattr(waiting, name), dtype=np.int64) for name in names})


def npz(arrays: dict[str, Any]) -> bytes:
    """A file's content."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def gathered(grid: ProcessGrid, rollouts: Rollouts) -> dict[str, np.ndarray] | None:
    """Rollouts as arrays, on rank 0, whichever ranks have them: what `flatten` says of each, and what tells whose it is."""
    sizes, own = sizes_of(rollouts), np.flatnonzero(rollouts.facts["source"] == grid.rank).tolist()
    buffer = np.zeros(sizes[own].sum(), dtype=np.uint8)
    for row, view in zip(own, np.split(buffer, np.cumsum(sizes[own])[:-1]), strict=True) if own else ():
        flatten(rollouts, row, view)
    parts = grid.gather((own, buffer.tobytes()))
    if not grid.is_main:
        return None
    by_row = dict[int, np.ndarray]()
    for rows, content in parts:
        ends = np.cumsum(sizes[rows], dtype=np.int64)
        by_row |= (
            dict(zip(rows, np.split(np.frombuffer(content, dtype=np.uint8), ends[:-1]), strict=True)) if rows else {}
        )
    facts = rollouts.facts.copy()
    facts["source"] = 0  # who has it is the layout's
    return {
        "ids": np.array([sample.id for sample in rollouts.samples], dtype=np.str_),
        "prompts": np.array([_digest(sample) for sample in rollouts.samples], dtype=np.uint64),
        "count": np.array(rollouts.count),
        "facts": facts,
        "tokens": np.concatenate([by_row[row] for row in range(len(rollouts))] or [buffer]),
    }


def _digest(sample: Sample) -> int:
    """Tells a prompt's tokens from others."""
    tokens = np.asarray(sample.prompt_ids, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(tokens, digest_size=8).digest(), "little")


def require_same(samples: Sequence[Sample | None], saved: Mapping[str, np.ndarray]) -> None:
    """Refuses samples, None where there is none, that are not the prompts that a checkpoint has rollouts of: `gathered`.

    Raises:
        ValueError: names the first.
    """
    # Older checkpoints have names only.
    digests = saved["prompts"].tolist() if "prompts" in saved else [None] * len(samples)
    for sample, name, digest in zip(samples, saved["ids"].tolist(), digests, strict=True):
        if sample is None or sample.id != name or digest not in (None, _digest(sample)):
            raise ValueError(
                f"responses to the prompt {name} wait in it, and the training prompts are no longer those it has; leave "
                "tasks, seed and model as in its recipe.yaml, or start over with --resume never"
            )


def unpack(content: bytes, grid: ProcessGrid, sample_at: Callable[[int], Sample]) -> Waiting:
    """Undoes `pack` at any layout: groups go round the engines, and each rank has its engine's.

    Raises:
        ValueError: the training prompts are no longer those that wait.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        saved = {name: file[name] for name in file.files}
    positions, engine, count = saved["positions"].tolist(), grid.engine, int(saved["count"])
    samples, facts = [sample_at(position) for position in positions], saved["facts"]
    require_same(samples, saved)
    group, rows = np.arange(len(facts)) // count, np.arange(len(facts))
    facts["source"] = (group % engine.count) * engine.size + rows % engine.size
    rollouts = Rollouts(samples, count, facts, {})
    views = np.split(saved["tokens"], np.cumsum(sizes_of(rollouts), dtype=np.int64)[:-1])
    for row in rows[group % engine.count == engine.index].tolist():
        rollouts.held[row] = unflatten(rollouts, row, views[row])
    opened, postponed = tuple(saved["opened"].tolist()), tuple(saved["postponed"].tolist())
    return Waiting(rollouts, opened, tuple(positions), postponed)
