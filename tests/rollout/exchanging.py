"""Ranks that exchange rollouts, without engines: every rollout is a function of its row, so that each rank knows them all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.data.rollout import FACTS, Rollout, Rollouts, Segment
from megatron_rl.data.sample import Sample
from megatron_rl.rollout import exchange as module
from megatron_rl.rollout.exchange import BYTES_PER_TOKEN, ExchangeError, Need, exchange, sizes_of
from megatron_rl.runtime import distributed
from megatron_rl.runtime.distributed import ALONE, ProcessGrid
from megatron_rl.trainer.shown import fetch_to_rank0

WORLD = 4
COUNT = 3  # rollouts per prompt


def kind_of_experts(seed: int) -> np.dtype | None:
    """Of every second seed none."""
    return None if seed % 2 == 0 else np.dtype(((np.uint8, np.uint16)[seed // 2 % 2], (2, 3)))


def token_weights(seed: int) -> dict[str, float]:
    """Of every third seed two columns."""
    return {"teacher": 1.0, "process": 0.5} if seed % 3 == 0 else {}


def whole(seed: int, sample: Sample, index: int) -> Rollout:
    """A rollout of one or several turns, of two versions of the weights; tokens and log-probs are random."""
    rng = np.random.default_rng([seed, int(sample.id), index])
    segments = [Segment(np.array(sample.prompt_ids))]
    for turn in range(rng.integers(1, 4)):
        size = int(rng.integers(turn == 0, 9))
        if turn and size and rng.integers(2):  # what a tool said
            parts = seed % 2 == 0 and bool(rng.integers(2))  # with experts a rollout has one sequence
            segments.append(Segment(rng.integers(0, 99, 2), begins_sequence=parts))
        segments.append(Segment(rng.integers(0, 99, size), rng.normal(size=size).astype(np.float32), seed + turn % 2))
    rollout = Rollout(sample.id, index, segments, "length" if rng.integers(2) else "stop")
    kind = kind_of_experts(seed)
    if kind is not None:
        rollout.experts = rng.integers(0, 99, (rollout.num_tokens, *kind.shape)).astype(kind.base)
    if columns := len(token_weights(seed)):
        rollout.token_rewards = rng.normal(size=(rollout.length, columns)).astype(np.float32)
    return rollout


def rollouts_of(seed: int, prompts: int, rank: int, world: int, size: int) -> tuple[Rollouts, dict[int, Rollout]]:
    """What engines of `size` ranks have drawn, as `rank` knows it; and all of it."""
    samples = [Sample(str(i), "t", "", [7] * (1 + i % 3)) for i in range(prompts)]
    everything = {i * COUNT + j: whole(seed, sample, j) for i, sample in enumerate(samples) for j in range(COUNT)}
    facts = np.zeros(len(everything), dtype=FACTS)
    engines = world // size
    for row, rollout in everything.items():
        first = row // COUNT % engines * size
        truncated = rollout.finish_reason == "length"
        facts[row] = (row, rollout.num_tokens, rollout.length, truncated, rollout.version, False, first + row % size)
    held = {row: drawn for row, drawn in everything.items() if row // COUNT % engines == rank // size}
    for row in held:
        if facts["source"][row] != rank:  # another rank of the engine has scored it
            held[row] = replace(held[row], token_rewards=None)
    return Rollouts(samples, COUNT, facts, held, kind_of_experts(seed), token_weights=token_weights(seed)), everything


def in_world(rank: int, folder: str, world: int, seconds: float, work: Callable[[ProcessGrid, Path], None]) -> None:
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    grid = ProcessGrid(**{**vars(ALONE), "rank": rank, "world": world, "host_group": dist.group.WORLD})
    work(grid, Path(folder))


def versions_of(rollout: Rollout) -> np.ndarray:
    """Of the weights that drew each sampled token."""
    drawn = [segment for segment in rollout.segments if segment.logprobs is not None]
    return np.repeat([segment.version for segment in drawn], [len(segment.ids) for segment in drawn])


def every_layout(grid: ProcessGrid, folder: Path) -> None:
    """Random prompts over engines and replicas of every size: a rank gets the rows that it needs, as they were drawn."""
    rng = np.random.default_rng(1)
    for seed in range(24):
        size, dp = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 4]))
        rollouts, everything = rollouts_of(seed, int(rng.integers(1, 9)), grid.rank, grid.world, size)
        trained = rng.permutation(len(rollouts))[: int(rng.integers(len(rollouts) + 1))]
        owner = rng.integers(dp, size=len(trained))
        replica = rng.permutation(WORLD) % dp  # of each rank
        needs: list[Need] = [(np.flatnonzero(replica == d).tolist(), trained[owner == d].tolist()) for d in range(dp)]
        got = exchange(grid, rollouts, needs)
        wanted = needs[replica[grid.rank]][1]
        assert sorted(got) == sorted(wanted), (seed, grid.rank)
        for row, rollout in got.items():
            there = everything[row]
            assert (rollout.sample_id, rollout.index) == (there.sample_id, there.index)
            assert (rollout.finish_reason, rollout.version) == (there.finish_reason, there.version)
            np.testing.assert_array_equal(rollout.tokens, there.tokens)
            np.testing.assert_array_equal(rollout.loss_mask, there.loss_mask)
            np.testing.assert_array_equal(rollout.logprobs, there.logprobs)
            np.testing.assert_array_equal(versions_of(rollout), versions_of(there))
            assert rollout.sequence_lengths == there.sequence_lengths
            if there.token_rewards is None:
                assert rollout.token_rewards is None
            else:
                np.testing.assert_array_equal(rollout.token_rewards, there.token_rewards, strict=True)
            if there.experts is None:
                assert rollout.experts is None
            else:
                np.testing.assert_array_equal(rollout.experts, there.experts, strict=True)


def bytes_of_worlds(grid: ProcessGrid, folder: Path) -> None:
    """One, two and four ranks at the same batch per rank: none sends or receives more than its batch."""
    moved = {"isend": 0, "irecv": 0}

    def counting(name: str) -> Callable[..., Any]:
        real = getattr(dist, name)

        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            moved[name] += tensor.numel()
            return real(tensor, *args, **kwargs)

        return call

    class Counting:
        isend, irecv, Work = staticmethod(counting("isend")), staticmethod(counting("irecv")), dist.Work

    module.dist = Counting  # type: ignore[assignment]
    for world in (1, 2, 4):
        group = dist.new_group(list(range(world)))
        if grid.rank < world:
            rollouts, _ = rollouts_of(2, 4 * world, grid.rank, world, 1)
            rows = np.random.default_rng(world).permutation(len(rollouts)).reshape(world, -1)
            moved.update(isend=0, irecv=0)
            part = ProcessGrid(**{**vars(grid), "world": world, "host_group": group})
            exchange(part, rollouts, [([rank], row.tolist()) for rank, row in enumerate(rows)])
            sizes = sizes_of(rollouts)
            assert (sizes < 4 + BYTES_PER_TOKEN * (rollouts.facts["num_tokens"] - rollouts.prompt_lengths)).all()
            mine = rows[grid.rank]
            from_others = mine[rollouts.facts["source"][mine] != grid.rank]
            to_others = np.setdiff1d(np.flatnonzero(rollouts.facts["source"] == grid.rank), mine)
            assert moved["irecv"] == sizes[from_others].sum()
            assert moved["isend"] == sizes[to_others].sum()
            assert world == 1 or moved["irecv"] > 0
    module.dist = dist


def gathered(grid: ProcessGrid, folder: Path) -> None:
    """Bytes of any length come from every rank, in as many rounds as the logarithm of the ranks; arrays of one shape."""
    sent = []

    class Counting:
        irecv, isend = staticmethod(dist.irecv), staticmethod(lambda *given: sent.append(0) or dist.isend(*given))

    distributed.dist = Counting  # type: ignore[attr-defined]
    grid.all_gather_bytes(b"facts")
    distributed.dist = dist  # type: ignore[attr-defined]
    assert len(sent) == 2 * 2, "sizes, then bytes: log2(4) messages each, where a ring has 3"
    for world in (1, 2, 3):
        group = dist.new_group(list(range(world)))
        if grid.rank < world:
            part = ProcessGrid(**{**vars(grid), "world": world, "host_group": group})
            assert part.all_gather_bytes(bytes([grid.rank] * 5)) == [bytes([r] * 5) for r in range(world)]
    assert grid.all_gather_bytes(bytes(grid.rank * [grid.rank])) == [bytes(r * [r]) for r in range(grid.world)]
    assert grid.all_gather_bytes(b"") == [b""] * grid.world
    assert grid.gather_rows(np.full(3, grid.rank, dtype=np.int32)).tolist() == [[r] * 3 for r in range(grid.world)]


def an_engines_ranks_hear_their_leader(grid: ProcessGrid, folder: Path) -> None:
    engine = distributed._engine_group(grid.rank, grid.world, 2, timeout_minutes=1)
    assert (engine.index, engine.count, engine.rank) == (grid.rank // 2, grid.world // 2, grid.rank % 2)
    assert engine.broadcast({"answer": grid.rank}) == {"answer": 2 * engine.index}
    alone = distributed._engine_group(grid.rank, grid.world, 1, timeout_minutes=1)
    assert (alone.broadcast(grid.rank), alone.count, alone.group) == (grid.rank, grid.world, None)


def to_rank_0(grid: ProcessGrid, folder: Path) -> None:
    """Where experts are replayed, too, responses that an interrupted evaluation has kept come without any."""
    rollouts, everything = rollouts_of(1, 5, grid.rank, grid.world, 2)
    for rollout in rollouts.held.values():
        rollout.experts = None
    rollouts.rewards = np.zeros((len(rollouts), 0))
    tokenizer: Any = SimpleNamespace(batch_decode=lambda sequences, **options: [""] * len(sequences))
    got = fetch_to_rank0(grid, rollouts, 4, tokenizer)
    assert [rollout.tokens.tolist() for rollout in got] == (
        [everything[row].tokens.tolist() for row in range(4)] if grid.is_main else []
    )


def received_before(grid: ProcessGrid, folder: Path) -> None:
    """A rollout that an earlier exchange brought stays as it was while later ones bring theirs."""
    kept: list[tuple[Rollout, Rollout]] = []
    for seed in range(0, 8, 2):
        rollouts, everything = rollouts_of(seed, 8, grid.rank, grid.world, 1)
        got = exchange(grid, rollouts, [([rank], range(len(rollouts))) for rank in range(grid.world)])
        kept.append(next((got[row], everything[row]) for row in got if row not in rollouts.held))
        for rollout, there in kept:
            np.testing.assert_array_equal(rollout.tokens, there.tokens)
            np.testing.assert_array_equal(rollout.logprobs, there.logprobs)


def everything(grid: ProcessGrid, folder: Path) -> None:
    every_layout(grid, folder)
    an_engines_ranks_hear_their_leader(grid, folder)
    received_before(grid, folder)
    bytes_of_worlds(grid, folder)
    gathered(grid, folder)
    to_rank_0(grid, folder)


def one_is_missing(grid: ProcessGrid, folder: Path) -> None:
    """The last rank dies, or hangs, before it hands over what it drew; the others write what they say. Rank 0 waits
    already when it dies, rank 1 comes later: it still hands over, so that rank 0 does not name it."""

    def both_have_said_it() -> None:
        while len([*folder.glob("said_*")]) < grid.world - 1:
            time.sleep(0.05)

    dist.barrier()
    if grid.rank == grid.world - 1:
        if (folder / "hangs").exists():
            both_have_said_it()
        time.sleep(0.5)
        os._exit(0)
    rollouts, _ = rollouts_of(0, 6, grid.rank, grid.world, 1)
    time.sleep(grid.rank)
    begin = time.monotonic()
    try:
        exchange(grid, rollouts, [([rank], range(len(rollouts))) for rank in range(grid.world)])
    except ExchangeError as error:
        (folder / f"said_{grid.rank}").write_text(f"{time.monotonic() - begin:.1f} {error}")
    both_have_said_it()  # a rank that ends would be the next to be named
    os._exit(0)  # the process group cannot end in order
