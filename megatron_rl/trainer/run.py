"""A run: what samples, what learns, what keeps; built once per rank."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import AutoTokenizer

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.reward import RewardActor
from megatron_rl.agents import journal
from megatron_rl.agents.template_remarks import template_remarks
from megatron_rl.algorithms import Algorithm, make_algorithm
from megatron_rl.base.messages import errors_named
from megatron_rl.checkpoint.convert import open_weights
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.config.actor import OptimizerConfig
from megatron_rl.config.schema import Config, SupervisedConfig
from megatron_rl.data.images import ImageReader
from megatron_rl.data.like_lengths import LENGTHS, LikeLengths
from megatron_rl.data.rollout import Rollouts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.models import model_of, read_hf_config
from megatron_rl.models.hf_config import stored_hf_config
from megatron_rl.models.text_only import NOT_READ
from megatron_rl.rewards import Scorer
from megatron_rl.rollout import environment
from megatron_rl.rollout.ahead import AHEAD, Batch
from megatron_rl.rollout.ahead import unpack as unpack_ahead
from megatron_rl.rollout.partial import WAITING
from megatron_rl.rollout.split_sync import Publisher
from megatron_rl.rollout.sync import Scored, WeightSync, make_sync
from megatron_rl.rollout.vllm_engine import VllmEngine, max_length
from megatron_rl.runtime.disk import next_previous
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.runtime.owner import Ownership
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.runtime.stop import StopFlag, StopRequested
from megatron_rl.tasks import Prompts
from megatron_rl.tasks.loading import check_demonstrations, load_prompts
from megatron_rl.tasks.preferences import PreferencePairs, load_pairs
from megatron_rl.trainer.checkpoints import Checkpoints
from megatron_rl.trainer.evaluate import evaluate
from megatron_rl.trainer.generator import GeneratorRun, Generators, Relay
from megatron_rl.trainer.learner import Learner
from megatron_rl.trainer.partial_sampling import check_prompts, staleness_metrics
from megatron_rl.trainer.report import Reporter
from megatron_rl.trainer.sampler import Sampler
from megatron_rl.trainer.state import State
from megatron_rl.weights.create import create_model, differences


@dataclass
class Run:
    """Holds the three, and hands the device to the one whose turn it is."""

    config: Config
    run_dir: Path
    grid: ProcessGrid
    sampler: Sampler
    learner: Learner
    checkpoints: Checkpoints
    report: Reporter
    timer: StepTimer
    stop: StopFlag
    pairs: PreferencePairs | None = None  # of a reward model's run
    state: State = field(default_factory=State)
    actor_has_device: bool = True
    started_sync: WeightSync | Publisher | None = None  # from `start_engine` on
    generators: Generators | None = None  # with split placement: the other ranks; None: these generate, too

    @property
    def sync(self) -> WeightSync | Publisher:
        assert self.started_sync is not None, "start_engine has not been called"
        return self.started_sync

    def start_engine(self, evaluates: bool = False) -> None:
        """Starts the engine, gives it the actor's weights, and proves that it computes what the actor does. `evaluates`: they
        will be evaluated."""
        if self.generators is not None:
            self._begin_generators(self.generators, evaluates)
            return
        with self.report.apart("engine start"), self.timer.untimed("start", "starting the engine"):
            actor, sampler = self.learner.actor, self.sampler
            actor.offload()  # vLLM wants its whole share of the device free when it starts
            actor.offload_weights()
            engine = VllmEngine(self.config, self.grid, sampler.folder, sampler.prompts.images)
            sampler.use(engine)
            self.started_sync = make_sync(self.config, self.grid, actor, engine, self.report.note)
            engine.sleep()
            actor.onload_weights()
            scored = self.score_by_actor()
            self.hand_device_to_engine()
            self.sync.check(scored)

    def _begin_generators(self, generators: Generators, evaluates: bool) -> None:
        with self.report.apart("engine start"), self.timer.untimed("start", "waiting for the engines"):
            actor = self.learner.actor
            generators.begin(self.state, evaluates, self.checkpoints.continued)
            self.sampler.max_scored = max_length(self.config.rollout, actor.model) - 1
            self.started_sync = publisher = Publisher(self.config, self.grid, actor)
            if publisher.why_whole is not None:
                self.report.note(f"weights go to the engine whole, not in slices: {publisher.why_whole}")
            scored = self.score_by_actor()
            publisher.push(self._weights_digest())
            publisher.check(scored)

    def check_stop(self) -> None:
        """Raises StopRequested where the run is to stop here, on every rank."""
        if self.generators is None:
            self.stop.check(self.grid)
        elif self.generators.signum:  # as both roles have agreed
            raise StopRequested(self.generators.signum)

    def next_batch(self, number: int) -> tuple[Batch, State]:
        """A step's rollouts, and the state with their prompts taken.

        Raises:
            StopRequested: nothing has changed yet.
        """
        if self.generators is None:
            return self.sampler.batch(
                number, self.state, self.learner.algorithm.estimator.needs.greedy, self.check_stop
            )
        if self.state.ahead is None:  # the first
            with self.timer("wait"):
                self.state = replace(self.generators.next_batch(), step=self.state.step)
            self.check_stop()
        batch = self.state.ahead
        assert batch is not None
        if self.config.rollout.partial is not None:
            ages = staleness_metrics(self.grid, batch.rollouts, self.learner.actor.optimizer_steps, self.config)
            batch = replace(batch, metrics={**batch.metrics, **ages})
        return batch, replace(self.state, ahead=None)

    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics of every eval task under the engine's current weights."""
        if self.generators is None:
            return evaluate(self.sampler, self.report, step, self.config.trainer.steps)
        with self.timer.untimed("wait", "waiting for the evaluation"):
            return self.generators.scores()

    def take_counters(self, batch: Batch | None = None) -> dict[str, float]:
        """Metrics of sampling and scoring since the last call. `batch`: the step's; None: of an evaluation alone."""
        if self.generators is None:
            return self.sampler.take_counters()
        return self.generators.take_counters(batch)

    def score_by_actor(self, rollouts: Rollouts | None = None) -> Scored:
        """The actor's side of the check after the next sync, over a few rollouts; None: over the recipe's first prompts."""
        return self.learner.score(*self.sampler.sequences_to_check(rollouts))

    def resume(self, resume: str, optimizer: OptimizerConfig, total_updates: int) -> bool:
        """Whether there was a checkpoint to continue from: `Checkpoints.resume`."""
        state = self.checkpoints.resume(resume, optimizer, total_updates, self._with_what_waits)
        self.state = state or self.state
        return state is not None

    def _with_what_waits(self, state: State, folder: Path) -> State:
        """The state with what its checkpoint has of rollouts, or of prompts, that were not trained on yet."""
        prompts = self.sampler.prompts
        with errors_named(str(folder), as_error=CheckpointError):
            if (folder / AHEAD).exists():
                ahead = unpack_ahead((folder / AHEAD).read_bytes(), self.grid, prompts.train_by_id)
                state = replace(state, ahead=ahead)
            if (folder / WAITING).exists() and self.generators is None:
                state = replace(state, waiting=self.sampler.read_waiting(folder / WAITING))
            if (folder / LENGTHS).exists():
                ids = [sample.id for sample in prompts.train]
                state = replace(state, by_length=LikeLengths.unpack((folder / LENGTHS).read_bytes(), ids))
        return state

    def hand_device_to_engine(self) -> None:
        """The device is the engine's from here on, and the engine has the actor's weights.

        On a GPU its weights are mapped first, filled from the actor, and only then does its KV cache come back: the two
        copies of the weights overlap, the cache and the actor's gradients never do, and with `actor.offload_weights` nor do
        the cache and the actor's weights. On a CPU nothing moves, nor with split placement, but for the weights.
        """
        if isinstance(self.sync, Publisher):
            self.sync.push(self._weights_digest())
            return
        actor, sampler = self.learner.actor, self.sampler
        actor.offload()
        sampler.engine.wake("weights")
        self.sync.push()
        sampler.weights = self._weights_digest()
        actor.offload_weights()
        sampler.engine.wake("cache")
        self.actor_has_device = False

    def _weights_digest(self) -> str:
        """Tells the actor's weights from others, where conversations are recorded."""
        if self.sampler.journal is None:
            return ""
        digests = self.grid.all_gather(self.learner.actor.weights_digest())
        return hashlib.blake2b(b"".join(digests), digest_size=12).hexdigest()

    def hand_device_to_actor(self) -> None:
        """The device is the actor's from here on; the engine keeps neither weights nor cache on a GPU."""
        if not self.actor_has_device:
            self.sampler.engine.sleep()
            self.learner.actor.onload()
            self.actor_has_device = True

    def close(self) -> None:
        if self.generators is not None:
            self.generators.dismiss(self.stop.signum)
        self.checkpoints.close()
        self.report.close()
        self.sampler.close()


