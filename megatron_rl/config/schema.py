"""The recipe's schema: one dataclass per section. A key's type, choices, range, default and meaning are in its field only.

This module imports no torch, so that recipes can be checked on a login node or a laptop. docs/recipes.md is written from
it (`python tools/document_recipes.py`), which replaces `<files>`, `<generators>`, `<rewards>`, `<agents>` by the names in
their registries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from megatron_rl.config.actor import ActorConfig, OptimizerConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.keys import (
    Count,
    CountOrNone,
    Finite,
    Minutes,
    Name,
    NonNegative,
    Params,
    Positive,
    PositiveShare,
    Ranks,
    Section,
    Seed,
    Share,
    Steps,
    StepsOrNone,
    Tokens,
    Wait,
    key,
)
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.rollout_keys import RolloutConfig


# ------------------------------------------------------------------------------------------------- tasks and rewards
@dataclass
class ColumnsConfig(Section):
    """Which column of a file or dataset is what; `a.b` is the key b of the object in column a. Absent ones are
    left out."""

    prompt: str = key("prompt", "text, or chat messages; has to exist")
    answer: str = key("answer", "the gold answer")
    tool_calls: str = key(
        "tool_calls", "the gold calls: a list of `{name, parameters}`, as JSON text too, or a tagged ToolRL response"
    )
    needs_response: str = key("needs_response", "whether the gold turn also answers the user")
    tools: str = key("tools", "tools for the chat template: a list of JSON schemas, or that list as JSON text")
    system: str | None = key(None, "text of a system message to stand before a prompt that is text")
    images: str | None = key(
        None,
        "images, one or a list: paths (relative to the data's folder) or the files' bytes, as Hugging Face's `Image` columns "
        "hold them. `<image>` in the prompt's text says where each stands; without it they come first",
    )
    metadata: dict[str, str] = key({}, "further metadata: name to column, e.g. `{index: extra_info.index}`")


@dataclass
class AgentConfig(Section):
    """Who converses with the policy about a task's prompts ([agents.md](agents.md)). Needs `chat: true`."""

    name: str = key(meaning="<agents>, or your own: `path/file.py:factory`, `package.module:factory`")
    params: Params = key({}, "the agent's parameters")
    parser: Literal["none", "hermes", "llama", "toolrl", "mistral", "glm4", "qwen3_5", "deepseek", "gpt_oss"] = key(
        "none", "how the policy writes tool calls ([tool_format](rewards/tool_format.md)); `none`: its turns are text"
    )
    max_turns: Count = key(8, "turns of the policy; `rollout.max_tokens` limits all that follows the prompt")
    turn_tokens: Tokens | None = key(None, "new tokens of a turn; null: as many as the rollout has left")
    sequences: Count = key(1, "the most that a rollout may have ([several sequences](agents.md#several-sequences))")
    history: Literal["kept", "rendered"] = key(
        "kept", "earlier turns as the policy wrote them, or [as the chat template does](agents.md#rewritten-histories)"
    )
    seconds: Annotated[float, Field(ge=0.01, le=1e6)] = key(
        120.0, "a conversation's wait for its agent, over all turns; the policy's own time does not count"
    )
    model_failed: Finite = key(0.0, "the reward `agent` where the policy broke off: a limit, an unreadable call")
    stop_after: Count = key(16, "conversations in a row that an engine has lost to the agent's failures end the run")


