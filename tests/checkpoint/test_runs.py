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
from megatron_rl.config.schema import Config
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.trainer import adapter_facts as adapters
from megatron_rl.trainer.adapter_facts import AdapterFacts
from megatron_rl.trainer.checkpoints import Checkpoints
from megatron_rl.trainer.compatibility import check_frozen, check_model, model_facts
from megatron_rl.trainer.exports import ReferenceFolder
from megatron_rl.trainer.state import State
from tests.actor.processes import spawn
from tests.checkpoint.ranks import Layout
from tests.checkpoint.test_layouts import contents
from tests.checkpoint.whole_runs import STEPS, STOPPED, run_in_every_way
from tests.conversion.convert import tensors, to_hf
from tests.e2e.job import RECIPE, untimed

pytestmark = pytest.mark.ranks
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
    assert manifest.missing(aside / f"step_{STEPS - 1}") is None


@pytest.mark.parametrize("rank", range(2))
def test_a_requeued_job_goes_on_whatever_its_command_line_said_of_the_first_start(root: Path, rank: int) -> None:
    facts = torch.load(root / f"damaged_{rank}.pt")
    assert facts["requeued"] == STEPS - 1
    assert facts["another"] is False


@pytest.mark.parametrize("rank", range(2))
def test_damaged_weights_are_not_evaluated(root: Path, rank: int) -> None:
    assert "damaged in tensor embedding.word_embeddings.weight" in torch.load(root / f"damaged_{rank}.pt")["evaluation"]


# ----------------------------------------------------------------------------------------------- what is not continued
@pytest.mark.parametrize("rank", range(2))
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over_by_itself(root: Path, rank: int) -> None:
    facts = torch.load(root / f"refused_{rank}.pt")
    assert f"none of the checkpoints in {root / 'refused' / 'checkpoints'} can be continued" in facts["damaged"]
    assert "run the same command with --resume never" in facts["damaged"]
    assert "checkpoints" in facts["left"]
    assert not any(name.startswith("previous_") for name in facts["left"])


@pytest.mark.parametrize("rank", range(2))
def test_a_whole_checkpoint_in_anothers_place_is_passed_over(root: Path, rank: int, tmp_path: Path) -> None:
    facts = torch.load(root / f"refused_{rank}.pt")
    assert "none of the checkpoints" in facts["misplaced"]
    assert "none of the checkpoints" in facts["another run"]
    assert facts["adopted"] == STEPS, "a run folder that does not say which run it is takes the newest whole one"
    folder = root / "straight" / "checkpoints" / f"step_{STEPS}"
    identity = store.read_state(folder)["run"]
    assert len(identity) == 16
    assert (root / "straight" / "run_id").read_text() == identity
    assert store.misplaced(folder, identity) == store.misplaced(folder, None) == []
    assert store.misplaced(folder, "0" * 16) == [f"it is of another run ({identity}; this one is {'0' * 16})"]
    (tmp_path / "step_8").symlink_to(folder)
    assert store.misplaced(tmp_path / "step_8", identity) == [f"it is the checkpoint of step {STEPS}"]


@pytest.mark.parametrize("rank", range(2))
def test_a_checkpoint_of_another_tokenizer_is_refused(root: Path, rank: int) -> None:
    refusal = torch.load(root / f"refused_{rank}.pt")["another tokenizer"]
    assert f"was trained with another tokenizer: tokenizer.json in {root / 'refused' / 'model'}" in refusal


# -------------------------------------------------------------------------------------------------------- the warm-up
@pytest.mark.parametrize("rank", range(2))
def test_a_warm_up_continues_where_it_was_saved(root: Path, rank: int) -> None:
    facts = torch.load(root / f"warm_{rank}.pt", weights_only=False)
    assert facts["continued"] == [0, 0, 2, 4]
    assert facts["warm"] is facts["warm in parts"] is False
    assert "step_4 is of step 4 of the warm-up, and the recipe's has sft.steps = 3" in facts["fewer"]
    assert facts["sft"] == ["metrics.jsonl"], "its checkpoints go when RL has one"


