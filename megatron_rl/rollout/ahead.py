"""With split placement: a batch on its way from the ranks that drew it to those that learn from it, and in a checkpoint.

A batch is drawn while the step before it is learned from, so a checkpoint has the one that is next.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.data.exact_json import from_json, to_json
from megatron_rl.data.rollout import Rollout, Rollouts, Turns
from megatron_rl.data.sample import Sample
from megatron_rl.rollout.exchange import exchange, sizes_of, unflatten
from megatron_rl.rollout.partial import gathered, npz, require_same
from megatron_rl.runtime.distributed import ProcessGrid

AHEAD = "ahead.npz"  # a checkpoint's file
_PLAIN = ("columns", "token_weights", "drawn")  # of `Rollouts`, as JSON
_MAPPINGS = ("metrics", "counts", "seconds")  # of `Batch`, as JSON
# Of a `Rollout`, what its tokens do not tell where an agent held it.
_OF_CONVERSATION = ("messages", "conversations", "last_turn", "agent_rewards", "turn_rewards", "failed_by")

Conversations: TypeAlias = dict[int, dict[str, Any]]
"""By row, those fields and their values."""


@dataclass(frozen=True)
class Batch:
    """A step's scored rollouts before anything is learned from them.

    `greedy`: one scored greedy rollout per sample, without its tokens, where the estimator compares with these.
    `metrics`: of sampling. `counts`: of it and scoring, as JSON has them (`trainer.step_counts`). `seconds`: of their phases,
    on the ranks that generate.
    """

    rollouts: Rollouts
    greedy: Rollouts | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def hand_over(grid: ProcessGrid, batch: Batch | None, samples: Mapping[str, Sample]) -> Batch:
    """Gives the ranks that learn a batch, each a share of the rollouts, and returns it; as it was on those that drew it.

    All ranks of both roles call it. `batch`: None on a rank that learns. `samples`: the training prompts by id.
    """
    link, learners = grid.everyone, grid.learners
    message = None
    if batch is not None:
        greedy = None if batch.greedy is None else (batch.greedy.facts, batch.greedy.columns, batch.greedy.rewards)
        plain = replace(batch.rollouts, samples=[], held={}, facts=batch.rollouts.facts.copy())
        mappings = {name: getattr(batch, name) for name in _MAPPINGS}
        message = [sample.id for sample in batch.rollouts.samples], plain, greedy, mappings
    message = link.broadcast(message, source=learners)
    assert message is not None  # the first rank that generates has it
    ids, plain, greedy, mappings = message
    rollouts = replace(plain, samples=[samples[name] for name in ids])
    rollouts.facts["source"] += learners  # their ranks in `link`
    if batch is not None:
        rollouts.held = batch.rollouts.held
    needs = [((learner,), range(len(rollouts))[learner::learners]) for learner in range(learners)]
    received = exchange(link, rollouts, needs)
    conversations = list[Conversations]()
    if any(sample.agent is not None for sample in rollouts.samples):
        outgoing = {learner: conversations_of(rollouts, rows, link.rank) for (learner,), rows in needs}
        conversations = exchange_objects(link, outgoing)
    if batch is not None:
        return batch
    rollouts.held = received
    for of_source in conversations:
        add_conversations(received, of_source)
    rollouts.facts["source"] = np.arange(len(rollouts)) % learners
    return Batch(rollouts, _greedy(rollouts, greedy), **mappings)


def conversations_of(rollouts: Rollouts, rows: Iterable[int], rank: int) -> Conversations:
    """Returns by row what the tokens of conversations do not tell, of those of these rows that a rank hands out."""
    here = (row for row in rows if rollouts.sample(row).agent is not None and rollouts.facts["source"][row] == rank)
    return {row: {name: getattr(rollouts.held[row], name) for name in _OF_CONVERSATION} for row in here}


def add_conversations(received: Mapping[int, Rollout], conversations: Conversations) -> None:
    """Gives rollouts that came as tokens, by row, what `conversations_of` says of them."""
    for row, fields in conversations.items():
        for name, value in fields.items():
            setattr(received[row], name, value)


def exchange_objects(link: ProcessGrid, outgoing: Mapping[int, Conversations]) -> list[Conversations]:
    """Returns what other ranks have for this one, in their order, without what is empty. `outgoing`: by rank. All ranks of
    both roles call it."""
    content = {target: pickle.dumps(what) for target, what in outgoing.items() if what and target != link.rank}
    sizes = np.zeros((link.world, link.world), dtype=np.int64)
    for target, data in content.items():
        sizes[link.rank, target] = len(data)
    link.sum_array(sizes)
    buffers = [
        (source, torch.empty(size, dtype=torch.uint8)) for source, size in enumerate(sizes[:, link.rank].tolist())
    ]
    buffers = [(source, buffer) for source, buffer in buffers if len(buffer)]
    works = [dist.irecv(buffer, source, link.host_group) for source, buffer in buffers]
    for target, data in content.items():
        works.append(dist.isend(torch.frombuffer(bytearray(data), dtype=torch.uint8), target, link.host_group))
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait()
    return [pickle.loads(buffer.numpy().tobytes()) for _, buffer in buffers]


def send_to_rank0(link: ProcessGrid, content: bytes | None, source: int) -> bytes | None:
    """Returns the bytes of the rank `source` on rank 0, None on the others. All ranks of both roles call it."""
    size = torch.tensor([0 if content is None else len(content)])
    dist.broadcast(size, source, link.host_group)
    if link.rank == source:
        assert content is not None
        dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0, link.host_group)
    if not link.is_main:
        return None
    received = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(received, source, link.host_group)
    return received.numpy().tobytes()


def _turns(lengths: Sequence[int], rewards: Mapping[str, Sequence[float]] | None) -> Turns:
    return Turns(tuple(lengths), None if rewards is None else {name: tuple(row) for name, row in rewards.items()})


def _greedy(rollouts: Rollouts, told: tuple[np.ndarray, tuple[str, ...], np.ndarray] | None) -> Rollouts | None:
    if told is None:
        return None
    facts, columns, rewards = told
    return Rollouts(rollouts.samples, 1, facts, {}, columns=columns, rewards=rewards)


# ------------------------------------------------------------------------------------------------------- checkpoints
def pack(grid: ProcessGrid, batch: Batch) -> bytes | None:
    """Returns a file's content on rank 0, None on the others. Every rank that learns calls it."""
    rollouts = batch.rollouts
    arrays, share = gathered(grid, rollouts), conversations_of(rollouts, range(len(rollouts)), grid.rank)
    conversations = grid.gather(share)
    if arrays is None:
        return None
    plain = {name: getattr(rollouts, name) for name in _PLAIN} | {name: getattr(batch, name) for name in _MAPPINGS}
    if rollouts.turns is not None:
        plain["turns"] = {row: [turns.lengths, turns.rewards] for row, turns in rollouts.turns.items()}
    if rollouts.experts is not None:
        assert rollouts.experts.subdtype is not None  # of layers × experts per token
        plain["experts"] = rollouts.experts.subdtype[0].name, rollouts.experts.subdtype[1]
    plain["conversations"] = {row: to_json(fields) for of_rank in conversations for row, fields in of_rank.items()}
    arrays |= {"rewards": rollouts.rewards, "plain": np.array(json.dumps(plain, default=dict))}
    if batch.greedy is not None:
        of_greedy = {"greedy_facts": batch.greedy.facts, "greedy_rewards": batch.greedy.rewards}
        arrays |= of_greedy | {"greedy_columns": np.array(batch.greedy.columns, dtype=np.str_)}
    return npz(arrays)


