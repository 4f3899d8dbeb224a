"""Rollouts of prompts, over all engines: a loop over the episodes that are open."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from megatron_rl.data.rollout import FACTS, UNANSWERED, Rollout, Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.rollout.dispatch import Dispatcher, longest_first
from megatron_rl.rollout.engine import Engine, EngineError, Failure, Request
from megatron_rl.rollout.episode import Episode, MakeEpisode, Poll
from megatron_rl.runtime.distributed import ProcessGrid

_DIGEST = 8  # bytes


def generate(
    engine: Engine,
    dispatcher: Dispatcher,
    samples: Sequence[Sample],
    count: int,
    make_episode: MakeEpisode,
    on_finished: Callable[[Rollout], None] = lambda rollout: None,
    on_failed: Callable[[Failure], None] | None = None,
    already_drawn: Mapping[tuple[str, int], Rollout] | None = None,
    lengths: Mapping[str, float] | None = None,
    poll: Poll | None = None,
    begun: Mapping[int, int] | None = None,
) -> Rollouts:
    """`count` rollouts of every sample, over all engines; every rank learns how long each is, and has its own engine's.
    Whole groups are spread over the engines (`DispatchRound`), on which what is drawn does not depend: requests have seeds.

    Args:
        on_finished: called with each rollout of this rank's engine as it ends, on every rank of the engine in the same order.
        on_failed: called with each request that the engine has no answer to, whose rollout is then missing; None: an error.
        already_drawn: rollouts that are not drawn again, by sample id and index; of begun samples this engine's, else all.
        lengths: mean tokens of earlier responses, by sample id; the same on every rank.
        poll: of the episodes whose requests others make; None: there are none.
        begun: places of samples that were begun before, and by which engine; they go on there.
    Raises:
        EngineError: on every rank, where the ranks of an engine did not stay in step, or not every rollout came once.
    """
    drawn, known, open_episodes = dict[int, Rollout](), already_drawn or {}, dict[tuple[str, int], Episode]()
    row_of = {(sample.id, index): i * count + index for i, sample in enumerate(samples) for index in range(count)}

    def begin(prompts: Iterable[int]) -> None:
        for sample in (samples[i] for i in prompts):
            names = [(sample.id, index) for index in range(count)]
            drawn.update({row_of[name]: known[name] for name in names if name in known})
            episodes = {name: make_episode(sample, name[1]) for name in names if name not in known}
            open_episodes.update(episodes)
            submit([episode.first() for episode in episodes.values()])

    def submit(requests: Iterable[Request | None]) -> None:
        engine.submit([request for request in requests if request is not None])

    def finish(name: tuple[str, int], rollout: Rollout) -> None:
        del open_episodes[name]
        drawn[row_of[name]] = rollout
        on_finished(rollout)

    def go_on() -> None:
        while (prompt := dispatch.next(len(open_episodes))) is not None:
            begin([prompt])

    begun, engines = begun or {}, dispatcher.grid.engine
    order = [place for place in longest_first(samples, lengths or {}) if place not in begun]
    dispatch = dispatcher.begin(order, count, busy=len(begun) * count // engines.count)
    begin([*(place for place, drawing in begun.items() if drawing == engines.index), *dispatch.first()])
    go_on()
    while open_episodes:
        for ended in engine.step():
            name = ended.request.name
            if isinstance(ended, Failure):
                if on_failed is None:
                    raise EngineError(f"the engine has no answer to rollout {name[1]} of {name[0]}: {ended.reason}")
                if not open_episodes[name].unanswered(ended):
                    del open_episodes[name]
                    on_failed(ended)
                continue
            outcome = open_episodes[name].advance(ended)
            if isinstance(outcome, Rollout):
                finish(name, outcome)
            else:
                submit([outcome])
        if poll is not None and open_episodes:
            asked = list[Request]()
            for name, came in poll(not engine.pending):
                if isinstance(came, Rollout):
                    finish(name, came)
                else:
                    asked.append(came)
            submit(asked)
        go_on()
    facts = _gather_facts(dispatcher.grid, drawn, len(samples) * count, complete=on_failed is None)
    return Rollouts(list(samples), count, facts, drawn, engine.experts)


def _gather_facts(grid: ProcessGrid, drawn: Mapping[int, Rollout], rows: int, complete: bool) -> np.ndarray:
    """FACTS [rows] about the rollouts of all engines. The ranks of an engine take turns as their source. `complete`: one that
    nobody has is an error."""
    engine = grid.engine
    share = [_facts(row, drawn[row]) for row in sorted(drawn)[engine.rank :: engine.size]]
    messages = grid.all_gather_bytes(_digest(drawn) + np.array(share, dtype=FACTS).tobytes())
    _check_in_step([message[:_DIGEST] for message in messages], engine.size)
    number = sum(len(message) - _DIGEST for message in messages) // FACTS.itemsize
    if number > rows or (complete and number < rows):
        raise EngineError(f"the engines have drawn {number} rollouts, and {rows} were asked for")
    facts = np.zeros(rows, dtype=FACTS)
    facts["source"] = UNANSWERED
    for rank, message in enumerate(messages):
        received = np.frombuffer(message[_DIGEST:], dtype=FACTS)
        facts[received["row"]] = received
        facts["source"][received["row"]] = rank
    return facts


def _facts(row: int, rollout: Rollout) -> tuple[int, int, int, bool, int, bool, int]:
    truncated, lost = rollout.finish_reason == "length", rollout.failed_by == "infrastructure"
    return row, rollout.num_tokens, rollout.length, truncated, rollout.version, lost, 0


def _digest(drawn: Mapping[int, Rollout]) -> bytes:
    """Tells which rollouts ended with which tokens, in order."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for row, rollout in drawn.items():
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
