"""One case: two optimizer steps at its layout, or four with a checkpoint between them, against the same in one process."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_rl.actor import build
from megatron_rl.actor.actor import Actor
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch, TrainBatch
from megatron_rl.models import model_of, read_hf_config
from megatron_rl.models.lora import adapters_of
from megatron_rl.weights.files import SafetensorsFolder, save_tensors
from megatron_rl.weights.load_hf import load_hf_weights
from tests import tolerance
from tests.actor.layouts import distance, in_parts, refuse_what_is_avoided
from tests.actor.lora import scores
from tests.actor.processes import spawn
from tests.checkpoint import ranks
from tests.checkpoint.test_layouts import contents
from tests.models import seeing, tiny

from .cases import SEEING, Case, Cut, config_of, of_seeing
from .faults import FAULTS
from .smaller import command

Results = dict[str, Any]
# A drawn model may blow roundings up, so that no bound for all holds. Of one that is off, by how much is measured: weights
# are changed by a rounding each, up or down, four times, as one may change a number by nothing, and twelve times more where
# it is still off. A number has four thousand roundings and more behind it, by their root 64: of 5,000 draws one was off by 51
# times as much, and seven of the same layout with other weights were within the bounds.
SHAKEN, SHAKES, ROUNDING = 64.0, 4, 2**-23


# ------------------------------------------------------------------------------------------------------------- on ranks
def run(root: str, cases: Sequence[Case], alone: bool, fault: str = "", shake: int = 0) -> None:
    """One rank of every case in turn; the first saves what came of it. `alone`: what others are compared with. `shake`: of
    those in which its weights are off by a rounding each, which."""
    refuse_what_is_avoided()
    if fault:
        FAULTS[fault]()
    for case in cases:
        try:
            name = f"shaken_{shake}" if shake else "alone" if alone else "own"
            result = _learned(Path(root) / str(case.number), case, name, shake)
        except Exception as error:
            error.add_note(f"again with: {command(case)}")
            raise
        if result is not None:
            torch.save(result, Path(root) / str(case.number) / f"{name}.pt")


def _learned(folder: Path, case: Case, name: str, shake: int) -> Results | None:
    alone = name != "own"
    batches = pickle.loads((folder / "batches.pkl").read_bytes())
    config, actor = _started(folder, case, case.cut, shake)
    result: Results = {"log_probs": scores(actor, batches[0].sequences), "marks": _wrong_marks(actor)}
    if alone:
        result["start"] = _tensors(actor)
    with _unawaited(actor) as result["unawaited"]:
        metrics = [_update(config, actor, batches[0], case.aggregation)]
    if case.then is not None:
        saver = ranks.save(actor, folder / f"{name}_saved", 1)
    if alone and case.then is not None:
        metrics.append(_update(config, actor, batches[1], case.aggregation))
    elif case.then is not None:
        ranks.close()
        config, actor = _started(folder, case, case.then)
        ranks.load(actor, folder / "own_saved" / "step_1", 2)
        saver = ranks.save(actor, folder / "again_saved", 1)
        result["saves"] = [outcome.error for outcome in saver.outcomes()]
        metrics.append(_update(config, actor, batches[1], case.aggregation))
    result |= {"metrics": metrics, "end": _tensors(actor)}
    is_main = actor.grid.is_main
    ranks.close()
    return result if is_main else None


def _started(folder: Path, case: Case, cut: Cut, shake: int = 0) -> tuple[Config, Actor]:
    from megatron_rl.runtime import device, distributed

    config = config_of(case, str(folder / "run"), cut)
    if case.bucket:
        build.DistributedDataParallelConfig = partial(DistributedDataParallelConfig, bucket_size=case.bucket)
    else:
        build.DistributedDataParallelConfig = DistributedDataParallelConfig
    actor = Actor(config, distributed.initialize(config.actor.parallel, timeout_minutes=2), folder / "model")
    if actor.adapters is not None:
        begin = SafetensorsFolder(folder / "adapters")
        with device.megatron():
            load_hf_weights(actor.chunks, actor.adapters.family, actor.hf_config, begin, actor.parallel)
    if shake:
        _shake(actor, [case.number, shake])
    actor.keep_reference()
    actor.start_optimizer(config.actor.optimizer, 4)
    return config, actor


def _wrong_marks(actor: Actor) -> list[str]:
    """Parameters, of all ranks, that tensor-parallel ranks have parts of and that are not marked so, or the other way round:
    the norm of the gradients goes by the marks, and a small one's share of it hides in rounding."""
    from megatron.core import parallel_state

    wrong = set[str]()
    for chunk in actor.chunks:
        for name, parameter in chunk.named_parameters():
            group = actor.parallel.tp.group
            if not getattr(parameter, "allreduce", True):  # an expert's
                group = parallel_state.get_expert_tensor_parallel_group()
            if group.size() == 1:
                continue
            parts = [torch.empty_like(parameter) for _ in range(group.size())]
            torch.distributed.all_gather(parts, parameter.detach().contiguous(), group=group)
            is_cut = any(not torch.equal(part, parts[0]) for part in parts)
            if is_cut != bool(getattr(parameter, "tensor_model_parallel", False)):
                wrong.add(name)
    of_ranks: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, wrong)
    return sorted(set.union(*of_ranks))


