"""Checks between the keys of a recipe before any process starts.

Each check is a generator over one subject: it yields a sentence per problem, naming key, value and remedy. `check` runs
them all, so that a recipe with three mistakes is refused once, not three times.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from megatron_rl.base.messages import ConfigError, did_you_mean, show
from megatron_rl.config.actor_checks import check_actor, check_actor_machine, optimizers
from megatron_rl.config.algorithm_checks import check_method_choice
from megatron_rl.config.evaluation_checks import check_evaluation, runs_harness
from megatron_rl.config.inactive import check_inactive
from megatron_rl.config.machine import Machine
from megatron_rl.config.model_checks import check_cpu_engine, check_model
from megatron_rl.config.rollout_checks import check_rollout, check_rollout_machine
from megatron_rl.config.rollout_keys import LEAST_TEMPERATURE
from megatron_rl.config.schema import Config
from megatron_rl.config.split_checks import check_split
from megatron_rl.config.supervised_checks import check_supervised
from megatron_rl.config.validate import problems as invalid
from megatron_rl.models import HFConfig

_LONGEST_PATH, _LONGEST_NAME = 3500, 255  # bytes; Linux takes 4095 and 255
_MOST_PROCESSES = 4096  # on one machine
_MOST_ROLLOUTS = 1e8  # of a step: all of them are in the memory of every rank


def check(
    config: Config, *, command: str = "train", machine: Machine | None = None, model: HFConfig | None = None
) -> Config:
    """Checks everything that needs more than one key, and fills in what follows from other keys.

    Args:
        config: not changed.
        command: train | sft | reward-model | evaluate; some needs differ.
        model: the model's config.json; None: it is read from `model.path`.

    Returns:
        A copy with `launch.processes` set (unless another launcher made the world), `model.create` null where
        `model.path` wins, and `~` in both paths resolved.

    Raises:
        ConfigError: one line per problem.
    """
    machine = machine or Machine.here()
    config = copy.deepcopy(config)
    config.run_dir = os.path.expanduser(config.run_dir)
    for section in (config.model, config.actor.lora):
        if section is not None and section.path is not None:
            section.path = os.path.expanduser(section.path)
    config.model.create = config.model.create if config.model.path is None else None
    config.launch.generators = config.launch.generators if command == "train" else None
    problems = list(_check_values(config))
    if not problems:  # the checks below may divide by these values
        if config.launch.processes is None and machine.world_size is None:
            config.launch.processes = machine.gpus or smallest_world(config)
            if config.launch.processes > _MOST_PROCESSES:
                problems.append(
                    f"the layout (actor.parallel, rollout.tensor_parallel) needs {config.launch.processes:,} processes "
                    f"on this machine, at most {_MOST_PROCESSES:,} are started; make it smaller, or start it across machines"
                )
        processes = machine.world_size or config.launch.processes or 1
        world = processes - (config.launch.generators or 0)
        problems += check_split(config, processes)
    if not problems:  # there is a process that learns
        problems += [
            *_check_layout(config, processes, machine),
            *(_check_batch(config, world) if command != "evaluate" else ()),
            *check_supervised(config, world, command),
            *check_evaluation(config),
            *check_actor(config, command),
            *check_rollout(config, machine.local_world_size),
            *_check_gradient_variance(config, world),
            *_check_trainer(config),
            *check_method_choice(config),
            *_check_rewards(config, command),
            *_check_tasks(config, command),
            *check_model(config, model, command),
            *_check_checkpoint(config, command),
            *_check_outputs(config),
        ]
    if not problems:  # methods and plug-ins are known
        problems += check_inactive(config, command)
    _refuse(problems)
    return config


def check_machine(config: Config, machine: Machine | None = None, command: str = "train") -> None:
    """Raises ConfigError where this machine cannot run a (checked) recipe. Not for a login node that only checks it."""
    _refuse(list(_check_machine(config, machine or Machine.here(), command)))


def _generates(config: Config, command: str) -> bool:
    """Whether the command starts an engine, and scores what it draws."""
    if command == "sft":
        return bool(config.tasks.eval)
    return command in ("train", "evaluate") and not runs_harness(config, command)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def smallest_world(config: Config) -> int:
    """The smallest number of processes that both the actor's layout and the rollout engine divide; with split placement the
    actor's smallest, and those that only generate."""
    generators, engine = config.launch.generators, config.rollout.tensor_parallel
    return _smallest_actor(config) + generators if generators else math.lcm(_smallest_actor(config), engine)


