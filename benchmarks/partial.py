"""python -m benchmarks.partial MODEL [--steps N] [--spread S ...]: partial rollouts, and steps of like lengths, beside
synchronous ones, vLLM on a CPU.

MODEL is a folder (`runs/quickstart/export`). Eight responses to each of eight prompts a step, 64 tokens in the mean, on one
engine with 64 places; lengths are log-normal, and forced. Partial rollouts keep 16 prompts open, with chunks of 32 tokens;
all steps are one block of like lengths, by what their prompts make the engine expect.
Prints the share of the places that is empty over the time of generation, tokens per CPU second, and what `plan --simulate`'s
code says of the same lengths on an engine whose passes take as long as those that were measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.others import told
from benchmarks.prefix_cache import ENVIRONMENT, start
from megatron_rl.config.rollout_keys import PartialConfig
from megatron_rl.data.like_lengths import of_like_lengths
from megatron_rl.data.pause import trained_groups
from megatron_rl.planning.simulation.engines import EngineSpeed, SimulatedGeneration
from megatron_rl.planning.simulation.simulated_steps import SETTLING, Mode, SimulatedJob, simulate
from megatron_rl.planning.time.lengths import LogNormal

if TYPE_CHECKING:
    from vllm import LLM

PROMPTS, GROUP, PLACES, PROMPT, MEAN, LIMIT = 8, 8, 64, 10, 64, 480
PARTIAL = PartialConfig(chunk_tokens=MEAN // 2)
SEED = 0
MODES: tuple[Mode, ...] = ("synchronous", "partial", "steps of like lengths")
_PASSES = EngineSpeed(lambda running, _: 1.0, lambda tokens: 0.0, 1e9, PLACES)  # its seconds are passes


@dataclass(frozen=True)
class Phase:
    """Calls of the engine until all that it was given has ended. `decoded`: sequences of all passes; `read`: tokens."""

    seconds: float
    passes: int
    decoded: int
    read: int
    empty: float  # place-seconds

    @property
    def rate(self) -> float:
        """Tokens per CPU second."""
        return self.decoded / self.seconds

    def __add__(self, other: Phase) -> Phase:
        return Phase(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--steps", type=int, default=8, help="of each, behind those in which partial rollouts settle")
    parser.add_argument("--spread", type=float, nargs="*", default=[0.5, 1.0, 1.5], help="of the lengths' logarithm")
    args = parser.parse_args()
    synchronous, partial = engines(args.model)
    drawn = dict[tuple[float, Mode], list[list[Phase]]]()
    for spread in args.spread:
        lengths = LogNormal(MEAN, spread, LIMIT)
        drawn[spread, "synchronous"] = [synchronous_step(synchronous, lengths, number) for number in range(args.steps)]
        drawn[spread, "steps of like lengths"] = _like_lengths(synchronous, lengths, args.steps)
        drawn[spread, "partial"] = partial_steps(partial, lengths, args.steps)
    speeds = {
        mode: _speed([phase for (_, of), steps in drawn.items() if of == mode for step in steps for phase in step])
        for mode in MODES
    }
    for (spread, mode), steps in drawn.items():
        figures = _figures(mode, LogNormal(MEAN, spread, LIMIT), steps, speeds[mode])
        print(json.dumps({"spread": spread, "mode": mode} | figures), flush=True)
    for spread in args.spread:
        plain, partial_, like = (summed(drawn[spread, mode]).rate for mode in MODES)
        print(
            f"spread {spread}: partial rollouts draw {partial_ / plain:.2f} times as many tokens per CPU second, steps of "
            f"like lengths {like / plain:.2f} times"
        )


def engines(model: str) -> tuple[LLM, LLM]:
    """One for synchronous steps and one for partial rollouts, which have drawn before."""
    os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})
    # As a run has them: synchronous single turns do without the prefix cache.
    synchronous, partial = start(model, "float32", keeps=False), start(model, "float32", keeps=True)
    synchronous_step(synchronous, LogNormal(MEAN, 0, LIMIT), 0), partial_steps(partial, LogNormal(MEAN, 0, LIMIT), 1)
    return synchronous, partial


def synchronous_step(llm: LLM, lengths: LogNormal, number: int) -> list[Phase]:
    """A step's only phase."""
    tokens, _ = lengths.draw(np.random.default_rng((SEED, number)), PROMPTS, GROUP)
    return [_draw(llm, _prompts(number), tokens.ravel().tolist())]


def _like_lengths(llm: LLM, lengths: LogNormal, steps: int) -> list[list[Phase]]:
    """The only phase of each step, over the same groups as `synchronous_step`."""
    drawn = [lengths.draw(np.random.default_rng((SEED, number)), PROMPTS, GROUP) for number in range(steps)]
    tokens, expected = (np.concatenate(part) for part in zip(*drawn, strict=True))
    texts = [text for number in range(steps) for text in _prompts(number)]
    done = []
    for groups in of_like_lengths(range(steps * PROMPTS), expected, PROMPTS):
        rows = [group * GROUP + index for group in groups for index in range(GROUP)]
        done.append([_draw(llm, [texts[row] for row in rows], tokens.ravel()[rows].tolist())])
    return done


