"""Everything a run holds on one rank, built once; the functions of this package take it as their first argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.actor.actor import Actor
from megatron_rl.algorithms import Algorithm, make_algorithm
from megatron_rl.checkpoint import store
from megatron_rl.checkpoint.convert import open_weights
from megatron_rl.checkpoint.owner import Ownership
from megatron_rl.checkpoint.saver import Saver
from megatron_rl.config.schema import Config
from megatron_rl.data import Sample
from megatron_rl.models.create import create_model, differences
from megatron_rl.rewards import Scorer, ScoringStats
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.sync import WeightSync
from megatron_rl.runtime.disk import next_previous
from megatron_rl.runtime.distributed import Grid
from megatron_rl.runtime.phases import Phases
from megatron_rl.runtime.stop import StopFlag
from megatron_rl.tasks import Order, make_order
from megatron_rl.trainer.prompts import check_demonstrations, load_prompts
from megatron_rl.trainer.report import Reporter


@dataclass
class State:
    """What a checkpoint holds besides weights, optimizer and estimator."""

    step: int = 0  # RL steps done (or SFT steps, under `megatron-rl sft`)
    warm_up: int = 0  # SFT steps of the warm-up before RL done
    position: int = 0  # training prompts taken


@dataclass
class Run:
    config: Config
    run_dir: Path
    grid: Grid
    folder: Path  # Hugging Face folder the model started from
    tokenizer: Any
    train_samples: list[Sample]
    eval_samples: dict[str, list[Sample]]
    order: Order | None  # of the training prompts; None in an evaluation
    task_weights: dict[str, float] | None  # of the train tasks; None: mixed by size
    actor: Actor
    algorithm: Algorithm
    scorer: Scorer
    report: Reporter
    phases: Phases
    stop: StopFlag
    state: State = field(default_factory=State)
    counters: dict[str, float] = field(default_factory=dict)  # extra metrics of the current step
    scored: ScoringStats = field(default_factory=ScoringStats)  # what slow rewards did in it
    warming_up: bool = False  # in the SFT steps before RL
    identity: str = ""  # tells this run's checkpoints from another's
    actor_has_device: bool = True
    ownership: Ownership | None = None  # rank 0's, of the run folder
    saver: Saver | None = None  # from the first save on
    save_due: bool = False  # a save was put off, or is to be done after this step
    reference_digests: dict[str, str] | None = None  # checksums of `<run_dir>/reference`, once it is there
    _engine: Engine | None = None
    _sync: WeightSync | None = None

    @property
    def step(self) -> int:
        """Steps done of the stage that the run is in."""
        return self.state.warm_up if self.warming_up else self.state.step

    @property
    def checkpoints(self) -> Path:
        """Where this stage's checkpoints are."""
        return store.folder_of(self.run_dir, self.warming_up)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "start_engine has not been called"
        return self._engine

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    @property
    def sync(self) -> WeightSync:
        assert self._sync is not None, "start_engine has not been called"
        return self._sync

    def start_engine(self) -> None:
        """Starts the colocated engine, gives it the actor's weights, and proves that it computes what the actor does."""
        with self.phases.untimed("start", "starting the engine"):
            self._start_engine()

    def _start_engine(self) -> None:
        self.actor.offload()  # vLLM wants its whole share of the device free when it starts
        self._engine = Engine(self.config, self.grid, self.folder)
        self._sync = WeightSync(self.config, self.grid, self.actor, self._engine)
        self.engine.sleep()
        self.hand_device_to_engine()
        samples = self.train_samples or [s for samples in self.eval_samples.values() for s in samples]
        self.sync.check([sample.prompt_ids for sample in samples[: self.config.rollout.sync_check_rollouts]])

    def hand_device_to_engine(self) -> None:
        """The device is the engine's from here on, and the engine has the actor's weights.

        On a GPU the engine's weights are mapped first, filled from the actor, and only then does its KV cache come back:
        the two copies of the weights overlap, the cache and the actor's gradients never do. On a CPU nothing moves.
        """
        self.actor.offload()
        self.engine.wake_weights()
        self.sync.push()
        self.engine.wake_cache()
        self.actor_has_device = False

    def hand_device_to_actor(self) -> None:
        """The device is the actor's from here on; the engine keeps neither weights nor cache on a GPU."""
        if not self.actor_has_device:
            self.engine.sleep()
            self.actor.onload()
            self.actor_has_device = True

    def take_counters(self) -> dict[str, float]:
        """The step's counts; starts over."""
        counters, self.counters, self.scored = self.counters, {}, ScoringStats()
        return counters

    def close(self) -> None:
        if self.saver is not None:
            self.saver.drain()
        self.report.close()
        self.scorer.close()
        if self._engine is not None:
            self._engine.shutdown()


def build_run(config: Config, grid: Grid, run_dir: Path, command: str = "train", stop: StopFlag | None = None) -> Run:
    """Loads data, model and rewards on every rank.

    Raises:
        ValueError: for what only data can show: an empty task, prompts that are too long, a demonstration missing.
    """
    from transformers import AutoTokenizer

    report = Reporter(config, run_dir, grid, command)
    report.phase("loading the model and the tasks")
    folder = model_folder(config, report, run_dir)
    grid.barrier()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    prompts = load_prompts(config, tokenizer, report.note, training=command != "evaluate")
    if command == "sft" or config.sft.steps:
        check_demonstrations(prompts.train, tokenizer, config.rollout.max_tokens)
    algorithm = make_algorithm(config.algorithm, max_tokens=config.rollout.max_tokens)
    scorer = Scorer(config.rewards, algorithm.estimator.needs.columns)
    for samples in ([prompts.train] if command == "train" else []) + list(prompts.eval.values()):
        scorer.check(samples)
        if grid.is_main:
            for doubt in scorer.doubts(samples):
                report.warn(doubt)
    scorer.open(run_dir, grid.rank, grid.world)
    order = None
    if prompts.train:
        order = make_order([sample.task for sample in prompts.train], prompts.weights, config.seed)
    return Run(
        config=config,
        run_dir=run_dir,
        grid=grid,
        folder=folder,
        tokenizer=tokenizer,
        train_samples=prompts.train,
        eval_samples=prompts.eval,
        order=order,
        task_weights=prompts.weights,
        actor=Actor(config, grid, folder, open_weights(folder)),
        algorithm=algorithm,
        scorer=scorer,
        report=report,
        phases=Phases(report.phase),
        stop=stop or StopFlag(),
    )


def model_folder(config: Config, report: Reporter, run_dir: Path) -> Path:
    """`model.path`, or the small model that `model.create` describes, made in the run folder by rank 0.

    One that is there is used only where it is, byte for byte, what this recipe makes; another is moved to `previous_<k>`.
    """
    if config.model.path is not None:
        return Path(config.model.path)
    assert config.model.create is not None  # the recipe check has seen to it
    folder = run_dir / "model"
    if report.active:
        if folder.exists() and (found := differences(folder, config.model.create, config.seed)):
            aside = next_previous(run_dir)
            aside.mkdir()
            folder.rename(aside / folder.name)
            report.warn(f"{folder} was not made from this recipe ({'; '.join(found)}): moved to {aside} and made anew")
        if not folder.exists():
            create_model(folder, config.model.create, config.seed)
    return folder
