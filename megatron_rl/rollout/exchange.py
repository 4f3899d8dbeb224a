"""Rollouts from the ranks that drew them to those that need their tokens, as flat arrays.

Who needs which rollouts, who hands each out and how long it is are known to every rank (`Rollouts.facts`), so no rank asks.
A rank receives what it needs, and sends what it drew to each rank that needs it: neither grows with the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.data import Rollout, Rollouts, Segment
from megatron_rl.runtime.distributed import Grid

# Id, log-prob, whether it was sampled; prompts stay where they are: every rank has them. Experts go with all tokens.
BYTES_PER_TOKEN = 9
Need = tuple[Sequence[int], Sequence[int]]
"""Ranks, and the rows that each of them needs."""


class ExchangeError(RuntimeError):
    """A rank did not hand over what it drew, or did not take what it needs."""


def exchange(grid: Grid, rollouts: Rollouts, needs: Sequence[Need]) -> dict[int, Rollout]:
    """The rollouts that this rank needs, by row. Every rank calls it with the same facts and needs.

    After a failure it goes on with the ranks that are left: one that did not get its part from here would name this rank.

    Raises:
        ExchangeError: another rank died, or was later than the process group's timeout; names it.
    """
    failed: list[ExchangeError] = []
    sources, sizes = rollouts.facts["source"], _sizes(rollouts)
    got: dict[int, Rollout] = {}
    receives: list[tuple[int, np.ndarray, torch.Tensor]] = []  # source, rows, their bytes
    works: list[tuple[dist.Work | None, str]] = []
    for tag, (ranks, wanted) in enumerate(needs):
        rows = np.asarray(wanted, dtype=np.int64)
        if grid.rank not in ranks:
            continue
        for source in np.unique(sources[rows]).tolist():
            chosen = rows[sources[rows] == source]
            if source == grid.rank:
                got |= {row: rollouts.held[row] for row in chosen.tolist()}
                continue
            buffer = torch.empty(int(sizes[chosen].sum()), dtype=torch.uint8)
            receives.append((source, chosen, buffer))
            if len(buffer):
                failure = f"rank {source} did not hand over {_name(rollouts, chosen)}"
                with _naming(failure, failed):
                    works.append((dist.irecv(buffer, source, group=grid.host_group, tag=tag), failure))
    for tag, (ranks, wanted) in enumerate(needs):
        rows = np.asarray(wanted, dtype=np.int64)
        own, others = rows[sources[rows] == grid.rank], [rank for rank in ranks if rank != grid.rank]
        if others and sizes[own].sum():
            flat = torch.from_numpy(flatten(rollouts, own.tolist()))
            for rank in others:
                failure = f"rank {rank} did not take {_name(rollouts, own)}"
                with _naming(failure, failed):
                    works.append((dist.isend(flat, rank, group=grid.host_group, tag=tag), failure))
    for work, failure in works:
        with _naming(failure, failed):
            assert work is not None  # this rank is in the group
            work.wait()
    if failed:
        raise failed[0]
    for _, chosen, buffer in receives:
        got |= unflatten(rollouts, chosen.tolist(), buffer.numpy())
    return got


@contextlib.contextmanager
def _naming(failure: str, failed: list[ExchangeError]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        failed.append(ExchangeError(f"{failure}: {error}"))


def _name(rollouts: Rollouts, rows: np.ndarray) -> str:
    """For a message: how many, and the first."""
    first = f"rollout {rows[0] % rollouts.count} of {rollouts.sample(rows[0]).id}"
    return first if len(rows) == 1 else f"{len(rows)} rollouts from {first} on"


def _sizes(rollouts: Rollouts) -> np.ndarray:
    """int64 [rows]: bytes of each that are exchanged."""
    tokens = rollouts.facts["num_tokens"].astype(np.int64)
    of_experts = 0 if rollouts.experts is None else rollouts.experts.itemsize
    return BYTES_PER_TOKEN * (tokens - rollouts.prompt_lengths) + of_experts * tokens


def flatten(rollouts: Rollouts, rows: Sequence[int]) -> np.ndarray:
    """What follows the prompts of rollouts held here: ids int32, log-probs float32 (0 where a token was not sampled) and
    which were sampled, each of all rows one after the other; then experts, if any, of all tokens; uint8 [bytes]."""
    segments = [segment for row in rows for segment in rollouts.held[row].segments[1:]]
    sizes = [len(segment.ids) for segment in segments]
    flat = np.empty(int(_sizes(rollouts)[list(rows)].sum()), dtype=np.uint8)
    ids, log_probs, mask, of_experts = _views(flat, sum(sizes))
    np.concatenate([segment.ids for segment in segments], out=ids, casting="same_kind")
    np.concatenate(
        [np.zeros(len(s.ids), dtype=np.float32) if s.logprobs is None else s.logprobs for s in segments], out=log_probs
    )
    mask[:] = np.repeat([segment.logprobs is not None for segment in segments], sizes)
    if rollouts.experts is not None:
        of_experts[:] = np.concatenate([rollouts.held[row].experts for row in rows], axis=None).view(np.uint8)
    return flat


def unflatten(rollouts: Rollouts, rows: Sequence[int], flat: np.ndarray) -> dict[int, Rollout]:
    """Undoes `flatten`, by the facts about these rows. Neighbouring segments of one author become one."""
    totals = rollouts.facts["num_tokens"][list(rows)]
    sizes = totals - rollouts.prompt_lengths[list(rows)]
    ends = np.cumsum(sizes)
    ids, log_probs, mask, of_experts = _views(flat, int(sizes.sum()))
    experts: list[np.ndarray | None] = [None] * len(rows)
    if rollouts.experts is not None:
        experts[:] = np.split(np.frombuffer(of_experts, rollouts.experts), np.cumsum(totals)[:-1])
    got: dict[int, Rollout] = {}
    for row, begin, end, own in zip(rows, (ends - sizes).tolist(), ends.tolist(), experts, strict=True):
        sample, version = rollouts.sample(row), int(rollouts.facts["version"][row])
        segments = [Segment(np.asarray(sample.prompt_ids, dtype=np.int64))]
        cuts = begin + 1 + np.flatnonzero(np.diff(mask[begin:end]))
        for first, last in zip([begin, *cuts], [*cuts, end], strict=True):
            sampled = bool(mask[first:last].all())
            segments.append(Segment(ids[first:last], log_probs[first:last] if sampled else None, version))
        got[row] = Rollout(sample.id, row % rollouts.count, segments, rollouts.finish_reason(row), own)
    return got


def _views(flat: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ids, log-probs and mask of so many tokens within the bytes, and the bytes behind them."""
    return (
        flat[: 4 * tokens].view(np.int32),
        flat[4 * tokens : 8 * tokens].view(np.float32),
        flat[8 * tokens : 9 * tokens].view(bool),
        flat[9 * tokens :],
    )
