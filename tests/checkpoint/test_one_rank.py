"""Saving and loading with one rank, in this process: both optimizers, saves that fail, what waited for what. The other files
of this folder do it with several ranks."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.checkpoint import gather_optimizer as gather
from megatron_rl.checkpoint import manifest, store
from megatron_rl.checkpoint import snapshot as snapshots
from megatron_rl.checkpoint.convert.layout import state_names
from megatron_rl.checkpoint.convert.reader import MASTERS
from megatron_rl.checkpoint.convert.source import SourceModel
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.saver import Saver
from megatron_rl.checkpoint.snapshot import Snapshot
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.weights.create import create_model
from tests.actor.layouts import SHAPE
from tests.checkpoint import ranks
from tests.checkpoint.ranks import Layout
from tests.checkpoint.test_layouts import contents

DISTRIBUTED, PLAIN = Layout(), Layout(distributed=False)
BF16, BF16_PLAIN = replace(DISTRIBUTED, dtype="bfloat16"), replace(PLAIN, dtype="bfloat16")
STEP = "step_1"


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[ProcessGrid]:
    """A process group of this process, and a gather that takes several rounds even for small models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        patch.setattr(gather, "_STAGED", 1000)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield ProcessGrid(0, 1, 1, 0, 1, 0, 1, 0, 1, 0, dist.group.WORLD)
        finally:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind a checkpoint after two updates, and one after two more."""
    folder = tmp_path_factory.mktemp("one")
    create_model(
        folder / DISTRIBUTED.model, CreateModelConfig(**{**vars(SHAPE), "layers": 2, "init_std": 0.15}), seed=5
    )
    ranks.save_trained(str(folder), [DISTRIBUTED, PLAIN, BF16, BF16_PLAIN])
    return folder


def made(root: Path, layout: Layout) -> Iterator[Actor]:
    actor = ranks.make_actor(root, layout)
    try:
        yield actor
    finally:
        ranks.close()


@pytest.fixture
def actor(root: Path) -> Iterator[Actor]:
    yield from made(root, DISTRIBUTED)


# ------------------------------------------------------------------------------------------------------- both optimizers
PAIRS = [(DISTRIBUTED, DISTRIBUTED), (PLAIN, PLAIN), (DISTRIBUTED, PLAIN), (PLAIN, DISTRIBUTED)]
PAIRS += [(BF16, BF16_PLAIN), (BF16_PLAIN, BF16)]


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda layout: layout.name)
def test_either_optimizer_continues_what_either_has_saved(root: Path, before: Layout, after: Layout) -> None:
    ranks.resume_at(str(root), [(before, after)])
    own = root / f"{before.name}--{after.name}"
    for step in (1, 2):  # as it was loaded, and after two more updates
        want, found = contents(root / before.name / f"step_{step}"), contents(own / f"step_{step}")
        assert want.keys() == found.keys()
        for name, tensor in want.items():
            if step == 2 and before != after:  # sums in another order
                torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
            else:
                assert torch.equal(found[name], tensor), name


def test_the_steps_of_an_optimizer_are_those_it_has_taken(root: Path, actor: Actor) -> None:
    """A checkpoint of the other optimizer says them in another place."""
    for saved in (DISTRIBUTED, PLAIN):
        store.load(root / saved.name / "step_2", actor.chunks, actor.optimizer, actor.grid)
        taken = {float(step) for step in store._steps(actor.optimizer.state_dict())}
        assert taken == {4.0}


@pytest.mark.parametrize(("before", "after"), [*PAIRS, (BF16_PLAIN, BF16_PLAIN)], ids=lambda layout: layout.name)
def test_a_run_that_was_stopped_before_its_first_update_continues(
    root: Path, tmp_path: Path, before: Layout, after: Layout
) -> None:
    for actor in made(root, before):
        ranks.save(actor, tmp_path / "stopped", 0)
    for actor in made(root, after):
        ranks.load(actor, tmp_path / "stopped" / "step_0", 0)
        assert {float(step) for step in store._steps(actor.optimizer.state_dict())} == {0.0}
        ranks.learn(actor, 0, groups=2)
        saver = ranks.save(actor, tmp_path / "continued", 1)
        assert [outcome.error for outcome in saver.outcomes()] == [None]
    want, found = contents(root / after.name / STEP), contents(tmp_path / "continued" / STEP)
    assert want.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


def test_the_recipes_numbers_win_over_the_checkpoints(root: Path, actor: Actor) -> None:
    [group, *_] = actor.optimizer.param_groups
    group |= {"betas": (0.5, 0.6), "eps": 1e-5, "weight_decay": 0.3}
    store.load(root / DISTRIBUTED.name / STEP, actor.chunks, actor.optimizer, actor.grid)
    [group, *_] = actor.optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 1e-5, 0.3)


# ------------------------------------------------------------------------------------------------------ what does not fit
VICTIM = "decoder.layers.mlp.linear_fc2.weight"


def relisted(source: Path, target: Path, changes: dict[str, dict[str, Any] | None]) -> Path:
    """A copy whose list of tensors says something else: another one, or none."""
    shutil.copytree(source, target)
    content = json.loads((target / manifest.TENSORS).read_text())
    for name, change in changes.items():
        content["tensors"].pop(name, None)
        if change is not None:
            content["tensors"][name] = change
            content["pieces"].append([name, [0], "__0_0.distcp", 0, 4, ""])
    (target / manifest.TENSORS).write_text(json.dumps(content))
    return target


FOUND = {
    "missing": ({VICTIM: None}, [f"it has no tensor {VICTIM}"]),
    "more": ({"extra": {"shape": [1], "dtype": "float32"}}, ["__0_0.distcp has tensor extra, which the model has not"]),
    "dtype": ({VICTIM: {"shape": [2, 64, 96], "dtype": "bfloat16"}}, [f"tensor {VICTIM} in __0_0.distcp is bfloat16"]),
    "shape": (
        {VICTIM: {"shape": [2, 64, 97], "dtype": "float32"}},
        [f"tensor {VICTIM} in __0_0.distcp has the shape [2, 64, 97], the model wants [2, 64, 96]"],
    ),
}


@pytest.mark.parametrize("change", FOUND)
def test_what_does_not_fit_is_refused_before_anything_is_changed(
    root: Path, tmp_path: Path, actor: Actor, change: str
) -> None:
    changes, said = FOUND[change]
    folder = relisted(root / DISTRIBUTED.name / STEP, tmp_path / STEP, changes)
    before = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
    with pytest.raises(store.CheckpointError) as refusal:
        store.load(folder, actor.chunks, actor.optimizer, actor.grid)
    assert all(part in str(refusal.value) for part in (str(folder), *said))
    assert all(torch.equal(before[name], tensor) for name, tensor in actor.iter_hf_weights())


def test_an_fp32_weight_that_a_checkpoint_has_twice_need_not_be_read_twice(root: Path, actor: Actor) -> None:
    """The plain optimizer of an fp32 model keeps no copy of the weights; the distributed one does."""
    saved, _ = manifest.read_tensors(root / DISTRIBUTED.name / STEP)
    copy = "optimizer.state.param." + VICTIM
    assert copy in saved
    assert store._is_copy(copy, saved)
    assert not store._is_copy(copy, saved | {VICTIM: replace(saved[VICTIM], dtype="bfloat16")})
    assert not store._is_copy(copy, {copy: saved[copy]})
    assert not store._is_copy("optimizer.state.exp_avg." + VICTIM, saved)


def test_the_model_alone(root: Path, actor: Actor) -> None:
    store.load_model(root / PLAIN.name / "step_2", actor.chunks)
    want = contents(root / PLAIN.name / "step_2")["output_layer.weight"]
    assert torch.equal(dict(actor.iter_hf_weights())["lm_head.weight"], want[: SHAPE.vocab_size])


def renamed(source: Path, target: Path, name: str, other: str) -> Path:
    """A copy without the list of tensors, whose index has a tensor under another name."""
    shutil.copytree(source, target)
    (target / manifest.TENSORS).unlink()
    metadata = pickle.loads((target / ".metadata").read_bytes())
    metadata.state_dict_metadata[other] = metadata.state_dict_metadata.pop(name)
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        metadata.storage_data[type(index)(other, index.offset)] = metadata.storage_data.pop(index)
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    return target


@pytest.mark.parametrize("layout", [BF16, BF16_PLAIN], ids=lambda layout: layout.name)
def test_a_conversion_of_the_masters_refuses_one_that_no_weight_has(root: Path, tmp_path: Path, layout: Layout) -> None:
    """Other state of the optimizer is none of its business."""
    saved, _ = manifest.read_tensors(root / layout.name / STEP)
    prefix = next(prefix for prefix in MASTERS if any(name.startswith(prefix) for name in saved))
    for name in (f"optimizer.state.exp_avg.{VICTIM}", prefix + VICTIM):
        folder = renamed(root / layout.name / STEP, tmp_path / name, name, f"{name}.more")
        refused = pytest.raises(ValueError, match=f"it holds unexpected {re.escape(name)}.more")
        with refused if name.startswith(prefix) else contextlib.nullcontext():
            ToHF(folder, root / layout.model, master=True).names()


def test_a_conversion_has_every_extra_state_that_a_model_asks_for(root: Path, actor: Actor) -> None:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    model = SourceModel.read(root / DISTRIBUTED.model)
    state = nested_values(snapshots.sharded_model(actor.chunks))
    asked = {value.unique_key for value in state if isinstance(value, ShardedObject)}
    assert "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2" in asked
    assert asked <= set(state_names(model))


# ----------------------------------------------------------------------------------------------------------------- saves
class Writer:
    """The writing of a share, as slow and as broken as it is told."""

    def __init__(self) -> None:
        self.go, self.failure = threading.Event(), None
        self._write = snapshots.write_share

    def __call__(self, snapshot: Snapshot, folder: Path, rank: int) -> list[snapshots.Written]:
        assert self.go.wait(60)
        if self.failure is not None:
            raise self.failure
        return self._write(snapshot, folder, rank)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    writer = Writer()
    monkeypatch.setattr(snapshots, "write_share", writer)
    return writer


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_a_save_says_of_itself(tmp_path: Path, actor: Actor, writer: Writer, asynchronous: bool) -> None:
    done: list[list[str]] = []
    names = lambda: sorted(path.name for path in tmp_path.iterdir())  # noqa: E731
    saver = Saver(tmp_path, tmp_path, actor.grid, asynchronous, after=lambda: done.append(names()))
    begin = time.perf_counter()
    snapshot = saver.take(actor.chunks, actor.optimizer)
    taken = time.perf_counter() - begin
    threading.Timer(0.5, writer.go.set).start()
    saver.submit(7, snapshot, {"step": 7}, {"templates/chat.jinja": b"x", "state.json": b"{}"})
    if asynchronous:
        assert saver.busy()
        assert saver.outcomes() == []
        assert names() in ([], [".step_7.writing"])
    saver.take(actor.chunks, actor.optimizer)  # waits
    [outcome] = saver.outcomes()
    assert (outcome.step, outcome.error) == (7, None)
    assert outcome.num_bytes == sum(len(d) if isinstance(d, bytes) else d.nbytes for _, d in snapshot.items) > 1e5
    assert outcome.seconds > 0.2
    if asynchronous:
        assert 0 < outcome.blocked < taken
    else:
        assert outcome.blocked > outcome.seconds
    assert not saver.busy()
    assert saver.last_step == 7
    assert done == [["step_7"]] == [names()]
    assert (tmp_path / "step_7" / "templates" / "chat.jinja").read_bytes() == b"x"
    assert manifest.read(tmp_path / "step_7")["step"] == 7
    assert manifest.verify(tmp_path / "step_7") == []
    saver.close()


def test_a_failed_save_is_not_the_last_one_and_leaves_nothing(tmp_path: Path, actor: Actor, writer: Writer) -> None:
    writer.go.set()
    saver = Saver(tmp_path, tmp_path, actor.grid, False, after=lambda: None)
    snapshot = saver.take(actor.chunks, actor.optimizer)

    def save(step: int) -> str | None:
        saver.submit(step, snapshot, {"step": step}, {})
        [outcome] = saver.outcomes()
        return outcome.error

    writer.failure = OSError(5, "Input/output error")
    assert re.fullmatch(
        rf"writing failed with OSError: \[Errno 5\] Input/output error \({tmp_path} has .* free\)", str(save(1))
    )
    assert saver.last_step is None
    writer.failure = None
    assert save(2) is None
    assert saver.last_step == 2
    snapshot.metadata = None  # what rank 0 lacks is found when the rest is written
    assert str(save(3)).startswith("writing failed with AssertionError: rank 0 has it")
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    saver.close()


def test_a_save_needs_room_for_its_tensors(tmp_path: Path, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, tmp_path / "checkpoints", actor.grid, False, after=lambda: None)
    snapshot = saver.take(actor.chunks, actor.optimizer)
    for free, fits in ((snapshot.num_bytes, True), (snapshot.num_bytes - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        saver.submit(1, snapshot, {}, {})
        [outcome] = saver.outcomes()
        assert (outcome.error is None) is fits
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    assert re.fullmatch(rf"it needs .* and {tmp_path}/checkpoints has .* free", str(outcome.error))
    saver.close()


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path, actor: Actor) -> None:
    saver = Saver(tmp_path, tmp_path, actor.grid, False, after=lambda: None)
    (tmp_path / ".step_1.old").mkdir()  # a save was killed between its two renames
    (tmp_path / ".step_1.old" / "left").touch()
    (tmp_path / ".step_1.writing").mkdir()
    (tmp_path / ".step_1.writing" / "left").touch()
    for content in (b"first", b"second"):
        saver.submit(1, saver.take(actor.chunks, actor.optimizer), {}, {"state.json": content})
        assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
        assert (tmp_path / "step_1" / "state.json").read_bytes() == content
        assert not (tmp_path / "step_1" / "left").exists()
    assert [outcome.error for outcome in saver.outcomes()] == [None, None]
    saver.close()


def test_a_snapshot_takes_the_memory_of_the_one_before_and_none_of_the_models(tmp_path: Path, actor: Actor) -> None:
    saver = Saver(tmp_path, tmp_path, actor.grid, True, after=lambda: None)
    first = saver.take(actor.chunks, actor.optimizer)
    kept = {index: tensor.clone() for index, tensor in first.items if isinstance(tensor, Tensor)}
    ranks.learn(actor, 0)
    assert all(torch.equal(kept[index], tensor) for index, tensor in first.items if isinstance(tensor, Tensor))
    second = saver.take(actor.chunks, actor.optimizer)
    places = [{i: t.data_ptr() for i, t in taken.items if isinstance(t, Tensor)} for taken in (first, second)]
    assert places[0] == places[1]
    changed = [index.fqn for index, tensor in second.items if index in kept and not torch.equal(kept[index], tensor)]
    assert VICTIM in changed
    assert f"optimizer.state.exp_avg.{VICTIM}" in changed
    saver.close()


# ---------------------------------------------------------------------------------------------------------------- gather
def test_copying_what_both_have() -> None:
    """Against plain loops, for random disjoint spans on both sides."""
    drawn = random.Random(0)
    for _ in range(200):
        spans = []
        for _ in range(2):
            cuts = sorted(drawn.sample(range(40), 2 * drawn.randrange(1, 8)))
            spans.append([(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True)])
        sources = [(a, b, torch.arange(a, b)) for a, b in spans[0]]
        targets = [(a, b, torch.full((b - a,), -1)) for a, b in spans[1]]
        gather._copy_overlap(sources, targets)
        had = {place for a, b in spans[0] for place in range(a, b)}
        for start, stop, tensor in targets:
            assert tensor.tolist() == [place if place in had else -1 for place in range(start, stop)]
