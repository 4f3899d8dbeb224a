"""The learner: the actor, by an algorithm. Rollouts and rewards to new weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.actor.routing import choices
from megatron_rl.actor.update_result import UpdateResult
from megatron_rl.algorithms import Algorithm, StepAdvantages
from megatron_rl.algorithms.aggregation import Denominators
from megatron_rl.algorithms.kl import sequence_kl
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.checkpoint import store
from megatron_rl.checkpoint.store import SavedState
from megatron_rl.config.actor import OptimizerConfig
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch, TrainBatch
from megatron_rl.data.images import PromptImages
from megatron_rl.data.rewards import RewardTable
from megatron_rl.data.rollout import Rollout, Rollouts
from megatron_rl.rollout.exchange import exchange
from megatron_rl.rollout.sync import Scored
from megatron_rl.runtime import device
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.trainer.minibatch import Minibatch, PolicyTokens, minibatches, train_batch, trained_rows
from megatron_rl.trainer.record import TokenLog


class Learner:
    """This rank's share of learning. Every rank calls each method at the same time."""

    def __init__(self, config: Config, actor: Actor, algorithm: Algorithm, timer: StepTimer) -> None:
        self.config, self.actor, self.algorithm = config, actor, algorithm
        self._grid, self.timer = actor.grid, timer

    def start(self) -> None:
        """RL begins from the actor's weights: they are the reference policy, and the optimizer is fresh."""
        if self.algorithm.needs_reference:
            self.actor.keep_reference()
        self.actor.start_optimizer(self.config.actor.optimizer, self.total_updates)

    def resume(self, folder: Path, saved: SavedState, optimizer: OptimizerConfig, total_updates: int) -> None:
        """Weights, optimizer and estimator are the checkpoint's; every rank calls it.

        Raises:
            CheckpointError: its tensors are not those of this model and optimizer.
        """
        self.actor.start_optimizer(optimizer, total_updates)
        store.load(folder, self.actor.chunks, self.actor.optimizer, self._grid)
        self.actor.optimizer_steps = saved["optimizer_steps"]
        self.algorithm.load_state_dict(saved["algorithm"])

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole run of RL."""
        trainer = self.config.trainer
        return trainer.steps * trainer.minibatches * trainer.epochs

    # ------------------------------------------------------------------------------------------------------ advantages
    def compute_advantages(self, table: RewardTable, rollouts: Rollouts) -> StepAdvantages:
        """The advantages of a step's rollouts.

        Raises:
            ValueError: a rollout was drawn by other weights than the actor's.
        """
        versions, newest, partial = (
            np.unique(rollouts.facts["version"]).tolist(),
            self.actor.optimizer_steps,
            self.config.rollout.partial,
        )
        per_step = self.config.trainer.minibatches * self.config.trainer.epochs
        ahead = int(self.config.launch.generators is not None)  # drawn while the last step was learned from
        oldest = newest - ((0 if partial is None else partial.max_staleness) + ahead) * per_step
        if not oldest <= versions[0] <= versions[-1] <= newest:
            raise ValueError(
                f"rollouts were drawn with weights of optimizer steps {versions}, and the actor is at step "
                f"{self.actor.optimizer_steps}: the engine missed a weight sync"
            )
        reference_kl = self._reference_kl(rollouts)
        return self.algorithm.compute_advantages(
            table,
            truncated=rollouts.truncated,
            reference_kl=None if reference_kl is None else reference_kl.view(table.mask.shape),
        )

    def train_batch(self, rollouts: Rollouts, estimate: StepAdvantages) -> TrainBatch:
        """The rollouts that are trained on, with their advantages; tokens only of those in this rank's micro-batches."""
        rows = trained_rows(estimate)
        parts = minibatches(rows // rollouts.count, self.config.trainer.minibatches)
        return train_batch(rollouts, estimate, self._receive(rollouts, rows, parts), self.algorithm)

    def _receive(self, rollouts: Rollouts, rows: np.ndarray, parts: Sequence[Sequence[int]]) -> dict[int, Rollout]:
        """Returns those of the rollouts `rows` that are in this rank's micro-batches, by row. `parts`: minibatches of these
        rows."""
        lengths = rollouts.facts["num_tokens"][rows].tolist()
        shares = [self.actor.shares(lengths, part) for part in parts]
        needs = [
            (ranks, [rows[i] for share in shares for micro in share[replica] for i in micro])
            for replica, ranks in enumerate(self._grid.replicas)
        ]
        return exchange(self._grid, rollouts, needs)

    def _reference_kl(self, rollouts: Rollouts) -> Tensor | None:
        """KL of every rollout from the reference policy, float64 [rollouts], 0 of lost ones; None where no reward uses it."""
        kl, temperature = self.config.algorithm.kl, self.config.rollout.temperature
        if not kl.reward_coef:
            return None
        local: dict[int, float] = {}
        with self.timer("ref_log_prob"):
            rows = np.flatnonzero(~rollouts.facts["lost"])
            received = self._receive(replace(rollouts, token_weights={}), rows, [[*range(len(rows))]])
            known = {i: received[row] for i, row in enumerate(rows.tolist()) if row in received}
            samples = {i: rollouts.sample(int(rows[i])) for i in known}
            micro_batches = self.actor.micro_batches(
                TokenBatch.of(rollouts.facts["num_tokens"][rows].tolist(), known, samples)
            )
            old = self.actor.log_probs(micro_batches, temperature)
            with self.actor.as_reference():
                reference = self.actor.log_probs(micro_batches, temperature)
            # Log-probs are on the last pipeline stage only.
            scored = zip(micro_batches if self._grid.is_last_stage else (), old, reference, strict=True)
            for micro, (log_probs, _), (ref_log_probs, _) in scored:
                values = sequence_kl(log_probs, ref_log_probs, micro.sequence_ids, kl.reward_estimator)
                local.update(zip(rows[list(micro.rows)].tolist(), values.tolist(), strict=True))
        merged: dict[int, float] = {}
        for part in self._grid.all_gather(local if self._grid.is_loss_rank else {}):
            merged.update(part)
        return torch.tensor([merged.get(row, 0.0) for row in range(len(rollouts))], dtype=torch.float64)

    # ------------------------------------------------------------------------------------------------------ sync check
    def score(self, sequences: Sequence[Sequence[int]], images: Sequence[PromptImages | None] = ()) -> Scored:
        """The actor's log-probs of sequences of two tokens or more, at temperature 1, on every rank: its side of the check
        after a weight sync. `images`: of the sequences' prompts, where these may have some."""

        def again(experts: Sequence[np.ndarray]) -> list[np.ndarray]:
            self.actor.onload_weights()  # before the diagnosis of a sync the engine has the device
            return self._scores(sequences, images, experts)[0]

        log_probs, experts = self._scores(sequences, images) if sequences else ([], None)
        return Scored(sequences, images, log_probs, again, experts)

    def _scores(
        self,
        sequences: Sequence[Sequence[int]],
        images: Sequence[PromptImages | None],
        experts: Sequence[np.ndarray] = (),
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """float32 [len - 1] of each sequence, and the experts that its tokens went to, where the engine says its own;
        `experts`: those to go to."""
        batch = TokenBatch.continuations(((tokens[:1], tokens[1:]) for tokens in sequences), images, experts)
        micro_batches = self.actor.micro_batches(batch)
        ends = np.cumsum([len(tokens) - 1 for tokens in sequences])
        scores = np.zeros(ends[-1], dtype=np.float32)
        by_row = np.split(scores, ends[:-1])
        computed = self.actor.log_probs(micro_batches, temperature=1.0)  # on the last pipeline stage only
        for micro, (log_probs, _) in zip(micro_batches if self._grid.is_last_stage else (), computed, strict=True):
            for local, row in enumerate(micro.rows if self._grid.is_loss_rank else ()):
                by_row[row][:] = log_probs[micro.sequence_ids == local].cpu().numpy()
        device.empty_cache()  # the engine takes the device next, and finds what this pass took free
        self._grid.sum_array(scores)
        if self.config.actor.moe.routing_replay != "rollout":
            return by_row, None
        cut = self.config.actor.parallel.sequence
        return by_row, choices(micro_batches, batch.lengths, self.actor.model, self._grid, cut)

    # ---------------------------------------------------------------------------------------------------------- update
    def update(
        self,
        batch: TrainBatch,
        clip_range: tuple[float, float] | None,
        log: TokenLog | None = None,
        measure_variance: bool = False,
    ) -> dict[str, float]:
        """Every optimizer step of one batch of rollouts: `epochs` passes over `minibatches` parts of it.

        `log`, where given, receives the log-probs of this rank's share. With `measure_variance` the metrics have the
        variance of the first update's gradient.

        The old policy's log-probs are recomputed by the actor, in the packing that the update uses, before the first step:
        the engine's rounding does not enter the loss. Those of the first minibatch are the ones that its update computes,
        where nothing needs them earlier: the ratio is then exactly 1. A pass of their own gives the same numbers, but for
        kernels that do not repeat theirs: a GPU's experts without Transformer Engine, FP8 with `recipe=delayed`.
        """
        if not len(batch):
            return {"actor/updates": 0.0}
        batches, metrics = self._pack(batch)
        if batch.by_token:
            metrics = metrics + self.actor.reduce(
                [_token_metrics(tokens) for minibatch in batches for tokens in minibatch.tokens]
            )
        self._add_reference(batches)
        self._add_denominators(batches)
        norms: list[float] = []
        variance: dict[str, float] = {}
        with self.timer("update"):
            epochs = self.config.trainer.epochs
            for epoch in range(epochs):
                for number, minibatch in enumerate(batches):
                    size = _part_size(self.algorithm.config.aggregation) if measure_variance and not norms else None
                    result = self.actor.update(
                        minibatch.micro_batches,
                        partial(self._loss, minibatch, clip_range),
                        self.config.rollout.temperature,
                        self.algorithm.needs_entropy or _awaits_old(minibatch),
                        size,
                        more=(epoch, number) != (epochs - 1, len(batches) - 1),
                    )
                    if size is not None:
                        variance = _variance_metrics(result)
                    metrics = metrics + result.metrics
                    norms.append(result.grad_norm)
        if log is not None and self._grid.is_loss_rank:
            for minibatch in batches:
                for tokens in minibatch.tokens:
                    tokens.gradient_weights = self._gradient_weights(minibatch, tokens, clip_range)
                log.add(minibatch, batch.by_token)
        return (
            metrics.values()
            | variance
            | self.actor.expert_load()
            | {
                "actor/grad_norm": float(np.mean(norms)),
                "actor/grad_norm_max": max(norms),
                "actor/lr": result.learning_rate,
                "actor/updates": float(len(norms)),
            }
        )

    def _pack(self, batch: TrainBatch) -> tuple[list[Minibatch], Metrics]:
        """The minibatches, packed, all but the first with the old policy's log-probs; and the metric of its entropy.

        A correction needs the first's too: the tokens that its filters leave are counted before the update. So do adapters
        with dropout: the old policy is the one that was sampled, which drops nothing.
        """
        batches, entropies = list[Minibatch](), list[Metrics]()
        with self.timer("old_log_prob"):
            for rows in minibatches(batch.group, self.config.trainer.minibatches):
                minibatch = Minibatch(self.actor.micro_batches(batch.sequences, rows))
                for micro in minibatch.micro_batches if self._grid.is_last_stage else ():
                    minibatch.tokens.append(
                        PolicyTokens(
                            sequence_ids=micro.sequence_ids,
                            advantages=micro.concatenate(batch.advantages),
                            old_log_probs=None,
                            rollout_log_probs=micro.concatenate(batch.rollout_logprobs),
                        )
                    )
                if batches or self.algorithm.corrects or (self.config.actor.lora and self.config.actor.lora.dropout):
                    scored = self.actor.log_probs(
                        minibatch.micro_batches, self.config.rollout.temperature, with_entropy=True
                    )
                    for tokens, (log_probs, entropy) in zip(minibatch.tokens, scored, strict=True):
                        tokens.old_log_probs = log_probs
                        entropies.append(_entropy_metric(entropy))
                batches.append(minibatch)
        return batches, self.actor.reduce(entropies)

    def _add_reference(self, parts: Sequence[Minibatch]) -> None:
        """The reference policy's log-probs, where the loss has a KL term."""
        if not self.algorithm.needs_reference:
            return
        with self.timer("ref_log_prob"), self.actor.as_reference():
            for part in parts:
                reference = self.actor.log_probs(part.micro_batches, self.config.rollout.temperature)
                for tokens, (log_probs, _) in zip(part.tokens, reference, strict=True):
                    tokens.ref_log_probs = log_probs

    def _add_denominators(self, batches: Sequence[Minibatch]) -> None:
        """Adds denominators to every minibatch, over all micro-batches and data-parallel ranks, after correction filters."""
        local = []
        for minibatch in batches:
            total = Denominators(0.0, 0.0)
            for tokens in minibatch.tokens if self._grid.is_loss_rank else ():
                total = total + self.algorithm.count(
                    _everything(tokens.advantages),
                    tokens.sequence_ids,
                    old_log_probs=tokens.old_log_probs,
                    rollout_log_probs=tokens.rollout_log_probs,
                )
            local.append((float(total.num_tokens), float(total.num_sequences)))
        ranks = self._grid.all_gather(local)
        for i, minibatch in enumerate(batches):
            minibatch.denominators = Denominators(sum(rank[i][0] for rank in ranks), sum(rank[i][1] for rank in ranks))

    def _loss(
        self,
        minibatch: Minibatch,
        clip_range: tuple[float, float] | None,
        number: int,
        log_probs: Tensor,
        entropy: Tensor | None,
    ) -> tuple[Tensor, Metrics]:
        """The policy loss of micro-batch `number` of a minibatch."""
        tokens = minibatch.tokens[number]
        tokens.log_probs = log_probs.detach()
        extra = Metrics()
        if tokens.old_log_probs is None:
            tokens.old_log_probs = tokens.log_probs
            extra = _entropy_metric(entropy)
        loss, metrics = self._policy_loss(minibatch, tokens, clip_range, log_probs, entropy)
        return loss, metrics + extra

    def _policy_loss(
        self,
        minibatch: Minibatch,
        tokens: PolicyTokens,
        clip_range: tuple[float, float] | None,
        log_probs: Tensor,
        entropy: Tensor | None,
    ) -> tuple[Tensor, Metrics]:
        assert tokens.old_log_probs is not None
        return self.algorithm.policy_loss(
            log_probs,
            tokens.old_log_probs,
            tokens.rollout_log_probs,
            tokens.ref_log_probs,
            entropy if self.algorithm.needs_entropy else None,
            tokens.advantages,
            _everything(log_probs),
            sequence_ids=tokens.sequence_ids,
            denominators=minibatch.denominators,
            clip_range=clip_range,
        )

    def _gradient_weights(
        self, minibatch: Minibatch, tokens: PolicyTokens, clip_range: tuple[float, float] | None
    ) -> Tensor:
        """Factor of the gradient of each token's log-prob in the last update, [tokens]: advantage, gradient weight,
        correction and aggregation, and what the KL term adds. Above 0 the token became more probable."""
        assert tokens.log_probs is not None
        log_probs = tokens.log_probs.clone().requires_grad_()
        loss, _ = self._policy_loss(minibatch, tokens, clip_range, log_probs, torch.zeros_like(tokens.log_probs))
        return -torch.autograd.grad(loss, log_probs)[0]


def _part_size(aggregation: str) -> Callable[[MicroBatch], float]:
    """How much of the minibatch's loss a micro-batch is."""
    if aggregation == "token-mean":
        return lambda micro: float(micro.targets.numel())
    return lambda micro: float(len(micro.rows))


def _variance_metrics(result: UpdateResult) -> dict[str, float]:
    """Trace of the gradient's covariance, and its share of the squared norm; above 1 the gradient is mostly noise."""
    metrics = {"gradient/parts": float(result.gradient_parts)}
    if result.gradient_variance is not None:
        metrics["gradient/variance"] = result.gradient_variance
        metrics["gradient/variance_share"] = result.gradient_variance / max(result.grad_norm**2, 1e-300)
    return metrics


def _awaits_old(part: Minibatch) -> bool:
    """Whether the next update computes the old policy's log-probs."""
    return any(tokens.old_log_probs is None for tokens in part.tokens)


def _entropy_metric(entropy: Tensor | None) -> Metrics:
    """Entropy of the old policy."""
    assert entropy is not None
    metrics = Metrics()
    metrics.mean("actor/entropy", entropy.detach(), _everything(entropy))
    return metrics


def _token_metrics(tokens: PolicyTokens) -> Metrics:
    """Mean, size and largest size of the advantages that a token part made."""
    metrics, advantages = Metrics(), tokens.advantages
    metrics.mean("token_advantage/mean", advantages, _everything(advantages))
    metrics.mean("token_advantage/abs_mean", advantages.abs(), _everything(advantages))
    metrics.maximum("token_advantage/max", advantages.abs(), _everything(advantages))
    return metrics


def _everything(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)
