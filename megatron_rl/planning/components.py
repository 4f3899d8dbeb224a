"""Where a GPU's and its host's memory goes: the parts, when each is there, and what does not fit. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from megatron_rl.models import Model

GIB = 2**30
LOAD, GENERATE, OLD, UPDATE, SYNC, CHECK = "load", "generate", "old_log_probs", "update", "sync", "sync_check"
PHASES = (LOAD, GENERATE, OLD, UPDATE, SYNC, CHECK)
OFFLOAD, CHECKPOINT = HOST_PHASES = ("offload", "checkpoint")  # whose peaks are memory of the host


class Part(Enum):
    """A consumer of memory; the value is its name in tables."""

    WEIGHTS = "actor: weights"
    FP8_COPIES = "actor: FP8 copies of the weights"
    SET_ASIDE = "actor: weights set aside for the reference"
    GRADIENTS = "actor: gradients (fp32)"
    OPTIMIZER = "actor: optimizer state"
    LOADING = "load: weights laid out anew"
    ACTIVATIONS = "actor: activations"
    HEAD = "actor: output layer's workspace"
    FORWARD = "actor: forward pass"
    SYNC_CHECK = "sync check: the actor's forward pass"
    ENGINE_WEIGHTS = "engine: weights"
    ENGINE_WORKSPACE = "engine: workspace"
    CACHE = "engine: KV cache"
    BUCKETS = "sync: two buckets"
    SYNC_LAYERS = "sync: layers made anew"
    RESERVE = "reserve: CUDA, NCCL, fragmentation"
    HOST_OPTIMIZER = "host: optimizer state"
    HOST_WEIGHTS = "host: weights, pinned"
    HOST_REFERENCE = "host: the reference policy"
    HOST_EXPERTS = "host: experts of the cache's tokens"
    HOST_CHECKPOINT = "host: the checkpoint's copy"


@dataclass(frozen=True)
class Parameters:
    """Parameters by how their optimizer state is sharded and whether a matrix product reads them in FP8."""

    linear: int = 0  # attention and dense feed-forward matrices
    other: int = 0  # embedding, output layer, norms, biases, router
    expert: int = 0  # the experts' matrices

    @property
    def dense(self) -> int:
        return self.linear + self.other

    @property
    def total(self) -> int:
        return self.linear + self.other + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.linear + other.linear, self.other + other.other, self.expert + other.expert)


@dataclass(frozen=True)
class Component:
    """One line of the table: bytes on the fullest rank, in the phases that need them."""

    part: Part
    bytes: float
    phases: tuple[str, ...]
    knobs: tuple[str, ...]  # recipe keys that make it smaller
    estimate: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of the fullest GPU by component, and of its host."""

    model: Model
    world: int
    gpu_bytes: float
    components: tuple[Component, ...]
    parameters: Parameters  # on the fullest rank of the actor
    data_parallel: int
    engines: int
    cache_tokens: float  # KV cache of one engine, tokens
    state_tokens: float  # of them, what a sequence takes whatever its tokens (`planning.memory.state_tokens`)
    longest: int  # tokens of the longest sequence
    host_bytes: float | None = None  # of the host's memory, for each of its GPUs; None: not known, so not checked
    # With split placement: of `world`, those that only generate. GENERATE is their phase, and the others are the actor's.
    generators: int = 0

    @property
    def actor_world(self) -> int:
        """GPUs of the actor."""
        return self.world - self.generators

    def peak(self, phase: str) -> float:
        return sum(component.bytes for component in self.components if phase in component.phases)

    def bytes_of(self, *parts: Part) -> float:
        """0 for parts that the plan has not."""
        return sum(component.bytes for component in self.components if component.part in parts)

    @property
    def full_length_sequences(self) -> float:
        """Sequences of full length that one engine holds at once."""
        return self.cache_tokens / (self.longest + self.state_tokens)

    def problems(self) -> Iterator[str]:
        """A sentence per reason why it does not fit, with the keys that would help, the largest part first."""
        for phase in (*PHASES, *HOST_PHASES):
            there_is = self.host_bytes if phase in HOST_PHASES else self.gpu_bytes
            if there_is is not None and (over := self.peak(phase) - there_is) > 0:
                parts = sorted(
                    (part for part in self.components if phase in part.phases and part.knobs),
                    key=lambda part: -part.bytes,
                )
                knobs = list(dict.fromkeys(knob for part in parts[:3] for knob in part.knobs))
                where = " of the host's memory, for each GPU," if phase in HOST_PHASES else ""
                yield f"phase {phase} needs {over / GIB:.1f} GiB{where} more than there is; what helps: {', '.join(knobs)}"
        if self.full_length_sequences < 1:
            state = f" and its state, {self.state_tokens:.0f} more" if self.state_tokens else ""
            yield (
                f"the engine's KV cache holds {max(0, self.cache_tokens):.0f} tokens, less than one sequence of "
                f"{self.longest}{state}; raise rollout.memory_fraction or rollout.tensor_parallel, or lower "
                "rollout.max_tokens"
            )
