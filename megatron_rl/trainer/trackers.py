"""Trackers of metrics besides `metrics.jsonl`: TensorBoard by default, Weights & Biases or MLflow by a key."""

from __future__ import annotations

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
            project=config.logging.wandb,
            name=run_dir.name,
            id=identity.read_text(),
            resume="allow",
            dir=str(run_dir),
            config=as_tree(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


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
