"""Seconds of the actor's micro-batches in a layout: forward and backward passes, their communication, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_rl.config.actor import ActorConfig
from megatron_rl.config.pipeline_split import stage_layers
from megatron_rl.models import Model
from megatron_rl.planning.components import Parameters
from megatron_rl.planning.memory import trained_parameters
from megatron_rl.planning.time.hardware import Hardware
from megatron_rl.planning.time.kernels import (
    CommGroup,
    attention_seconds,
    host_seconds,
    memory_seconds,
    product_seconds,
)

WIDTH = 2  # bytes of an activation


@dataclass(slots=True)  # not frozen: a search makes millions
class Cost:
    """Seconds by what a rank does in them: nothing of it at the same time as anything else."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0  # norms, activations, permutations, casts
    tensor: float = 0.0  # communication
    context: float = 0.0
    experts: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    host: float = 0.0  # the GPU waits for the program, or for its processors' optimizer
    bubble: float = 0.0

    @property
    def seconds(self) -> float:
        here = self.products + self.attention + self.memory + self.host
        return here + self.tensor + self.context + self.experts + self.pipeline + self.data + self.bubble

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.products + other.products,
            self.attention + other.attention,
            self.memory + other.memory,
            self.tensor + other.tensor,
            self.context + other.context,
            self.experts + other.experts,
            self.pipeline + other.pipeline,
            self.data + other.data,
            self.host + other.host,
            self.bubble + other.bubble,
        )

    def __mul__(self, factor: float) -> Cost:
        return Cost(*(getattr(self, name) * factor for name in Cost.__slots__))

    @property
    def largest(self) -> str:
        """The part that takes longest, in words: what to look at first."""
        name = max(Cost.__slots__, key=lambda name: float(getattr(self, name)))
        return "matrix products" if name == "products" else name