@contextlib.contextmanager
def _unawaited(actor: Actor) -> Iterator[list[str]]:
    """Modules, of all ranks, whose weights are not waited for within, where they are gathered while others are computed: what
    is read then may be old, and is seldom old enough for a number to tell."""
    unawaited, waits = set[str](), list[RemovableHandle]()

    def seen(name: str, module: nn.Module, _: object) -> None:
        unawaited.discard(name)

    for chunk in actor.ddp_chunks:
        for name, module in chunk.named_modules():
            weights = module.parameters(recurse=False)
            if module in chunk.remove_forward_pre_hook_handles and any(
                w in chunk.param_to_bucket_group for w in weights
            ):
                unawaited.add(name)
                waits.append(module.register_forward_pre_hook(partial(seen, name)))
    found = list[str]()
    yield found
    for wait in waits:
        wait.remove()
    of_ranks: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, unawaited)
    found += sorted(set.union(*of_ranks))


@torch.no_grad()
def _shake(actor: Actor, seed: Sequence[int]) -> None:
    rng = np.random.default_rng(seed)
    for chunk in actor.chunks:
        for parameter in chunk.parameters():
            signs = torch.from_numpy(rng.integers(2, size=parameter.shape) * 2 - 1)
            parameter.mul_(1 + signs * ROUNDING)


def _update(config: Config, actor: Actor, batch: TrainBatch, aggregation: str) -> dict[str, float]:
    from megatron_rl.algorithms import make_algorithm
    from megatron_rl.runtime.step_timer import StepTimer
    from megatron_rl.trainer.learner import Learner

    section = {"preset": "grpo", "aggregation": aggregation}
    algorithm = make_algorithm(section, max_tokens=config.rollout.max_tokens)
    return Learner(config, actor, algorithm, StepTimer()).update(batch, None)


def _tensors(actor: Actor) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
    return found | {name: tensor.clone() for name, tensor in actor.iter_adapters()} if actor.adapters else found


# --------------------------------------------------------------------------------------------------------- its material
def make(folder: Path, case: Case) -> None:
    """The model of a case, two batches, and adapters of which neither factor is zero."""
    if case.family in SEEING:
        seeing.write(folder / "model", kind=case.family, seed=case.number, **of_seeing(case.sizes))
    else:
        tiny.write(folder / "model", case.family, case.number, **case.sizes)
    batches = [batch_of(case, seed, folder / "model") for seed in range(2)]
    (folder / "batches.pkl").write_bytes(pickle.dumps(batches))
    lora = config_of(case).actor.lora
    if lora is None:
        return
    adapters, generator = adapters_of(model_of(read_hf_config(folder / "model")), lora), torch.Generator()
    generator.manual_seed(case.number)
    values = {
        tensor.name: torch.randn(tensor.sizes(adapters.dims), generator=generator) * 0.2
        for rule in adapters.weights()
        for tensor in rule.hf
    }
    (folder / "adapters").mkdir()
    save_tensors(folder / "adapters" / "adapter_model.safetensors", values)


