"""Steps one after the other: as the product runs them, and as they would be in other ways.

Times are seconds of the whole job. What is drawn is a function of the seed and the step, so modes and layouts are compared on
the same responses.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megatron_rl.config.rollout_keys import PartialConfig
from megatron_rl.data.like_lengths import of_like_lengths
from megatron_rl.data.pause import trained_groups
from megatron_rl.data.resample import groups_to_draw
from megatron_rl.planning.simulation.engines import EngineSpeed, SimulatedGeneration, generate, joined
from megatron_rl.planning.time.lengths import LogNormal, Recorded
from megatron_rl.planning.time.step import OLD, REFERENCE

Mode = Literal["synchronous", "partial", "passes under the tail", "steps of like lengths", "one step off"]
MODES: tuple[Mode, ...] = ("synchronous", "partial", "passes under the tail", "steps of like lengths", "one step off")
BUILT: tuple[Mode, ...] = ("synchronous", "partial", "steps of like lengths", "one step off")  # the product has them
SETTLING = 4  # steps of partial rollouts that are not counted: the first have no carried responses
PASSES = (OLD, REFERENCE)  # over what was drawn, before the update
_SPLITS = 6  # one step off: parts of the GPUs that are tried for the engines
_TRIED = 2  # steps of each try


@dataclass(frozen=True)
class Latency:
    """A server's answers: log-normal times, at most `at_once` under way."""

    mean: float  # seconds
    spread: float  # standard deviation of the logarithm
    at_once: int


@dataclass(frozen=True)
class Resampling:
    """Dynamic sampling: groups have a signal with the probability `share`, whatever their lengths. `ahead`: what further
    rounds will need is drawn with the first."""

    share: float
    rounds: int
    ahead: bool


@dataclass(frozen=True)
class SimulatedJob:
    """The job that is simulated.

    Attributes:
        gpus: of the whole job; `engines` share them.
        prompts, count: groups per step, responses in each.
        prompt: tokens of a prompt.
        training: seconds of each phase after the rewards, by the step's tokens.
        reward: asked as responses end; None: rewards take no time.
        drawn_before: earlier responses to the same prompts say which will be long, and those are begun first.
        like_lengths: the recipe's; 1: a block has all steps.
        partial: the recipe's; None: see `partial_of`.
        resampling: None: groups without signal are not replaced.
        cache_beside: tokens that an engine's cache holds beside the actor's weights; None: they are always there.
        engines_share: one step off: of the GPUs, those that draw; None: what is fastest.
    """

    speed: EngineSpeed
    engines: int
    gpus: int
    prompts: int
    count: int
    prompt: float
    lengths: LogNormal | Recorded
    training: Callable[[float], Mapping[str, float]]
    reward: Latency | None = None
    drawn_before: bool = False
    like_lengths: int = 1
    partial: PartialConfig | None = None
    resampling: Resampling | None = None
    cache_beside: float | None = None
    engines_share: float | None = None


@dataclass(frozen=True)
class Span:
    """A phase. `share` of the GPUs take part in it, and are without work for `idle` of that."""

    name: str
    begin: float  # seconds after the step's
    seconds: float
    share: float = 1.0
    idle: float = 0.0


@dataclass(frozen=True)
class SimulatedStep:
    """`tokens`: of the sequences that are trained on, prompts included."""

    seconds: float
    spans: tuple[Span, ...]
    generation: SimulatedGeneration
    tokens: float