def _smallest_actor(config: Config) -> int:
    parallel = config.actor.parallel
    dense = parallel.tensor * parallel.context * parallel.pipeline
    return math.lcm(dense, parallel.expert * parallel.expert_tensor * parallel.pipeline)


# ------------------------------------------------------------------------------------------------------------- values
def _check_values(config: Config) -> Iterator[str]:
    """Yields a sentence per value that is not among its key's choices or out of its range."""
    yield from invalid(config)
    rollouts = config.trainer.prompts_per_step * config.rollout.group_size
    if rollouts > _MOST_ROLLOUTS:
        yield (
            f"a step has {rollouts:,} rollouts (`trainer.prompts_per_step` {config.trainer.prompts_per_step:,} x "
            f"`rollout.group_size` {config.rollout.group_size:,}); at most {_MOST_ROLLOUTS:,.0f} are possible: lower one"
        )
    for key, optimizer in optimizers(config):
        if optimizer.min_lr > optimizer.lr:
            yield f"`{key}.min_lr` ({optimizer.min_lr}) must not exceed `{key}.lr` ({optimizer.lr})"
    start = config.watchdog.phases.get("start", config.watchdog.default_minutes)
    if config.watchdog.enabled and (config.launch.endpoint_minutes or 0) >= start:
        yield (
            f"`launch.endpoint_minutes` ({config.launch.endpoint_minutes:g}) must be less than the deadline of the start, "
            f"which includes the wait for servers; raise `watchdog.phases.start` ({start:g})"
        )


