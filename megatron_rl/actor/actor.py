"""The policy being trained: Megatron-Core model chunks on this rank, their log-probs, and their update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region as copy_to_region
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_rl.actor import build, fp8_training, reference
from megatron_rl.actor.build import learning_rate
from megatron_rl.actor.head import VocabShard, log_probs_from_hidden
from megatron_rl.actor.offload import ActorMemory
from megatron_rl.actor.optimizer_step import forget_gradients, gradient_norm, take_step
from megatron_rl.actor.packing import MicroBatch, pack, planned
from megatron_rl.actor.routing import (
    Pass,
    as_chosen,
    expert_load,
    forget_expert_load,
    layer_routings,
    update_biases,
)
from megatron_rl.actor.update_result import LossFunction, Scores, UpdateResult
from megatron_rl.actor.variance import GradientParts, PartSize, of_parts, sizes_over_ranks
from megatron_rl.algorithms.diagnostics import GradientVariance
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.config.actor import OptimizerConfig
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch
from megatron_rl.models import HFConfig, model_of, padded_vocab_size, read_hf_config
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.seams.megatron import (
    Chunk,
    Optimizer,
    return_hidden_states,
    tensors_of,
)
from megatron_rl.seams.transformer_engine import keep_rounded
from megatron_rl.weights import checksum
from megatron_rl.weights.adapters import add_adapters, begin_pass, dropping, switched_off
from megatron_rl.weights.check_shards import ShardProof
from megatron_rl.weights.files import WeightSource
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.inventory import Key, local_weights
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups


class Actor:
    """Holds this rank's shard of the policy.

    Args:
        config: the recipe.
        grid: where this process stands.
        folder: with config.json unless `hf_config` is what it says, and the initial weights as Hugging Face's safetensors
            unless `weights` has them.
    """

    def __init__(
        self,
        config: Config,
        grid: ProcessGrid,
        folder: str | Path,
        weights: WeightSource | None = None,
        hf_config: HFConfig | None = None,
    ) -> None:
        self.config, self.grid, self.folder = config.actor, grid, Path(folder)
        self.dtype, self._seed, self._exactly = build.DTYPES[config.model.dtype], config.seed, config.rollout.exact
        self.hf_config = hf_config or config.model.completed(read_hf_config(folder))
        self.model = model_of(self.hf_config)
        self.family, self.description = self.model.family, self.model.description
        vocab_size = self.description.dims["vocab"]
        with device.megatron():
            self.chunks = build.build_model(self.model, self.config, self.dtype, self._exactly)
            self.parallel = ParallelGroups.from_megatron()
            for chunk in self.chunks:
                if chunk.post_process:
                    return_hidden_states(chunk)
            self.adapters = add_adapters(self.chunks, self.model, self.hf_config, config, self.parallel)
            self.load_hf(weights or folder)
            fp8_params = self.config.fp8 is not None and self.config.fp8.param_gather
            measures = config.logging.gradient_variance_every > 0  # it needs this rank's gradients, not yet summed
            overlap = self.config.overlap if self.config.overlap is not None else device.has_gpu() and not measures
            distributed = self.config.optimizer.distributed
            self.ddp_chunks = build.wrap_for_training(self.chunks, distributed, fp8_params, overlap)
        self._gathers_later = overlap and distributed
        first_row = grid.tp_rank * padded_vocab_size(vocab_size, grid.tp) // grid.tp
        self.vocab_shard = VocabShard(first_row, vocab_size, self.parallel.tp.group)
        self._replays = self.config.moe.routing_replay != "none"
        self._routings = layer_routings(self.chunks, self._replays)
        self.reference: list[dict[str, Tensor]] | None = None
        self._optimizer: Optimizer | None = None
        self._memory = ActorMemory(self.config, self.ddp_chunks)
        self.optimizer_config = self.config.optimizer
        self.optimizer_steps = self.total_optimizer_steps = 0  # taken, of the stage: the learning rate's arguments

    # ------------------------------------------------------------------------------------------------ optimizer
    def start_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """A fresh optimizer; `total_steps` optimizer steps are what the learning-rate schedule spans.

        Raises:
            ValueError: it would shard its state otherwise than the model's gradients are summed.
        """
        if config.distributed != self.config.optimizer.distributed:
            raise ValueError(f"distributed={config.distributed}, and the gradients' buffers were made for the opposite")
        recipe = self.config.fp8.recipe if self.config.fp8 else None
        with device.megatron():
            keep_rounded(parameter for chunk in self.chunks for parameter in chunk.parameters())
            self._optimizer = build.build_optimizer(self.ddp_chunks, config, self.dtype, recipe)
        self.optimizer_config, self.total_optimizer_steps, self.optimizer_steps = config, total_steps, 0

    @property
    def has_optimizer(self) -> bool:
        """False in an evaluation, and before `start_optimizer`."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> Optimizer:
        self._memory.wait()
        return self._started_optimizer()

    def _started_optimizer(self) -> Optimizer:
        """Returns the optimizer; its state may still be on the way from the host."""
        if self._optimizer is None:
            raise RuntimeError("there is no optimizer yet; call start_optimizer first")
        return self._optimizer

    def optimizer_state(self) -> list[Tensor]:
        """Moments and master weights on the device: what the optimizer holds beside the model's weights."""
        if self.optimizer_config.device == "cpu":
            return []
        shared = {p.untyped_storage().data_ptr() for c in self.chunks for p in c.parameters() if not is_float8tensor(p)}
        return [t for t in tensors_of(self.optimizer) if t.untyped_storage().data_ptr() not in shared]

    # ---------------------------------------------------------------------------------------------- micro-batches
    def shares(self, lengths: Sequence[int], rows: Sequence[int]) -> list[list[list[int]]]:
        """Which of the sequences `rows` go to which data-parallel rank and micro-batch, see `packing.plan`."""
        multiple = self.grid.pp if self.config.parallel.virtual_pipeline > 1 else 1
        return planned(tuple(lengths), tuple(rows), self.grid.dp, self.config.tokens_per_microbatch, multiple)

    def micro_batches(self, batch: TokenBatch, rows: Sequence[int] | None = None) -> list[MicroBatch]:
        """This data-parallel rank's share of the minibatch `rows` (None: of all), packed; all ranks call it alike."""
        shares = self.shares(batch.lengths, range(len(batch)) if rows is None else rows)
        return [self.pack(batch, part, device.device()) for part in shares[self.grid.dp_rank]]

    def pack(self, batch: TokenBatch, rows: Sequence[int], where: torch.device) -> MicroBatch:
        """The sequences `rows` of a batch as one micro-batch, in this rank's layout."""
        # Sequence parallelism cuts tokens over TP ranks.
        multiple = (self.grid.tp if self.config.parallel.sequence else 1) * fp8_training.rows_multiple(self.config.fp8)
        micro = pack(rows, batch, where, multiple, self.grid.cp, self.grid.cp_rank)
        if micro.experts is not None:
            layers = (routing.layer for routing in self._routings)
            micro.chosen_experts = {layer: self._cut(as_chosen(micro.experts, layer)) for layer in layers}
        return micro

    # ----------------------------------------------------------------------------------------------------- compute
    def log_probs(
        self, micro_batches: Sequence[MicroBatch], temperature: float, with_entropy: bool = False
    ) -> list[Scores]:
        """Log-probs (and entropy) of every scored token, per micro-batch; [] except on the last pipeline stage."""

        def collect(number: int, micro: MicroBatch, output: Tensor, non_loss_data: bool) -> Scores:
            return self.score(micro, output, temperature, with_entropy)

        with torch.no_grad():
            return self._run(micro_batches, collect, forward_only=True)

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossFunction,
        temperature: float,
        with_entropy: bool = False,
        part_size: PartSize | None = None,
        more: bool = False,
        with_metrics: bool = True,
    ) -> UpdateResult:
        """One optimizer step on a minibatch, gradients summed over micro-batches and data-parallel ranks.

        Args:
            more: another update follows, and nothing else reads the weights before: with `actor.overlap` they are
                gathered in its forward pass.
            part_size: where given, the gradient's variance is measured; see `actor.variance`. In layouts that split
                gradients over ranks `loss` is then called twice, and the metrics are the first call's.
            with_metrics: those of `loss` are added over all ranks, which wait; else `expert_load` does not count the update.

        Raises:
            FloatingPointError: if the gradient norm is not finite; nothing has been changed then.
        """

        def backward_from(number: int, micro: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            log_probs, entropy = self.score(micro, output, temperature, with_entropy)
            value, metrics = loss(number, log_probs, entropy)
            return value, torch.zeros((), dtype=torch.int), metrics

        variance: GradientVariance | None = None
        measured: list[Metrics] | None = None
        gradient_parts: GradientParts | None = None
        if part_size is not None and self.config.parallel.splits_gradients:
            variance, measured = self._measured_apart(micro_batches, backward_from, part_size)
        elif part_size is not None:
            gradient_parts = GradientParts(self.ddp_chunks, micro_batches, part_size)
        forget_gradients(self.ddp_chunks, self._started_optimizer())
        with gradient_parts.measuring() if gradient_parts is not None else contextlib.nullcontext():
            collected = self._run(micro_batches, backward_from, forward_only=False, gradient_parts=gradient_parts)
        rate = learning_rate(self.optimizer_config, self.optimizer_steps, self.total_optimizer_steps)
        grad_norm = take_step(self.optimizer, rate, self.optimizer_steps + 1)
        if self._gathers_later and not more:
            with device.megatron():
                for chunk in self.ddp_chunks:
                    chunk.start_param_sync(force_sync=True)
        update_biases(self._routings, self.model, self.config.moe.bias_update_rate)
        self.optimizer_steps += 1
        if not with_metrics:  # nor is what its tokens used the experts for
            forget_expert_load(self._routings)
        if gradient_parts is not None:
            variance = gradient_parts.result(self.grid)
        metrics = self.reduce(measured or collected) if with_metrics else Metrics()
        if variance is None:
            return UpdateResult(metrics, grad_norm, rate)
        trace = variance.of_sum(grad_norm**2) if variance.count > 1 else None
        return UpdateResult(metrics, grad_norm, rate, trace, variance.count)

    def _measured_apart(
        self, micro_batches: Sequence[MicroBatch], finish: Callable[..., Any], part_size: PartSize
    ) -> tuple[GradientVariance, list[Metrics]]:
        """Measures the gradient's parts, each in passes of its own. Returns their norms and what `finish` reports."""
        collected = list[Metrics]()

        def squared_norm(part: slice) -> float:
            forget_gradients(self.ddp_chunks, self._started_optimizer())
            collected.extend(self._run(micro_batches[part], finish, forward_only=False, first=part.start))
            return gradient_norm(self.optimizer) ** 2

        in_step = self.grid.pp if self.config.parallel.virtual_pipeline > 1 else 1  # that the schedule takes
        sizes = sizes_over_ranks(self.grid, micro_batches, part_size)
        variance = of_parts(sizes, in_step, squared_norm)
        forget_expert_load(self._routings)  # the update counts them
        return variance, collected

    def expert_load(self) -> dict[str, float]:
        """How evenly the updates since the last call used the experts, on every rank; {} where the model has none."""
        layers = sorted(self.model.expert_layers)
        return expert_load(self._routings, layers, self.model.expert_count) if layers else {}

    def reduce(self, parts: Sequence[Metrics]) -> Metrics:
        """The metrics of all micro-batches of all data-parallel ranks, added in rank order, on every rank."""
        own = sum(parts, Metrics()) if self.grid.is_loss_rank else Metrics()
        return sum(self.grid.all_gather(own), Metrics())

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        finish: Callable[..., Any],
        forward_only: bool,
        gradient_parts: GradientParts | None = None,
        first: int = 0,
    ) -> list[Any]:
        """Megatron's pipeline schedule over the micro-batches, whose numbers begin at `first`; what `finish` reports, on the
        last stage."""
        for routing in self._routings:
            routing.reset()
        drops = dropping(self.chunks, not forward_only)

        def forward_step(iterator: Iterator[tuple[int, MicroBatch]], model: Chunk) -> tuple[Tensor, Callable[..., Any]]:
            number, micro = next(iterator)
            if gradient_parts is not None:
                gradient_parts.start()
            if drops:
                begin_pass(self._seed, self.optimizer_steps, self.grid.dp_rank, self.grid.cp_rank, number)
            return self.forward(model, micro, updates=not forward_only), partial(finish, number, micro)

        iterators = [enumerate(micro_batches, first) for _ in self.ddp_chunks]
        several = len(self.ddp_chunks) > 1
        with device.megatron():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if several else iterators[0],
                model=self.ddp_chunks if several else self.ddp_chunks[0],
                num_microbatches=len(micro_batches),
                seq_length=self.config.tokens_per_microbatch,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def forward(self, model: Chunk, micro: MicroBatch, updates: bool) -> Tensor:
        """One model chunk's part of a forward pass: hidden states. `updates`: a backward pass follows."""
        if self._routings:
            now = Pass(micro.chosen_experts if self._replays else None, self._scored_here(micro), updates)
            for routing in self._routings:
                routing.given = now
        return model(**micro.model_inputs())

    def _scored_here(self, micro: MicroBatch) -> Tensor:
        """Which of this rank's tokens predict a scored one, bool."""
        scored = torch.zeros(len(micro.tokens), dtype=torch.bool, device=micro.tokens.device)
        scored[micro.predictors] = True
        return self._cut(scored)

    def _cut(self, per_token: Tensor) -> Tensor:
        """This rank's part of a tensor over tokens in the layers: with sequence parallelism TP ranks share them."""
        return per_token.chunk(self.grid.tp)[self.grid.tp_rank] if self.config.parallel.sequence else per_token

    def score(self, micro: MicroBatch, hidden: Tensor, temperature: float, with_entropy: bool) -> Scores:
        """Hidden states [1, tokens (/ TP with sequence parallelism), hidden] -> log-probs and entropy of the targets.

        Context-parallel ranks score the targets that they hold the predictors of, and all get all of them: whatever follows
        is the same on each, and its gradient goes to the rank that a token came from.
        """
        whole = gather_from_sequence_parallel_region if self.config.parallel.sequence else copy_to_region
        hidden = whole(hidden[0])
        last = self.chunks[-1]
        tied = last.share_embeddings_and_output_weights
        weight = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
        log_probs, entropy = log_probs_from_hidden(
            hidden.index_select(0, micro.predictors),
            weight,
            micro.targets[micro.own],
            self.vocab_shard,
            temperature,
            self.config.logits_mib * 2**20,
            with_entropy,
            self._exactly,
        )
        cp = self.parallel.cp
        return micro.whole(log_probs, cp), micro.whole(entropy, cp) if entropy is not None else None

    # ----------------------------------------------------------------------------------------------------- weights
    def iter_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every weight, on every rank, in the same order."""
        return iter_hf_weights(self.chunks, self.family, self.hf_config, self.parallel)

    def iter_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """(PEFT's name, full tensor) of every adapter, likewise."""
        assert self.adapters is not None
        return iter_hf_weights(self.chunks, self.adapters.family, self.hf_config, self.parallel)

    def weights(self) -> dict[Key, Tensor]:
        """This rank's parameters and mapped buffers, by rule, layer and local expert."""
        return {weight.key: weight.parameter for weight in local_weights(self.chunks, self.model, self.parallel)}

    def weights_digest(self) -> bytes:
        """16 bytes that tell the bits of this rank's weights and adapters from others."""
        own = [*self.weights().values()] if self.adapters is None else [p for c in self.chunks for p in c.parameters()]
        return checksum.digest(tensor.dequantize() if is_float8tensor(tensor) else tensor for tensor in own)

    def shard_proof(self) -> ShardProof:
        """Compares full tensors under Hugging Face's names with this rank's own shards."""
        return ShardProof(self.chunks, self.family, self.hf_config, self.parallel)

    def load_hf(self, weights: str | Path | WeightSource) -> None:
        """Replaces every weight by those of a Hugging Face folder; before an optimizer takes its master copy of them."""
        with device.megatron():
            load_hf_weights(self.chunks, self.family, self.hf_config, weights, self.parallel)

    def keep_reference(self) -> None:
        """Makes the current weights the reference policy (trained ones in host memory); with adapters, the model without."""
        if self.adapters is None:
            self.reference = reference.copies(self.chunks)

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """While entered, the actor computes with the reference policy's weights."""
        if self.reference is None and self.adapters is None:
            raise RuntimeError("no reference policy was kept; call keep_reference() first")
        replays, self._replays = self._replays, False  # its router is another one
        try:
            with reference.in_place(self.chunks, self.reference), switched_off(self.chunks):
                yield
        finally:
            self._replays = replays

    # ------------------------------------------------------------------------------------------------ GPU memory
    def offload(self) -> None:
        """Gradients are freed and the optimizer's state moves to the host, so that the engine has the room."""
        self._memory.state_out(self.optimizer_state() if self.config.offload and self.has_optimizer else ())

    def offload_weights(self) -> None:
        """The weights move to the host, once the engine has them. Until they are back nothing reads them here."""
        self._memory.weights_out(parameter for chunk in self.chunks for parameter in chunk.parameters())

    def onload_weights(self) -> None:
        self._memory.weights_back()

    def onload(self) -> None:
        """Undoes both. The optimizer's state is copied while log-probs and gradients are computed."""
        self._memory.back()
