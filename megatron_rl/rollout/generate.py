"""Rollouts of prompts, over all engines; written with an engine's `submit` and `step`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Sequence

from megatron_rl.data import Rollout, Sample
from megatron_rl.rollout.engine import Engine, EngineError, Request
from megatron_rl.rollout.sampling import Sampling, rollout_seed


def generate(
    engine: Engine,
    samples: Sequence[Sample],
    count: int,
    sampling: Sampling,
    step: int,
    on_finished: Callable[[Rollout], None] | None = None,
    already_drawn: Container[tuple[str, int]] = (),
) -> list[Rollout]:
    """`count` rollouts of every sample, over all engines; every rank gets all of them, by sample, then index.

    Engine e of E takes every E-th sample. Each rollout has a seed of its own (`rollout_seed`), so what is drawn depends
    neither on the number of engines nor on what else is in the batch.

    Args:
        on_finished: called with each rollout of this rank's engine as it ends, on every rank of the engine in the same order.
        already_drawn: (sample id, index) of rollouts that are left out; the same on every rank.

    Raises:
        EngineError: on every rank, where the ranks of an engine did not stay in step.
    """
    requests, by_id = [], {sample.id: sample for sample in samples}
    for sample in samples[engine.index :: engine.engines]:
        for index in range(count):
            if (sample.id, index) not in already_drawn:
                seed = rollout_seed(engine.seed, step, sample.id, index) if sampling.temperature > 0 else None
                requests.append(Request((sample.id, index), sample.prompt_ids, sampling, seed))
    engine.submit(requests)
    rollouts = []
    for completion in engine.drain():
        sample_id, index = completion.request.name
        rollout = Rollout.single_turn(
            by_id[sample_id], index, completion.ids, completion.finish_reason, completion.logprobs, completion.version
        )
        rollouts.append(rollout)
        if on_finished is not None:
            on_finished(rollout)
    gathered = engine.grid.all_gather((_digest(rollouts), rollouts if engine.is_leader else []))
    _check_in_step([digest for digest, _ in gathered], engine)
    place = {sample.id: i for i, sample in enumerate(samples)}
    everything = [rollout for _, part in gathered for rollout in part]
    return sorted(everything, key=lambda rollout: (place[rollout.sample_id], rollout.index))


def _digest(rollouts: Sequence[Rollout]) -> bytes:
    """Of which rollouts ended with which tokens, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for rollout in rollouts:
        digest.update(f"{rollout.sample_id} {rollout.index} ".encode())
        digest.update(rollout.response_ids.tobytes())
    return digest.digest()


def _check_in_step(digests: Sequence[bytes], engine: Engine) -> None:
    """Each rank of an engine schedules and samples for itself. Once one draws another token, their passes do not match."""
    size = engine.config.tensor_parallel
    for first in range(0, len(digests), size):
        differing = [rank for rank in range(first, first + size) if digests[rank] != digests[first]]
        if differing:
            raise EngineError(
                f"ranks {first} and {differing[0]} of engine {first // size} have drawn different tokens: the engine's ranks "
                "must run the same build of vLLM on the same kind of device with the same settings"
            )
