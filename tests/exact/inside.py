"""One rank of a run with `rollout.exact`: what its engine and its actor compute of the same tokens, and what is seen of a
change in either.

Started once per rank with the run folder as its argument. Writes `found.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.config import load_recipe
from megatron_rl.data.batch import TokenBatch
from megatron_rl.rollout import vllm_engine
from megatron_rl.rollout.engine import Request, drain
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.runtime import distributed
from megatron_rl.trainer.loop import step
from megatron_rl.trainer.run import build_run

OPERATIONS = {
    "norm": "rms_norm",
    "rotary": "rotate",
    "product": "linear",
    "attention": "attention",
    "activation": "silu",
    "router": "route",
    "experts": "add_expert",
    "head": "log_softmax",
}  # -> the function of `base.exact_rows`
Trace = list[tuple[str, Any]]
# Scored at least, by engine and actor together, in batches by chance: EXACT_SEQUENCES=10000 for many, by hand.
SEQUENCES = int(os.environ.get("EXACT_SEQUENCES", "0"))


@contextlib.contextmanager
def traced(damaged: str | None = None) -> Iterator[Trace]:
    """While entered, each operation's result is appended, each token's numbers in order of size: the engine keeps the columns
    of query, key and value otherwise than the actor. `damaged`: the operation whose results are a little larger."""
    from megatron_rl.base import exact_rows as exact

    trace: Trace = []

    def wrap(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            first, *rest = result if isinstance(result, tuple) else (result,)
            if operation == damaged:
                first = first * (1 + 2**-6)
            if len(first):  # an expert may have no token
                trace.append((operation, first.detach().float().reshape(len(first), -1).sort(dim=-1).values))
            return (first, *rest) if rest else first

        return call

    originals = {name: getattr(exact, name) for name in OPERATIONS.values()}
    for operation, name in OPERATIONS.items():
        setattr(exact, name, wrap(operation, originals[name]))
    try:
        yield trace
    finally:
        for name, function in originals.items():
            setattr(exact, name, function)


def first_difference(engine: Trace, actor: Trace, scores: tuple[np.ndarray, np.ndarray]) -> str | None:
    """The operation of the first results that are not the same bits; None: all are, and the log-probs `scores`."""
    for (name, of_engine), (other, of_actor) in zip(*map(merged, (engine, actor)), strict=False):
        if name == "head" or name != other:
            break
        if not torch.equal(of_engine, of_actor[: len(of_engine)]):
            return name
    return None if np.array_equal(*scores) else "head"


def merged(trace: Trace) -> Trace:
    """With what is left once a layer's experts are added: the engine adds those of a token, the actor each to its tokens."""
    following = [*(name for name, _ in trace[1:]), ""]
    return [entry for entry, name in zip(trace, following, strict=True) if (entry[0], name) != ("experts", "experts")]


def with_cache(options: dict[str, Any], chunked: bool) -> dict[str, Any]:
    """vLLM's options, with prompts read in parts, or else prefixes kept, which short prompts on a CPU are not."""
    if chunked:
        # Of a step none is: those have seeds, which vLLM cannot take back on a CPU.
        return options | {"enable_chunked_prefill": True, "max_num_seqs": 50, "max_num_batched_tokens": 400}
    return options | {"enable_prefix_caching": True, "block_size": 32}


def main(run_dir: Path, chunked: bool) -> None:
    config = load_recipe(run_dir / "recipe.yaml")
    torch.manual_seed(config.seed)
    grid = distributed.initialize(config.actor.parallel, 5, engine_ranks=config.rollout.tensor_parallel)
    run = build_run(config, grid, run_dir)
    run.report.start_over()
    run.learner.start()
    options = vllm_engine.llm_options
    vllm_engine.llm_options = lambda *arguments: with_cache(options(*arguments), chunked)
    run.start_engine()
    engine, actor = run.sampler.engine, run.learner.actor
    chance = random.Random(0)
    lengths = [2, 31, 32, 33, 34, 64, 65, 66, 97, 98, *(chance.randint(2, 98) for _ in range(40))]
    sequences = [[chance.randrange(2, 64) for _ in range(length)] for length in lengths]
    everything = list(range(len(sequences)))

    def score(order: list[int], scorer: Callable[..., Any]) -> dict[int, bytes]:
        return {
            i: np.float32(scores).tobytes()
            for i, scores in zip(order, scorer([sequences[i] for i in order]), strict=True)
        }

    def of_actor(parts: list[list[int]]) -> Any:
        return run.learner.score(parts).log_probs

    known, differing, scored, rounds = score(everything, of_actor), [], 0, 0
    while rounds < 6 or scored < SEQUENCES:
        order = chance.sample(everything, chance.choice((1, 2, len(everything))))
        for who, scorer in (("engine", engine.score), ("actor", of_actor)):
            differing += [(who, rounds, i) for i, scores in score(order, scorer).items() if scores != known[i]]
        rounds, scored = rounds + 1, scored + 2 * len(order)
    found: dict[str, Any] = {"differing": differing, "scored": scored, "drawn": 0, "drawn otherwise": 0, "cached": 0}

    for length in (34, 70):  # the second find what the first left in the cache
        sampling = Sampling(0.7, 1.0, max_tokens=28)
        requests = [
            Request(("", i), tokens[:length], sampling, seed=None if chunked else i)
            for i, tokens in enumerate(sequences)
        ]
        engine.submit(requests)
        drawn = {completion.request.name[1]: completion for completion in drain(engine)}
        found["cached"] += sum(completion.cached_tokens for completion in drawn.values())
        batch = TokenBatch.continuations((requests[i].tokens, drawn[i].ids) for i in everything)
        micro_batches = actor.micro_batches(batch)
        for micro, (log_probs, _) in zip(micro_batches, actor.log_probs(micro_batches, temperature=0.7), strict=True):
            recorded = np.concatenate([np.asarray(drawn[row].logprobs, dtype=np.float32) for row in micro.rows])
            found["drawn"] += len(recorded)
            found["drawn otherwise"] += int((recorded != log_probs.numpy()).sum())

    tokens = sequences[8]
    with traced() as of_actor_trace:
        [actor_scores] = of_actor([tokens])
    found["operations"] = sorted({name for name, _ in of_actor_trace})
    found["seen"] = {}
    for damaged in (None, *OPERATIONS):
        with traced(damaged) as of_engine:
            [engine_scores] = engine.score([tokens])
        found["seen"][str(damaged)] = first_difference(of_engine, of_actor_trace, (engine_scores, actor_scores))
    step(run)
    if grid.rank == 0:
        (run_dir / "found.json").write_text(json.dumps(found))
    run.close()
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "chunked")
