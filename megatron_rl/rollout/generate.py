"""Rollouts of prompts, over all engines; written with an engine's `submit` and `step`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from megatron_rl.data.rollout import FACTS, Rollout, Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.rollout.dispatch import HandOut, longest_first
from megatron_rl.rollout.engine import Engine, EngineError, Request
from megatron_rl.rollout.sampling import Sampling, rollout_seed

_DIGEST = 8  # bytes


def generate(
    engine: Engine,
    samples: Sequence[Sample],
    count: int,
    sampling: Sampling,
    step: int,
    on_finished: Callable[[Rollout], None] | None = None,
    already_drawn: Mapping[tuple[str, int], Rollout] | None = None,
    lengths: Mapping[str, float] | None = None,
) -> Rollouts:
    """`count` rollouts of every sample, over all engines; every rank learns how long each is, and holds its own engine's.

    Whole groups are spread over the engines (`HandOut`). Each rollout has a seed of its own (`rollout_seed`), so what is
    drawn depends neither on the engine nor on what else is in the batch.

    Args:
        on_finished: called with each rollout of this rank's engine as it ends, on every rank of the engine in the same order.
        already_drawn: rollouts that are not drawn again, by sample id and index; the same on every rank.
        lengths: mean tokens of earlier responses, by sample id; the same on every rank.

    Raises:
        EngineError: on every rank, where the ranks of an engine did not stay in step, or not every rollout came once.
    """
    there, place = already_drawn or {}, {sample.id: i for i, sample in enumerate(samples)}
    held = dict[int, Rollout]()

    def submit(places: Iterable[int]) -> None:
        for i in places:
            requests = []
            for index in range(count):
                name = samples[i].id, index
                if name in there:
                    held[i * count + index] = there[name]
                    continue
                seed = rollout_seed(engine.seed, step, *name) if sampling.temperature > 0 else None
                requests.append(Request(name, samples[i].prompt_ids, sampling, seed, images=samples[i].images))
            engine.submit(requests)

    hand_out = HandOut(engine, longest_first(samples, lengths or {}), count)
    submit(hand_out.first())
    submit(hand_out.more())
    for completion in engine.drain():
        sample_id, index = completion.request.name
        rollout = Rollout.single_turn(
            samples[place[sample_id]],
            index,
            completion.ids,
            completion.finish_reason,
            completion.logprobs,
            completion.version,
            completion.experts,
        )
        held[place[sample_id] * count + index] = rollout
        if on_finished is not None:
            on_finished(rollout)
        submit(hand_out.more())
    facts = _gather_facts(engine, held, len(samples) * count)
    hand_out.end()
    return Rollouts(list(samples), count, facts, held, engine.experts)


def _gather_facts(engine: Engine, held: Mapping[int, Rollout], rows: int) -> np.ndarray:
    """FACTS [rows] about the rollouts of all engines. The ranks of an engine take turns as their source."""
    size = engine.config.tensor_parallel
    own = [_facts(row, held[row]) for row in sorted(held)[engine.grid.rank % size :: size]]
    parts = engine.grid.all_gather_bytes(_digest(held) + np.array(own, dtype=FACTS).tobytes())
    _check_in_step([part[:_DIGEST] for part in parts], size)
    if (number := sum(len(part) - _DIGEST for part in parts) // FACTS.itemsize) != rows:
        raise EngineError(f"the engines have drawn {number} rollouts, and {rows} were asked for")
    facts = np.zeros(rows, dtype=FACTS)
    for rank, part in enumerate(parts):
        drawn = np.frombuffer(part[_DIGEST:], dtype=FACTS)
        facts[drawn["row"]] = drawn
        facts["source"][drawn["row"]] = rank
    return facts


def _facts(row: int, rollout: Rollout) -> tuple[int, int, int, bool, int, int]:
    return row, rollout.num_tokens, rollout.length, rollout.finish_reason == "length", rollout.version, 0


def _digest(held: Mapping[int, Rollout]) -> bytes:
    """Of which rollouts ended with which tokens, in order."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for row, rollout in held.items():
        digest.update(f"{row} ".encode())
        digest.update(rollout.response_ids.tobytes())
    return digest.digest()


def _check_in_step(digests: Sequence[bytes], size: int) -> None:
    """Each rank of an engine schedules and samples for itself. Once one draws another token, their passes do not match."""
    for first in range(0, len(digests), size):
        differing = [rank for rank in range(first, first + size) if digests[rank] != digests[first]]
        if differing:
            raise EngineError(
                f"ranks {first} and {differing[0]} of engine {first // size} have drawn different tokens: the engine's ranks "
                "must run the same build of vLLM on the same kind of device with the same settings"
            )