def _prompts(number: int) -> list[list[int]]:
    """Of the rollouts of a step."""
    return [[*_prompt(number, group)] for group in range(PROMPTS) for _ in range(GROUP)]


def partial_steps(llm: LLM, lengths: LogNormal, steps: int, prompts: int = PROMPTS) -> list[list[Phase]]:
    """The phases of each step. Groups are opened, paused and trained on as by `trainer.partial_sampling`."""
    texts, left, opened, done = (
        list[list[int]](),
        np.zeros((0, GROUP), dtype=np.int64),
        list[int](),
        list[list[Phase]](),
    )
    for number in range(1, steps + SETTLING + 1):
        llm.reset_prefix_cache()  # new weights
        new = PARTIAL.opened(prompts) - len(left)
        left = np.concatenate([left, lengths.draw(np.random.default_rng((SEED, number)), new, GROUP)[0]])
        texts += [[*_prompt(number, group)] for group in range(new) for _ in range(GROUP)]
        opened += [number] * new
        phases, trained = list[Phase](), list[int]()
        while not trained:
            chunk = np.minimum(left, PARTIAL.chunk_tokens)
            going_on = np.flatnonzero(left).tolist()
            phases.append(_draw(llm, [texts[row] for row in going_on], chunk.ravel()[going_on].tolist()))
            left = left - chunk
            trained = trained_groups((left == 0).all(1).tolist(), opened, number, prompts, PARTIAL.max_staleness)
        done.append(phases)
        rest = np.setdiff1d(np.arange(len(left)), trained).tolist()
        texts = [texts[group * GROUP + index] for group in rest for index in range(GROUP)]
        left, opened = left[rest], [opened[group] for group in rest]
    return done[SETTLING:]


def _prompt(number: int, group: int) -> list[int]:
    rng = random.Random(f"{number} {group}")
    return [rng.randint(3, 60) for _ in range(PROMPT)]


def _draw(llm: LLM, texts: Sequence[list[int]], tokens: Sequence[int]) -> Phase:
    """As many tokens behind each text, added to it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, read, passes, decoded, empty = llm.llm_engine, 0, 0, 0, 0.0
    begin = last = time.process_time()
    for row, (text, count) in enumerate(zip(texts, tokens, strict=True)):
        params = SamplingParams(
            seed=row,
            max_tokens=count,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(row), {"prompt_token_ids": text}, params)
    while waiting := engine.get_num_unfinished_requests():
        outputs = engine.step()
        now = time.process_time()
        running = min(PLACES, waiting)
        passes, decoded, empty = passes + 1, decoded + running, empty + (PLACES - running) * (now - last)
        for output in outputs:
            text = texts[int(output.request_id)]
            read += len(text) - (output.num_cached_tokens or 0)
            text += output.outputs[0].token_ids
        last = now
    return Phase(time.process_time() - begin, passes, decoded, read, empty)


def _figures(mode: Mode, lengths: LogNormal, steps: Sequence[Sequence[Phase]], speed: EngineSpeed) -> dict[str, float]:
    simulated, by_pass = (simulate(simulated_job(each, lengths), mode, len(steps), SEED) for each in (speed, _PASSES))
    total, spent = summed(steps), sum(step.generation.seconds for step in simulated.steps)
    held_places = sum(held(step.generation) for step in simulated.steps)
    return {
        "empty_places": round(total.empty / PLACES / total.seconds, 3),
        "empty_places_simulated": round(1 - held_places / PLACES / spent, 3),
        "tokens_per_cpu_second": round(total.rate),
        "seconds_per_step": round(total.seconds / len(steps), 3),
        "seconds_per_step_simulated": round(spent / len(steps), 3),
        "passes_per_step": round(total.passes / len(steps), 1),
        "passes_per_step_simulated": round(float(by_pass.seconds.mean()), 1),
        "read_per_step": round(total.read / len(steps)),
    }


def summed(steps: Sequence[Sequence[Phase]]) -> Phase:
    return sum((phase for step in steps for phase in step), Phase(0.0, 0, 0, 0, 0.0))


def _speed(phases: Sequence[Phase]) -> EngineSpeed:
    """An engine whose passes, sequences in them and tokens that it reads take as long as in these phases: least squares."""
    parts = np.array([(phase.passes, phase.decoded, phase.read) for phase in phases], dtype=float)
    base, each, read = np.linalg.lstsq(parts, np.array([phase.seconds for phase in phases]), rcond=None)[0].tolist()
    return EngineSpeed(lambda running, _: base + each * running, lambda tokens: read * tokens, 1e9, PLACES)


def simulated_job(speed: EngineSpeed, lengths: LogNormal) -> SimulatedJob:
    """The same groups."""
    return SimulatedJob(speed, 1, 1, PROMPTS, GROUP, PROMPT, lengths, lambda tokens: {}, partial=PARTIAL)


def held(generation: SimulatedGeneration) -> float:
    """Place-seconds of all engines that have a sequence."""
    total = 0.0
    for running in generation.running:
        times = np.array([*(time for time, _ in running), generation.seconds])
        total += float(np.diff(times) @ np.array([number for _, number in running]))
    return total


if __name__ == "__main__":
    with told():
        main()