def build_run(
    config: Config,
    grid: ProcessGrid,
    run_dir: Path,
    command: str = "train",
    stop: StopFlag | None = None,
    ownership: Ownership | None = None,
) -> Run:
    """Loads data, model and rewards on every rank that learns. `ownership`: rank 0's, of the run folder.

    Raises:
        ValueError: for what only data can show: an empty task, prompts that are too long, a demonstration missing.
    """
    if config.rollout.exact:  # on a GPU the actor calls vLLM, which reads its environment when it is imported
        environment.prepare(exact=True)
    report = Reporter(config, run_dir, grid, command)
    algorithm = make_algorithm(config.algorithm, max_tokens=config.rollout.max_tokens)
    sampler = _sampler(config, grid, run_dir, command, report, algorithm)
    stop, timer = stop or StopFlag(), sampler.timer
    pairs = None
    if command == "reward-model":
        vocab_size = model_of(read_hf_config(sampler.folder)).dims["vocab"]
        pairs = load_pairs(sampler.prompts, sampler.tokenizer, config.rollout, vocab_size, report.note)
        set_steps(config.reward_model, len(pairs.train))
    weights = open_weights(sampler.folder)
    actor = (Actor if pairs is None else RewardActor)(config, grid, sampler.folder, weights)
    learner = Learner(config, actor, algorithm, timer)
    return Run(
        config=config,
        run_dir=run_dir,
        grid=grid,
        sampler=sampler,
        learner=learner,
        checkpoints=Checkpoints(config, run_dir, grid, sampler.folder, learner, report, timer, ownership),
        report=report,
        timer=timer,
        stop=stop,
        pairs=pairs,
        generators=None if grid.link is None else Generators(config, grid, sampler.prompts.train_by_id, report, stop),
    )