@dataclass
class TaskConfig(Section):
    """Where prompts come from. `source` decides which of the other keys apply."""

    source: str = key(
        meaning="<files> (your data), <generators> (generated), `split` (eval only: part of a train task), or a generator of "
        "your own: `path/file.py:function`, `package.module:function`",
    )
    name: str | None = key(None, "reasoning_gym: the dataset, e.g. `chain_sum`, `countdown`, `knights_knaves`")
    params: Params = key({}, "generated: the generator's own parameters")
    size: Steps | None = key(None, "generated: number of items (required); your data: at most so many, the first ones")
    seed: Seed = key(1, "generated: the generator's; split: of the drawing")
    path: str | None = key(
        None,
        "jsonl, parquet: a file, a folder of such files, or a pattern (`data/train-*.parquet`); huggingface: a "
        "name on the hub, or a folder",
    )
    subset: str | None = key(None, "huggingface: the dataset's configuration")
    split: str = key("train", "huggingface: the split")
    revision: str | None = key(None, "huggingface: branch, tag or commit on the hub")
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    of: str | None = key(None, "split: the train task whose prompts are held out")
    hold_out: float | None = key(None, "split: how many of its prompts (1 or more), or which share of them (below 1)")
    prompt: str = key(
        "{prompt}", "text around the prompt: `{prompt}`, any metadata key, `{key:compact}` without white space"
    )
    chat: bool = key(False, "apply the tokenizer's chat template. No special tokens are added otherwise")
    tools: list[Params] = key([], "with `chat`: tools of the prompts that have none of their own, in OpenAI's form")
    chat_template: str | None = key(None, "a file; null: the tokenizer's ([ToolRL's](agents.md#toolrls-conversations))")
    chat_params: Params = key({}, "keyword arguments of the chat template, e.g. `{enable_thinking: false}`")
    weight: Positive | None = key(
        None,
        "this task's share of the training prompts, relative to the other tasks' weights; null for all: every "
        "prompt once per epoch",
    )
    exclude: list[str] = key([], "names of evaluation tasks whose prompts are removed from this training task")
    agent: AgentConfig | None = key(None, "the section below; null: a prompt's response is the rollout")
    demonstrations: str | None = key(
        None, "SFT targets: `chain_sum_steps`, `tool_world`, `tool_house`, `python_maths`, `column:<key>` of your data"
    )
    demonstration_params: Params = key({}, "the writer's parameters")


@dataclass
class TasksConfig(Section):
    train: dict[Name, TaskConfig] = field(default_factory=dict)
    eval: dict[Name, TaskConfig] = field(default_factory=dict)


@dataclass
class ConditionConfig(Section):
    """A reward counts only where another one is high enough, and is 0 elsewhere (GDPO Eq. 8); both before
    weighting."""

    column: str = key(meaning="the other reward")
    at_least: Finite = key(1.0, "its threshold, inclusive")


@dataclass
class RewardConfig(Section):
    """One named column of the reward table. The section `rewards` maps column name to this."""

    reward: str = key(
        meaning="a registered reward (<rewards>: [rewards](rewards/README.md)), or your own: `package.module:factory`, "
        "`path/file.py:factory`",
    )
    weight: Finite = key(1.0, "in the weighted sum that scalar estimators see")
    params: Params = key({}, "the reward's parameters; its docstring lists them")
    tasks: list[str] | None = key(None, "only for prompts of these tasks, 0 elsewhere; null: all")
    condition: ConditionConfig | None = key(None, "the section below; null: always counts")
    when_needed: bool = key(False, "computed only where the estimator asks for a column of this name (`awpo`: `judge`)")


# ---------------------------------------------------------------------------------------------------------- trainer
@dataclass
class SupervisedConfig(Section):
    """A stage without rollouts."""

    steps: StepsOrNone = key(0, "0: none, unless `epochs` is set")
    epochs: Annotated[float, Field(gt=0, le=1e5)] | None = key(
        None, "passes over the examples, rounded up to whole steps; `steps` then follows from them"
    )
    batch_size: Count = key(64, "demonstrations, or pairs, per step")
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    log_every: Steps = key(10)
    eval_every: StepsOrNone = key(0, "steps between evaluations of the command's own run; 0: only after the last step")

    @property
    def wanted(self) -> bool:
        return self.steps > 0 or self.epochs is not None


