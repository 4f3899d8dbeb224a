"""What a run records of its rollouts comes back as it was."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.actor.packing import pack
from megatron_rl.algorithms import make_algorithm
from megatron_rl.algorithms.aggregation import Denominators
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch
from megatron_rl.data.rewards import RewardTable
from megatron_rl.trainer.learner import Learner
from megatron_rl.trainer.minibatch import Minibatch, PolicyTokens, trained_rows
from megatron_rl.trainer.record import _WRITTEN, TokenLog, read_step, recorded_steps, write_step, write_tokens


def test_two_ranks_write_one_step(tmp_path: Path) -> None:
    """Rollouts in any order over micro-batches and ranks; a group without signal is not trained on."""
    values = torch.tensor([[[0.0, 1.0], [1.0, 0.5]], [[1.0, 1.0], [1.0, 1.0]], [[2.0, 0.0], [0.0, 0.0]]])
    lengths = torch.tensor([[3, 1], [2, 2], [4, 2]])
    table = RewardTable(values.double(), ("a", "b"), weights={"b": 0.1}, lengths=lengths)
    estimate = make_algorithm(
        {"preset": "awpo", "drop_zero_variance_groups": True, "estimator": {"params": {"reasoning": "b"}}}
    )
    result = estimate.compute_advantages(table)
    assert result.train.tolist() == [[True, True], [False, False], [True, True]]
    sizes = [3, 1, 4, 2]  # tokens of the trained rollouts
    responses = [np.full(size, row + 1) for row, size in enumerate(sizes)]
    batch = TokenBatch.continuations(([9], response) for response in responses)
    logs = [TokenLog(), TokenLog()]
    for log, shares in zip(logs, ([[2], [0]], [[1, 3], []]), strict=True):
        part = Minibatch([pack(rows, batch, torch.device("cpu")) for rows in shares if rows])
        for micro in part.micro_batches:
            scored = {name: micro.targets + 10.0 * scale for scale, name in enumerate(_WRITTEN)}
            part.tokens.append(PolicyTokens(micro.sequence_ids, micro.targets * 0.5, **scored))
        log.add(part, by_token=True)
    truncated = torch.zeros(3, 2, dtype=torch.bool)
    for replica, log in enumerate(logs):
        write_tokens(tmp_path / "rollouts/step_20.npz", replica, trained_rows(result), log)
    write_step(tmp_path / "rollouts/step_20.npz", list("xyz"), table, truncated, result, len(logs))
    write_tokens(tmp_path / "rollouts/step_3.npz", 0, trained_rows(result), TokenLog())
    write_step(tmp_path / "rollouts/step_3.npz", list("xyz"), table, truncated, result, 1)
    for name in ("step_x.npz", "step_.npz", "step_4 (copy).npz"):
        (tmp_path / "rollouts" / name).touch()
    steps = recorded_steps(tmp_path)
    assert list(steps) == [3, 20]
    step = read_step(steps[20])
    assert torch.equal(step.table.values, table.values)
    assert step.table.names == ("a", "b")
    assert step.table.weight("b") == 0.1
    assert torch.equal(step.advantages, result.advantages)
    assert step.clip_range == result.clip_range
    assert step.rows.tolist() == [0, 1, 4, 5]
    assert step.offsets.tolist() == [0, 3, 4, 8, 10]
    assert step.log_probs.tolist() == [1, 1, 1, 2, 3, 3, 3, 3, 4, 4]
    assert step.rollout_log_probs.tolist() == [value + 20 for value in step.log_probs.tolist()]
    assert step.token_advantages is not None
    assert step.token_advantages.tolist() == [value * 0.5 for value in step.log_probs.tolist()]
    assert step.sequence_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]
    assert len(read_step(steps[3]).log_probs) == 0


@pytest.mark.parametrize(("kl", "entropy"), [(0.0, 0.0), (0.5, 0.1)])
def test_gradient_weights_are_what_the_update_multiplied_with(kl: float, entropy: float) -> None:
    """Advantage, 0 where clipped, ratio and the share of the mean; and the KL term's slope."""
    algorithm = make_algorithm(
        {"preset": "grpo", "aggregation": "token-mean", "kl": {"coef": kl}, "entropy_coef": entropy}
    )
    actor: Any = SimpleNamespace(grid=None)
    timer: Any = None
    learner = Learner(Config(run_dir=""), actor, algorithm, timer)
    log_ratios = torch.tensor([0.0, 0.1, 0.5, 0.5, -0.5])  # outside the bounds from the third on
    advantages = torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0])
    old = torch.full((5,), -1.0)
    tokens = PolicyTokens(torch.tensor([0, 0, 0, 1, 1]), advantages, old, old, old, old + log_ratios)
    part = Minibatch([], [tokens], Denominators(10.0, 4.0))
    weights = learner._gradient_weights(part, tokens, None)
    want = torch.tensor([2.0, 2.0 * math.exp(0.1), 0.0, -math.exp(0.5), 0.0])
    slope = kl * (1 - torch.exp(-log_ratios)) if kl else 0.0  # of k3
    torch.testing.assert_close(weights, (want - slope) / 10)
    assert tokens.log_probs is not None
    assert not tokens.log_probs.requires_grad


def test_another_file_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "step_1.npz", rewards=np.zeros(3))
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"cut.npz cannot be read: File is not a zip file"):
        read_step(tmp_path / "cut.npz")
    with pytest.raises(ValueError, match="is not a recorded step: it lacks"):
        read_step(tmp_path / "step_1.npz")


def test_greedy_rewards_and_missing_scores_come_back(tmp_path: Path) -> None:
    scored = torch.tensor([[[True, False], [True, True]]])
    table = RewardTable(
        torch.tensor([[[1.0, 0.0], [0.0, 0.5]]]).double(),
        ("a", "b"),
        greedy=torch.tensor([[0.25, 0.75]]).double(),
        scored=scored,
    )
    estimate = make_algorithm("remax").compute_advantages(table)
    write_step(tmp_path / "step_1.npz", ["x"], table, torch.zeros(1, 2, dtype=torch.bool), estimate, parts=0)
    back = read_step(tmp_path / "step_1.npz").table
    assert torch.equal(back.greedy, table.greedy)
    assert torch.equal(back.scored, scored)
    assert back.lengths is None
