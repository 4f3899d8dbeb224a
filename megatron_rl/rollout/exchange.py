"""Rollouts from the ranks that drew them to those that need their tokens, as flat arrays.

Who needs which rollouts, who hands each out and how long it is are known to every rank (`Rollouts.facts`), so no rank asks.
A rank receives what it needs, and sends what it drew to each rank that needs it: neither grows with the number of ranks.
gloo sends, within a host and between hosts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.data.rollout import Rollout, Rollouts, Segment
from megatron_rl.runtime.distributed import ProcessGrid

# Id, log-prob, author; prompts stay where they are: every rank has them. Sampled tokens have rewards too, all tokens experts.
BYTES_PER_TOKEN = 9
_BYTES_PER_REWARD = 4
_BEGINS = np.iinfo(np.uint8).max  # not sampled, and a further sequence begins with it
_AUTHORS = _BEGINS - 1  # 0: not sampled; 1: by the oldest weights that drew a part of the rollout; 2: one step newer
_ALIGNMENT = 4  # bytes, of a rollout in a message
Need = tuple[Sequence[int], Sequence[int]]
"""Ranks, and the rows that each of them needs."""
_Buffer = tuple[np.ndarray, list[np.ndarray]]
"""A message's bytes, and of these each rollout's."""


class ExchangeError(RuntimeError):
    """A rank did not hand over what it drew, or did not take what it needs."""


def exchange(grid: ProcessGrid, rollouts: Rollouts, needs: Sequence[Need]) -> dict[int, Rollout]:
    """The rollouts that this rank needs, by row. Every rank calls it with the same facts and needs.

    After a failure it goes on with the ranks that are left: one that did not get its part from here would name this rank.

    Raises:
        ExchangeError: another rank died, or was later than the process group's timeout; names it.
    """
    got: dict[int, Rollout] = {}
    receives: list[_Message] = []
    sends: list[tuple[_Message, list[int]]] = []  # with the ranks that are sent it
    for tag, (ranks, wanted) in enumerate(needs):
        by_source: dict[int, list[int]] = {}
        for row, source in zip(wanted, rollouts.facts["source"][list(wanted)].tolist(), strict=True):
            by_source.setdefault(source, []).append(row)
        own = by_source.pop(grid.rank, [])
        if own and any(rank != grid.rank for rank in ranks):
            sends.append((_Message(tag, grid.rank, own), [rank for rank in ranks if rank != grid.rank]))
        if grid.rank in ranks:
            got |= {row: rollouts.held[row] for row in own}
            receives += [_Message(tag, source, rows) for source, rows in by_source.items()]

    sizes, failed = sizes_of(rollouts), list[ExchangeError]()
    incoming = _buffers([sizes[message.rows] for message in receives])
    outgoing = _buffers([sizes[message.rows] for message, _ in sends])
    works: list[tuple[dist.Work | None, str, list[int]]] = []
    for (tag, source, rows), (buffer, _) in zip(receives, incoming, strict=True):
        if len(buffer):
            with _naming(failure := f"rank {source} did not hand over", rollouts, rows, failed):
                works.append((dist.irecv(torch.from_numpy(buffer), source, grid.host_group, tag), failure, rows))
    for ((tag, _, rows), targets), (buffer, views) in zip(sends, outgoing, strict=True):
        for row, view in zip(rows, views, strict=True):
            flatten(rollouts, row, view)
        for target in targets if len(buffer) else ():
            with _naming(failure := f"rank {target} did not take", rollouts, rows, failed):
                works.append((dist.isend(torch.from_numpy(buffer), target, grid.host_group, tag), failure, rows))
    for work, failure, rows in works:
        with _naming(failure, rollouts, rows, failed):
            assert work is not None  # this rank is in the group
            work.wait()
    if failed:
        raise failed[0]
    for (*_, rows), (_, views) in zip(receives, incoming, strict=True):
        got |= {row: unflatten(rollouts, row, view) for row, view in zip(rows, views, strict=True)}
    return got


class _Message(NamedTuple):
    tag: int  # number of the need
    source: int
    rows: list[int]


@contextlib.contextmanager
def _naming(failure: str, rollouts: Rollouts, rows: list[int], failed: list[ExchangeError]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first = f"rollout {rows[0] % rollouts.count} of {rollouts.sample(rows[0]).id}"
        which = first if len(rows) == 1 else f"{len(rows)} rollouts from {first} on"
        failed.append(ExchangeError(f"{failure} {which}: {error}"))


def sizes_of(rollouts: Rollouts) -> np.ndarray:
    """int64 [rows]: bytes of each that are exchanged."""
    tokens = rollouts.facts["num_tokens"].astype(np.int64)
    of_experts = 0 if rollouts.experts is None else rollouts.experts.itemsize
    of_rewards = _BYTES_PER_REWARD * len(rollouts.token_weights) * rollouts.facts["length"].astype(np.int64)
    sizes = BYTES_PER_TOKEN * (tokens - rollouts.prompt_lengths) + of_rewards + of_experts * tokens
    return -(-sizes // _ALIGNMENT) * _ALIGNMENT


def _buffers(messages: Sequence[np.ndarray]) -> list[_Buffer]:
    """Allocates for messages of rollouts of so many bytes each a message's bytes, and of these each rollout's. All lie in
    one piece of memory: small pieces would be new pages each time."""
    ends = [0, *np.cumsum([sizes.sum() for sizes in messages], dtype=np.int64).tolist()]
    memory = np.empty(ends[-1], dtype=np.uint8)
    wholes = [memory[begin:end] for begin, end in itertools.pairwise(ends)]
    return [(whole, np.split(whole, np.cumsum(sizes)[:-1])) for whole, sizes in zip(wholes, messages, strict=True)]


def flatten(rollouts: Rollouts, row: int, flat: np.ndarray) -> None:
    """Writes what follows the prompt of a rollout held here: ids int32, log-probs float32 (0 where a token was not sampled),
    token rewards float32, authors uint8 (`_AUTHORS`); then experts, if any, of all tokens.

    Raises:
        ExchangeError: its oldest and newest weights are more optimizer steps apart than an author can say.
    """
    rollout = rollouts.held[row]
    segments, oldest = rollout.segments[1:], rollout.version
    views = _views(rollouts, row, flat)
    end = 0
    for segment in segments:
        begin, end = end, end + len(segment.ids)
        author = 0 if segment.logprobs is None else 1 + segment.version - oldest
        if author > _AUTHORS:
            raise ExchangeError(
                f"weights of {author} successive versions drew rollout {rollout.index} of {rollout.sample_id}"
            )
        views.ids[begin:end] = segment.ids
        views.log_probs[begin:end] = 0 if segment.logprobs is None else segment.logprobs
        views.authors[begin:end] = author
        if segment.begins_sequence:
            views.authors[begin] = _BEGINS
    if rollouts.token_weights:
        views.rewards[:] = rollout.token_rewards
    if rollouts.experts is not None:
        assert rollout.experts is not None
        views.experts[: rollout.experts.nbytes] = rollout.experts.reshape(-1).view(np.uint8)


def unflatten(rollouts: Rollouts, row: int, flat: np.ndarray) -> Rollout:
    """Undoes `flatten`, by the facts about the rollout. Neighbouring segments of one author become one."""
    sample, oldest = rollouts.sample(row), int(rollouts.facts["version"][row])
    views = _views(rollouts, row, flat)
    segments = [Segment(np.asarray(sample.prompt_ids, dtype=np.int64))]
    begins = views.authors == _BEGINS
    authors = np.where(begins, 0, views.authors)
    cuts = 1 + np.flatnonzero((authors[1:] != authors[:-1]) | begins[1:])
    for begin, end in itertools.pairwise([0, *cuts.tolist(), len(authors)]):
        author = int(authors[begin]) if end else 1  # an empty response was drawn
        log_probs, version = (views.log_probs[begin:end], oldest + author - 1) if author else (None, 0)
        segments.append(Segment(views.ids[begin:end], log_probs, version, bool(end and begins[begin])))
    experts = None
    if rollouts.experts is not None:
        experts = np.frombuffer(views.experts, rollouts.experts, int(rollouts.facts["num_tokens"][row]))
    rewards = views.rewards if rollouts.token_weights else None
    reason = rollouts.finish_reason(row)
    return Rollout(sample.id, row % rollouts.count, segments, reason, experts, token_rewards=rewards)


class _Parts(NamedTuple):
    """Views of a rollout's bytes."""

    ids: np.ndarray
    log_probs: np.ndarray
    rewards: np.ndarray  # [sampled tokens, columns]
    authors: np.ndarray
    experts: np.ndarray  # uint8: their bytes, and what aligns the next rollout


def _views(rollouts: Rollouts, row: int, flat: np.ndarray) -> _Parts:
    tokens = int(rollouts.facts["num_tokens"][row]) - len(rollouts.sample(row).prompt_ids)
    columns = len(rollouts.token_weights)
    ends = np.cumsum([4 * tokens, 4 * tokens, _BYTES_PER_REWARD * columns * int(rollouts.facts["length"][row]), tokens])
    ids, log_probs, rewards, authors, experts = np.split(flat, ends)
    rewards = rewards.view(np.float32).reshape(-1, columns) if columns else np.zeros((0, 0), dtype=np.float32)
    return _Parts(ids.view(np.int32), log_probs.view(np.float32), rewards, authors, experts)
