"""What ranks do in the tests of this folder: an actor at some layout learns, is saved, is loaded at another layout."""

from __future__ import annotations

import contextlib
import io
import resource
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.checkpoint import manifest, store
from megatron_rl.checkpoint.saver import Saver
from megatron_rl.config.actor import LoRAConfig, OptimizerConfig, ParallelConfig
from megatron_rl.config.schema import Config
from megatron_rl.runtime import distributed
from megatron_rl.seams.megatron import optimizer_parts
from megatron_rl.trainer import adapter_facts as adapters
from tests.actor.layouts import make_batch

UPDATES = 8  # the schedule's length: the rate is 0 at its end


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    distributed: bool = True
    model: str = "model-False"
    dtype: str = "float32"
    moments: str = "float32"
    device: str = "gpu"  # of the optimizer
    lora: int = 0  # rank of the adapters
    dropout: float = 0.0

    @property
    def name(self) -> str:
        kind = "distributed" if self.distributed else "plain"
        order = "-sequence" if self.sequence else ""
        return (
            f"{self.model}-tp{self.tensor}{order}-pp{self.pipeline}x{self.virtual}-cp{self.context}-ep{self.expert}"
            f"x{self.expert_tensor}-{kind}-{self.dtype}{'-moments' if self.moments != 'float32' else ''}"
            f"{'-host' if self.device == 'cpu' else ''}"
            f"{f'-lora{self.lora}' if self.lora else ''}{'-dropout' if self.dropout else ''}"
        )


def make_actor(root: Path, layout: Layout) -> Actor:
    config = Config(run_dir=str(root / "run"))
    config.model.dtype = layout.dtype
    config.actor.parallel = ParallelConfig(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        sequence=layout.sequence,
    )
    config.actor.optimizer = OptimizerConfig(
        lr=1e-3,
        schedule="linear",
        distributed=layout.distributed,
        moments=layout.moments,
        device=layout.device,
    )
    config.actor.tokens_per_microbatch = 192
    if layout.lora:
        config.actor.lora = LoRAConfig(rank=layout.lora, experts="experts" in layout.model, dropout=layout.dropout)
    config.actor.logits_mib = 1
    config.trainer.minibatches = 2
    config.rollout.max_tokens = 40
    actor = Actor(config, distributed.initialize(config.actor.parallel, timeout_minutes=5), root / layout.model)
    actor.start_optimizer(config.actor.optimizer, UPDATES)
    actor.recipe = config  # type: ignore[attr-defined]
    return actor


def learn(actor: Actor, seed: int, groups: int = 6) -> dict[str, float]:
    """Two optimizer steps, by the trainer's own update, on groups of four rollouts. Two are one micro-batch per step."""
    from megatron_rl.algorithms import make_algorithm
    from megatron_rl.runtime.step_timer import StepTimer
    from megatron_rl.trainer.learner import Learner

    algorithm = make_algorithm({"preset": "grpo"}, max_tokens=40)
    learner = Learner(actor.recipe, actor, algorithm, StepTimer())  # type: ignore[attr-defined]
    return learner.update(make_batch(seed, groups), None)


def check_gradients_are_not_copied(actor: Actor) -> None:
    """After an update: what the optimizer has read lies where the gradients were summed."""
    buffers = (b for chunk in actor.ddp_chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers))
    summed = {buffer.grad_data.untyped_storage().data_ptr() for buffer in buffers}
    for part in optimizer_parts(actor.optimizer):
        for weight in part.get_parameters():
            gradient = weight.grad if weight.grad is not None else weight.decoupled_grad  # type: ignore[attr-defined]
            assert gradient.untyped_storage().data_ptr() in summed


def save(actor: Actor, root: Path, step: int, saver: Saver | None = None) -> Saver:
    saver = saver or Saver(root.parent, root, actor.grid, asynchronous=False, after=lambda: None)
    about = {"step": step, "adapters": adapters.facts(actor, actor.folder)}
    saver.submit(step, saver.take(actor.chunks, actor.optimizer), about, {"state.json": b"{}"})
    return saver


def load(actor: Actor, folder: Path, steps: int) -> None:
    store.load(folder, actor.chunks, actor.optimizer, actor.grid)
    actor.optimizer_steps = steps