@dataclass(frozen=True)
class SimulatedRun:
    mode: Mode
    gpus: int
    steps: Sequence[SimulatedStep]
    engines_share: float = 1.0  # of the GPUs; one step off: the others train

    @property
    def seconds(self) -> np.ndarray:
        """float64 [steps]."""
        return np.array([step.seconds for step in self.steps])

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return sum(step.tokens for step in self.steps) / float(self.seconds.sum()) / self.gpus

    def phases(self) -> dict[str, np.ndarray]:
        """Seconds of each phase, float64 [steps], in the order of the first step."""
        names = dict.fromkeys(span.name for step in self.steps for span in step.spans)
        found = {name: np.zeros(len(self.steps)) for name in names}
        for number, step in enumerate(self.steps):
            for span in step.spans:
                found[span.name][number] += span.seconds
        return found

    def idle(self, name: str | None = None) -> float:
        """Share of the GPU-seconds of a phase, or of all time, in which GPUs have no work. Within engines and pipelines at
        work nothing is looked at."""
        spans = [span for step in self.steps for span in step.spans if name in (None, span.name)]
        lost = sum(span.seconds * span.share * span.idle for span in spans)
        whole = float(self.seconds.sum()) if name is None else sum(span.seconds * span.share for span in spans)
        return lost / whole if whole else 0.0

    @property
    def tail_share(self) -> float:
        """Share of generation after 95 % of a step's responses have ended."""
        tails = sum(step.generation.tail_share * step.generation.seconds for step in self.steps)
        return tails / max(1e-30, sum(step.generation.seconds for step in self.steps))


def simulate(job: SimulatedJob, mode: Mode, steps: int, seed: int) -> SimulatedRun:
    """`steps` steps of a job.

    Raises:
        ValueError: an engine's cache does not hold the longest sequence.
    """
    if mode == "one step off":
        return _split(job, steps, seed)
    if mode == "partial":
        done = _partial(job, steps, seed)
    elif mode == "steps of like lengths":
        done = _like_lengths(job, steps, seed)
    elif mode == "synchronous" and job.resampling is not None:
        done = _resampled(job, job.resampling, steps, seed)
    else:
        step = _under_the_tail if mode == "passes under the tail" else _synchronous
        done = [step(job, *_drawn(job, seed, number)) for number in range(steps)]
    return SimulatedRun(mode, job.gpus, done)


