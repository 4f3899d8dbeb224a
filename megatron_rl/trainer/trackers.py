"""Trackers of metrics besides `metrics.jsonl`: TensorBoard by default, Weights & Biases or MLflow by a key."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megatron_rl.config import as_tree
from megatron_rl.config.schema import Config


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Rows of steps that will be done again are hidden.
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb

        identity = run_dir / "wandb_id"
        if not identity.exists():
            identity.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            **wandb_place(config.logging.wandb or "", run_dir, os.environ),
            id=identity.read_text(),
            resume="allow",
            dir=str(run_dir),
            config=as_tree(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


_OF_A_SWEEP = re.compile(r"\d{3}-.*")  # what `launch.job_plan.sweep` calls the folder of a line


def wandb_place(project: str, run_dir: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Entity, project, name and group of a run: `entity/project`, the folder's name, and the sweep's folder for its runs.

    What a variable of wandb's own says (WANDB_ENTITY, WANDB_NAME, WANDB_RUN_GROUP) is left to it.
    """
    entity, slash, name = project.rpartition("/")
    place = {"project": name} | ({"entity": entity} if slash else {})
    if not environment.get("WANDB_NAME"):
        place["name"] = run_dir.name
    if _OF_A_SWEEP.fullmatch(run_dir.name) and not environment.get("WANDB_RUN_GROUP"):
        place["group"] = run_dir.parent.name
    return place


class MLflow:
    def __init__(self, config: Config, run_dir: Path) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(config.logging.mlflow)
        identity = run_dir / "mlflow_id"
        known = identity.read_text() if identity.exists() else None
        run = mlflow.start_run(run_id=known) if known else mlflow.start_run(run_name=run_dir.name)
        identity.write_text(run.info.run_id)
        if known is None:
            mlflow.log_dict(as_tree(config), "recipe.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow allows no @ in names.
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def make_trackers(config: Config, run_dir: Path, step: int) -> list[Tracker]:
    """The trackers that the recipe asks for; `step` is the last one already logged."""
    trackers: list[Tracker] = []
    if config.logging.tensorboard:
        trackers.append(TensorBoard(run_dir, step))
    if config.logging.wandb is not None:
        trackers.append(WandB(config, run_dir))
    if config.logging.mlflow is not None:
        trackers.append(MLflow(config, run_dir))
    return trackers
