"""Weight sync from the actor to the engine, and the proof after every sync that both are the same model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.config.schema import Config
from megatron_rl.data import TokenBatch
from megatron_rl.rollout.engine import Engine
from megatron_rl.runtime.distributed import Grid

_DEFAULT_TOLERANCE = {"float32": 3e-4, "bfloat16": 0.25}


class SyncError(RuntimeError):
    """After a weight sync the engine does not compute what the actor computes."""


class WeightSync:
    """Moves the actor's weights into the engine and compares log-probs afterwards."""

    def __init__(self, config: Config, grid: Grid, actor: Actor, engine: Engine) -> None:
        self.grid, self.actor, self.engine = grid, actor, engine
        given = config.rollout.sync_tolerance
        self.tolerance = given if given is not None else _DEFAULT_TOLERANCE[config.model.dtype]
        self._sent: dict[str, tuple[float, float]] = {}

    def push(self) -> None:
        """Every weight from the actor into the engine."""
        self._sent = {}
        self.engine.load_weights(self._recorded(self.actor.iter_hf_weights()), self.actor.optimizer_steps)

    def _recorded(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Notes a fingerprint of each tensor as the engine is given it; compared only when a check fails."""
        for name, tensor in weights:
            self._sent[name] = _fingerprint(tensor)
            yield name, tensor

    def check(self, sequences: Sequence[Sequence[int]]) -> float:
        """Largest |log-prob of the engine - log-prob of the actor| over all tokens but the first of each sequence.

        Every engine scores the same sequences. The comparison is over all ranks, so all of them return or raise alike.

        Raises:
            SyncError: where the difference is above the tolerance or not finite, with a diagnosis.
        """
        sequences = [tokens[: self.engine.max_scored] for tokens in sequences if len(tokens) > 1]
        if not sequences:
            return 0.0
        scored = self.engine.score(sequences)
        batch = TokenBatch.continuations((tokens[:1], tokens[1:]) for tokens in sequences)
        micro_batches = self.actor.micro_batches(batch)
        own: dict[int, np.ndarray] = {}
        for micro, (log_probs, _) in zip(
            micro_batches, self.actor.log_probs(micro_batches, temperature=1.0), strict=False
        ):
            for local, row in enumerate(micro.rows):
                own[row] = log_probs[micro.sequence_ids == local].cpu().numpy()
        actor_scores: dict[int, np.ndarray] = {}
        for part in self.grid.all_gather(own if self.grid.reports_loss else {}):
            actor_scores.update(part)
        worst = max(float(np.abs(scored[row] - actor_scores[row]).max()) for row in range(len(sequences)))
        by_rank = self.grid.all_gather(worst)
        largest = max(by_rank, key=lambda value: value if value == value else float("inf"))
        if not largest <= self.tolerance:
            raise SyncError(
                f"after a weight sync the engine's log-probs differ from the actor's by up to {largest:.3g}, more than "
                f"rollout.sync_tolerance = {self.tolerance:g}. {self._diagnose(by_rank)}"
            )
        return largest

    def _diagnose(self, by_rank: Sequence[float]) -> str:
        """Names the first tensor that is not what the actor holds: in what was sent, in what the engine keeps, and in the
        copies that it computes with."""
        bad_engines = sorted(
            {rank // self.engine.config.tensor_parallel for rank, d in enumerate(by_rank) if not d <= self.tolerance}
        )
        where = f"Engines affected: {bad_engines} of {self.engine.engines}."
        sent_bad, kept_bad = None, None
        kept, packed = self.engine.parameters(), self.engine.packed_weights()
        tp_rank, tp = self.grid.rank % self.engine.config.tensor_parallel, self.engine.config.tensor_parallel
        for name, tensor in self.actor.iter_hf_weights():
            if sent_bad is None and name in self._sent and self._sent[name] != _fingerprint(tensor):
                sent_bad = name
            held = packed[name]() if name in packed else kept.get(name)
            if kept_bad is None and held is not None and not _holds(held, tensor, tp_rank, tp):
                kept_bad = name
        sent_bad = next((name for name in self.grid.all_gather(sent_bad) if name), None)
        kept_bad = next((name for name in self.grid.all_gather(kept_bad) if name), None)
        stale = [name for names in self.grid.all_gather(self.engine.stale_layers()) for name in names]
        if sent_bad:
            return f"{where} The first tensor that was changed on its way to the engine is {sent_bad}."
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
        return (
            f"{where} Every tensor was sent as the actor holds it, and what can be read back from the engine agrees: the two "
            "compute differently. Compare their kernels and dtypes (model.dtype, actor.fp8), or raise rollout.sync_tolerance "
            "if the difference is expected."
        )


_FINGERPRINT_ELEMENTS = 2**16  # of a tensor, evenly spaced: a full pass over 235B parameters would cost seconds


def _fingerprint(tensor: Tensor) -> tuple[float, float]:
    """Two sums over the tensor (over evenly spaced elements of a large one) that a change or a shift changes."""
    flat = tensor.detach().reshape(-1)
    flat = flat[:: -(-flat.numel() // _FINGERPRINT_ELEMENTS)].double()
    weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
    sums = torch.stack([flat.sum(), flat @ weights]).tolist()
    return sums[0], sums[1]


def _holds(held: Tensor, full: Tensor, tp_rank: int, tp: int) -> bool:
    """Whether `held` is the tensor, or this rank's shard of it along either dimension.

    Rows may be padded; where there are fewer shards than ranks (key and value heads), neighbouring ranks hold the same one.
    """
    if held.dim() != full.dim():
        return True  # kept in another form: nothing can be said
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
