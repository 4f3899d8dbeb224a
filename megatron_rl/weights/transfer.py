"""Moves the actor's weights into the engines by the resharding plan (`weights/sync_plan.py`), and proves that they arrived.

Two buckets are under way at a time: while one is unpacked and loaded, the next is packed and travels. A message is one flat
buffer per source, target and bucket. Every box has a checksum, taken of the source's parameter and of what then stands in the
engine's, and every message one where it leaves and where it comes; they meet in one exchange at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.models.rules import Sharding
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.weights.checksum import INTEGERS, WORD, Checksums
from megatron_rl.weights.gather import values
from megatron_rl.weights.inventory import Key
from megatron_rl.weights.sync_plan import Box, Bucket, Move, Plan

T = TypeVar("T")
_LINE = 64  # words; a message's are summed as a matrix of so many columns, and it is filled up to whole rows


class SyncError(RuntimeError):
    """A weight sync failed, or the engine does not compute what the actor computes after it."""


class Loader(Protocol):
    """Where the shards go; `seams.vllm.ShardLoader` is an engine's."""

    def tensor(self, name: str) -> Tensor: ...

    def count(self, name: str, elements: int) -> None: ...


class Message(NamedTuple):
    """One rank's boxes for another, end to end in one buffer; or what a rank keeps, with an empty one."""

    source: int
    target: int
    bucket: int
    moves: list[Move]
    buffer: Tensor


@dataclass(frozen=True)
class _Flight:
    """A bucket under way. `works`: with what each does."""

    sends: list[Message]
    receives: list[Message]
    own: list[Message]
    works: list[tuple[dist.Work, str]]