@dataclass
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning on demonstrations: the whole of `megatron-rl sft`, or a warm-up before RL where `steps` > 0 or
    `epochs` is set."""


@dataclass
class RewardModelConfig(SupervisedConfig):
    """A Bradley-Terry reward model on preference pairs: the whole of `megatron-rl reward-model`."""

    centering: NonNegative = key(0.0, "weight of the squared sum of a pair's scores, which keeps scores near 0; 0: off")


@dataclass
class TrainerConfig(Section):
    steps: Steps = key(100, "RL steps")
    prompts_per_step: Count = key(64, "a multiple of `minibatches`")
    minibatches: Count = key(1, "optimizer steps per batch of rollouts and epoch; groups are never split")
    epochs: Count = key(1, "passes over each batch")
    like_lengths: Count = key(
        1,
        "of the prompts of so many steps, those whose last responses were about as long share one "
        "([long tails](long-tails.md#steps-of-like-lengths)); 1: as they come",
    )
    eval_every: StepsOrNone = key(10, "0: only before the first and after the last step")
    eval_rollouts: Count = key(1, "k, rollouts per held-out prompt; 1: greedy")
    eval_temperature: Annotated[float, Field(ge=0, le=2)] = key(0.0, "above 0 where k > 1")
    eval_top_p: PositiveShare = key(
        1.0, "nucleus sampling in evaluations; training always draws from the whole distribution"
    )
    eval_max_prompts: Steps | None = key(None, "of each task; null: all")
    eval_reward: str | None = key(None, "the column that says whether a rollout is right; null: the task's first")
    eval_threshold: Finite = key(1.0, "right where that reward is at least this")


# ------------------------------------------------------------------------------------------------------- evaluation
@dataclass
class ServerConfig(Section):
    """How HTTP servers are asked: those of judges, of reward models, of a served model."""

    max_in_flight: Count = key(256, "requests at a time, over all servers")
    request_seconds: Annotated[float, Field(ge=0.001, le=1e8)] = key(60.0, "longest time of a request")
    retries: CountOrNone = key(4, "further requests after a failed one, each to the next server")
    backoff_seconds: NonNegative = key(0.5, "before the first retry; doubles up to 30 s. A `Retry-After` is obeyed")
    api_key_env: str | None = key(None, "name of the environment variable with the key; null: no key is sent")


@dataclass
class EndpointConfig(ServerConfig):
    """How a served model is asked (`megatron-rl evaluate --endpoint`)."""

    request_seconds: Annotated[float, Field(ge=0.001, le=1e8)] = key(3600.0, "longest time of a request")
    retries: CountOrNone = key(5, "further requests after a failed one, each to the next server")
    max_failed_share: Share = key(0.0, "the command fails where more than this share of the requests stays unanswered")


@dataclass
class HarnessConfig(Section):
    """Another project's package that asks and grades in place of `tasks.eval` ([evaluation.md](evaluation.md#harnesses))."""

    name: Literal["bfcl", "evalplus", "lm_eval"] | None = key(None, "which; `--harness` sets it; null: none")
    sets: list[str] | None = key(None, "what it runs, in its own names; null: the usual ones")
    arguments: list[str] = key([], "added to its command that asks")
    limit: Count | None = key(None, "bfcl, lm_eval: only each set's first so many questions, to try it; null: all")
    handler: str | None = key(
        None, "bfcl: the model of its list whose prompt and parser it takes, for example `Qwen/Qwen3-8B-FC`"
    )


@dataclass
class EvaluationConfig(Section):
    """Which metrics of the responses to held-out prompts are reported; `trainer.eval_...` sets how they are drawn."""

    pass_k: list[Count] | None = key(None, "every k of `pass@k`; null: 1, 2, 4, ... and `trainer.eval_rollouts`")
    confidence: Annotated[float, Field(gt=0.5, le=0.9999)] = key(0.95, "of the intervals")
    length_limit: Tokens | None = key(None, "tokens; `exceed_share` is the share of longer responses; null: none")
    format_reward: str | None = key(None, "a column; `format_ratio` is the share of responses where it is 1 or more")
    bug_reward: str | None = key(None, "a column; `bug_ratio` is the share of responses where it is below 1")
    pass_rate_reward: str | None = key(None, "a column; `pass_rate` is its mean")
    pairwise: list[str] | None = key(
        None, "two columns of the reward `pairwise`, one for each `position`; `win_rate` is made of them"
    )
    style: str | None = key(None, "a column `style`; with it, `win_rate_controlled` is the win rate at equal style")
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    harness: HarnessConfig = field(default_factory=HarnessConfig)