def unpack(content: bytes, grid: ProcessGrid, samples: Mapping[str, Sample]) -> Batch:
    """Undoes `pack` for any number of ranks that learn.

    Raises:
        ValueError: the training prompts are no longer those that it has responses to.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        saved = {name: file[name] for name in file.files}
    ids = saved["ids"].tolist()
    require_same([samples.get(name) for name in ids], saved)
    plain = json.loads(str(saved["plain"]))
    mappings = {name: plain.pop(name, {}) for name in _MAPPINGS}  # checkpoints before 2026-11-28 have no counts
    conversations, plain["columns"] = plain.pop("conversations"), tuple(plain["columns"])
    if (turns := plain.get("turns")) is not None:
        plain["turns"] = {int(row): _turns(*of_row) for row, of_row in turns.items()}
    if (experts := plain.get("experts")) is not None:
        plain["experts"] = np.dtype((np.dtype(experts[0]), tuple(experts[1])))
    rollouts = Rollouts([samples[name] for name in ids], int(saved["count"]), saved["facts"], {}, **plain)
    rollouts.rewards = saved["rewards"]
    rollouts.facts["source"] = np.arange(len(rollouts)) % grid.world
    views = np.split(saved["tokens"], np.cumsum(sizes_of(rollouts), dtype=np.int64)[:-1])
    rollouts.held = {row: unflatten(rollouts, row, views[row]) for row in range(len(rollouts))[grid.rank :: grid.world]}
    here = {int(row): fields for row, fields in conversations.items() if int(row) in rollouts.held}
    add_conversations(rollouts.held, {row: from_json(fields) for row, fields in here.items()})
    greedy = None
    if "greedy_facts" in saved:
        greedy = saved["greedy_facts"], tuple(saved["greedy_columns"].tolist()), saved["greedy_rewards"]
    return Batch(rollouts, _greedy(rollouts, greedy), **mappings)