# ------------------------------------------------------------------------------------------------------------- layout
def _check_layout(config: Config, processes: int, machine: Machine) -> Iterator[str]:
    parallel, engine = config.actor.parallel, config.rollout.tensor_parallel
    world_key = "the number of processes" if machine.world_size else "`launch.processes`"
    generators = config.launch.generators or 0
    world = processes - generators  # of the actor
    if generators:
        world_key = f"{world_key} without the `launch.generators` {generators}"
    local = machine.local_world_size
    if machine.world_size and config.launch.processes not in (None, local or machine.world_size):
        yield (
            f"`launch.processes` is {config.launch.processes}, but the launcher started {local or machine.world_size} "
            "processes on this machine; set it to null or to that number"
        )
    model = parallel.tensor * parallel.pipeline
    smallest = _smallest_actor(config) if generators else smallest_world(config)
    fits = math.ceil(world / smallest) * smallest
    names, sizes = "tensor x pipeline", f"{parallel.tensor} x {parallel.pipeline}"
    if parallel.context > 1:
        names, sizes = f"{names} x context", f"{sizes} x {parallel.context}"
    if world % (model * parallel.context):
        yield (
            f"{world_key} ({world}) must be a multiple of actor.parallel.{names} "
            f"({sizes} = {model * parallel.context}); a number that fits is {fits}"
        )
    elif (world // parallel.pipeline) % (parallel.expert * parallel.expert_tensor):
        cut = parallel.expert_tensor > 1
        yield (
            f"`actor.parallel.expert`{' x `expert_tensor`' if cut else ''} "
            f"({parallel.expert}{f' x {parallel.expert_tensor}' if cut else ''}) must divide the "
            f"{world // parallel.pipeline} ranks of a pipeline stage (tensor x context x data = {world} processes / "
            f"{parallel.pipeline}); a number of processes that fits is {fits}"
        )
    if world % engine and not generators:
        yield f"{world_key} ({world}) must be a multiple of `rollout.tensor_parallel` ({engine}); one that fits is {fits}"
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield (
            f"`actor.parallel.virtual_pipeline` ({parallel.virtual_pipeline}) needs `actor.parallel.pipeline` > 1, "
            "which is 1; set virtual_pipeline to 1"
        )
    if parallel.sequence and parallel.tensor == 1:
        yield "`actor.parallel.sequence` needs `actor.parallel.tensor` > 1, which is 1; set sequence to false"


def _check_machine(config: Config, machine: Machine, command: str) -> Iterator[str]:
    local = machine.local_world_size or config.launch.processes or 1
    if machine.gpus and machine.local_world_size and local > machine.gpus:
        yield (
            f"the launcher started {local} processes on this machine, and this one sees {machine.gpus} GPUs: each must see "
            "those of all (vLLM takes the one with the number LOCAL_RANK); start one process per GPU, without "
            "--gpus-per-task and --gpu-bind, and with the same CUDA_VISIBLE_DEVICES for all"
        )
    elif machine.gpus and local > machine.gpus:
        yield (
            f"{local} processes need a GPU each and this machine offers {machine.gpus}; make the layout smaller "
            "(actor.parallel, rollout.tensor_parallel), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU"
        )
    yield from check_rollout_machine(config) if machine.gpus else check_actor_machine(config)
    has_te = importlib.util.find_spec("transformer_engine") is not None
    if machine.gpus and has_te and config.model.dtype == "float32" and config.actor.parallel.context > 1:
        yield (
            f"`actor.parallel.context` is {config.actor.parallel.context}, and Transformer Engine has no attention for "
            "`model.dtype` float32 over several ranks; set model.dtype=bfloat16, or actor.parallel.context=1"
        )
    if not machine.gpus and _generates(config, command):
        yield from check_cpu_engine(config)


# -------------------------------------------------------------------------------------------------- batch and trainer
def _check_batch(config: Config, world: int) -> Iterator[str]:
    trainer, rollout, parallel = config.trainer, config.rollout, config.actor.parallel
    if trainer.prompts_per_step % trainer.minibatches:
        yield (
            f"`trainer.prompts_per_step` ({trainer.prompts_per_step}) must be a multiple of `trainer.minibatches` "
            f"({trainer.minibatches}), so that all updates of a step see as many prompts"
        )
    ranks = max(1, world // (parallel.tensor * parallel.pipeline * parallel.context))
    rollouts = trainer.prompts_per_step // trainer.minibatches * rollout.group_size
    if rollouts < ranks:
        yield (
            f"a minibatch has {rollouts} rollouts (trainer.prompts_per_step {trainer.prompts_per_step} / minibatches "
            f"{trainer.minibatches} x rollout.group_size {rollout.group_size}) for {ranks} data-parallel ranks; give "
            "each at least one: raise prompts_per_step or group_size, or use fewer processes"
        )
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    if config.actor.tokens_per_microbatch < longest:
        yield (
            f"`actor.tokens_per_microbatch` ({config.actor.tokens_per_microbatch}) must hold the longest "
            f"sequence, rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_tokens "
            f"{rollout.max_tokens} = {longest}"
        )


def _check_gradient_variance(config: Config, world: int) -> Iterator[str]:
    if not config.logging.gradient_variance_every:
        return
    trainer, rollout = config.trainer, config.rollout
    key = "`logging.gradient_variance_every`"
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    tokens = trainer.prompts_per_step // trainer.minibatches * rollout.group_size * longest
    parallel, budget = config.actor.parallel, config.actor.tokens_per_microbatch
    replicas = max(1, world // (parallel.tensor * parallel.pipeline * parallel.context))
    # A part of the gradient: a micro-batch; in layouts that split gradients what all replicas have at the same place.
    together = (
        replicas * (parallel.pipeline if parallel.virtual_pipeline > 1 else 1) if parallel.splits_gradients else 1
    )
    if (replicas == 1 or together > 1) and tokens <= budget * together:
        whose = f"{together} that are one part of the gradient" if together > 1 else "one"
        yield (
            f"{key} compares micro-batches, and a whole minibatch of at most {tokens} tokens fits {whose}; lower "
            f"`actor.tokens_per_microbatch` ({budget}) so that there are several"
        )


def _check_trainer(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.eval_rollouts > 1 and trainer.eval_temperature == 0:
        yield (
            f"`trainer.eval_rollouts` is {trainer.eval_rollouts}, and with `trainer.eval_temperature` 0 all of them "
            "would be the same; set a temperature, or eval_rollouts=1"
        )
    if trainer.eval_rollouts == 1 and trainer.eval_temperature > 0:
        yield (
            f"`trainer.eval_temperature` is {trainer.eval_temperature}, but one rollout per prompt is decoded "
            "greedily; set trainer.eval_rollouts > 1, or eval_temperature=0"
        )
    if 0 < trainer.eval_temperature < LEAST_TEMPERATURE:
        yield (
            f"`trainer.eval_temperature` is {trainer.eval_temperature}, and vLLM would draw at {LEAST_TEMPERATURE}, the "
            "least that it has above 0; set it to that or more"
        )
    for k in config.evaluation.pass_k or ():
        if not 1 <= k <= trainer.eval_rollouts:
            yield f"`evaluation.pass_k` has {k}; pass@k needs 1 <= k <= `trainer.eval_rollouts` ({trainer.eval_rollouts})"


# -------------------------------------------------------------------------------------------------- tasks and rewards
def _check_rewards(config: Config, command: str) -> Iterator[str]:
    chosen = config.trainer.eval_reward
    of_evaluation = (f"evaluation.{name}_reward" for name in ("format", "bug", "pass_rate"))
    for key in ("trainer.eval_reward", *of_evaluation):
        name = attrgetter(key)(config)
        if name is not None and name not in config.rewards:
            yield f"`{key}` names {name!r}, which is not one of `rewards` ({', '.join(config.rewards)})"
    for task in config.tasks.eval:
        of_task = [name for name, reward in config.rewards.items() if reward.tasks is None or task in reward.tasks]
        if chosen in config.rewards and chosen not in of_task:
            yield (
                f"`trainer.eval_reward` {chosen!r} is not computed for `tasks.eval.{task}`; add {task} to "
                f"`rewards.{chosen}.tasks`, or set trainer.eval_reward=null to take each task's first reward"
            )
        elif config.rewards and all(config.rewards[name].when_needed for name in of_task):
            yield f"no reward says whether a response to `tasks.eval.{task}` is right; add it to a `rewards.<name>.tasks`"
    if not config.rewards and _generates(config, command):
        yield "`rewards` is empty: name at least one, for example rewards.correct.reward=math"
    tasks = {*config.tasks.train, *config.tasks.eval}
    for name, reward in config.rewards.items():
        for task in reward.tasks if reward.tasks is not None else ():
            if task not in tasks:
                hint = did_you_mean(task, tasks) or "; `tasks` has none"
                yield f"`rewards.{name}.tasks` names the unknown task {task!r}{hint}"
        if reward.tasks == []:
            yield f"`rewards.{name}.tasks` is an empty list: the reward would never be computed; null means all tasks"


def _check_tasks(config: Config, command: str) -> Iterator[str]:
    needed, purpose = ("eval", "evaluate") if command == "evaluate" else ("train", "train")
    if not getattr(config.tasks, needed) and not runs_harness(config, command):
        yield f"`tasks.{needed}` is empty: name at least one task to {purpose} on"
    for split, tasks in (("train", config.tasks.train), ("eval", config.tasks.eval)):
        for name, task in tasks.items():
            create = config.model.create
            if task.chat and create is not None and create.chat_template is None and task.chat_template is None:
                yield (
                    f"`tasks.{split}.{name}.chat`: the model that `model.create` makes has no chat template; write one as "
                    "`model.create.chat_template`, or set chat to false"
                )


# ------------------------------------------------------------------------------------------------------------ outputs
def _no_path(text: str) -> str | None:
    """Why a text cannot name a folder of a run; None where it can."""
    if not text.strip():
        return "is empty"
    if not text.isprintable():
        return "has a line break or another character that cannot be printed"
    if len(os.fsencode(os.path.abspath(text))) > _LONGEST_PATH:
        return f"is longer than {_LONGEST_PATH} bytes, which leaves no room for the files in it"
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in Path(text).parts):
        return f"has a part of more than {_LONGEST_NAME} bytes"
    return None


def _check_checkpoint(config: Config, command: str) -> Iterator[str]:
    section, trainer = config.checkpoint, config.trainer
    if not section.every:  # `check_inactive`
        return
    if not section.keep_best:
        if section.best is not None:
            yield f"`checkpoint.best` {section.best!r} does nothing without checkpoint.keep_best > 0"
        return
    if section.best is None:
        yield "`checkpoint.keep_best` needs checkpoint.best, the metric to choose by, e.g. eval/<task>/avg@1"
        return
    tasks = {name for name in config.tasks.eval if section.best.startswith(f"eval/{name}/")}
    if not tasks:
        yield f"`checkpoint.best` {section.best!r} must be eval/<task>/… of an eval task: {', '.join(config.tasks.eval)}"
    if command == "train" and section.every and trainer.eval_every:
        together = math.lcm(section.every, trainer.eval_every)
        if together >= trainer.steps:
            yield (
                f"`checkpoint.keep_best`: no step before the last has both a checkpoint (every {section.every}) and an "
                f"evaluation (trainer.eval_every {trainer.eval_every}); make one divide the other"
            )


def _check_outputs(config: Config) -> Iterator[str]:
    folder = Path(config.run_dir)
    if (problem := _no_path(config.run_dir)) is not None:
        yield f"`run_dir` {show(config.run_dir)} {problem}; give it a folder, for example runs/mine"
        return
    try:
        existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    except OSError as error:  # a folder above that may not be searched
        yield f"`run_dir`: {error.strerror}: {folder}; choose another folder"
        return
    if not existing.is_dir():
        yield f"`run_dir`: {existing} is a file; choose another folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"`run_dir`: no permission to write in {existing}; choose another folder"
    for key in ("wandb", "mlflow"):
        if getattr(config.logging, key) is not None and importlib.util.find_spec(key) is None:
            yield f"`logging.{key}` needs the package {key}, which is missing; install it, or set logging.{key}=null"