def build_generator(config: Config, grid: ProcessGrid, run_dir: Path, stop: StopFlag) -> GeneratorRun:
    """Loads data and rewards on a rank that only generates. Raises ValueError as `build_run`."""
    report = Relay(config, run_dir, grid)
    algorithm = make_algorithm(config.algorithm, max_tokens=config.rollout.max_tokens)
    sampler = _sampler(config, grid, run_dir, "train", report, algorithm)
    return GeneratorRun(config, grid, sampler, algorithm.estimator.needs.greedy, report, sampler.timer, stop)


def _sampler(
    config: Config, grid: ProcessGrid, run_dir: Path, command: str, report: Reporter, algorithm: Algorithm
) -> Sampler:
    """Prompts and rewards, checked against one another."""
    report.phase("loading the model and the tasks")
    folder = model_folder(config, report, run_dir)
    grid.everyone.barrier()
    if read_hf_config(folder) != stored_hf_config(folder):
        report.note(f"{folder}: only the language model is read, not {' nor '.join(f'{name}*' for name in NOT_READ)}")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    prompts = load_prompts(config, tokenizer, report.note, command != "evaluate", _reader(config, folder))
    for sentence in template_remarks(config, tokenizer):
        report.note(sentence)
    if command == "sft" or config.sft.wanted:
        check_demonstrations(prompts.train, tokenizer, config.rollout.max_tokens)
        set_steps(config.sft, sum(sample.demonstration is not None for sample in prompts.train))
    scorer = Scorer(config.rewards, algorithm.estimator.needs.columns)
    if command == "train":
        _check_token_rewards(config, scorer, tokenizer, prompts)
    for samples in ([prompts.train] if command == "train" else []) + list(prompts.eval.values()):
        scorer.check(samples)
        if grid.everyone.is_main:
            for doubt in scorer.doubts(samples):
                report.warn(doubt)
    if command == "train" and config.rollout.partial is not None:
        check_prompts(config, prompts)
    if grid.link is None or grid.generates_only:
        scorer.open(run_dir, grid.rank, grid.world)
    if command == "train" and config.rollout.fp8 != "none" and grid.everyone.is_main:
        weight = config.algorithm.correction.weight
        report.note(f"rollouts are drawn with weights in FP8, corrected by algorithm.correction.weight={weight}")
        if taken := environment.overridden():
            report.note(f"the environment's {', '.join(taken)} changes what the engine computes in FP8 (docs/gpu.md)")
    sampler = Sampler(config, grid, folder, tokenizer, prompts, scorer, report, StepTimer(report.phase))
    if command == "train" and config.trainer.like_lengths > 1 and (visits := visits_of_new_prompts(config, sampler)):
        report.warn(
            f"trainer.like_lengths changes nothing: no prompt comes twice, {config.trainer.steps} steps take {visits:,} of "
            f"{len(prompts.train):,}"
        )
    if command == "train" and config.checkpoint.every and any(sample.agent is not None for sample in prompts.train):
        sampler.journal = run_dir / journal.FOLDER
    return sampler