def close() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def contents(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, put together from its pieces."""
    about, pieces = manifest.read_tensors(folder)
    whole = {
        name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for name, t in about.items() if t.dtype != "object"
    }
    for piece in pieces:
        if piece.name in whole:
            data = (folder / piece.file).read_bytes()[piece.offset : piece.offset + piece.length]
            part = torch.load(io.BytesIO(data), weights_only=True)
            place = tuple(slice(at, at + size) for at, size in zip(piece.start, part.shape, strict=True))
            whole[piece.name][place] = part
    return whole


def save_trained(root: str, layouts: list[Layout]) -> None:
    """Of every layout: two updates, a checkpoint, two more, and another one."""
    for layout in layouts:
        actor, folder = make_actor(Path(root), layout), Path(root) / layout.name
        learn(actor, 0, groups=2)
        saver = save(actor, folder, 1)
        learn(actor, 1, groups=2)
        save(actor, folder, 2, saver)
        assert [outcome.error for outcome in saver.outcomes()] == [None, None]
        close()


def resume_at(root: str, pairs: list[tuple[Layout, Layout]]) -> None:
    """(saved at, loaded at): the first checkpoint loaded and saved again, two updates, and the result saved."""
    for before, after in pairs:
        actor, folder = make_actor(Path(root), after), Path(root) / f"{before.name}--{after.name}"
        load(actor, Path(root) / before.name / "step_1", 2)
        saver = save(actor, folder, 1)
        learn(actor, 1, groups=2)
        save(actor, folder, 2, saver)
        assert [outcome.error for outcome in saver.outcomes()] == [None, None]
        close()


def save_in_every_way(root: str) -> None:
    """Synchronous and asynchronous saves of one run, saves that fail, and loading what does not fit; see test_saving."""
    from megatron_rl.checkpoint import snapshot as snapshots

    folder = Path(root)
    actor = make_actor(folder, Layout(tensor=2))
    learn(actor, 0)
    stored = save(actor, folder / "sync", 1).take(actor.chunks, actor.optimizer)
    weights = {weight.untyped_storage().data_ptr() for chunk in actor.chunks for weight in chunk.parameters()}
    written = {data.untyped_storage().data_ptr() for _, data in stored.items if isinstance(data, Tensor)}
    held, write = threading.Event(), snapshots.write_share

    def write_when_told(*arguments: Any) -> Any:
        assert held.wait(120)
        return write(*arguments)

    beside = Saver(folder, folder / "async", actor.grid, asynchronous=True, after=lambda: None)
    snapshots.write_share = write_when_told
    save(actor, folder, 1, beside)
    facts: dict[str, Any] = {"busy": beside.busy(), "there": (folder / "async" / "step_1").exists()}
    learn(actor, 1)
    held.set()
    beside.drain()
    snapshots.write_share = write
    facts["busy after"] = beside.busy()
    facts["uncopied"] = bool(weights & written)
    save(actor, folder, 2, beside)
    learn(actor, 2)
    beside.drain()
    save(actor, folder, 3, beside)
    beside.drain()
    facts["outcomes"] = [(outcome.step, outcome.error) for outcome in beside.outcomes()]

    def broken_on_rank_1(snapshot: Any, place: Path, rank: int) -> Any:
        if rank == 1:
            raise OSError(5, "Input/output error", str(place))
        return write(snapshot, place, rank)

    def out_of_memory_on_rank_1(snapshot: Any, place: Path, rank: int) -> Any:
        if rank == 1:
            raise MemoryError("no memory")
        return write(snapshot, place, rank)

    snapshots.write_share = broken_on_rank_1
    save(actor, folder, 4, beside)
    beside.drain()
    snapshots.write_share = out_of_memory_on_rank_1
    away = mock.patch("shutil.disk_usage", side_effect=OSError(116, "Stale file handle"))
    with away if actor.grid.rank == 1 else contextlib.nullcontext():
        save(actor, folder, 9, beside)
        beside.drain()
    snapshots.write_share = write
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    save(actor, folder, 5, beside)
    beside.drain()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if (folder / "tiny").exists():
        small = Saver(folder, folder / "tiny", actor.grid, asynchronous=True, after=lambda: None)
        save(actor, folder, 6, small)
        small.drain()
        facts["no room"] = [outcome.error for outcome in small.outcomes()]
    save(actor, folder, 7, beside)
    beside.drain()
    facts["failures"] = {outcome.step: outcome.error for outcome in beside.outcomes()}
    facts["last"] = beside.last_step
    torch.save(facts, folder / f"facts_{actor.grid.rank}.pt")
    close()


def try_to_load(root: str, layout: Layout, folders: list[str], hostile: list[str]) -> None:
    """What loading each of the folders says; the weights must still be those of before, but for `hostile` ones."""
    actor, said = make_actor(Path(root), layout), {}
    before = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
    for folder in folders:
        try:
            store.load(Path(folder), actor.chunks, actor.optimizer, actor.grid)
            said[folder] = "loaded"
        except store.CheckpointError as error:
            said[folder] = str(error)
            assert all(torch.equal(before[name], tensor) for name, tensor in actor.iter_hf_weights())
    for folder in hostile:
        for what, read in (
            ("all", partial(store.load, optimizer=actor.optimizer, grid=actor.grid)),
            ("model", store.load_model),
        ):
            try:
                read(Path(folder), chunks=actor.chunks)
                said[f"{what} of {folder}"] = "loaded"
            except store.CheckpointError as error:
                said[f"{what} of {folder}"] = str(error)
    changed = OptimizerConfig(lr=1e-3, betas=[0.5, 0.6], eps=1e-5, weight_decay=0.3, distributed=layout.distributed)
    actor.start_optimizer(changed, UPDATES)
    load(actor, Path(folders[-1]), 2)
    groups = actor.optimizer.param_groups
    said["groups"] = str([(tuple(group["betas"]), group["eps"], group["weight_decay"]) for group in groups])
    torch.save(said, Path(root) / f"said_{layout.name}_{actor.grid.rank}.pt")
    close()