def test_a_warm_up_in_parts_is_the_same_bit_for_bit(root: Path) -> None:
    own, want = (
        [untimed(json.loads(line)) for line in (root / name / "sft" / "metrics.jsonl").read_text().splitlines()]
        for name in ("warm in parts", "warm")
    )
    assert [row["step"] for row in own] == list(range(1, STEPS + 1))
    assert own == want
    # The straight one's are gone; `megatron-rl sft` takes the same steps by the same recipe.
    parts = root / "warm in parts" / "sft" / "checkpoints"
    assert sorted(path.name for path in parts.iterdir()) == ["step_2", "step_4", "step_6"]
    want_, own_ = contents(last(root / "straight")), contents(parts / f"step_{STEPS}")
    assert want_.keys() == own_.keys()
    assert any(name.startswith("optimizer.") for name in want_)
    assert all(torch.equal(own_[name], tensor) for name, tensor in want_.items())
    state = store.read_state(parts / f"step_{STEPS}")
    assert state["progress"] == {"step": 0, "position": 0, "warm_up": STEPS}
    assert state["optimizer_steps"] == STEPS


# -------------------------------------------------------------------------------------------------- one recipe for all
@pytest.mark.parametrize("rank", range(2))
def test_ranks_that_were_given_other_recipes_are_told_the_keys(root: Path, rank: int) -> None:
    assert "ranks 0 and 1 were started with different recipes: sft.batch_size 8 and 9;" in torch.load(
        root / f"unlike_{rank}.pt"
    )


# ------------------------------------------------------------------------------------------------ the estimator's state
@pytest.mark.parametrize("rank", range(2))
def test_a_continued_run_estimates_with_the_state_of_the_steps_before(root: Path, rank: int) -> None:
    facts = torch.load(root / f"awpo_{rank}.pt")
    assert facts["resumed state"] == facts["state"] != facts["fresh state"]
    assert not torch.equal(facts["second only"], facts["both"]), "the state changes the result"
    assert torch.equal(facts["continued"], facts["both"])
    assert facts["progress"] == (3, 25, 6)


# -------------------------------------------------------------------------------------------------- the reference policy
def test_a_reference_comes_along_from_another_run_folder(root: Path) -> None:
    facts = torch.load(root / "reference_0.pt")
    reference, saved = facts["reference"], facts["saved"]
    for other in (facts["at first"], saved):
        assert not any(torch.equal(other[name], tensor) for name, tensor in reference.items())
    for kind in ("here's", "its own"):
        for want, own in (
            (saved, facts[f"continued from {kind}"]),
            (reference, facts[f"reference from {kind}"]),
        ):
            assert want.keys() == own.keys()
            assert all(torch.equal(own[name], tensor) for name, tensor in want.items())
    digests = store.read_state(root / "there" / "checkpoints" / "step_2")["reference"]
    assert digests == manifest.digests(root / "there" / "reference")


def test_a_continued_warm_up_puts_every_checkpoint_of_rl_aside(tmp_path: Path) -> None:
    for step in (0, 1, 2):
        (tmp_path / "rl" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "warm" / f"step_{step}").mkdir(parents=True)
    notes: list[str] = []
    checkpoints: Any = SimpleNamespace(
        root=lambda warm_up: tmp_path / ("warm" if warm_up else "rl"), _report=SimpleNamespace(note=notes.append)
    )
    Checkpoints._set_later_aside(checkpoints, State(warm_up=1, warming_up=True))
    assert sorted(path.name for path in (tmp_path / "rl" / "previous_1").iterdir()) == ["step_0", "step_1", "step_2"]
    assert [path.name for path in (tmp_path / "warm" / "previous_1").iterdir()] == ["step_2"]
    assert notes == [
        f"moved step_2 to {tmp_path / 'warm' / 'previous_1'}",
        f"moved step_2, step_1, step_0 to {tmp_path / 'rl' / 'previous_1'}",
    ]