def _split(job: SimulatedJob, steps: int, seed: int) -> SimulatedRun:
    """One step off, with the share of the engines that is given or else the fastest of some."""
    shares = sorted({max(1, job.engines * part // _SPLITS) / job.engines for part in range(1, _SPLITS)} - {1.0})
    if job.engines_share is not None:
        return _one_step_off(job, job.engines_share, steps, seed)
    if not shares:
        raise ValueError("one step off needs two engines' GPUs: some draw while others train")
    runs = [_one_step_off(job, share, min(steps, _TRIED), seed) for share in shares]
    best = min(runs, key=lambda run: float(run.seconds.mean())).engines_share
    return _one_step_off(job, best, steps, seed)


def _drawn(job: SimulatedJob, seed: int, number: int) -> tuple[np.ndarray, Sequence[int], np.random.Generator]:
    """Responses of a step, and the order in which their groups are begun."""
    rng = np.random.default_rng((seed, number))
    tokens, expected = job.lengths.draw(rng, job.prompts, job.count)
    order = np.argsort(-expected, kind="stable").tolist() if job.drawn_before else range(job.prompts)
    return tokens, order, rng


def _waiting(ends: np.ndarray, seconds: float, reward: Latency | None, rng: np.random.Generator) -> float:
    """Seconds from the last response to the last score. `ends`: of the responses that are to be scored."""
    if reward is None:
        return 0.0
    middle = np.log(reward.mean) - reward.spread**2 / 2
    free: list[float] = [0.0] * min(reward.at_once, ends.size)
    takes = np.exp(middle + reward.spread * rng.standard_normal(ends.size))
    last = 0.0
    for end, take in zip(np.sort(ends).tolist(), takes.tolist(), strict=True):
        scored = max(end, free[0]) + take
        heapq.heapreplace(free, scored)
        last = max(last, scored)
    return max(0.0, last - seconds)


def _one_after_the_other(
    job: SimulatedJob, generation: SimulatedGeneration, waited: float, tokens: float, passes_done: float = 0.0
) -> SimulatedStep:
    """`passes_done`: share of the passes before the update that generation has hidden."""
    spans = [Span("generate", 0.0, generation.seconds, idle=generation.idle_share)]
    phases = {"reward": waited} | dict(job.training(tokens))
    at = generation.seconds
    for name, seconds in phases.items():
        seconds *= 1 - passes_done if name in PASSES else 1.0
        if seconds > 0:
            spans.append(Span(name, at, seconds, idle=float(name == "reward")))
            at += seconds
    return SimulatedStep(at, tuple(spans), generation, tokens)


def _scored(
    job: SimulatedJob, lengths: np.ndarray, order: Sequence[int], rng: np.random.Generator
) -> tuple[SimulatedGeneration, float, float]:
    """Draws whole responses. Returns also the seconds until all are scored, and the tokens that are trained on."""
    generation = generate(job.speed, job.engines, job.prompt, np.zeros_like(lengths), lengths, order)
    waited = _waiting(generation.ends.ravel(), generation.seconds, job.reward, rng)
    return generation, waited, _trained(job, lengths)


def _synchronous(
    job: SimulatedJob, lengths: np.ndarray, order: Sequence[int], rng: np.random.Generator
) -> SimulatedStep:
    return _one_after_the_other(job, *_scored(job, lengths, order, rng))


def _trained(job: SimulatedJob, lengths: np.ndarray) -> float:
    """Tokens of whole sequences."""
    return float(lengths.sum() + lengths.size * job.prompt)


def _under_the_tail(
    job: SimulatedJob, lengths: np.ndarray, order: Sequence[int], rng: np.random.Generator
) -> SimulatedStep:
    """Engines that have nothing left to draw make the passes before the update over groups that have ended; there always are
    some, and no pass is cut over two engines: no way of building it is faster. The actor's weights are on the devices
    meanwhile."""
    speed = job.speed if job.cache_beside is None else replace(job.speed, cache_tokens=job.cache_beside)
    generation, waited, tokens = _scored(replace(job, speed=speed), lengths, order, rng)
    whole = sum(seconds for name, seconds in job.training(tokens).items() if name in PASSES)
    done = min(1.0, generation.idle_share * generation.seconds / whole) if whole else 0.0
    return _one_after_the_other(job, generation, waited, tokens, done)


def _like_lengths(job: SimulatedJob, steps: int, seed: int) -> list[SimulatedStep]:
    """Blocks of `like_lengths` steps, or one of all: `data.like_lengths`, as in a run."""
    rng = np.random.default_rng((seed, steps))
    drawn = [job.lengths.draw(np.random.default_rng((seed, number)), job.prompts, job.count) for number in range(steps)]
    lengths, expected = (np.concatenate(part) for part in zip(*drawn, strict=True))
    block = job.prompts * (job.like_lengths if job.like_lengths > 1 else steps)
    by_length = [
        places
        for begin in range(0, len(lengths), block)
        for places in of_like_lengths(range(begin, min(begin + block, len(lengths))), expected, job.prompts)
    ]
    longest_first = [sorted(places, key=lambda place: -expected[place]) for places in by_length]
    return [_synchronous(job, lengths[places], range(job.prompts), rng) for places in longest_first]


def _resampled(job: SimulatedJob, rule: Resampling, steps: int, seed: int) -> list[SimulatedStep]:
    """Groups are drawn until as many have a signal as are trained on: as `trainer.sampler` does it."""
    done, drew = list[SimulatedStep](), job.prompts
    for number in range(steps):
        rounds = [_drawn(job, seed, number * (rule.rounds + 1) + round_) for round_ in range(rule.rounds + 1)]
        lengths = np.concatenate([lengths for lengths, _, _ in rounds])
        signal = np.random.default_rng((seed, number, 2)).random(len(lengths)) < rule.share
        phases, waited, begin = list[SimulatedGeneration](), 0.0, 0
        order = [round_ * job.prompts + place for round_, (_, groups, _) in enumerate(rounds) for place in groups]
        missing, seen = job.prompts, (drew, job.prompts)
        while missing > 0 and begin < len(lengths):
            end = min(len(lengths), begin + (groups_to_draw(missing, *seen) if rule.ahead else job.prompts))
            now, due = np.zeros_like(lengths), [place for place in order if begin <= place < end]
            now[due] = lengths[due]
            phases.append(generate(job.speed, job.engines, job.prompt, np.zeros_like(lengths), now, due))
            waited += _waiting(phases[-1].ends[due].ravel(), phases[-1].seconds, job.reward, rounds[0][2])
            begin, seen = end, (end, int(signal[:end].sum()))
            missing = job.prompts - seen[1]
        trained = np.flatnonzero(signal)[: job.prompts]
        drew = int(trained[-1]) + 1 if len(trained) == job.prompts else len(lengths)
        generation = joined(phases)
        done.append(_one_after_the_other(job, generation, waited, _trained(job, lengths[trained])))
    return done


def partial_of(job: SimulatedJob) -> PartialConfig:
    """The job's, or one with chunks of half a mean response."""
    tokens, _ = job.lengths.draw(np.random.default_rng(0), 64, job.count)
    return job.partial or PartialConfig(chunk_tokens=max(1, round(float(tokens.mean()) / 2)))


def _partial(job: SimulatedJob, steps: int, seed: int) -> list[SimulatedStep]:
    """More groups are open than are trained on; chunks are drawn until the step has its groups, and the rest goes on in the
    next one: `data.pause`, as in a run. There, what waits also stays with its engine."""
    rule = partial_of(job)
    drawn = left = np.zeros((0, job.count), dtype=np.int64)
    opened, done = list[int](), list[SimulatedStep]()
    for number in range(1, steps + SETTLING + 1):
        lengths, _, _ = _drawn(replace(job, prompts=rule.opened(job.prompts) - len(left)), seed, number)
        drawn, left = np.concatenate([drawn, np.zeros_like(lengths)]), np.concatenate([left, lengths])
        opened += [number] * len(lengths)
        totals, phases, trained = drawn + left, list[SimulatedGeneration](), list[int]()
        is_read = np.zeros(len(left), dtype=bool)
        while not trained:
            chunk = np.minimum(left, rule.chunk_tokens)
            phase = generate(job.speed, job.engines, job.prompt, drawn, chunk, range(len(left)), is_read)
            drawn, left, is_read = drawn + chunk, left - chunk, np.ones_like(is_read)
            phases.append(replace(phase, left=left))
            trained = trained_groups((left == 0).all(1).tolist(), opened, number, job.prompts, rule.max_staleness)
        generation = joined(phases)
        scored = generation.ends[trained][generation.ends[trained] > 0]
        waited = _waiting(scored, generation.seconds, job.reward, np.random.default_rng((seed, number, 1)))
        done.append(_one_after_the_other(job, generation, waited, _trained(job, totals[trained])))
        rest = np.setdiff1d(np.arange(len(left)), trained)
        drawn, left, opened = drawn[rest], left[rest], [opened[place] for place in rest.tolist()]
    return done[SETTLING:]


def _one_step_off(job: SimulatedJob, share: float, steps: int, seed: int) -> SimulatedRun:
    """Some GPUs draw the next step's responses while the others train on this one's; both wait for each other, and for the
    sync. What trains takes as much longer as it has fewer GPUs."""
    generating = replace(job, engines=round(job.engines * share))
    done = []
    for number in range(steps):
        generation, waited, tokens = _scored(generating, *_drawn(generating, seed, number))
        spans = [Span("generate", 0.0, generation.seconds, share, generation.idle_share)]
        if waited:
            spans.append(Span("reward", generation.seconds, waited, share, 1.0))
        drew, at, after = generation.seconds + waited, 0.0, 0.0
        for name, seconds in job.training(tokens).items():
            if name in ("sync", "sync_check"):
                after += seconds
            elif seconds > 0:
                spans.append(Span(name, at, seconds / (1 - share), 1 - share))
                at += seconds / (1 - share)
        both = max(drew, at)
        waiting = Span("wait", min(drew, at), abs(drew - at), share if drew < at else 1 - share, 1.0)
        spans += [waiting, Span("sync", both, after)]
        done.append(SimulatedStep(both + after, tuple(span for span in spans if span.seconds), generation, tokens))
    return SimulatedRun("one step off", job.gpus, done, share)