# ---------------------------------------------------------------------------------------------------------- outputs
@dataclass
class CheckpointConfig(Section):
    every: StepsOrNone = key(0, "steps between checkpoints, also at the first, the last and Ctrl-C; 0: none")
    sft_every: StepsOrNone = key(
        100,
        "SFT steps of `train`'s warm-up between its checkpoints, where `every` is not 0; 0: only after its last "
        "step and when the run is asked to stop. (`megatron-rl sft` uses `every`)",
    )
    keep: Count = key(2, "newest checkpoints kept")
    keep_best: CountOrNone = key(0, "further ones kept: those with the highest `best`")
    best: str | None = key(
        None,
        "metric of an evaluation to choose them by, for example `eval/<task>/avg@1`; needed where `keep_best` > "
        "0. Only a step with an evaluation (`trainer.eval_every`) has it",
    )
    asynchronous: bool = key(True, "write beside training ([checkpoints.md](checkpoints.md))")
    on_failure: Literal["continue", "stop"] = key("continue", "what a failed save does to the run")
    export: bool = key(True, "write the final Hugging Face folder `<run_dir>/export`")


@dataclass
class LoggingConfig(Section):
    tensorboard: bool = key(True)
    wandb: str | None = key(
        None, "`project` or `entity/project`; needs the package: [run-folder.md](run-folder.md#weights--biases)"
    )
    mlflow: str | None = key(None, "experiment name; needs the package")
    report: bool = key(True, "write `<run_dir>/report.html` at the end, as `megatron-rl report` does at any time")
    samples_per_step: StepsOrNone = key(16, "rollouts in each step's file in `samples/`, as text; 0: no such files")
    record_every: StepsOrNone = key(10, "steps between `rollouts/step_<n>.npz` (all rewards and log-probs); 0: none")
    gradient_variance_every: StepsOrNone = key(
        0,
        "steps between measurements of the gradient's variance over micro-batches; 0: none. Needs several "
        "micro-batches, or data-parallel ranks without pipeline, context, expert and sequence parallelism, with which the "
        "measured update computes its gradient twice",
    )


@dataclass
class LaunchConfig(Section):
    processes: Annotated[int, Field(ge=1, le=4096)] | None = key(
        None, "local processes; null: one per GPU, on a CPU the smallest number that fits the layout"
    )
    generators: Ranks | None = key(
        None,
        "split placement: the last so many processes only generate, a step ahead of the others; "
        "null: all do both ([long-tails.md](long-tails.md#split-placement)). "
        "`algorithm.correction.weight` is then `token` by default",
    )
    timeout_minutes: Minutes = key(
        30.0, "deadline of a collective; of one between GPUs at least the longest of the watchdog's deadlines"
    )
    preflight: Literal["off", "quick", "full"] = key(
        "quick", "what is checked on every node before a run ([preflight.md](preflight.md))"
    )
    endpoint_minutes: Wait | None = key(
        None,
        "how long pre-flight waits for judges and reward models that do not answer yet; null: 10 in a Slurm job, "
        "else 0 ([slurm.md](slurm.md#7-servers-for-judges-and-reward-models))",
    )


# What a run is doing at any moment has one of these names.
Phase: TypeAlias = Literal[
    "start", "load", "generate", "reward", "switch", "estimate", "old_log_prob", "ref_log_prob", "update", "checkpoint",
    "sync", "sync_check", "evaluate", "export", "wait",
]  # fmt: skip
PHASES: tuple[Phase, ...] = get_args(Phase)
_MINUTES: dict[Phase, float] = {
    "start": 40.0, "generate": 40.0, "evaluate": 60.0, "update": 40.0, "checkpoint": 40.0, "wait": 240.0,
}  # fmt: skip


@dataclass
class WatchdogConfig(Section):
    """Deadlines of the phases of a run. Past one, every rank leaves its stacks and the run ends with exit code 76."""

    enabled: bool = key(True, "false: heartbeats only, for a debugger")
    default_minutes: Minutes = key(20.0, "a phase that is not named below, and the time between two phases")
    phases: dict[Phase, Minutes] = key(
        _MINUTES,
        f"minutes per phase; further ones: {', '.join(f'`{name}`' for name in PHASES if name not in _MINUTES)}",
    )
    first_time_minutes: Wait = key(20.0, "more for a phase's first time in a process: compilation, cold file caches")


@dataclass
class Config(Section):
    run_dir: str = key(meaning="the run's folder, see [run-folder.md](run-folder.md); `~` is your home")
    seed: Seed = key(0, "model initialisation, order of prompts, sampling")
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    rewards: dict[Name, RewardConfig] = field(default_factory=dict)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