def test_another_reference_policy_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    """A folder with the right files, of which one has other bytes."""
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "config.json").write_text("{}")
    manifest.write(reference, {}, {}, [])
    written = manifest.digests(reference)
    assert written
    grid = SimpleNamespace(is_main=True, broadcast=lambda found: found)
    actor: Any = SimpleNamespace(grid=grid)
    checkpoint = tmp_path / "checkpoints" / "step_2"
    for digests, said in (
        (dict.fromkeys(written, "0" * 32), rf"{reference}/config\.json is not what was written"),
        ({**written, "model.safetensors": "0" * 32}, rf"{reference}/model\.safetensors is not what was written"),
        (None, rf"{checkpoint} has none"),
    ):
        with pytest.raises(CheckpointError, match=said):
            ReferenceFolder(tmp_path, actor, tmp_path).load(checkpoint, digests)


def test_a_run_that_never_could_write_its_reference_policy_ends_with_an_error(tmp_path: Path) -> None:
    warnings: list[str] = []
    learner: Any = SimpleNamespace(actor=None)
    report: Any = SimpleNamespace(warn=warnings.append)
    checkpoints = Checkpoints(Config(str(tmp_path)), tmp_path, ALONE, tmp_path, learner, report, StepTimer())
    checkpoints._reference = SimpleNamespace(is_due=True, save=lambda: "no room for it")  # type: ignore[assignment]
    checkpoints.save(State(step=1))
    assert warnings == [
        "no room for it; without it no checkpoint can be continued, so none is written; training goes on"
    ]
    assert checkpoints.metrics() == {"checkpoint/failed": 1.0}
    with pytest.raises(CheckpointError, match="no room for it; so no checkpoint was written; make room"):
        checkpoints.finish()


# ------------------------------------------------------------------------------------------------------- another model
ADAPTERS: AdapterFacts = {
    "rank": 4,
    "scale": 2.0,
    "modules": ["q_proj", "v_proj"],
    "experts": False,
    "base": "models/base",
    "base_weights": "0" * 32,
}


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({}, None),
        ({"base": "models/moved"}, None),
        ({"base_weights": "1" * 32}, r"adapters of another model: they were trained beside models/base"),
        ({"rank": 8}, r"actor\.lora\.rank is 4 there and 8 here"),
        ({"scale": 1.0}, r"actor\.lora\.alpha / rank is 2\.0 there and 1\.0 here"),
        ({"modules": ["q_proj"]}, r"actor\.lora\.targets is \['q_proj', 'v_proj'\] there and \['q_proj'\] here"),
        ({"experts": True}, r"actor\.lora\.experts is False there and True here"),
        (None, r"trained adapters only, and this recipe trains every parameter \(actor\.lora is null\)"),
    ],
)
def test_adapters_of_another_kind_or_model_are_refused(
    tmp_path: Path, here: dict[str, Any] | None, said: str | None
) -> None:
    manifest.write(tmp_path, {"adapters": ADAPTERS}, {}, [])
    own: Any = None if here is None else ADAPTERS | here
    with pytest.raises(CheckpointError, match=said) if said else contextlib.nullcontext():
        adapters.check(tmp_path, own)


def test_a_checkpoint_of_every_parameter_is_refused_by_a_run_of_adapters(tmp_path: Path) -> None:
    manifest.write(tmp_path, {}, {}, [])
    adapters.check(tmp_path, None)
    with pytest.raises(CheckpointError, match=r"trained every parameter, and this recipe trains adapters only"):
        adapters.check(tmp_path, ADAPTERS)


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
    manifest.write(tmp_path, {"model": model_facts(config)}, {}, [])
    own = config if here is None else config | {"rope_parameters": here}
    with pytest.raises(CheckpointError, match=said) if here else contextlib.nullcontext():
        check_model(own, tmp_path)
    older = tmp_path / "older"  # has plain fields only
    older.mkdir()
    manifest.write(older, {"model": {"hidden_size": 64}}, {}, [])
    check_model(own, older)


def test_a_checkpoint_whose_tower_was_frozen_goes_on_frozen(tmp_path: Path) -> None:
    for actor in ({"freeze_vision_tower": True}, {}):  # and one from before there was the key
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"actor": actor}))
        check_frozen(bool(actor), tmp_path)
        with pytest.raises(
            CheckpointError, match=f"freeze_vision_tower = {bool(actor)}, whose optimizer has other state"
        ):
            check_frozen(not actor, tmp_path)