def batch_of(case: Case, seed: int, model: Path) -> TrainBatch:
    """Rollouts of very different lengths, some of several sequences or with images, with advantages of either sign."""
    rng, vocab = np.random.default_rng([case.number, seed]), case.sizes["vocab_size"]
    if case.family in SEEING:
        sequences = seeing.batch(model)
        return _train_batch(case, sequences, [int(mask.sum()) for mask in sequences.loss_mask.values()], rng)
    count = case.groups * case.group_size
    prompts = [rng.integers(2, vocab, size=rng.integers(2, 10)) for _ in range(case.groups)]
    responses = [rng.integers(2, vocab, size=rng.integers(1, 25)) for _ in range(count)]
    pairs = [(prompts[row // case.group_size], responses[row]) for row in range(count)]
    sequences = in_parts(pairs, range(0, count, 3))
    return _train_batch(case, sequences, [len(ids) for ids in responses], rng)


def _train_batch(case: Case, sequences: TokenBatch, lengths: Sequence[int], rng: np.random.Generator) -> TrainBatch:
    """`lengths`: response tokens of each rollout."""
    if case.replay == "rollout":
        sequences.experts = _chosen(case, sequences, rng)
    advantages = rng.normal(size=len(lengths)).astype(np.float32)
    return TrainBatch(
        sequences=sequences,
        rollout_logprobs={row: rng.normal(-4, 0.3, size=n).astype(np.float32) for row, n in enumerate(lengths)},
        advantages={row: np.full(n, advantages[row]) for row, n in enumerate(lengths)},
        group=np.arange(len(lengths)) // case.group_size,
    )


def _chosen(case: Case, sequences: TokenBatch, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Experts of every token and layer, at random."""
    layers, sizes = case.sizes["num_hidden_layers"], {"num_experts": 4, "num_experts_per_tok": 2} | case.sizes
    top = sizes["num_experts_per_tok"]
    experts = next(sizes[k] for k in ("n_routed_experts", "num_local_experts", "num_experts") if k in sizes)
    tokens = rng.random((sum(sequences.lengths), layers, experts)).argsort(axis=2)[..., :top].astype(np.uint8)
    return dict(enumerate(np.split(tokens, np.cumsum(sequences.lengths)[:-1])))


# ----------------------------------------------------------------------------------------------------------- comparison
def times(case: Case) -> float:
    """How many of `tolerance`'s bounds a case may be off: those are of 6 layers, 80 terms to a product and two updates."""
    terms = max(case.sizes["hidden_size"], case.sizes["intermediate_size"], case.sizes["vocab_size"])
    work = case.sizes["num_hidden_layers"] / 6 * terms / 80 * (1 if case.then is None else 2)
    return max(1.0, math.sqrt(work)) * (tolerance.GATED_DELTA if case.family.startswith("qwen3_5") else 1.0)


def differences(case: Case, folder: Path) -> list[str]:
    """What of a case is not what one process makes of it: beyond the bounds, and beyond what roundings of its weights change,
    where that was measured."""
    own, want = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("own", "alone"))
    shakes = [torch.load(path, weights_only=True) for path in sorted(folder.glob("shaken_*.pt"))]
    bound, found = times(case) * tolerance.RELATIVE, [f"the mark of {name}: cut, or whole" for name in own["marks"]]
    found += [f"the weights of {name}: read before they are gathered" for name in own["unawaited"]]
    for number, (mine, theirs) in enumerate(zip(own["metrics"], want["metrics"], strict=True)):
        for name in tolerance.differing(mine, theirs, times(case)):
            at = theirs.get(name, math.nan)
            moved = max((abs(shaken["metrics"][number].get(name, math.nan) - at) for shaken in shakes), default=0.0)
            if not abs(mine.get(name, math.nan) - at) <= SHAKEN * moved:
                found.append(f"{name} of batch {number}: {mine.get(name)}, alone {theirs.get(name)}")
    for row, theirs in want["log_probs"].items():
        off, *moves = (float((each["log_probs"][row] - theirs).abs().max()) for each in (own, *shakes))
        if off > max(times(case) * tolerance.LOG_PROB, SHAKEN * max(moves, default=0.0)):
            found.append(f"log-probs of rollout {row} by {off:.1e}")
    for name, theirs in want["end"].items():
        mine, start = own["end"][name], want["start"][name]
        # A weight keeps no more digits of its change than it has itself: one rounding of each step, of either process.
        rounding = 2**-24 * 2 * len(want["metrics"]) * float(theirs.norm() / (theirs - start).norm().clamp(min=1e-30))
        changes = [distance(shaken["end"][name] - shaken["start"][name], theirs - start) for shaken in shakes]
        off, allowed = distance(mine - start, theirs - start), max(bound + rounding, SHAKEN * max(changes, default=0.0))
        if not (torch.equal(mine, theirs) or off < allowed):
            found.append(f"the change of {name} by {off:.1e}, {allowed:.1e} allowed")
    if case.then is not None:
        found += [f"a save: {error}" for error in own["saves"] if error]
        found += _checkpoint_differences(folder, case.frozen)
        found += _moment_differences(folder, bound)
    return found


def _checkpoint_differences(folder: Path, frozen: bool) -> list[str]:
    """Tensors of a checkpoint that another layout has loaded, and saved as other bits. `frozen`: of the tower the optimizer
    has none, and `contents` says of the plain one's that it has its weights."""
    want, own = (contents(folder / f"{name}_saved" / "step_1") for name in ("own", "again"))
    names = sorted(name for name in want.keys() ^ own.keys() if not (frozen and ".visual." in name))
    for name in want.keys() & own.keys():
        rows = min(len(want[name]), len(own[name]))  # the vocabulary is padded to the layout
        if not torch.equal(want[name][:rows], own[name][:rows]):
            names.append(name)
    return [f"{name} of the checkpoint, loaded and saved" for name in names]


def _moment_differences(folder: Path, bound: float) -> list[str]:
    """Adam's moments after the first batch that are not those of one process; a square has twice its root's error."""
    want = contents(folder / "alone_saved" / "step_1")
    own = contents(folder / "own_saved" / "step_1")
    shakes = [contents(path / "step_1") for path in sorted(folder.glob("shaken_*_saved"))]
    found = list[str]()
    for name in sorted(name for name in want if ".exp_avg" in name):
        theirs, *others = (each[name][: min(len(want[name]), len(own[name]))] for each in (want, own, *shakes))
        off, *moves = (distance(other, theirs) for other in others)
        if off > max(2 * bound, SHAKEN * max(moves, default=0.0)):
            found.append(f"{name} after the first batch by {off:.1e}")
    return found


def prove(cases: Iterable[Case], root: Path, fault: str = "") -> dict[int, list[str]]:
    """The differences of each case, which have different numbers; worlds are started once each.

    `fault`: one of `FAULTS`, in the layouts and not in the one process.
    """
    worlds = defaultdict[int, list[Case]](list)
    for case in cases:
        make(root / str(case.number), case)
        worlds[case.world].append(case)
    every = [case for here in worlds.values() for case in here]
    spawn(run, 1, str(root), [case.alone for case in every], True)
    for world, here in worlds.items():
        spawn(run, world, str(root), here, False, fault)
    found = {case.number: differences(case, root / str(case.number)) for case in every}
    for shakes in (range(1, SHAKES + 1), range(SHAKES + 1, 4 * SHAKES + 1)):
        off = [case for case in every if found[case.number]]
        for shake in shakes if off else ():
            spawn(run, 1, str(root), [case.alone for case in off], True, "", shake)
        found |= {case.number: differences(case, root / str(case.number)) for case in off}
    return found


def prove_one(case: Case, fault: str = "") -> list[str]:
    """The differences of one case, an error of its ranks included."""
    with TemporaryDirectory() as root:
        try:
            return prove([case], Path(root), fault)[case.number]
        except Exception as error:
            return [str(error).strip()]
