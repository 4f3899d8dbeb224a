"""The trackers for real, offline. Neither package is in the development environment; to run these:

python -m venv /tmp/trackers && /tmp/trackers/bin/pip install pytest wandb mlflow omegaconf pyyaml
PYTHONPATH=. /tmp/trackers/bin/python -m pytest -c /dev/null --rootdir . tests/trainer/test_trackers.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.trainer.trackers import make_trackers, wandb_place

RECIPE = "recipes/cpu/quickstart.yaml"


def log_twice(run_dir: Path, key: str) -> None:
    """Three rows, then a run that continues from the second and does the third again."""
    config = load_recipe(RECIPE, ["logging.tensorboard=false", f"logging.{key}=name"])
    for done, steps in ((0, (0, 1, 2)), (1, (2, 3))):
        (tracker,) = make_trackers(config, run_dir, done)
        for step in steps:
            tracker.log(step, {"reward/mean": float(step), "eval/sums/avg@1": 0.5})
        tracker.close()


def test_wandb_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_twice(tmp_path, "wandb")
    identity = (tmp_path / "wandb_id").read_text()
    parts = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert {part.name.rpartition("-")[2] for part in parts} == {identity}


def test_mlflow_continues_the_same_run_and_keeps_the_last_value_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'store.db'}")
    log_twice(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    (experiment,) = [one for one in client.search_experiments() if one.name == "name"]
    (run,) = client.search_runs([experiment.experiment_id])
    history = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "reward/mean")]
    assert history == [(0, 0.0), (1, 1.0), (2, 2.0), (2, 2.0), (3, 3.0)]
    assert run.data.metrics["eval/sums/avg_at_1"] == 0.5


# What follows runs everywhere: which run a tracker is asked to open is decided here, not in its package.
def test_a_continued_run_asks_wandb_for_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def init(**given: Any) -> SimpleNamespace:
        asked.append(given)
        return SimpleNamespace(log=lambda *row, step: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log_twice(tmp_path, "wandb")
    assert [call["id"] for call in asked] == 2 * [(tmp_path / "wandb_id").read_text()]
    assert {call["resume"] for call in asked} == {"allow"}
    (tmp_path / "wandb_id").unlink()  # as a run that starts over does
    log_twice(tmp_path, "wandb")
    assert asked[2]["id"] == asked[3]["id"] != asked[0]["id"]


def test_where_wandb_keeps_a_run() -> None:
    alone, swept = Path("runs/maths"), Path("runs/maths/003-trainer.steps=5")
    assert wandb_place("sums", alone, {}) == {"project": "sums", "name": "maths"}
    assert wandb_place("team/sums", swept, {}) == {
        "entity": "team",
        "project": "sums",
        "name": "003-trainer.steps=5",
        "group": "maths",
    }
    own = {"WANDB_NAME": "mine", "WANDB_RUN_GROUP": "ours"}
    assert wandb_place("sums", swept, own) == {"project": "sums"}, "wandb reads them"


def test_a_continued_run_asks_mlflow_for_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []

    def start_run(**given: str) -> SimpleNamespace:
        asked.append(given)
        return SimpleNamespace(info=SimpleNamespace(run_id="r7"))

    nothing = dict.fromkeys(("set_experiment", "log_dict", "log_metrics", "end_run"), lambda *given, **more: None)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(start_run=start_run, **nothing))
    log_twice(tmp_path, "mlflow")
    assert asked == [{"run_name": tmp_path.name}, {"run_id": "r7"}]


def test_tensorboard_shows_a_step_that_was_done_again_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, steps in ((0, (0, 1, 2)), (1, (2, 3))):
        (tracker,) = make_trackers(load_recipe(RECIPE), tmp_path, done)
        for step in steps:
            tracker.log(step, {"reward/mean": 10.0 * done + step})
        tracker.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in shown] == [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0)]
