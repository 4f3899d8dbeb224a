"""Inputs of a plan beside the recipe: the model's sizes, the machines, the lengths of responses."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_rl.base.messages import errors_named
from megatron_rl.config import Config, ConfigError, Machine, check, load_recipe
from megatron_rl.config.checks import smallest_world
from megatron_rl.config.published import published_config
from megatron_rl.models import HFConfig, Model, model_of, read_hf_config
from megatron_rl.models.registry import created_config
from megatron_rl.models.text_only import language_model
from megatron_rl.planning.components import GIB, MemoryPlan
from megatron_rl.planning.memory import make_plan
from megatron_rl.planning.simulation.generation_share import SimulatedShare
from megatron_rl.planning.time.calibrate import MeasuredRun, calibrated
from megatron_rl.planning.time.hardware import Hardware
from megatron_rl.planning.time.lengths import Lengths, LogNormal, Recorded, Tokens, read_lengths
from megatron_rl.planning.time.step import Predictor

SPREAD = 0.6  # of responses: standard deviation of the logarithm of their lengths


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs. `host_bytes`: of a node's memory, each GPU's share; None: not known."""

    hardware: Hardware
    gpus_per_node: int
    host_bytes: float | None = None

    @property
    def gpu_bytes(self) -> float:
        return self.hardware.memory_gib * GIB

    def machine(self, nodes: int) -> Machine:
        gpus = self.gpus_per_node
        return Machine(gpus=gpus, world_size=nodes * gpus, local_world_size=gpus)

    def plan(self, config: Config, model: Model, nodes: int) -> MemoryPlan:
        return make_plan(config, model, nodes * self.gpus_per_node, self.gpu_bytes, self.host_bytes)

    def fewest_nodes(self, config: Config, known: HFConfig | None) -> int:
        """The fewest nodes that the layout divides, doubled until it fits by arithmetic (below 1,024)."""
        gpus = self.gpus_per_node
        nodes = fewest = max(1, math.lcm(smallest_world(config), gpus) // gpus)  # 0 of a size that `check` will refuse
        while nodes < 1024:
            with contextlib.suppress(ConfigError):  # a batch may be too small for so many; the caller checks the fewest
                checked = check(config, command="train", machine=self.machine(nodes), model=known)
                alone = replace(self, host_bytes=None)
                if not any(alone.plan(checked, model_of(hf_config_of(checked, known)), nodes).problems()):
                    return nodes
            nodes *= 2
        return fewest


def known_config(config: Config, file: Path | None) -> tuple[HFConfig | None, str]:
    """The config.json to plan with, where it is not in `model.path`; and a remark for the table.

    Raises:
        ConfigError: the file cannot be read, or nothing is known of a model whose folder is not there.
    """
    if file is not None:
        return _read(file), ""
    if config.model.path is None or (folder := Path(os.path.expanduser(config.model.path))).exists():
        return None, ""
    known = published_config(folder.name)
    if known is None:
        raise ConfigError(
            f"`model.path`: {folder} does not exist, and the package knows no published model called {folder.name}; give "
            "its config.json: --model-config FILE"
        )
    return known, f"; sizes of the published {folder.name}, since {folder} does not exist"


def _read(path: Path) -> HFConfig:
    with errors_named(f"--model-config {path} cannot be read", OSError, ValueError, as_error=ConfigError):
        model = json.loads(path.read_text("utf-8"))
        if isinstance(model, dict):
            return language_model(model)
    raise ConfigError(f"--model-config {path} does not hold a JSON object")


def hf_config_of(config: Config, known: HFConfig | None) -> HFConfig:
    """`known`, or what the recipe's `model` says."""
    if known is None and config.model.path is not None:
        known = read_hf_config(config.model.path)
    if known is None:
        assert config.model.create is not None  # `check` requires one of the two
        known = created_config(config.model.create)
    return config.model.completed(known)


@dataclass(frozen=True)
class Responses:
    """The lengths of responses and prompts: as a run has recorded them (`recorded`: its folder or one of its files), or with
    this mean (default: half of `rollout.max_tokens`, a quarter of `rollout.max_prompt_tokens`)."""

    recorded: Path | None = None
    mean: float | None = None
    spread: float = SPREAD
    prompt: float | None = None

    @property
    def is_given(self) -> bool:
        return self.recorded is not None or self.mean is not None

    def lengths(self, config: Config) -> Lengths:
        """Raises ValueError: nothing is recorded there, or a mean that cannot be."""
        limit, longest = config.rollout.max_tokens, config.rollout.max_prompt_tokens
        prompt = longest / 4 if self.prompt is None else self.prompt
        if prompt > longest:
            raise ValueError(f"prompts of {prompt:g} tokens in the mean: rollout.max_prompt_tokens is {longest}")
        if self.recorded is None:
            return Lengths.log_normal(self.mean or limit / 2, limit, spread=self.spread, prompt=prompt)
        return Lengths.recorded(np.concatenate([tokens.ravel() for tokens in self._steps(limit)]), prompt)

    def to_draw(self, mean: float, limit: int) -> LogNormal | Recorded:
        """Whence a simulation draws. `mean`: of what is not recorded."""
        if self.recorded is None:
            return LogNormal(mean, self.spread, limit)
        return Recorded(tuple(group for tokens in self._steps(limit) for group in tokens))

    def _steps(self, limit: int) -> list[Tokens]:
        assert self.recorded is not None
        return list(read_lengths(self.recorded, limit))


def predictor_of(
    config: Config,
    model: Model,
    cluster: Cluster,
    responses: Responses,
    reward_seconds: float | None = None,
    run: Path | None = None,
    drafted_share: float | None = None,
    signal_share: float = 1.0,
) -> Predictor:
    """The predictor of a recipe's steps; with `run`, scaled so that the run's own times come out.

    Raises:
        ConfigError: lengths that cannot be, or a folder that is no run's.
    """
    with errors_named("--response-..., --prompt-tokens, --calibrate", as_error=ConfigError):
        measured = None if run is None else MeasuredRun.read(run)
        share = SimulatedShare(responses.to_draw, signal_share)
        predictor = Predictor(model, cluster.hardware, responses.lengths(config), generation_share=share)
    if measured is not None:
        recipe = load_recipe(measured.folder / "recipe.yaml")
        its_model = model_of(hf_config_of(recipe, known_config(recipe, None)[0]))
        plan = make_plan(recipe, its_model, measured.gpus, cluster.gpu_bytes)
        scaled = calibrated(replace(predictor, model=its_model), measured, recipe, plan)
        lengths = predictor.lengths if responses.is_given else measured.lengths
        if responses.prompt is not None:
            lengths = replace(lengths, prompt=responses.prompt)
        predictor = replace(scaled, model=model, lengths=lengths, drafted_share=measured.drafted_share)
    if drafted_share is not None:
        predictor = replace(predictor, drafted_share=drafted_share)
    return predictor if reward_seconds is None else replace(predictor, reward_seconds=reward_seconds)
