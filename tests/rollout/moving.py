"""One rank of a test that moves a real actor's weights over real gloo into plain tensors of the shapes that vLLM declares."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models.cut_by_hand import Weights
from models.megatron import build, start, stop

from megatron_rl.config.actor import ParallelConfig
from megatron_rl.models import Model, family_for, read_hf_config
from megatron_rl.runtime.distributed import ALONE, ProcessGrid
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.inventory import local_weights
from megatron_rl.weights.layouts import ActorLayout, EngineLayout
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.sync_plan import Move, make_plan
from megatron_rl.weights.transfer import Message, SyncError, Transfer


@dataclass(frozen=True)
class Layout:
    """Of the actor; `engine` ranks per engine, which hold whole experts with `whole_experts`."""

    variant: str
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    virtual: int = 1
    expert_tensor: int = 1
    engine: int = 1
    whole_experts: bool = False


@dataclass
class Shards:
    """Takes shards as an engine does, and keeps them."""

    shapes: dict[str, tuple[int, ...]]
    wanted: dict[str, int]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            self.tensors[name] = torch.zeros(self.shapes[name])
            self.written[name] = 0
        assert self.written[name] < self.wanted[name], f"{name} was whole"
        return self.tensors[name]

    def count(self, name: str, elements: int) -> None:
        self.written[name] += elements
        if self.written[name] > self.wanted[name]:
            raise RuntimeError("some came twice")

    def check(self) -> None:
        assert self.written == {name: elements for name, elements in self.wanted.items() if elements}


class Rank:
    """This rank's model in a layout."""

    def __init__(self, rank: int, world: int, rendezvous: str, folder: Path, layout: Layout) -> None:
        axes = (layout.tensor, layout.pipeline, layout.expert, layout.virtual, layout.expert_tensor)
        self.parallel = start(rank, world, rendezvous, *axes)
        self.config = read_hf_config(folder)
        family = family_for(self.config)
        self.model = Model(family, family.describe(self.config))
        self.chunks = build(family, self.model.description, self.parallel, layout.virtual)
        load_hf_weights(self.chunks, family, self.config, folder, self.parallel)
        # The host's group is the default one, which is gloo's too.
        self.grid = ProcessGrid(**{**vars(ALONE), "rank": rank, "world": world})
        self.layout = layout

    def transfer(self, bucket_bytes: int, timeout: float = 30, node: int = 2) -> Transfer:
        layout = self.layout
        parallel = ParallelConfig(
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            virtual_pipeline=layout.virtual,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
        )
        actor = ActorLayout.of(parallel, self.model.dims["layers"], self.grid.world)
        engine = EngineLayout(layout.engine, layout.whole_experts)
        plan = make_plan(self.model, actor, engine, bucket_elements=bucket_bytes // 4, node=node)
        found = local_weights(self.chunks, self.model, self.parallel)
        weights = {weight.key: weight.parameter for weight in found}
        return Transfer(plan, weights, torch.float32, self.grid, timedelta(seconds=timeout))

    def shards(self, transfer: Transfer) -> Shards:
        shapes = EngineLayout(self.layout.engine, self.layout.whole_experts).parameters(self.model)
        return Shards(shapes, transfer.wanted)

    def cut(self) -> dict[str, np.ndarray]:
        """The bits of what vLLM would cut out of whole tensors for this rank; 0 in the vocabulary's padding."""
        whole = iter_hf_weights(self.chunks, self.model.family, self.config, self.parallel)
        weights = Weights(self.model)
        weights.tensors = {name: value.clone().view(torch.int32).numpy() for name, value in whole}
        found = weights.of_engine(self.layout.engine, self.grid.rank % self.layout.engine, self.layout.whole_experts)
        return {name: np.where(value == -1, 0, value) for name, value in found.items() if (value != -1).any()}

    def change(self, seed: int) -> None:
        """As an update does: every number becomes another one, on all ranks that hold it the same."""
        factor = 1 + 0.1 * torch.rand((), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(factor)

    def compare(self, shards: Shards, what: object) -> None:
        shards.check()
        expected = self.cut()
        assert expected.keys() == shards.tensors.keys()
        for name, value in expected.items():
            assert np.array_equal(shards.tensors[name].view(torch.int32).numpy(), value), (what, self.grid.rank, name)


def exact(rank: int, world: int, rendezvous: str, root: str, layouts: list[Layout], faults: int) -> None:
    """After 1, 2 and 20 syncs the engine holds the bits that whole tensors would have brought; then so many faults in each
    layout, whose messages rank 0 writes down."""
    told: list[dict[str, Any]] = []
    for number, layout in enumerate(layouts):
        this = Rank(rank, world, f"{rendezvous}-{number}", Path(root) / layout.variant, layout)
        for bucket_bytes, syncs in ((8_000, [0]), (2**28, [0, 1, 19])):
            transfer = this.transfer(bucket_bytes)
            for sync in range(syncs[-1] + 1):
                shards = this.shards(transfer)
                with most_alive(transfer) as sizes:
                    transfer.push(shards)
                # Two buckets, each way; a message for or from each of the others is filled up to a whole line.
                assert sizes.most <= 2 * 2 * (bucket_bytes + 512 * (world - 1)), (layout, sizes.most)
                if sync in syncs:
                    this.compare(shards, (layout, bucket_bytes, sync))
                this.change(sync)
        transfer = this.transfer(8_000)
        told += [fault(this, transfer, 1000 * number + seed) for seed in range(faults)]
        shards = this.shards(transfer)
        transfer.push(shards)
        this.compare(shards, "after the faults")
        stop()
    if rank == 0:
        (Path(root) / "faults.json").write_text(json.dumps(told))


@dataclass
class Alive:
    """Bytes of buffers."""

    now: int = 0
    most: int = 0


@contextlib.contextmanager
def most_alive(transfer: Transfer) -> Iterator[Alive]:
    """Counts the messages' buffers while entered."""
    alive, make = Alive(), transfer._message

    def counted(*arguments: Any) -> Message:
        message = make(*arguments)
        alive.now += message.buffer.nbytes
        alive.most = max(alive.most, alive.now)
        weakref.finalize(message.buffer, freed, message.buffer.nbytes)
        return message

    def freed(size: int) -> None:
        alive.now -= size

    transfer._message = counted  # type: ignore[method-assign]
    yield alive
    del transfer._message


# ------------------------------------------------------------------------------------------------------ ranks that are gone
def gone(rank: int, world: int, rendezvous: str, root: str) -> None:
    """What rank 0 says of a rank with another plan, of one that is stopped in the middle of a sync, and of one that ends."""
    layout = Layout("qwen3", tensor=2)
    told: dict[str, str] = {}
    for case in ("another plan", "stopped", "ended"):
        this = Rank(rank, world, f"{rendezvous}-{case}", Path(root) / layout.variant, layout)
        other = this.grid.all_gather(os.getpid())[1]
        began = time.monotonic()
        try:
            transfer = this.transfer(16_000 if case == "another plan" and rank else 8_000, timeout=2)
            assert len(transfer._plan.buckets) > 3
            if rank and case == "stopped":
                at_bucket(transfer, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))
            elif rank and case == "ended":
                at_bucket(transfer, 1, lambda: os._exit(0))
            transfer.push(this.shards(transfer))
        except SyncError as error:
            told[case] = f"{time.monotonic() - began:.0f} s: {error}"
        if rank == 0 and case == "stopped":
            os.kill(other, signal.SIGCONT)
        if case != "ended":
            stop()
    (Path(root) / "gone.json").write_text(json.dumps(told))


def at_bucket(transfer: Transfer, number: int, do: Callable[[], None]) -> None:
    """Has the rank do something before it sends a bucket."""
    begin = transfer._start

    def start(bucket: int) -> Any:
        if bucket == number:
            do()
        return begin(bucket)

    transfer._start = start  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------------------- faults
def _changed(value: torch.Tensor, random: np.random.Generator) -> None:
    """One number, in its last bit or more."""
    at = tuple(int(random.integers(size)) for size in value.shape)
    value[at] = torch.nextafter(value[at], torch.tensor(float("inf")))


def _another_order(value: torch.Tensor, random: np.random.Generator) -> None:
    several = [dim for dim, size in enumerate(value.shape) if size > 1]
    value.copy_(value.flip(int(random.choice(several))).clone())


def _gone(value: torch.Tensor, random: np.random.Generator) -> None:
    value.zero_()


KINDS: dict[str, Callable[[torch.Tensor, np.random.Generator], None]] = {
    "corrupted": _changed,
    "swapped": _another_order,
    "dropped": _gone,
}


def fault(this: Rank, transfer: Transfer, seed: int) -> dict[str, Any]:
    """A sync in which one box or message is damaged once, on one rank at one stage; what the ranks say, and should.

    Every rank draws the same fault from its own copy of the plan; only the damaged one has something to do.
    """
    random = np.random.default_rng(seed)
    kind = list(KINDS)[int(random.integers(3))]
    plans = [transfer._layout.of(rank) for rank in range(this.grid.world)]
    found: list[tuple[int, int, int, int]] = []  # source, target, bucket, number of the box
    for source, plan in enumerate(plans):
        for number, bucket in enumerate(plan.buckets):
            for target, moves in (*bucket.sends.items(), (source, bucket.copies)):
                found += [
                    (source, target, number, index) for index, move in enumerate(moves) if _matters(move, this.model)
                ]
    travels = [each for each in found if each[0] != each[1]]
    stage = ["pack", "send or receive", "load", "copy"][int(random.integers(4))]
    if stage == "copy" or not travels:
        stage, choices = "copy", [each for each in found if each[0] == each[1]]
        if not choices:
            stage, choices = "load", travels
    else:
        choices = travels
    source, target, number, index = choices[int(random.integers(len(choices)))]
    where = plans[source].buckets[number]
    moves = where.copies if source == target else where.sends[target]
    damage = _Damage(transfer, KINDS[kind], random, (source, target, number), moves[index])
    with damage.at(stage):
        try:
            transfer.push(this.shards(transfer))
            said = "nothing"
        except SyncError as error:
            said = str(error)
    messages = this.grid.all_gather(said)
    expected = [
        transfer._tensor(moves[index].box),
        f"from rank {source} to rank {target} in bucket {number} of ",
        stage,
    ]
    return {"kind": kind, "expected": expected, "said": messages}


def _matters(move: Move, model: Model) -> bool:
    """Whether its order and its numbers can be another: more than one row or column."""
    return math.prod(move.box.shape(model, 4)) > 1


@dataclass
class _Damage:
    """Damages one box, once."""

    transfer: Transfer
    how: Callable[[torch.Tensor, np.random.Generator], None]
    random: np.random.Generator
    route: tuple[int, int, int]
    move: Move

    @contextlib.contextmanager
    def at(self, stage: str) -> Iterator[None]:
        transfer, (source, target, _) = self.transfer, self.route
        name = {"pack": "pack", "send or receive": "unpack", "load": "_arrived", "copy": "_arrived"}[stage]
        original = getattr(transfer, name)
        done = False

        def in_message(message: Message, *others: Any) -> None:
            nonlocal done
            here = (message.source, message.target, message.bucket) == self.route and not done
            done = done or here
            if here and name == "unpack":
                self.damage_buffer(message)
            original(message, *others)
            if here and name == "pack":
                self.damage_buffer(message)

        def in_engine(move: Move, there: torch.Tensor, loader: Any) -> None:
            if move == self.move:
                self.how(there, self.random)
            original(move, there, loader)

        if transfer.grid.rank == (source if stage == "pack" else target):
            setattr(transfer, name, in_engine if name == "_arrived" else in_message)
        try:
            yield
        finally:
            vars(transfer).pop(name, None)

    def damage_buffer(self, message: Message) -> None:
        for move, box in self.transfer._boxes(message):
            if move == self.move:
                self.how(box, self.random)
