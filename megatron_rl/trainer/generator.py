"""Split placement: what a rank that only generates runs, and what the ranks that learn know of these.

Step k + 1 is drawn while step k is learned from. Both sides meet twice a step, always in this order: batch k + 1 is handed
over, then the weights after step k are pushed into the engines. So whatever takes longer, the weights after step k - 1 draw
batch k + 1 (the first two are drawn by the first weights), which is one sync older than what learns from it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from megatron_rl.actor.build import DTYPES
from megatron_rl.config.schema import Config
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.models import model_of, read_hf_config
from megatron_rl.rollout.ahead import Batch, hand_over, send_to_rank0
from megatron_rl.rollout.partial import WAITING, Waiting, pack
from megatron_rl.rollout.split_sync import RemoteWeights, Subscriber
from megatron_rl.rollout.sync import make_sync
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.runtime.heartbeat import HEARTBEAT
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.runtime.stop import StopFlag, StopRequested
from megatron_rl.trainer.evaluate import evaluate, evaluates
from megatron_rl.trainer.report import Reporter
from megatron_rl.trainer.sampler import Sampler
from megatron_rl.trainer.state import State
from megatron_rl.trainer.step_counts import StepCounts

_BEGIN = "split/begin"  # in the store of the run: where the generators begin, or that they need not
_LOOK = 0.2  # seconds between two looks at it
_Said = list[tuple[str, tuple[object, ...]]]


@dataclass(frozen=True)
class Begin:
    """Tells the generators what to draw first: the step after `step`, or where that `has_ahead` the one behind it.

    `evaluates`: the weights that they are given first. `waiting`: file of a checkpoint with what waits of partial rollouts.
    """

    step: int
    position: int
    groups_drawn: int
    has_ahead: bool
    evaluates: bool
    waiting: str | None


class Relay(Reporter):
    """Keeps what a rank that only generates has to say, for the first rank that learns, which says it."""

    def __init__(self, config: Config, run_dir: Path, grid: ProcessGrid) -> None:
        super().__init__(config, run_dir, grid.everyone)
        self._said: _Said = []

    def note(self, text: str) -> None:
        self._said.append(("note", (text,)))

    def warn(self, text: str) -> None:
        self._said.append(("warn", (text,)))

    def eval_samples(self, step: int, task: str, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> None:
        self._said.append(("eval_samples", (step, task, samples, rollouts)))

    def take(self) -> _Said:
        """Returns what was said since the last call."""
        said, self._said = self._said, []
        return said


# ------------------------------------------------------------------------------------------------ ranks that generate
@dataclass
class GeneratorRun:
    """A rank that only generates."""

    config: Config
    grid: ProcessGrid
    sampler: Sampler
    greedy: bool  # whether the estimator compares with greedy rollouts
    report: Relay
    timer: StepTimer
    stop: StopFlag

    def close(self) -> None:
        self.report.close()
        self.sampler.close()


def generate_ahead(run: GeneratorRun) -> None:
    """Draws the steps of a run, from an engine without weights to the last evaluation.

    Raises:
        StopRequested: once the ranks that learn have what was drawn, and this engine their newest weights.
    """
    config, sampler, grid = run.config, run.sampler, run.grid
    samples = sampler.prompts.train_by_id
    with run.timer.untimed("start", "starting the engine"):
        engine = VllmEngine(config, grid, sampler.folder, sampler.prompts.images)
        sampler.use(engine)
    begin = _await_begin(run)
    if begin is None:
        return
    steps, learned = config.trainer.steps, begin.step
    run.report.begin("RL", learned, steps)
    waiting = None if begin.waiting is None else sampler.read_waiting(Path(begin.waiting))
    state = State(step=learned, position=begin.position, groups_drawn=begin.groups_drawn, waiting=waiting)
    with run.timer.untimed("start", "joining the ranks that learn"):
        model = model_of(config.model.completed(read_hf_config(sampler.folder)))
        source = RemoteWeights(grid, model, DTYPES[config.model.dtype])
        subscriber = Subscriber(grid, source, make_sync(config, grid, source, engine, run.report.note))
    _take_weights(run, subscriber, always_checked=True, evaluated=begin.evaluates, step=learned)
    for number in range(learned + 1 + begin.has_ahead, steps + 1):
        run.timer.start(number)
        batch, state = sampler.batch(number, state, run.greedy, lambda: None)
        seconds = {name: value for name, value in run.timer.take().items() if name != "timing_s/step"}
        metrics, counts = sampler.take_counts()
        batch = replace(batch, metrics=metrics, counts=counts.plain(), seconds=seconds)
        with run.timer.untimed("wait"):
            signum, saves = _meet(grid, run.stop, saves=number == steps)  # what waits then is in the last checkpoint
            hand_over(grid, batch, samples)
            grid.everyone.broadcast((replace(state, waiting=None), run.report.take()), source=grid.learners)
            if saves and isinstance(state.waiting, Waiting):
                send_to_rank0(grid.everyone, pack(grid, state.waiting), grid.learners)
        if number - 1 > learned:
            _take_weights(run, subscriber, number - 1, evaluated=evaluates(config, number - 1))
        if signum:
            raise StopRequested(signum)
    if steps > learned:
        _take_weights(run, subscriber, steps, evaluated=True)
    HEARTBEAT.finish()


def _await_begin(run: GeneratorRun) -> Begin | None:
    """Waits as long as a warm-up takes. Returns None where there is nothing to draw.

    Raises:
        StopRequested: it was stopped before.
    """
    assert run.grid.store is not None  # of a world that `initialize` has made
    while not run.grid.store.check([_BEGIN]):
        with run.timer.untimed("wait", "waiting for the ranks that learn"):
            time.sleep(_LOOK)
    told = json.loads(run.grid.store.get(_BEGIN))
    if told.get("signum"):
        raise StopRequested(told["signum"])
    return Begin(**told) if told else None


def _take_weights(
    run: GeneratorRun, subscriber: Subscriber, step: int, evaluated: bool, always_checked: bool = False
) -> None:
    """Takes the weights after a step, and compares and evaluates them where the recipe wants it."""
    with run.timer.untimed("wait"):
        run.sampler.weights = subscriber.push()
    if always_checked or step % run.config.rollout.sync_check_every == 0:
        with run.timer.untimed("sync_check"):
            subscriber.check()
    if evaluated:
        scores = evaluate(run.sampler, run.report, step, run.config.trainer.steps)
        _, counts = run.sampler.take_counts()
        run.grid.everyone.broadcast((scores, counts, run.report.take()), source=run.grid.learners)


def _meet(grid: ProcessGrid, stop: StopFlag, saves: bool = False) -> tuple[int, bool]:
    """Returns the signal that any rank of both roles was told to stop by, 0: none; and whether a checkpoint will have the
    batch that is handed over. `saves`: whether this rank knows that one will."""
    signum, saved = grid.everyone.gather_rows(np.array([stop.signum, saves])).max(axis=0).tolist()
    return signum, bool(saved or signum)


# ----------------------------------------------------------------------------------------------------- ranks that learn
class Generators:
    """Stands for the ranks that generate, on each rank that learns. `samples`: the training prompts by id."""

    def __init__(
        self, config: Config, grid: ProcessGrid, samples: Mapping[str, Sample], report: Reporter, stop: StopFlag
    ) -> None:
        self._grid, self._report, self._stop = grid, report, stop
        self._is_partial = config.rollout.partial is not None
        self._samples = samples
        self._told = False
        self._counts = StepCounts()  # of evaluations, until a step has taken them
        self.signum = 0  # what stops the run before the next step

    def begin(self, state: State, evaluates: bool, continued: Path | None) -> None:
        """Ends their wait: they draw what follows on a state, of the checkpoint `continued`."""
        waiting = None if continued is None or not (continued / WAITING).exists() else str(continued / WAITING)
        begin = Begin(state.step, state.position, state.groups_drawn, state.ahead is not None, evaluates, waiting)
        self._tell(asdict(begin))

    def dismiss(self, signum: int = 0) -> None:
        """Ends their wait, if they still do: there is nothing to draw. `signum`: what stopped the run."""
        self._tell({"signum": signum} if signum else {})

    def _tell(self, begin: dict[str, object]) -> None:
        if not self._told and self._grid.is_main:
            assert self._grid.store is not None  # of a world that `initialize` has made
            self._grid.store.set(_BEGIN, json.dumps(begin))
        self._told = True

    def next_batch(self, saves: bool = False) -> State:
        """The state behind the next step's batch, with it. Waits until it is drawn. `saves`: a checkpoint will have it."""
        link, learners = self._grid.everyone, self._grid.learners
        self.signum, saves = _meet(self._grid, self._stop, saves)
        batch = hand_over(self._grid, None, self._samples)
        state, said = link.broadcast((State(), _Said()), source=learners)
        self._say(said)
        waiting = send_to_rank0(link, None, learners) if saves and self._is_partial else None
        return replace(state, ahead=batch, waiting=waiting)

    def scores(self) -> dict[str, float]:
        """The metrics of an evaluation; waits for it."""
        told = dict[str, float](), StepCounts(), _Said()
        scores, counts, said = self._grid.everyone.broadcast(told, source=self._grid.learners)
        self._counts += counts
        self._say(said)
        return scores

    def take_counters(self, batch: Batch | None) -> dict[str, float]:
        """Metrics of a step's sampling and scoring and of the evaluation after it; None: of an evaluation alone."""
        counts, self._counts = self._counts, StepCounts()
        if batch is None:
            return counts.metrics()
        counts += StepCounts.of(batch.counts)
        return {**batch.metrics} | counts.metrics()

    def _say(self, said: _Said) -> None:
        for method, arguments in said:
            getattr(self._report, method)(*arguments)
