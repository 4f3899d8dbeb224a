"""The recipe's shape: one dataclass per section, every key with its type, default and meaning.

This module imports neither torch nor any other part of the package, so recipes can be checked on a login node or a laptop.
A default of ``None`` on an optional field means what the comment beside it says; there are no hidden defaults elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


# ------------------------------------------------------------------------------------------------------------ model
@dataclass
class CreateModelConfig:
    """A small, randomly initialised Qwen3 model with a character tokenizer, made at start-up. For runs without downloads."""

    layers: int = 2
    hidden_size: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 256
    vocab_size: int = 64  # rows of the embedding; the tokenizer's characters are padded to it
    characters: str = "0123456789+-*/=#.,() "  # what the character tokenizer knows besides its special tokens
    words: list[str] = field(default_factory=list)  # strings of several characters that are one token each
    max_positions: int = 512
    tie_embeddings: bool = False
    init_std: float = 0.02


@dataclass
class ModelConfig:
    path: str | None = None  # Hugging Face folder, or what `convert to-megatron` made of one. Wins over `create`
    create: CreateModelConfig | None = None  # makes `<run_dir>/model` where `path` is null
    dtype: str = "bfloat16"  # float32 | bfloat16: parameters and activations of actor and rollout engine


# ------------------------------------------------------------------------------------------------- tasks and rewards
@dataclass
class ColumnsConfig:
    """Which column of a file or dataset is what; `a.b` is the key b of the object in column a. Absent ones are left out."""

    prompt: str = "prompt"  # text, or chat messages; the only one that has to exist
    answer: str = "answer"  # gold answer
    tool_calls: str = "tool_calls"  # gold calls: a list of {name, parameters}, that list as JSON, or a tagged response
    needs_response: str = "needs_response"  # whether the gold turn also answers the user
    tools: str = "tools"  # tools for the chat template: a list of JSON schemas, or that list as JSON
    system: str | None = None  # text for a system message before a prompt that is text; null: none
    metadata: dict[str, str] = field(default_factory=dict)  # further metadata: name -> column


@dataclass
class TaskConfig:
    """Where prompts come from. `source` decides which of the other keys apply."""

    source: str = MISSING  # reasoning_gym | tool_world | jsonl | parquet | huggingface | split
    name: str | None = None  # reasoning_gym: the dataset, e.g. chain_sum
    params: dict[str, Any] = field(default_factory=dict)  # reasoning_gym, tool_world: the generator's own parameters
    size: int | None = None  # generated: number of items; else: at most so many, the first ones (null: all)
    seed: int = 1  # generated: the generator's seed; split: of the drawing
    path: str | None = None  # jsonl, parquet: a file, a folder or a pattern; huggingface: name on the hub, or a folder
    subset: str | None = None  # huggingface: the dataset's configuration
    split: str = "train"  # huggingface: the split
    revision: str | None = None  # huggingface: branch, tag or commit on the hub
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)  # jsonl, parquet, huggingface
    of: str | None = None  # split: the train task that gives prompts away
    hold_out: float | None = None  # split: how many prompts (1 or more), or the share of them (below 1)
    prompt: str = "{prompt}"  # text around the prompt; {prompt} and any of the sample's metadata keys are filled in
    chat: bool = False  # apply the tokenizer's chat template to the prompt
    chat_params: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the template, e.g. enable_thinking
    weight: float | None = None  # share of the training prompts, relative to the other tasks'; null: by its size
    exclude: list[str] = field(default_factory=list)  # names of eval tasks whose prompts are removed from this one
    demonstrations: str | None = None  # SFT targets: a writer (tasks/demonstrations.py), or `column:<key>` of a file
    demonstration_params: dict[str, Any] = field(default_factory=dict)


@dataclass
class TasksConfig:
    train: dict[str, TaskConfig] = field(default_factory=dict)
    eval: dict[str, TaskConfig] = field(default_factory=dict)


@dataclass
class ConditionConfig:
    """A reward counts only where another one is high enough, and is 0 elsewhere (GDPO Eq. 8); both before weighting."""

    column: str = MISSING  # the other reward
    at_least: float = 1.0  # its threshold, inclusive


@dataclass
class RewardConfig:
    """One named column of the reward table. The section `rewards` maps column name to this."""

    reward: str = MISSING  # registered reward, see `megatron_rl.rewards.list_rewards()`
    weight: float = 1.0
    params: dict[str, Any] = field(default_factory=dict)
    tasks: list[str] | None = None  # only for prompts of these train/eval tasks (elsewhere the column is 0); null: all
    condition: ConditionConfig | None = None  # null: always counts
    when_needed: bool = False  # only computed where the chosen estimator asks for a column of this name (e.g. a judge)


# -------------------------------------------------------------------------------------------------------- algorithm
@dataclass
class MethodConfig:
    name: str = MISSING
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class KLConfig:
    """KL divergence from the reference policy: a loss term (`coef`), a reward column (`reward_coef`), or both."""

    coef: float = 0.0  # weight of the loss term; with `reward_coef` also 0 no reference policy is kept
    estimator: str = "k3"  # k1 | k2 | mse (another name of k2) | k3 | abs
    reward_coef: float = 0.0  # weight of the reward column `kl`: minus the KL summed over the response
    reward_estimator: str = "k1"  # same names


@dataclass
class CorrectionFilterConfig:
    """Drops tokens, or whole rollouts, whose train/rollout mismatch lies outside [low, high]."""

    level: str = "token"  # token | geometric (mean over the rollout's tokens) | sequence (sum over them)
    by: str = "ratio"  # ratio: pi_train(old) / pi_rollout | k1 | k2 | k3: KL(rollout || train) of the same samples
    low: float | None = None  # null: no lower bound
    high: float | None = None  # null: no upper bound


@dataclass
class CorrectionConfig:
    """Train/rollout mismatch: one importance weight pi_train(old) / pi_rollout, truncated at `cap`, and any filters."""

    weight: str = "none"  # none | token | geometric | sequence: what one weight covers
    cap: float = 2.0  # weights above are cut to it
    filters: list[CorrectionFilterConfig] = field(default_factory=list)  # applied together; what fails one is dropped


@dataclass
class OverlongConfig:
    """Soft length penalty (DAPO Eq. 13), a reward column `overlong` in [-1, 0]."""

    share: float = 0.0  # last part of the response budget over which the penalty grows from 0 to -1; 0: off
    weight: float = 1.0  # weight of the column
    max_length: int | None = None  # response budget in tokens; null: rollout.max_tokens


@dataclass
class AlgorithmConfig:
    preset: str = "grpo"  # fills in every key below that the recipe does not set
    plugins: list[str] = field(default_factory=list)  # Python files or modules that register own estimators or weights
    estimator: MethodConfig = field(default_factory=lambda: MethodConfig(name="grpo"))
    weight: MethodConfig = field(default_factory=lambda: MethodConfig(name="clip"))
    ratio: str = "token"  # token | sequence (geometric mean over the response, GSPO) | sequence-product
    aggregation: str = "seq-mean-token-mean"
    max_length: int | None = None  # seq-mean-token-sum-norm: the constant divisor in tokens; null: rollout.max_tokens
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = 0.0
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    truncated: str = "keep"  # rollouts cut at the token limit: keep | mask (no loss) | drop (no loss, no statistics)
    drop_no_signal_groups: bool = False  # groups whose rewards are all equal leave the update and its denominators
    signal_rewards: list[str] | None = None  # reward columns that decide it; null: all. Shaping columns never count
    resample_rounds: int = 0  # further rounds of prompts sampled to replace dropped groups (dynamic sampling); 0: none


# ---------------------------------------------------------------------------------------------------------- rollout
@dataclass
class RolloutConfig:
    tensor_parallel: int = 1
    group_size: int = 8  # rollouts per prompt
    max_prompt_tokens: int = 512
    max_tokens: int = 512  # new tokens per rollout
    temperature: float = 1.0
    too_long: str = "error"  # error | drop: prompts of more than max_prompt_tokens
    memory_fraction: float = 0.6  # GPU: share of the device's memory for the engine while it is awake
    cpu_cache_gib: float = 1.0  # CPU: KV cache per process
    max_concurrent: int = 512  # sequences decoded together by one engine
    sync_check_rollouts: int = 4  # rollouts whose log-probs are compared after every weight sync
    sync_tolerance: float | None = None  # largest |log-prob difference| after a sync; null: 3e-4 in fp32, 0.25 in bf16


# ------------------------------------------------------------------------------------------------------------ actor
@dataclass
class ParallelConfig:
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1  # model chunks per pipeline stage
    context: int = 1  # ranks that share each sequence's tokens
    expert: int = 1  # ranks that the experts are spread over
    expert_tensor: int = 1  # ranks that each expert is cut over
    sequence: bool = False  # sequence parallelism, needs tensor > 1


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: str = "constant"  # constant | linear | cosine
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0  # decoupled, as in AdamW; of all parameters, norms and biases included
    clip_grad: float = 1.0
    distributed: bool = True  # Megatron's DistributedOptimizer: state sharded over data-parallel ranks


@dataclass
class FP8Config:
    recipe: str = "blockwise"  # delayed | tensorwise | blockwise | mxfp8
    format: str = "e4m3"  # e4m3 | hybrid
    param_gather: bool = False  # keep the parameters themselves in FP8


@dataclass
class ActorConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tokens_per_microbatch: int = 8192  # packed tokens in one forward pass, per data-parallel rank
    logprob_chunk_tokens: int = 2048  # tokens whose logits exist at once
    recompute: str = "none"  # none | selective | full: activation recomputation
    offload: bool = False  # GPU: move gradients and optimizer state to the host while the engine generates
    fp8: FP8Config | None = None


# ---------------------------------------------------------------------------------------------------------- trainer
@dataclass
class SFTConfig:
    """Supervised fine-tuning on demonstrations: the whole of `megatron-rl sft`, or a warm-up before RL where steps > 0."""

    steps: int = 0
    batch_size: int = 64  # demonstrations per optimizer step
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    log_every: int = 10


@dataclass
class TrainerConfig:
    steps: int = 100
    prompts_per_step: int = 64
    minibatches: int = 1  # optimizer steps per batch of rollouts and epoch
    epochs: int = 1  # passes over each batch of rollouts
    eval_every: int = 10  # steps between evaluations; 0: only before the first and after the last step
    eval_rollouts: int = 1  # k: rollouts per held-out prompt. 1: greedy
    eval_temperature: float = 0.0  # must be > 0 where eval_rollouts > 1
    eval_top_p: float = 1.0  # rollouts for training always draw from the whole distribution, which the actor scores
    eval_max_prompts: int | None = None
    eval_reward: str | None = None  # the column that says whether a rollout is right; null: the task's first
    eval_threshold: float = 1.0  # right where that reward is at least this


# ------------------------------------------------------------------------------------------------------- evaluation
@dataclass
class EndpointConfig:
    """How a served model is asked (`megatron-rl evaluate --endpoint`)."""

    max_in_flight: int = 256  # requests at a time
    request_seconds: float = 3600.0  # longest time of one request, its answer included
    retries: int = 5  # further requests after a failed one
    api_key_env: str | None = None  # name of the environment variable with the key; null: no key is sent
    max_failed_share: float = 0.0  # the command fails where more than this share of the requests stays unanswered


@dataclass
class EvaluationConfig:
    """What is said about the responses to held-out prompts; `trainer.eval_...` says how they are drawn."""

    pass_k: list[int] | None = None  # every k of pass@k, at most eval_rollouts; null: 1, 2, 4, ... and eval_rollouts
    confidence: float = 0.95  # of the intervals
    length_limit: int | None = None  # tokens; the share of longer responses is `exceed_share`; null: not reported
    format_reward: str | None = None  # column; the share of responses where it is 1 or more is `format_ratio`
    bug_reward: str | None = None  # column; the share of responses where it is below 1 is `bug_ratio`
    pass_rate_reward: str | None = None  # column; its mean is `pass_rate`
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)


# ---------------------------------------------------------------------------------------------------------- outputs
@dataclass
class CheckpointConfig:
    every: int = 0  # steps between checkpoints; 0: none
    sft_every: int = (
        100  # SFT steps of train's warm-up between its checkpoints; 0: only after its last and when stopped
    )
    keep: int = 2  # newest complete checkpoints kept
    keep_best: int = 0  # further ones kept: those with the highest `best`
    best: str | None = None  # metric of an evaluation, e.g. eval/<task>/avg@1; needed where keep_best > 0
    asynchronous: bool = True  # write beside training, which waits only for the copy to host memory
    on_failure: str = "continue"  # continue | stop: what a save that fails (no room, a broken disk) does to the run
    export: bool = True  # write the final Hugging Face folder `<run_dir>/export`


@dataclass
class LoggingConfig:
    tensorboard: bool = True
    wandb: str | None = None  # project name; needs the `wandb` package
    mlflow: str | None = None  # experiment name; needs the `mlflow` package
    report: bool = True  # write `<run_dir>/report.html` at the end, as `megatron-rl report` does at any time
    samples_every: int = 1  # steps between sample files; 0: none
    samples_per_step: int = 16  # rollouts written per sample file
    record_every: int = 10  # steps between `rollouts/step_<n>.npz` (all rewards and log-probs, as arrays); 0: none
    gradient_variance_every: int = 0  # steps between measurements of the gradient's variance; 0: none


@dataclass
class LaunchConfig:
    processes: int | None = None  # local processes; null: one per GPU; on CPU the fewest that fit the layout
    timeout_minutes: float = 30.0  # deadline of a collective; between GPUs not before the watchdog's
    preflight: str = "quick"  # off | quick | full: what is checked on every node before a run (megatron-rl preflight)
    # How long pre-flight waits for judges and reward models that do not answer yet; null: 10 in a Slurm job, else 0.
    endpoint_minutes: float | None = None


# What a run is doing at any moment has one of these names.
PHASES = (
    *("start", "load", "generate", "reward", "switch", "estimate", "old_log_prob", "ref_log_prob", "update"),
    *("checkpoint", "sync", "sync_check", "evaluate", "export"),
)


@dataclass
class WatchdogConfig:
    """Deadlines of the phases of a run. Past one, every rank leaves its stacks and the run ends with exit code 76."""

    enabled: bool = True
    default_minutes: float = 20.0  # a phase that is not named below, and the time between two phases
    phases: dict[str, float] = field(
        default_factory=lambda: {"start": 40.0, "generate": 40.0, "evaluate": 60.0, "update": 40.0, "checkpoint": 40.0}
    )  # minutes per phase: its name as in `timing_s/<phase>`; start, evaluate, load, export
    first_time_minutes: float = 20.0  # more for a phase's first time in a process: compilation, cold file caches


@dataclass
class Config:
    run_dir: str = MISSING
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
