"""Weight sync from the actor to the engine, and the proof after every sync that both are the same model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch
from megatron_rl.data.images import PromptImages
from megatron_rl.rollout.engine import Engine
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.layouts import ActorLayout, EngineLayout, unplaced
from megatron_rl.weights.plan import BUCKET_BYTES, Plan, make_plan
from megatron_rl.weights.transfer import SyncError, Transfer

# Of the mean over tokens. Two sets of kernels in bf16 differ by a heavy-tailed error, whose largest value over thousands of
# tokens is no criterion; with experts a router's choice may tip by rounding. Not calibrated on a GPU yet.
_DEFAULT_TOLERANCE = {"float32": 3e-5, "bfloat16": 0.05}
_DEFAULT_TOLERANCE_OF_EXPERTS = {"float32": 3e-5, "bfloat16": 0.1}
# Of an engine or an actor in FP8. The quick start's model differed by 0.02 to 0.07 with an engine of rounded weights, by 0.03
# to 0.20 with an actor in FP8.
_DEFAULT_TOLERANCE_OF_FP8 = 0.2
PERCENTILE, _PERCENTILE_FACTOR = 99, 10  # it may be this many times the mean's tolerance


@dataclass(frozen=True)
class SyncDifference:
    """|log-prob of the engine - log-prob of the actor| over tokens: mean, 99th percentile, largest."""

    mean: float = 0.0
    percentile: float = 0.0
    largest: float = 0.0

    @staticmethod
    def of(differences: np.ndarray) -> SyncDifference:
        """Of fewer than 100 tokens, the percentile still leaves one out: no single token stops a run."""
        percentile = np.percentile(differences, PERCENTILE, method="lower")
        return SyncDifference(float(differences.mean()), float(percentile), float(differences.max()))

    def within(self, tolerance: float) -> bool:
        """False also where a difference is not finite: the mean is not, then."""
        return self.mean <= tolerance and self.percentile <= _PERCENTILE_FACTOR * tolerance

    def metrics(self) -> dict[str, float]:
        return {
            "sync/logprob_mean_diff": self.mean,
            "sync/logprob_p99_diff": self.percentile,
            "sync/logprob_max_diff": self.largest,
        }


@dataclass(frozen=True)
class Scored:
    """Sequences of token ids, and the actor's log-probs of every token but the first of each: float32 [len - 1]; and the
    images in them."""

    sequences: list[Sequence[int]]
    log_probs: list[np.ndarray]
    images: list[PromptImages | None]


class WeightSync:
    """Moves the actor's weights into the engine and compares log-probs afterwards.

    Attributes:
        transfer: brings each rank its slices; None: every tensor is gathered whole on every rank.
        adapters: what goes to the engine, where it is not the whole model.
        whole_because: why it is None where the recipe wants it.
    """

    def __init__(self, config: Config, grid: ProcessGrid, actor: Actor, engine: Engine) -> None:
        self.grid, self.actor, self.engine = grid, actor, engine
        self.transfer: Transfer | None = None
        self.whole_because: str | None = None
        self.adapters = actor.adapters if config.actor.lora.sync == "adapters" else None
        if config.rollout.sync == "sliced" and self.adapters is None:
            self.whole_because = _no_plan(config, grid, actor, engine)
            if self.whole_because is None:
                timeout = timedelta(minutes=config.launch.timeout_minutes)
                self.transfer = Transfer(_plan(config, grid, actor), actor.weights(), actor.dtype, grid, timeout)
        given = config.rollout.sync_tolerance
        defaults = _DEFAULT_TOLERANCE_OF_EXPERTS if actor.description.dims["experts"] else _DEFAULT_TOLERANCE
        in_fp8 = config.rollout.fp8 != "none" or config.actor.fp8 is not None
        default = _DEFAULT_TOLERANCE_OF_FP8 if in_fp8 else defaults[config.model.dtype]
        self.tolerance = given if given is not None else default

    def push(self) -> None:
        """Every weight from the actor into the engine, compared with what the actor's ranks hold; or its adapters, which only
        the check of log-probs compares.

        Raises:
            SyncError: on all ranks, where a tensor did not come or is another one; names the first.
        """
        if self.adapters is not None:
            actor = self.actor
            adapters = iter_hf_weights(actor.chunks, self.adapters.family, actor.hf_config, actor.parallel)
            self.engine.load_adapters(adapters, actor.optimizer_steps)
            return
        if self.transfer is None:
            self._push_whole()
            return
        with self.engine.loading_shards(self.transfer.wanted, self.actor.optimizer_steps) as loader:
            self.transfer.push(loader)
        device.empty_cache()  # the engine's KV cache comes next

    def _push_whole(self) -> None:
        proof = self.actor.shard_proof()
        self.engine.load_weights(proof.watching(self.actor.iter_hf_weights()), self.actor.optimizer_steps)
        by_rank = self.grid.all_gather((proof.wrong(), proof.missing()))
        for number, what in enumerate(("that was changed on its way to the engine", "that was not sent to the engine")):
            if first := next((names[number][0] for names in by_rank if names[number]), None):
                raise SyncError(f"a weight sync went wrong. The first tensor {what} is {first}.")

    def score(self, sequences: Sequence[Sequence[int]], images: Sequence[PromptImages | None] = ()) -> Scored:
        """The actor's side of a check, on every rank; while the actor has the device. `images`: of the sequences' prompts,
        where these may have some."""
        images = [own for own, tokens in zip_longest(images, sequences) if len(tokens) > 1]
        sequences = [tokens[: self.engine.max_scored] for tokens in sequences if len(tokens) > 1]
        return Scored(sequences, self._actor_scores(sequences, images) if sequences else [], images)

    def check(self, actor: Scored) -> SyncDifference:
        """How far the engine's log-probs are from the actor's, over all tokens but the first of each sequence.

        Every engine scores the same sequences. The comparison is over all ranks, so all of them return or raise alike: each
        number is that of the worst engine.

        Raises:
            SyncError: where the mean or the 99th percentile is above its tolerance, or not finite, with a diagnosis.
        """
        if not actor.sequences:
            return SyncDifference()
        engine = np.concatenate(self.engine.score(actor.sequences, actor.images))
        differences = np.abs(engine - np.concatenate(actor.log_probs))
        by_rank = self.grid.gather_rows(np.array(astuple(SyncDifference.of(differences))))
        worst = SyncDifference(*by_rank.max(axis=0).tolist())  # NaN if any is
        if not worst.within(self.tolerance):
            raise SyncError(
                f"after a weight sync the engine's log-probs differ from the actor's by {worst.mean:.3g} in the mean, by "
                f"{worst.percentile:.3g} at the {PERCENTILE}th percentile and by up to {worst.largest:.3g}; "
                f"rollout.sync_tolerance = {self.tolerance:g} allows a mean of that and {_PERCENTILE_FACTOR} times that at "
                f"the percentile. {self._diagnose(by_rank, actor, engine)}"
            )
        return worst

    def _actor_scores(
        self, sequences: Sequence[Sequence[int]], images: Sequence[PromptImages | None]
    ) -> list[np.ndarray]:
        micro_batches = self.actor.micro_batches(
            TokenBatch.continuations(((tokens[:1], tokens[1:]) for tokens in sequences), images)
        )
        ends = np.cumsum([len(tokens) - 1 for tokens in sequences])
        scores = np.zeros(ends[-1], dtype=np.float32)
        by_row = np.split(scores, ends[:-1])
        for micro, (log_probs, _) in zip(
            micro_batches, self.actor.log_probs(micro_batches, temperature=1.0), strict=False
        ):
            for local, row in enumerate(micro.rows if self.grid.is_loss_rank else ()):
                by_row[row][:] = log_probs[micro.sequence_ids == local].cpu().numpy()
        device.empty_cache()  # the engine takes the device next, and finds what this pass took free
        self.grid.sum_array(scores)
        return by_row

    def _diagnose(self, by_rank: np.ndarray, actor: Scored, engine: np.ndarray) -> str:
        """Names the first tensor that is not what the actor holds, in what the engine keeps and in the copies that it
        computes with; where there is none, says which of the two computes otherwise when asked again. What was sent has been
        compared by `push`. `by_rank`: float64 [ranks, 3], differences; `engine`: its log-probs, float32 [tokens].
        """
        bad_ranks = [rank for rank, row in enumerate(by_rank) if not SyncDifference(*row).within(self.tolerance)]
        bad_engines = sorted({rank // self.engine.config.tensor_parallel for rank in bad_ranks})
        where = f"Engines affected: {bad_engines} of {self.engine.engines}."
        if self.adapters is not None:
            return (
                f"{where} The engine adds the actor's adapters to the weights that it has read from the model's folder; "
                "nothing compares either with the actor's. With actor.lora.sync=merged every tensor is compared."
            )
        again = [np.abs(np.concatenate(self.engine.score(actor.sequences, actor.images)) - engine).max()]
        self.engine.drop_cache()
        self.actor.onload_weights()
        scores = self._actor_scores(actor.sequences, actor.images)
        again.append(np.abs(np.concatenate(scores) - np.concatenate(actor.log_probs)).max())
        kept_bad = None
        kept, packed = self.engine.parameters(), self.engine.packed_weights()
        tp_rank, tp = self.grid.rank % self.engine.config.tensor_parallel, self.engine.config.tensor_parallel
        for name, tensor in self.engine.stored(self.actor.iter_hf_weights()):
            held = packed[name]() if name in packed else kept.get(name)
            if kept_bad is None and held is not None and not _holds(held, tensor, tp_rank, tp):
                kept_bad = name
        kept_bad = next((name for name in self.grid.all_gather(kept_bad) if name), None)
        stale = [name for names in self.grid.all_gather(self.engine.stale_layers()) for name in names]
        if kept_bad:
            copy = ", in the copy that vLLM packs for the CPU's kernels" if kept_bad in packed else ""
            return (
                f"{where} Every tensor was sent as the actor holds it; the first that the engine holds otherwise is "
                f"{kept_bad}{copy}."
            )
        if stale:
            return (
                f"{where} Every tensor was sent and is held as the actor has it, but the engine's layer {stale[0]} computes "
                "with something else: the copy of its weight that vLLM packs for the CPU's kernels, which this sync has not "
                "refreshed (megatron_rl/seams/vllm.py)."
            )
        of_engine, of_actor = self.grid.gather_rows(np.array(again)).max(axis=0)
        return (
            f"{where} Every tensor was sent as the actor holds it, and what can be read back from the engine agrees: the two "
            f"compute differently. Asked again, the engine answers as before but for {of_engine:.3g} and the actor but for "
            f"{of_actor:.3g}. Where these are small, compare their kernels and dtypes (model.dtype, actor.fp8), or raise "
            "rollout.sync_tolerance if the difference is expected; where one is as large as the difference itself, that side "
            "does not compute the same thing twice: try OMP_NUM_THREADS=1, and another machine."
        )


def _no_plan(config: Config, grid: ProcessGrid, actor: Actor, engine: Engine) -> str | None:
    """Why the weights cannot go in slices, the same on every rank; None: they can."""
    model, reason = actor.model, None
    if name := unplaced(model):
        reason = f"family `{model.family.name}` does not say where vLLM keeps {name}"
    else:
        declared, found = EngineLayout.of(config.rollout).parameters(model), engine.shapes()
        if name := next((name for name in {**declared, **found} if declared.get(name) != found.get(name)), None):
            reason = f"vLLM's {name} is {found.get(name)}, where {declared.get(name)} was expected"
        elif odd := next((weight.dtype for weight in actor.weights().values() if weight.dtype != actor.dtype), None):
            reason = f"the actor holds {odd} beside {actor.dtype}"
    return next(filter(None, grid.all_gather(reason)), None)


def _plan(config: Config, grid: ProcessGrid, actor: Actor) -> Plan:
    layout = ActorLayout.of(config.actor.parallel, actor.model.dims["layers"], grid.world)
    elements = BUCKET_BYTES // actor.dtype.itemsize
    # Nodes may be of several sizes; every rank has to make the same plan.
    node = min(grid.all_gather(int(os.environ.get("LOCAL_WORLD_SIZE", grid.world))))
    return make_plan(actor.model, layout, EngineLayout.of(config.rollout), bucket_elements=elements, node=node)


def _holds(held: Tensor, full: Tensor, tp_rank: int, tp: int) -> bool:
    """Whether `held` is the tensor, or this rank's shard of it along either dimension.

    Rows may be padded; where there are fewer shards than ranks (key and value heads), neighbouring ranks hold the same one.
    """
    if held.dim() != full.dim():
        return True  # kept in another form: nothing can be said
    if held.dtype == full.dtype and held.dtype.itemsize == 1:  # torch compares no FP8
        held, full = held.view(torch.uint8), full.view(torch.uint8)
    if held.shape == full.shape:
        return bool(torch.equal(held, full.to(held.dtype)))
    for dim in range(full.dim()):
        size = held.shape[dim]
        shards = -(-full.shape[dim] // size)
        for begin in {tp_rank * size, tp_rank * shards // tp * size}:
            part = full.narrow(dim, min(begin, full.shape[dim]), max(0, min(size, full.shape[dim] - begin)))
            mine = held.narrow(dim, 0, part.shape[dim])
            if mine.shape == part.shape and torch.equal(mine, part.to(held.dtype)):
                return True
    return False