class Transfer:
    """One rank's part in all weight syncs of a run.

    Args:
        weights: this rank's parameters and mapped buffers of the actor; none on a rank that only generates.
        dtype: theirs; FP8 parameters travel dequantised.
        timeout: how long a wait for another rank may take.

    Raises:
        SyncError: on all ranks, where two of them disagree in what one sends to the other.
    """

    def __init__(
        self, plan: Plan, weights: Mapping[Key, Tensor], dtype: torch.dtype, grid: ProcessGrid, timeout: timedelta
    ) -> None:
        self.model, self._layout, self._plan = plan.model, plan, plan.of(grid.rank)
        self.grid, self.dtype, self._timeout = grid, dtype, timeout
        self._weights = weights
        self._device = next((weight.device for weight in weights.values()), device.device())
        self._held: dict[Key, Tensor] = {}  # values of the parameters that the current bucket reads
        self._checksums = Checksums()
        self._integers: dict[Move, torch.dtype] = {}
        self._sent = _by_peer(grid.world)  # checksums at the source
        self._there = _by_peer(grid.world)  # and at the target
        self.wanted = dict.fromkeys(self._plan.parameters, 0)  # elements that come for each of the engine's parameters
        for bucket in self._plan.buckets:
            for move in _arriving(bucket):
                self.wanted[self._name(move.box)] += self._size(move)
        place = (grid.rank - plan.engine.ranks(plan.actor).start) % plan.engine.tensor
        for name, size in plan.engine.elements(self.model, place, dtype.itemsize).items():
            if self.wanted.get(name, size) != size:
                raise SyncError(f"the plan of the weight sync brings {self.wanted[name]} of {size} elements of {name}")
        if grid.world > 1:
            self._agree()

    def _agree(self) -> None:
        """Every rank tells each other one what it will send to it: a message of another size than its receiver expects would
        end the receiver's process without a word. On a GPU it is the group's first use too, which takes all ranks."""
        sends, receives = _by_peer(self.grid.world), _by_peer(self.grid.world)
        for bucket in self._plan.buckets:
            for found, messages in ((sends, bucket.sends), (receives, bucket.receives)):
                for peer, moves in messages.items():
                    found[peer].append(tuple(moves))
        mine, expected = (
            torch.tensor([hash((self.dtype.itemsize, *peer)) for peer in found], device=self._device)
            for found in (sends, receives)
        )
        said = torch.empty_like(mine)
        dist.all_to_all_single(said, mine, group=self.grid.device_group)
        other = torch.nonzero(said != expected).flatten().tolist()
        for target, sources in enumerate(self.grid.all_gather(other)):
            if sources:
                raise SyncError(
                    f"ranks {sources[0]} and {target} have different plans of what the first sends to the second in a weight "
                    "sync: they run with different recipes, models or versions of this package"
                )

    # ------------------------------------------------------------------------------------------------------------- push
    @torch.no_grad()
    def push(self, loader: Loader) -> None:
        """Brings every weight of the actor into the engine's parameters.

        Raises:
            SyncError: on all ranks, where a box is not in the engine as the actor has it; on this rank, where another one did
                not answer, or the engine refused a shard.
        """
        flight = self._start(0)
        for number in range(1, len(self._plan.buckets)):
            following = self._start(number)
            self._land(flight, loader)
            flight = following
        self._land(flight, loader)
        del flight
        self._verify()

    def _start(self, number: int) -> _Flight:
        """Packs a bucket and sends it on its way."""
        bucket, here = self._plan.buckets[number], self.grid.rank
        receives = [self._message(source, here, number, moves) for source, moves in bucket.receives.items()]
        sends = [self._message(here, target, number, moves) for target, moves in bucket.sends.items()]
        own = Message(here, here, number, bucket.copies, torch.empty(0, dtype=self.dtype, device=self._device))
        local = [own] if bucket.copies else []
        for message in sends:
            self.pack(message)
        for message in sends + local:
            for move in message.moves:
                self._add(move, self.source(move))
        self._held.clear()
        self._keep(self._sent, [(message.target, message) for message in sends + local])
        group = self.grid.device_group
        operations = [dist.P2POp(dist.irecv, message.buffer, message.source, group, number) for message in receives]
        operations += [dist.P2POp(dist.isend, message.buffer, message.target, group, number) for message in sends]
        names = [f"receive {self._describe(message)}" for message in receives]
        names += [f"send {self._describe(message)}" for message in sends]
        works: list[dist.Work] = []
        if device.has_gpu() and names:  # NCCL wants them together, and has one work for all
            name = f"exchange {self._describe((receives + sends)[0])}"
            works += self._waiting(partial(dist.batch_isend_irecv, operations), name)
            names = [name] * len(works)
        else:
            for operation, name in zip(operations, names, strict=True):
                works += self._waiting(partial(dist.batch_isend_irecv, [operation]), name)
        return _Flight(sends, receives, local, list(zip(works, names, strict=True)))

    def _land(self, flight: _Flight, loader: Loader) -> None:
        """Waits for a bucket and writes it into the engine's parameters."""
        for work, what in flight.works:
            # NCCL's work is waited for by the stream, and torch's watchdog has the deadline; a limit would halt the host.
            self._waiting(work.wait if device.has_gpu() else partial(work.wait, self._timeout), what)
        for message in flight.receives:
            self.unpack(message, loader)
        for message in flight.own:
            for move in message.moves:
                target = self._target(move, loader)
                for there, own in zip(self._split(move, target), self.source(move), strict=True):
                    there.copy_(own)
                self._arrived(move, target, loader)
        self._held.clear()
        self._keep(self._there, [(message.source, message) for message in flight.receives + flight.own])

    def pack(self, message: Message) -> None:
        for move, box in self._boxes(message):
            for there, own in zip(self._split(move, box), self.source(move), strict=True):
                there.copy_(own)

    def unpack(self, message: Message, loader: Loader) -> None:
        for move, box in self._boxes(message):
            self._arrived(move, self._target(move, loader).copy_(box), loader)

    def source(self, move: Move) -> list[Tensor]:
        """A box in this rank's parameters of the actor; of experts, one tensor for each."""
        box, rule = move.box, self.model.family.rules[move.source_rule]
        keys = [(move.source_rule, box.layer, -1)]
        if rule.per_expert:
            keys = [
                (move.source_rule, box.layer, move.source_expert + number) for number in range(box.last - box.first)
            ]
        self._held |= {key: values(self._weights[key]) for key in keys if key not in self._held}
        boxes = (self._held[key].narrow(rule.dim, move.source_at, box.stop - box.start) for key in keys)
        return [whole.view(self.dtype) if rule.buffer else whole for whole in boxes]

    def _target(self, move: Move, loader: Loader) -> Tensor:
        """A box in the engine's parameter."""
        box, rule = move.box, self.model.family.rules[move.box.rule]
        tensor = loader.tensor(self._name(box))
        if rule.per_expert:
            tensor = tensor.narrow(0, move.target_expert, box.last - box.first)
        dim, (at, turn) = rule.dim + rule.per_expert, divmod(move.target_at, rule.engine_step)
        turns = tensor.unflatten(dim, (-1, rule.engine_step)).select(dim + 1, turn)
        target = turns.narrow(dim, at, box.stop - box.start)
        return target.view(self.dtype) if rule.buffer else target

    def _arrived(self, move: Move, there: Tensor, loader: Loader) -> None:
        """Called after a box was written: a parameter that has all of its own may be processed, and be gone."""
        self._add(move, [there.to(self.dtype)])
        try:
            loader.count(self._name(move.box), self._size(move))
        except RuntimeError as error:
            raise SyncError(f"a weight sync went wrong: load of {self._tensor(move.box)} failed: {error}") from error

    def _split(self, move: Move, box: Tensor) -> Sequence[Tensor]:
        """A box as the tensors that `source` has it in."""
        return box.unbind() if self.model.family.rules[move.box.rule].per_expert else [box]

    def _message(self, source: int, target: int, bucket: int, moves: list[Move]) -> Message:
        line, size = _LINE * WORD // self.dtype.itemsize, sum(map(self._size, moves))
        buffer = torch.empty(-(-size // line) * line, dtype=self.dtype, device=self._device)
        buffer[size:] = 0
        return Message(source, target, bucket, moves, buffer)

    def _boxes(self, message: Message) -> Iterator[tuple[Move, Tensor]]:
        at = 0
        for move in message.moves:
            yield move, message.buffer[at : at + self._size(move)].view(move.box.shape(self.model, self.dtype.itemsize))
            at += self._size(move)

    def _waiting(self, wait: Callable[[], T], what: str) -> T:
        try:
            return wait()
        except RuntimeError as error:
            raise SyncError(f"a weight sync went wrong: {what} failed: {error}") from error

    # ------------------------------------------------------------------------------------------------------------ proof
    def _keep(self, peers: list[list[Tensor]], messages: Sequence[tuple[int, Message]]) -> None:
        """Adds a bucket's checksums to those for each peer: a row per box, then one for the message."""
        if not messages:
            return
        for _, message in messages:
            self._add_message(message)
        boxes, whole = self._checksums.take().split([sum(len(message.moves) for _, message in messages), len(messages)])
        parts = boxes.split([len(message.moves) for _, message in messages])
        for (peer, _), rows, row in zip(messages, parts, whole, strict=True):
            peers[peer] += [rows, row[None]]

    def _add(self, move: Move, boxes: Sequence[Tensor]) -> None:
        if len(self.model.family.rules[move.box.rule].hf[0].shape) == 1:
            boxes = [box[..., None] for box in boxes]  # experts' vectors may come stacked
        self._checksums.add(boxes, self._integer(move))

    def _add_message(self, message: Message) -> None:
        """The checksum of all that travels, in the order in which it does."""
        words = message.buffer.view(INTEGERS[WORD])
        self._checksums.add([words.view(len(words) // _LINE, _LINE)], INTEGERS[WORD])

    def _verify(self) -> None:
        """Compares what was sent with what is there, over all ranks, in one exchange; the host waits for the device here.

        Raises:
            SyncError: on all ranks, with the first box that is not the same, and the stage that changed it.
        """
        none = torch.empty(0, 2, dtype=torch.int64, device=self._device)
        sent = [torch.cat([none, *rows]) for rows in self._sent]
        received = [torch.cat([none, *rows]) for rows in self._there]
        self._sent, self._there = _by_peer(self.grid.world), _by_peer(self.grid.world)
        came, sizes = torch.cat(sent), [[len(rows) for rows in peers] for peers in (received, sent)]
        if self.grid.world > 1:
            came = torch.empty_like(torch.cat(received))
            exchange = partial(
                dist.all_to_all_single,
                came,
                torch.cat(sent),
                output_split_sizes=sizes[0],
                input_split_sizes=sizes[1],
                group=self.grid.device_group,
            )
            self._waiting(exchange, "the exchange of checksums")
        differs = (torch.cat(received) != came).any(1).cpu()
        self.grid.sum_array(found := np.array([int(differs.sum())]))
        if not found[0]:
            return
        by_rank = self.grid.all_gather(self._first_wrong([rows.tolist() for rows in differs.split(sizes[0])]))
        wrong = next(each for each in by_rank if each)
        stages = self.grid.all_gather(self._stage(wrong, sent[wrong.target]) if wrong.source == self.grid.rank else "")
        boxes = sum(each.boxes for each in by_rank if each)
        raise SyncError(
            f"a weight sync went wrong: {self._tensor(wrong.box)} is not in the engine as the actor has it; the first of "
            f"{boxes} such parts. It went from rank {wrong.source} to rank {wrong.target} in bucket {wrong.bucket} of "
            f"{len(self._plan.buckets)}, and was changed at the stage: {stages[wrong.source]}"
        )

    def _first_wrong(self, differs: Sequence[Sequence[bool]]) -> _Wrong | None:
        """Finds the first wrong box by the rows of every source's checksums."""
        first, boxes = None, 0
        for source, rows in enumerate(differs):
            at = 0
            for number, bucket in enumerate(self._plan.buckets):
                if moves := bucket.copies if source == self.grid.rank else bucket.receives.get(source):
                    *each, message = rows[at : at + len(moves) + 1]
                    boxes += sum(each)
                    if first is None and (message or any(each)):
                        box = moves[each.index(True) if any(each) else 0].box
                        first = _Wrong(source, self.grid.rank, number, box, message, 0)
                    at += len(moves) + 1
        return first and first._replace(boxes=boxes)

    def _stage(self, wrong: _Wrong, sent: Tensor) -> str:
        """Where a box was changed; on its source, which packs the message again and compares. `sent`: its checksums for the
        target, a row per box and one per message."""
        if wrong.source == wrong.target:
            return "copy"
        buckets = [bucket.sends.get(wrong.target, []) for bucket in self._plan.buckets[: wrong.bucket + 1]]
        end = sum(len(moves) + 1 for moves in buckets if moves)
        rows = sent[end - len(buckets[-1]) - 1 : end]
        again = self._message(wrong.source, wrong.target, wrong.bucket, buckets[-1])
        self.pack(again)
        self._held.clear()
        for move, box in self._boxes(again):
            self._add(move, [box])
        self._add_message(again)
        if not torch.equal(self._checksums.take(), rows):
            return "pack"
        return "send or receive" if wrong.on_its_way else "load"

    def _integer(self, move: Move) -> torch.dtype:
        """The type in which the rows of a box are summed: whole words where they begin at words at the source and at the
        target."""
        if move not in self._integers:
            self._integers[move] = self._find_integer(move)
        return self._integers[move]

    def _find_integer(self, move: Move) -> torch.dtype:
        box, rule, actor = move.box, self.model.family.rules[move.box.rule], self._layout.actor
        full = rule.hf[box.tensor].sizes(self.model.dims)
        at = [full[-1]]
        if rule.sharding is Sharding.ROW:
            [shape] = self._layout.engine.shapes(self.model, rule).values()
            at = [box.stop - box.start, move.source_at, move.target_at, shape[-1]]
            at.append(full[-1] // (actor.expert_tensor if rule.per_expert else actor.tensor))
        whole = len(full) > 1 and all(number * self.dtype.itemsize % WORD == 0 for number in at)
        return INTEGERS[WORD if whole else self.dtype.itemsize]

    # -------------------------------------------------------------------------------------------------------- for messages
    def _name(self, box: Box) -> str:
        """vLLM's parameter."""
        return self.model.family.rules[box.rule].engine[box.tensor].format(layer=box.layer)

    def _size(self, move: Move) -> int:
        return math.prod(move.box.shape(self.model, self.dtype.itemsize))

    def _tensor(self, box: Box) -> str:
        rule = self.model.family.rules[box.rule]
        name = rule.hf[box.tensor].name.format(layer=box.layer, expert=box.first)
        experts = f" (experts {box.first} to {box.last - 1})" if rule.per_expert else ""
        return f"{name}{experts}, {'columns' if rule.dim else 'rows'} {box.start} to {box.stop - 1},"

    def _describe(self, message: Message) -> str:
        return (
            f"of {self._tensor(message.moves[0].box)} and {len(message.moves) - 1} more parts (bucket {message.bucket} of "
            f"{len(self._plan.buckets)}, from rank {message.source} to rank {message.target})"
        )


class _Wrong(NamedTuple):
    """A box that is another one in the engine.

    Attributes:
        on_its_way: its message did not come as it was sent.
        boxes: how many of the target's are wrong.
    """

    source: int
    target: int
    bucket: int
    box: Box
    on_its_way: bool
    boxes: int


def _by_peer(world: int) -> list[list[Any]]:
    return [[] for _ in range(world)]


def _arriving(bucket: Bucket) -> Iterator[Move]:
    for moves in (*bucket.receives.values(), bucket.copies):
        yield from moves
