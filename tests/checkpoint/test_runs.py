"""Runs that end early or begin where another ended: an SFT run at another layout, a new run from a checkpoint's weights, an
export for which there is no room, a newest checkpoint that is damaged, a reference policy from another run's folder."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megatron_rl.checkpoint import manifest, store
from megatron_rl.checkpoint.convert import open_weights
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.trainer.checkpointing import _check_model, _model
from tests.actor.processes import spawn
from tests.checkpoint.ranks import Layout
from tests.checkpoint.test_layouts import contents
from tests.checkpoint.whole_runs import STEPS, STOPPED, run_in_every_way
from tests.conversion.convert import tensors, to_hf
from tests.e2e.job import RECIPE

pytestmark = pytest.mark.slow
BEFORE = Layout(tensor=2)
LAYOUTS = [BEFORE, Layout(pipeline=2), Layout(distributed=False)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    sums = {**RECIPE["tasks"]["train"]["sums"], "size": 40, "exclude": []}
    optimizer = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2}
    recipe = {
        **RECIPE,
        "tasks": {"train": {"sums": sums}},
        "sft": {"steps": STEPS, "batch_size": 8, "log_every": 1, "optimizer": optimizer},
        "checkpoint": {"every": 2, "keep": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    spawn(run_in_every_way, 2, str(folder), LAYOUTS)
    return folder


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def last(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step_{STEPS}"


def test_a_stopped_sft_run_leaves_a_checkpoint_of_its_last_step(root: Path) -> None:
    assert [row["step"] for row in rows(root / "stopped")] == list(range(1, STOPPED + 1))
    newest = store.newest(root / "stopped" / "checkpoints")
    assert newest is not None
    assert newest.name == f"step_{STOPPED}"
    assert not (root / "stopped" / "export").exists()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_it_continues_at_another_layout(root: Path, layout: Layout) -> None:
    want, own = rows(root / "straight"), rows(root / layout.name)
    assert [row["step"] for row in own] == list(range(1, STEPS + 1))
    for a, b in zip(want, own, strict=True):
        assert b["actor/lr"] == a["actor/lr"]
        assert b["sft/tokens"] == a["sft/tokens"], "another batch"
        assert b["sft/loss"] == pytest.approx(a["sft/loss"], rel=1e-5)
    before, after = contents(last(root / "straight")), contents(last(root / layout.name))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        rows_ = min(len(tensor), len(after[name]))
        if layout == BEFORE:
            assert torch.equal(after[name], tensor), name
        else:
            gap = (after[name][:rows_] - tensor[:rows_]).norm() / tensor.norm().clamp(min=1e-30)
            assert float(gap) < 1e-4, (name, float(gap))
    assert (root / layout.name / "export" / "model.safetensors").exists()


# ------------------------------------------------------------------------------------------------ from another's weights
def test_a_checkpoint_is_a_model_that_another_run_starts_from(root: Path) -> None:
    facts, exported = torch.load(root / "anew.pt"), tensors(root / "straight" / "export")
    assert facts["step"] == 0
    assert facts["weights"].keys() == exported.keys()
    assert all(torch.equal(facts["weights"][name], tensor) for name, tensor in exported.items())


def test_a_run_with_another_estimator_is_told_how_to_start_from_it(root: Path) -> None:
    refusal = torch.load(root / "anew.pt")["refusal"]
    assert "is of a run with the estimator 'grpo', the recipe's is 'rloo'" in refusal
    assert f"model.path={last(root / 'straight')}" in refusal


def test_a_checkpoint_converts_wherever_it_lies(root: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.symlink_to(last(root / "straight"))
    assert open_weights(alone).names() == tensors(root / "straight" / "export").keys()
    to_hf(alone, tmp_path / "hf")
    for folder in (tmp_path / "hf", root / "straight" / "export"):
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    names = {path.name for path in (root / "straight" / "export").iterdir()}
    assert names <= {path.name for path in (tmp_path / "hf").iterdir()}


# ------------------------------------------------------------------------------------------------------------- no room
@pytest.mark.parametrize("rank", range(2))
def test_an_export_without_room_is_said_and_the_same_command_makes_it(root: Path, rank: int) -> None:
    facts = torch.load(root / f"full_{rank}.pt")
    assert "export to" in facts["error"]
    assert "safetensors" in facts["error"]
    assert "Make room, then run the same command" in facts["error"]
    assert facts["left"] == []
    assert len(tensors(root / "full" / "export")) > 10


# ----------------------------------------------------------------------------------------------------- the newest damaged
def test_a_run_that_passed_over_its_newest_checkpoint_keeps_what_it_saves_after_that(root: Path) -> None:
    """With `checkpoint.keep` 1 the damaged one, still the newest, would be the only one that stays."""
    aside = root / "damaged" / "previous_1" / "checkpoints"  # where the last start, which starts over, has moved them
    assert sorted(path.name for path in aside.iterdir()) == ["previous_1", f"step_{STEPS - 1}"]
    assert [path.name for path in (aside / "previous_1").iterdir()] == [f"step_{STEPS}"]
    assert store.whole(aside / f"step_{STEPS - 1}") is None


@pytest.mark.parametrize("rank", range(2))
def test_a_requeued_job_goes_on_whatever_its_command_line_said_of_the_first_start(root: Path, rank: int) -> None:
    facts = torch.load(root / f"damaged_{rank}.pt")
    assert facts["requeued"] == STEPS - 1
    assert facts["another"] is False


@pytest.mark.parametrize("rank", range(2))
def test_damaged_weights_are_not_evaluated(root: Path, rank: int) -> None:
    assert "damaged in tensor embedding.word_embeddings.weight" in torch.load(root / f"damaged_{rank}.pt")["evaluation"]


# -------------------------------------------------------------------------------------------------- the reference policy
def test_a_reference_comes_along_from_another_run_folder(root: Path) -> None:
    first, second = torch.load(root / "reference_0.pt")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    digests = store.read_state(root / "there" / "checkpoints" / "step_2")["reference"]
    assert digests == manifest.digests(root / "there" / "reference")


# ------------------------------------------------------------------------------------------------------- another model
@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"rope_theta": 1e4}, "rope_parameters is"),
        ({"rope_theta": 1e6, "factor": 8.0}, "rope_parameters is"),
        (None, ""),
    ],
)
def test_a_checkpoint_of_another_rotary_embedding_is_refused(
    tmp_path: Path, here: dict[str, float] | None, said: str
) -> None:
    """Which changes no tensor's shape; as transformers 5 writes it, it is no plain field."""
    config = {"hidden_size": 64, "rope_parameters": {"rope_theta": 1e6}}
    run: Any = SimpleNamespace(actor=SimpleNamespace(hf_config=config))
    manifest.write(tmp_path, {"model": _model(run)}, {}, [])
    if here is not None:
        run.actor.hf_config = config | {"rope_parameters": here}
    with pytest.raises(CheckpointError, match=said) if here else contextlib.nullcontext():
        _check_model(run, tmp_path)
    older = tmp_path / "older"  # has plain fields only
    older.mkdir()
    manifest.write(older, {"model": {"hidden_size": 64}}, {}, [])
    _check_model(run, older)
