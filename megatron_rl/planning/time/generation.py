"""Seconds of an engine's decoding steps and prompts, and of a batch of responses with its tail."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models import Model
from megatron_rl.planning.memory import active_parameters, cache_bytes_per_token, engine_weight_bytes
from megatron_rl.planning.time.hardware import Hardware
from megatron_rl.planning.time.kernels import CommGroup, attention_seconds, memory_seconds
from megatron_rl.planning.time.lengths import BETWEEN, Lengths

_KERNELS = 9, 16  # of a decoding step and layer, in a CUDA graph: dense, with experts
_SAMPLING = 24  # bytes per logit that sampling reads and writes: fp32, six times


@dataclass(frozen=True)
class GenerationTime:
    """A batch's time, of which engines wait for the longest responses: `idle` is the share of their places that are empty,
    mean over the time."""

    seconds: float
    prompts: float  # seconds of it, reading prompts
    idle: float
    places: float  # sequences that an engine decodes at a time, at most
    bound: str


@dataclass(frozen=True)
class Decoding:
    """One engine.

    Attributes:
        cache_tokens: what its KV cache holds; `state_tokens`: of them, what each sequence takes beside its own (both as of
            `MemoryPlan`).
        drafted_share: with `rollout.speculation`, of the tokens of sequences that are few enough for drafts, those that were
            guessed; so the others are a pass each.
    """

    model: Model
    rollout: RolloutConfig
    hardware: Hardware
    cache_tokens: float
    state_tokens: float
    drafted_share: float = 0.0

    @cached_property
    def _group(self) -> CommGroup:
        return CommGroup(self.hardware, self.rollout.tensor_parallel)

    @cached_property
    def _weights(self) -> tuple[float, float]:
        """Bytes on a rank that every step reads, and those of experts, which it reads where a token is sent to them."""
        dims, tensor = self.model.dims, self.rollout.tensor_parallel
        width = 2 if self.rollout.fp8 == "none" else 1
        experts = width * self.model.expert_numbers / tensor
        looked_up = 0 if self.model.description.tied else 2 * dims["vocab"] * dims["hidden"] / tensor
        return engine_weight_bytes(self.model, self.rollout, 2) - experts - looked_up, experts

    @cached_property
    def _cache(self) -> float:
        return cache_bytes_per_token(self.model, self.rollout.tensor_parallel)

    @cached_property
    def _states(self) -> float:
        """Bytes of a sequence's states, which every decoding step reads and writes."""
        return self.model.dims["layers"] * self.model.attention.state_bytes(self.rollout.tensor_parallel, 2)

    @cached_property
    def _kernels(self) -> int:
        mixtures = len(self.model.expert_layers)
        return (self.model.dims["layers"] - mixtures) * _KERNELS[0] + mixtures * _KERNELS[1]

    @cached_property
    def _active(self) -> float:
        return active_parameters(self.model) / self.rollout.tensor_parallel

    def _drafts(self, running: float) -> int:
        """Returns the tokens of a draft; 0 where too many sequences run, or no draft would be accepted."""
        speculation = self.rollout.speculation
        return speculation.tokens if speculation and self.drafted_share and running <= speculation.below else 0

    def _parts(self, running: float, context: float) -> dict[str, float]:
        """Predicts the seconds of a pass over all sequences, by cause. Every sequence has a draft of full length."""
        dims, hardware = self.model.dims, self.hardware
        always, experts = self._weights
        tokens = running * (1 + self._drafts(running))
        touched = self.model.experts.touched(tokens) if self.model.experts else 0.0
        read = hardware.memory * hardware.decode_share
        weights = (always + touched * experts) / read
        peak = (
            hardware.bf16 * hardware.product_share
            if self.rollout.fp8 == "none"
            else hardware.fp8 * hardware.product_share_fp8
        )
        products = 2 * tokens * self._active / peak
        moved = tokens * dims["hidden"] * 2
        return {
            "weights": weights,
            "matrix products": max(0.0, products - weights),
            "cache": running * (context * self._cache + 2 * self._states) / read,
            "tensor": 2 * dims["layers"] * self._group.reduce_seconds(moved),
            "launches": self._kernels * hardware.launch,
            "sampling": memory_seconds(hardware, tokens * dims["vocab"] * _SAMPLING),
        }

    def _host(self, running: float) -> float:
        return self.hardware.engine_host + running * self.hardware.engine_host_sequence

    def step_seconds(self, running: float, context: float) -> float:
        """One more token of `running` sequences with `context` tokens each in the mean: a pass, with drafts a part of one."""
        device = sum(self._parts(running, context).values())
        host = self._host(running)
        seconds = max(device, host) if self._is_async else device + host
        return seconds * (1 - self.drafted_share) if self._drafts(running) else seconds

    @property
    def _is_async(self) -> bool:
        """Whether the host prepares a pass under the one before; with drafts it does not know that one's tokens."""
        return self.rollout.async_scheduling and self.rollout.speculation is None

    def bound(self, running: float, context: float) -> str:
        """Names what takes most of such a step."""
        parts = self._parts(running, context) | {"host": 0.0}
        if not self._is_async or self._host(running) > sum(parts.values()):
            parts["host"] = self._host(running)
        return max(parts, key=lambda name: parts[name])

    def prompt_seconds(self, tokens: float, pairs: float) -> float:
        """`tokens` of prompts, with so many pairs of query and key."""
        dims, hardware = self.model.dims, self.hardware
        products = 2 * tokens * self._active / (hardware.bf16 * hardware.product_share)
        attention = dims["layers"] * attention_seconds(
            hardware, self.model.attention.operations(tokens, pairs, self.rollout.tensor_parallel)
        )
        bandwidth_only = 4 * dims["layers"] * self._group.gather_seconds(tokens * dims["hidden"] * 2)
        return products + attention + bandwidth_only

    def places(self, lengths: Lengths) -> float:
        """Sequences that are decoded at a time: what the recipe allows and the cache holds at their mean length under way."""
        under_way = lengths.prompt + lengths.remaining + self.state_tokens
        return max(1.0, min(self.rollout.max_concurrent, self.cache_tokens / under_way))

    def _more(self, responses: float, engines: float, lengths: Lengths) -> float:
        """Responses of the slowest engine, over the mean of all. Engines are given whole groups, as many as they may decode
        at a time, and more as they become free: sums of so many groups differ, and the largest of normal ones counts."""
        count = self.rollout.group_size
        groups, given = responses / count, min(responses, self.rollout.max_concurrent) / count
        of_group = (lengths.square / lengths.mean**2 - 1) * (BETWEEN + (1 - BETWEEN) / count)  # variance of its mean
        largest = NormalDist().inv_cdf((engines - 0.375) / (engines + 0.25)) if engines > 1 else 0.0
        return 1 + largest * math.sqrt(of_group * given) / groups

    def generate(self, responses: float, everywhere: float, lengths: Lengths) -> GenerationTime:
        """`responses` of each engine, `everywhere` of all engines together: the slowest engine ends it.

        More than there are places are drawn as places become free; when none are left, those under way are as far as a
        long-running queue's are (renewal theory), else all begin together.
        """
        engines = everywhere / responses
        more = self._more(responses, engines, lengths)
        lengths = lengths.longer(more)
        places = min(self.places(lengths), responses)
        prompts = responses / self.rollout.group_size
        prompt = self.prompt_seconds(prompts * lengths.prompt, prompts * lengths.prompt**2 / 2)
        seconds = drawn = 0.0
        alive = lengths.alive
        if responses > 1.02 * places:
            full = max(0.0, responses * lengths.mean / places - lengths.remaining)
            seconds = full * self.step_seconds(places, lengths.prompt + lengths.remaining)
            drawn = seconds * places
            tail = [sum(alive[i:]) * lengths.cell / lengths.mean for i in range(len(alive))]
        else:
            tail = list(alive)
        for i, share in enumerate(tail):
            some = 1 - (1 - share) ** (places * engines)  # somewhere a response is not done
            running = max(1.0, places * share)
            took = some * lengths.cell * self.step_seconds(running, lengths.prompt + (i + 0.5) * lengths.cell)
            seconds, drawn = seconds + took, drawn + took * places * share
        return GenerationTime(
            seconds=prompt + seconds,
            prompts=prompt,
            idle=1 - drawn / more / (seconds * places),
            places=places,
            bound=self.bound(max(1.0, drawn / seconds), lengths.prompt + lengths.remaining),
        )
