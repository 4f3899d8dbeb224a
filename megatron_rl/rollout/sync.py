"""Weight sync into the engine, and the proof after every sync that it computes what the trained model does."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.data.images import PromptImages
from megatron_rl.models import Model
from megatron_rl.rollout.engine import Completion, Engine, read
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.vllm_probe import VllmProbe
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.weights.inventory import Key
from megatron_rl.weights.layouts import ActorLayout, EngineLayout, unplaced
from megatron_rl.weights.sync_plan import BUCKET_BYTES, Plan, make_plan
from megatron_rl.weights.transfer import SyncError, Transfer

# Of the mean over tokens. Two sets of kernels in bf16 differ by a heavy-tailed error, whose largest value over thousands of
# tokens is no criterion; with experts a router's choice may tip by rounding. Not calibrated on a GPU yet.
_DEFAULT_TOLERANCE = {"float32": 3e-5, "bfloat16": 0.05}
_DEFAULT_TOLERANCE_OF_EXPERTS = {"float32": 3e-5, "bfloat16": 0.1}
# Of an engine or an actor in FP8. The quick start's model differed by 0.02 to 0.07 with an engine of rounded weights, by 0.03
# to 0.20 with an actor in FP8.
_DEFAULT_TOLERANCE_OF_FP8 = 0.2
PERCENTILE, _PERCENTILE_FACTOR = 99, 10  # it may be this many times the mean's tolerance
# Of the engine's experts of a layer, those that the actor has not chosen, as a share of what two independent routers come
# to. With 4 of 32 experts bf16 tipped 0.02 to 0.04 of them, FP8 0.11 to 0.14, and chance is 0.875.
_MOST_OF_CHANCE, _MOST_OF_CHANCE_IN_FP8 = 0.25, 0.5


@dataclass(frozen=True)
class SyncDifference:
    """|log-prob of the engine - log-prob of the actor| over tokens: mean, 99th percentile, largest.

    `experts`: the share of a token's experts in the engine that the actor has not chosen, of the layer where it is largest;
    None: the engine does not say.
    """

    mean: float = 0.0
    percentile: float = 0.0
    largest: float = 0.0
    experts: float | None = None

    @staticmethod
    def of(differences: np.ndarray) -> SyncDifference:
        """The percentile leaves one token out even of fewer than 100: no single token stops a run."""
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
        } | ({} if self.experts is None else {"sync/experts_max_diff": self.experts})


def chosen_otherwise(of_engine: np.ndarray, of_actor: np.ndarray) -> np.ndarray:
    """Returns the share of the engine's experts that the actor has not chosen, float64 [layers].

    Args:
        of_engine, of_actor: integers [tokens, layers, experts per token].
    """
    return 1 - (of_engine[..., None] == of_actor[..., None, :]).any(axis=-1).mean(axis=(0, 2))


class TrainedWeights(Protocol):
    """Where a sync takes weights from. The actor is one."""

    dtype: torch.dtype
    model: Model
    optimizer_steps: int  # behind the weights

    def weights(self) -> Mapping[Key, Tensor]:
        """This rank's parameters and mapped buffers, by rule, layer and local expert."""
        ...

    def iter_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every weight, on every rank, in the same order."""
        ...

    def iter_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """(PEFT's name, full tensor) of every adapter, likewise."""
        ...

    def shard_proof(self) -> TensorProof:
        """A comparison of full tensors under Hugging Face's names with this rank's own shards."""
        ...


class TensorProof(Protocol):
    """Compares tensors as they pass by; `weights.check_shards.ShardProof` is one."""

    def watching(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]: ...
    def wrong(self) -> list[str]: ...
    def missing(self) -> list[str]: ...


class EngineProbe(Protocol):
    """Looks into an engine after a sync that went wrong; all ranks together."""

    def drop_cache(self) -> None:
        """Frees what the engine holds beside its weights; it generates no more."""
        ...

    def first_difference(self, weights: Iterable[tuple[str, Tensor]]) -> str | None:
        """A sentence, the same on every rank, that names what the engine holds or computes with and is not in `weights`,
        (Hugging Face name, full tensor) pairs; None: all that can be read back agrees."""
        ...


@dataclass(frozen=True)
class Scored:
    """Sequences of token ids, and what the trained model makes of them.

    Attributes:
        images: in the sequences.
        log_probs: of every token but the first of each, float32 [len - 1].
        again: computes these once more, where the weights may have left the device; every token goes to the given experts,
            or with () to those that the model chooses.
        experts: that it has chosen, int16 [len, layers, experts per token]; None where the engine does not say its own.
    """

    sequences: Sequence[Sequence[int]]
    images: Sequence[PromptImages | None]
    log_probs: Sequence[np.ndarray]
    again: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
    experts: Sequence[np.ndarray] | None = None


class WeightSync(ABC):
    """Moves weights into the engine (`push`) and compares log-probs afterwards (`check`)."""

    def __init__(
        self, config: Config, grid: ProcessGrid, source: TrainedWeights, engine: Engine, probe: EngineProbe
    ) -> None:
        self.grid, self.source, self.engine, self._probe = grid, source, engine, probe
        defaults = _DEFAULT_TOLERANCE_OF_EXPERTS if source.model.experts else _DEFAULT_TOLERANCE
        in_fp8 = config.rollout.fp8 != "none" or config.actor.fp8 is not None
        default = _DEFAULT_TOLERANCE_OF_FP8 if in_fp8 else defaults[config.model.dtype]
        self.tolerance = default if config.rollout.sync_tolerance is None else config.rollout.sync_tolerance
        self._most_of_chance = _MOST_OF_CHANCE_IN_FP8 if in_fp8 else _MOST_OF_CHANCE

    @abstractmethod
    def push(self) -> None:
        """Brings the source's present weights into the engine.

        Raises:
            SyncError: on all ranks, where a tensor did not come or is another one; names the first.
        """

    def check(self, scored: Scored) -> SyncDifference:
        """How far the engine is from the trained model, over all tokens but the first of each sequence.

        Every engine scores the same sequences. The comparison is over all ranks, so all of them return or raise alike: each
        number is that of the worst engine.

        Raises:
            SyncError: where the mean or the 99th percentile of log-probs is above its tolerance, or not finite, or a layer's
                routers choose otherwise, with a diagnosis.
        """
        if not scored.sequences:
            return SyncDifference()
        answers = read(self.engine, scored.sequences, scored.images)
        log_probs = np.concatenate([answer.token_scores for answer in answers])
        found = SyncDifference.of(np.abs(log_probs - np.concatenate(scored.log_probs)))
        otherwise = self._chosen_otherwise(scored, answers)
        by_rank = self.grid.gather_rows(np.array([found.mean, found.percentile, found.largest, *otherwise.values()]))
        mean, percentile, largest, *by_layer = by_rank.max(axis=0).tolist()  # NaN if any is
        worst = SyncDifference(mean, percentile, largest, max(by_layer, default=None))
        wrong = ""
        if not worst.within(self.tolerance):
            wrong = (
                f"the engine's log-probs differ from the actor's by {worst.mean:.3g} in the mean, by "
                f"{worst.percentile:.3g} at the {PERCENTILE}th percentile and by up to {worst.largest:.3g}; "
                f"rollout.sync_tolerance = {self.tolerance:g} allows a mean of that and {_PERCENTILE_FACTOR} times that at "
                "the percentile"
            )
            bad = [rank for rank, row in enumerate(by_rank) if not SyncDifference(*row[:3]).within(self.tolerance)]
        elif worst.experts is not None and worst.experts > self._most_otherwise:
            at = next(i for i, share in enumerate(by_layer) if share > self._most_otherwise)
            wrong = (
                f"the actor has not chosen {by_layer[at]:.0%} of the experts that tokens go to in the engine's layer "
                f"{[*otherwise][at]} (the first is 0); rounding may tip {self._most_otherwise:.0%}"
            )
            bad = np.flatnonzero(by_rank[:, 3 + at] > self._most_otherwise).tolist()
        if wrong:
            engines = sorted({rank // self.grid.engine.size for rank in bad})
            raise SyncError(
                f"after a weight sync {wrong}. Engines affected: {engines} of {self.grid.engine.count}. "
                f"{self._diagnose(scored, answers)}"
            )
        return worst

    def _chosen_otherwise(self, scored: Scored, answers: Sequence[Completion]) -> dict[int, float]:
        """Returns `chosen_otherwise` by layer with experts, {} where nothing says what was chosen. The engine may not say
        what a sequence's last token's are."""
        if scored.experts is None:
            return {}
        of_engine = _experts_of(answers)
        shares = chosen_otherwise(
            np.concatenate([chosen[:-1] for chosen in of_engine]), np.concatenate([own[:-1] for own in scored.experts])
        )
        return {layer: shares[layer] for layer in sorted(self.source.model.expert_layers)}

    @property
    def _most_otherwise(self) -> float:
        experts = self.source.model.experts
        assert experts is not None
        return self._most_of_chance * (1 - experts.top_k / experts.count)

    def _diagnose(self, scored: Scored, answers: Sequence[Completion]) -> str:
        """Names the first tensor that is not what was sent, in what the engine holds and in the copies that it computes
        with; where there is none, says which of the two computes otherwise when asked again. What was sent has been compared
        by `push`. `answers`: the engine's."""
        log_probs = np.concatenate([answer.token_scores for answer in answers])
        again = [np.abs(np.concatenate(self.engine.score(scored.sequences, scored.images)) - log_probs).max()]
        if self.grid.link is not None:
            return "Every tensor came as the actor holds it: the two compute differently (model.dtype, actor.fp8, kernels)."
        self._probe.drop_cache()
        again.append(np.abs(np.concatenate(scored.again(())) - np.concatenate(scored.log_probs)).max())
        replayed = 0.0
        if scored.experts is not None:
            replayed = np.abs(np.concatenate(scored.again(_experts_of(answers))) - log_probs).mean()
        if difference := self._probe.first_difference(self.source.iter_hf_weights()):
            return difference
        of_engine, of_actor, replayed = self.grid.gather_rows(np.array([*again, replayed])).max(axis=0)
        text = (
            "Every tensor was sent as the actor holds it, and what can be read back from the engine agrees: the two "
            f"compute differently. Asked again, the engine answers as before but for {of_engine:.3g} and the actor but for "
            f"{of_actor:.3g}. Where these are small, compare their kernels and dtypes (model.dtype, actor.fp8), or raise "
            "rollout.sync_tolerance if the difference is expected; where one is as large as the difference itself, that side "
            "does not compute the same thing twice: try OMP_NUM_THREADS=1, and another machine."
        )
        if scored.experts is not None:
            text += (
                f" With every token sent to the engine's experts in the actor too, {replayed:.3g} of the mean is left."
            )
        return text


def _experts_of(answers: Sequence[Completion]) -> list[np.ndarray]:
    """Returns those of every token that was scored."""
    experts = list[np.ndarray]()
    for answer in answers:
        assert answer.experts is not None, "the engine was started with actor.moe.routing_replay=rollout"
        experts.append(answer.experts[: len(answer.request.tokens)])
    return experts


class SlicedSync(WeightSync):
    """Each rank is sent the slices that it lacks, and proves by checksums that they came."""

    engine: VllmEngine  # no other takes slices

    def __init__(
        self, config: Config, grid: ProcessGrid, source: TrainedWeights, engine: VllmEngine, probe: EngineProbe
    ) -> None:
        super().__init__(config, grid, source, engine, probe)
        timeout = timedelta(minutes=config.launch.timeout_minutes)
        plan = sliced_plan(config, grid, source)
        self.transfer = Transfer(plan, source.weights(), source.dtype, grid.everyone, timeout)

    def push(self) -> None:
        with self.engine.loading_shards(self.transfer.wanted, self.source.optimizer_steps) as loader:
            self.transfer.push(loader)
        device.empty_cache()  # the engine's KV cache comes next


class WholeSync(WeightSync):
    """Every tensor is gathered whole on every rank, and compared with its shards on the way."""

    def push(self) -> None:
        proof = self.source.shard_proof()
        self.engine.load(proof.watching(self.source.iter_hf_weights()), self.source.optimizer_steps)
        by_rank = self.grid.all_gather((proof.wrong(), proof.missing()))
        for number, what in enumerate(("that was changed on its way to the engine", "that was not sent to the engine")):
            if first := next((names[number][0] for names in by_rank if names[number]), None):
                raise SyncError(f"a weight sync went wrong. The first tensor {what} is {first}.")


class AdapterSync(WeightSync):
    """Adapters alone go to an engine that adds them itself; only the check of log-probs compares them."""

    def push(self) -> None:
        self.engine.load(self.source.iter_adapters(), self.source.optimizer_steps)

    def _diagnose(self, scored: Scored, answers: Sequence[Completion]) -> str:
        return (
            "The engine adds the actor's adapters to the weights that it has read from the model's folder; "
            "nothing compares either with the actor's. With actor.lora.sync=merged every tensor is compared."
        )


def make_sync(
    config: Config, grid: ProcessGrid, source: TrainedWeights, engine: VllmEngine, note: Callable[[str], None]
) -> WeightSync:
    """The way that the recipe asks for. `note`: told why, where weights go whole though the recipe would have slices."""
    probe = VllmProbe(engine, grid)
    if config.actor.lora is not None and config.actor.lora.sync == "adapters":
        return AdapterSync(config, grid, source, engine, probe)
    if config.rollout.sync == "sliced":
        reason = no_plan(config, grid, source, engine)
        if reason is None:
            return SlicedSync(config, grid, source, engine, probe)
        note(f"weights go to the engine whole, not in slices: {reason}")
    return WholeSync(config, grid, source, engine, probe)


def no_plan(config: Config, grid: ProcessGrid, source: TrainedWeights, engine: VllmEngine | None) -> str | None:
    """Why the weights cannot go in slices, the same on every rank; None: they can. `engine`: None on a rank without one."""
    model, reason = source.model, None
    if name := unplaced(model):
        reason = f"family `{model.family.name}` does not say where vLLM keeps {name}"
    else:
        declared = EngineLayout.of(config.rollout).parameters(model)
        actual = declared if engine is None else engine.shard_shapes()
        if name := next((name for name in {**declared, **actual} if declared.get(name) != actual.get(name)), None):
            reason = f"vLLM's {name} is {actual.get(name)}, where {declared.get(name)} was expected"
        elif odd := next(_other_dtypes(source), None):
            reason = f"the actor holds {odd} beside {source.dtype}"
    return next(filter(None, grid.everyone.all_gather(reason)), None)


def _other_dtypes(source: TrainedWeights) -> Iterator[torch.dtype]:
    """Yields the dtype of each weight that has neither the model's nor, in a buffer, float32."""
    rules = source.model.family.rules
    for (rule, _, _), weight in source.weights().items():
        if weight.dtype != (torch.float32 if rules[rule].buffer else source.dtype):
            yield weight.dtype


def sliced_plan(config: Config, grid: ProcessGrid, source: TrainedWeights) -> Plan:
    everyone, generators = grid.everyone, config.launch.generators or 0
    layout = ActorLayout.of(config.actor.parallel, source.model.dims["layers"], everyone.world - generators)
    elements = BUCKET_BYTES // source.dtype.itemsize
    # Nodes may be of several sizes; every rank has to make the same plan.
    node = min(everyone.all_gather(int(os.environ.get("LOCAL_WORLD_SIZE", everyone.world))))
    engine = EngineLayout.of(config.rollout, generators)
    return make_plan(source.model, layout, engine, bucket_elements=elements, node=node)