@dataclass(frozen=True)
class Training:
    """An actor's layout on `world` GPUs. `tokens` and `pairs` below are those of a micro-batch of one data-parallel rank:
    packed tokens, and pairs of query and key over all its sequences.

    Attributes:
        imbalance: tokens of the busiest rank's experts over the mean.
        tensor_overlap: share of tensor-parallel communication that runs under matrix products (0: ours, one after the other).
        held: what `trained_parameters` gives for the layout, where it is known.
    """

    model: Model
    actor: ActorConfig
    world: int
    hardware: Hardware
    imbalance: float = 1.2
    tensor_overlap: float = 0.0
    held: Parameters | None = None

    # ----------------------------------------------------------------------------------------------------- layout
    @cached_property
    def data_parallel(self) -> int:
        parallel = self.actor.parallel
        return self.world // (parallel.tensor * parallel.pipeline * parallel.context)

    @cached_property
    def stages(self) -> list[int]:
        """Layers on each pipeline stage."""
        parallel = self.actor.parallel
        return stage_layers(self.model.dims["layers"], parallel.pipeline, parallel.virtual_pipeline)

    @cached_property
    def trained(self) -> Parameters:
        """Parameters that are trained, on the rank that holds most."""
        return trained_parameters(self.model, self.actor) if self.held is None else self.held

    def _group(self, size: int, stride: int = 1) -> CommGroup:
        return CommGroup(self.hardware, size, stride)

    @cached_property
    def _tensor(self) -> CommGroup:
        return self._group(self.actor.parallel.tensor)

    @cached_property
    def _context(self) -> CommGroup:
        return self._group(self.actor.parallel.context, self.actor.parallel.tensor)

    @cached_property
    def _experts(self) -> CommGroup:
        return self._group(self.actor.parallel.expert * self.actor.parallel.expert_tensor)

    # ------------------------------------------------------------------------------------------------------ layers
    def _rows(self, tokens: float) -> tuple[float, float]:
        """Returns for a micro-batch on each rank the rows of its matrix products, and rows between them (sequence
        parallelism)."""
        rows = tokens / self.actor.parallel.context
        return rows, rows / self.actor.parallel.tensor if self.actor.parallel.sequence else rows

    def _products(self, rows: float, matrices: list[tuple[float, float]], count: float = 1) -> Cost:
        """`matrices`: columns and terms of the forward products."""
        fp8 = self.actor.fp8 is not None
        seconds = sum(product_seconds(self.hardware, rows, *size, count=count, fp8=fp8) for size in matrices)
        # Casts: read in bf16, written in FP8 by rows and by columns.
        cast = sum(4 * rows * terms * count for _, terms in matrices) if fp8 else 0.0
        return Cost(products=seconds, memory=memory_seconds(self.hardware, cast))

    def _between(self, rows: float) -> float:
        """Seconds of tensor-parallel communication around attention, or around a dense feed-forward: an all-gather and a
        reduce-scatter, or an all-reduce of the same traffic."""
        whole = rows * self.model.dims["hidden"] * WIDTH
        return 2 * self._tensor.gather_seconds(whole) * (1 - self.tensor_overlap)

    def attention(self, tokens: float, pairs: float) -> Cost:
        """Cost of one layer's attention block, forwards."""
        attention, parallel, hidden = self.model.attention, self.actor.parallel, self.model.dims["hidden"]
        rows, kept = self._rows(tokens)
        core = attention_seconds(self.hardware, attention.operations(rows, pairs / parallel.context, parallel.tensor))
        # A norm, a residual sum (bf16 read and written), rotation and norms of queries and keys.
        moved = WIDTH * (kept * 5 * hidden + rows * attention.moved_numbers(parallel.tensor))
        ring = 0.0
        if parallel.context > 1:  # every other rank's keys and values, under the attention to those that are there
            sent = rows * attention.sent_numbers(parallel.tensor) * WIDTH
            ring = (parallel.context - 1) * self._context.send_seconds(sent)
        return self._products(rows, attention.products(hidden, parallel.tensor)) + Cost(
            attention=core,
            memory=memory_seconds(self.hardware, moved),
            tensor=self._between(rows),
            context=max(0.0, ring - self.hardware.overlap * core),
        )

    def feed_forward(self, tokens: float) -> Cost:
        """Cost of one layer's dense feed-forward or experts, forwards; the mean where layers differ."""
        if not (share := self.model.expert_share):
            return self._dense(tokens)
        return (
            self._mixture(tokens) if share == 1 else self._mixture(tokens) * share + self._dense(tokens) * (1 - share)
        )

    def _dense(self, tokens: float) -> Cost:
        return self._dense_of(self.model.dims["ffn"], tokens)

    def _dense_of(self, ffn: float, tokens: float) -> Cost:
        """A feed-forward of `ffn` numbers that every token goes through."""
        hidden, ffn = self.model.dims["hidden"], ffn / self.actor.parallel.tensor
        rows, kept = self._rows(tokens)
        moved = WIDTH * (kept * 5 * hidden + rows * 3 * ffn)
        return self._products(rows, [(2 * ffn, hidden), (hidden, ffn)]) + Cost(
            memory=memory_seconds(self.hardware, moved), tensor=self._between(rows)
        )

    def _mixture(self, tokens: float) -> Cost:
        """Router, exchange, experts, exchange, on every rank."""
        experts, hidden, parallel = self.model.experts, self.model.dims["hidden"], self.actor.parallel
        assert experts is not None
        ffn, top_k = experts.ffn / parallel.expert_tensor, experts.top_k
        _, kept = self._rows(tokens)
        here = experts.count / parallel.expert
        sent = kept * top_k  # rows
        got = sent * parallel.expert_tensor * self.imbalance
        router = product_seconds(self.hardware, kept, experts.count, hidden)
        exchange = self._experts.exchange_seconds(
            kept, WIDTH * hidden, top_k, once_per_domain=self.actor.moe.dispatcher == "deepep"
        )
        # Read and written: permuted by rank, again by expert, and both ways back; the activation.
        moved = WIDTH * (kept * 5 * hidden + 4 * sent * hidden + 4 * got * hidden + 3 * got * ffn)
        costs = self._products(got / here, [(2 * ffn, hidden), (hidden, ffn)], here)
        if experts.shared:
            costs += self._dense_of(experts.shared, tokens)
        return costs + Cost(
            products=router,
            memory=memory_seconds(self.hardware, moved),
            experts=2 * exchange * (parallel.expert_tensor * self.imbalance),
        )

    @cached_property
    def _known(self) -> dict[tuple[float, float], tuple[Cost, Cost]]:
        return {}

    def _halves(self, tokens: float, pairs: float) -> tuple[Cost, Cost]:
        """`attention` and `feed_forward`, computed once."""
        if (tokens, pairs) not in self._known:
            self._known[tokens, pairs] = self.attention(tokens, pairs), self.feed_forward(tokens)
        return self._known[tokens, pairs]

    def _waiting(self, cost: Cost, passes: float) -> Cost:
        """Adds the time that the GPU waits for the host's program, which issues each kernel."""
        share = self.model.expert_share
        issue = share * self.hardware.host_experts + (1 - share) * self.hardware.host_dense
        return cost + Cost(host=max(0.0, passes * issue - cost.seconds))

    def forward(self, tokens: float, pairs: float) -> Cost:
        """Cost of one layer's forward pass."""
        attention, feed_forward = self._halves(tokens, pairs)
        return self._waiting(attention + feed_forward, 1)

    def backward(self, tokens: float, pairs: float) -> Cost:
        """Cost of one layer, without what is computed again: twice the products and bytes, the same communication; gradients
        of the weights are added in fp32, and with LoRA there are none."""
        attention, feed_forward = self._halves(tokens, pairs)
        once = attention + feed_forward
        added = memory_seconds(self.hardware, 8 * self._layer_parameters)
        return self._waiting(
            Cost(
                products=once.products + (0.0 if self.actor.lora is not None else max(once.products, added)),
                attention=2.5 * once.attention,
                memory=2 * once.memory,
                tensor=once.tensor,
                context=once.context,
                experts=once.experts,
            ),
            2,
        )

    @cached_property
    def _layer_parameters(self) -> float:
        held = self.trained
        return (held.linear + held.expert) / max(self.stages)

    def again(self, tokens: float, pairs: float) -> Cost:
        """Cost of what the backward pass of one layer computes again, mean over the layers of a stage."""
        actor = self.actor
        if actor.recompute == "none":
            return Cost()
        if actor.recompute == "full":
            layers = max(self.stages) / actor.parallel.virtual_pipeline
            return self.forward(tokens, pairs) * min(1.0, (actor.recompute_layers or layers) / layers)
        again, experts, share = Cost(), self.model.experts, self.model.expert_share
        if experts is not None and "moe" in actor.recompute_modules:
            again += self._mixture(tokens) * share
        elif experts is not None and "moe_act" in actor.recompute_modules:
            _, kept = self._rows(tokens)
            moved = WIDTH * 3 * kept * experts.top_k * experts.ffn
            again += Cost(memory=memory_seconds(self.hardware, moved * share))
        if share < 1 and "mlp" in actor.recompute_modules:
            again += self._dense(tokens) * (1 - share)
        if "core_attn" in actor.recompute_modules:
            again += Cost(attention=self._halves(tokens, pairs)[0].attention)
        return again

    def head(self, tokens: float, *, backward: bool) -> Cost:
        """The output layer, a tile of logits at a time: forwards once; backwards logits again, and two products more."""
        rows = tokens / self.actor.parallel.context
        vocab, hidden = self.model.dims["vocab"] / self.actor.parallel.tensor, self.model.dims["hidden"]
        times = 3 if backward else 1
        # Tiles of logits, in fp32, read and written about four times.
        moved = times * 16 * rows * vocab
        return Cost(
            products=times * product_seconds(self.hardware, rows, vocab, hidden),
            memory=memory_seconds(self.hardware, moved),
            tensor=self._between(rows),
        )

    # ---------------------------------------------------------------------------------------------------- pipeline
    def _stage_costs(self, tokens: float, pairs: float, train: bool) -> list[Cost]:
        layer = self.forward(tokens, pairs)
        head = self.head(tokens, backward=False)
        if train:
            layer += self.backward(tokens, pairs) + self.again(tokens, pairs)
            head += self.head(tokens, backward=True)
        by_count = {count: layer * count for count in set(self.stages)}
        costs = [by_count[count] for count in self.stages]
        costs[-1] += head
        return costs

    def passes(self, batches: int, tokens: float, pairs: float, *, train: bool) -> Cost:
        """`batches` micro-batches through all stages: one forward, one backward, interleaved over virtual stages."""
        parallel = self.actor.parallel
        costs = self._stage_costs(tokens, pairs, train)
        slowest = max(costs, key=lambda cost: cost.seconds)
        fill = (sum(cost.seconds for cost in costs) - slowest.seconds) / parallel.virtual_pipeline
        sends = 0.0
        if parallel.pipeline > 1:
            _, kept = self._rows(tokens)
            stride = self.world // parallel.pipeline
            once = self._group(parallel.pipeline, stride).send_seconds(kept * self.model.dims["hidden"] * WIDTH)
            sends = (2 if train else 1) * once * (batches + parallel.pipeline - 1)
            if parallel.virtual_pipeline > 1:  # under computation
                sends *= parallel.virtual_pipeline * (1 - self.hardware.overlap)
        return slowest * batches + Cost(bubble=fill, pipeline=sends)

    # --------------------------------------------------------------------------------------------------- optimizer
    def _shared(self) -> tuple[CommGroup, CommGroup]:
        """Ranks with the same dense weights, and with the same experts."""
        parallel = self.actor.parallel
        stage = self.world // parallel.pipeline
        experts = parallel.expert * parallel.expert_tensor
        return self._group(stage // parallel.tensor, parallel.tensor), self._group(stage // experts, experts)

    def data_communication(self, tokens: float, pairs: float) -> Cost:
        """Cost of an optimizer step's communication: gradients summed in fp32 under the last backward pass, weights gathered
        in bf16 under the first forward pass."""
        dense, experts = self._shared()
        held = self.trained
        scatter = dense.gather_seconds(4 * held.dense) + experts.gather_seconds(4 * held.expert)
        gather = dense.gather_seconds(2 * held.dense) + experts.gather_seconds(2 * held.expert)
        hidden = 0.0 if self.actor.overlap is False else self.hardware.overlap
        under = max(self.stages) * hidden
        scatter = max(scatter * 0.05, scatter - under * self.backward(tokens, pairs).seconds)
        gather = max(gather * 0.05, gather - under * self.forward(tokens, pairs).seconds)
        return Cost(data=scatter + gather)

    def optimizer_bytes_moved(self) -> float:
        """Bytes that an optimizer step moves in the GPU's memory: the norm reads all gradients, which are then zeroed; Adam
        reads gradient, master weight and moments, and writes three of them and the weight. On the CPU it reads and writes
        the first and the last there."""
        return 4 * self.trained.total + self._stepped() * (34 if self.actor.optimizer.device == "gpu" else 6)

    def _stepped(self) -> float:
        """Parameters whose state this rank holds."""
        held, (dense, experts) = self.trained, self._shared()
        if not self.actor.optimizer.distributed:
            return float(held.total)
        return held.dense / dense.size + held.expert / experts.size

    def optimizer(self) -> Cost:
        """Adam's step. On the CPU gradients come in fp32 and bf16 weights go back, under the arithmetic. The host's memory is
        read and written with 36 bytes a parameter: the gradient twice, master and moments, the weight twice."""
        hardware, host = self.hardware, 0.0
        if self.actor.optimizer.device == "cpu":
            own = self._stepped()
            host = max(host_seconds(hardware, 6 * own), 36 * own / (hardware.host_memory * hardware.host_memory_share))
        return Cost(memory=memory_seconds(hardware, self.optimizer_bytes_moved()), host=host)