def visits_of_new_prompts(config: Config, sampler: Sampler) -> int:
    """How many prompts the whole run takes where none of them comes twice; else 0."""
    visits, order = config.trainer.steps * config.trainer.prompts_per_step, sampler.order
    assert order is not None  # there are training prompts
    return visits if visits <= len(sampler.prompts.train) and len({*order.take(0, visits)}) == visits else 0


def _check_token_rewards(config: Config, scorer: Scorer, tokenizer: Tokenizer, prompts: Prompts) -> None:
    """ValueError where a reward per token does not understand the prompts."""
    scorer.check_tokenizer(tokenizer)
    teachers = [name for name in scorer.token_weights if config.rewards[name].reward == "teacher"]
    if teachers and (seen := next((sample for sample in prompts.train if sample.images is not None), None)) is not None:
        raise ValueError(
            f"rewards.{teachers[0]}: the teacher is given tokens only, and the prompt {seen.id} has images"
        )


def set_steps(section: SupervisedConfig, examples: int) -> None:
    """Steps follow from the number of examples, where the recipe counts epochs."""
    if section.epochs is not None:
        section.steps = max(1, math.ceil(section.epochs * examples / section.batch_size))


def _reader(config: Config, folder: Path) -> ImageReader | None:
    """A reader of images, where the model has a vision tower."""
    vision = model_of(read_hf_config(folder)).description.vision
    return ImageReader(folder, vision, config.model.min_pixels, config.model.max_pixels) if vision is not None else None


def model_folder(config: Config, report: Reporter, run_dir: Path) -> Path:
    """`model.path`, or the small model that `model.create` describes, made in the run folder by rank 0.

    One that is there is used only where it is, byte for byte, what this recipe makes; another is moved to `previous_<k>`.
    """
    if config.model.path is not None:
        return Path(config.model.path)
    assert config.model.create is not None  # the recipe check requires one of the two
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
