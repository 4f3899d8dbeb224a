"""Every estimator, and every surrogate, aggregation and ratio level, through one training step of the real actor.

The gradient that arrives at the optimizer is compared with F(w, A) A coefficient, worked out here on padded rows, times
the Jacobian of the log-probs, which the actor gave one token at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms import aggregate_loss, make_surrogate
from megatron_rl.weights.create import create_model
from tests.tolerance import differing

from .every_method import COMBINATIONS, LONGEST, SHAPE, SOME, make_rollouts, run_steps
from .processes import spawn

TOLERANCE = 1e-4  # relative, fp32: sums over tokens of gradients that partly cancel


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("methods")
    create_model(root / "model", SHAPE, seed=1)
    spawn(run_steps, 1, str(root), "one", COMBINATIONS, True)
    spawn(run_steps, 2, str(root), "two", SOME, False)
    return root


@pytest.fixture(scope="module")
def one(root: Path) -> dict[str, Any]:
    return torch.load(root / "one.pt", weights_only=False)


def with_loss(weight: str, aggregation: str, ratio: str) -> tuple[str, str, str, str]:
    return next(combination for combination in COMBINATIONS if combination[1:] == (weight, aggregation, ratio))


def token_coefficients(one: dict[str, Any], combination: tuple[str, str, str, str]) -> Tensor:
    """What each token's score is multiplied by, float64 [tokens] in the micro-batches' order."""
    _, weight, aggregation, ratio = combination
    step = one["steps"][combination]
    _, responses, shifts = make_rollouts()
    order = [row for rows in one["rows"] for row in rows]
    longest = max(map(len, responses))
    factor = torch.zeros(len(order), longest, dtype=torch.float64)
    mask = torch.zeros(len(order), longest, dtype=torch.bool)
    for place, row in enumerate(order):
        log_ratio = torch.from_numpy(shifts[row])
        if ratio == "sequence":
            log_ratio = log_ratio.mean().expand_as(log_ratio)
        elif ratio == "sequence-product":
            log_ratio = log_ratio.sum().expand_as(log_ratio)
        advantage = torch.full_like(log_ratio, float(step["advantages"][row]))
        bounds = (
            {} if step["clip_range"] is None else dict(zip(("eps_low", "eps_high"), step["clip_range"], strict=True))
        )
        method = make_surrogate(weight, **({} if weight == "none" else bounds))
        factor[place, : len(log_ratio)] = method(log_ratio, advantage) * advantage
        mask[place, : len(log_ratio)] = True
    score = torch.zeros_like(factor, requires_grad=True)
    max_length = LONGEST if aggregation == "seq-mean-token-sum-norm" else None
    aggregate_loss(-factor * score, mask, aggregation, max_length=max_length).backward()
    assert score.grad is not None
    return score.grad[mask]


@pytest.mark.ranks
@pytest.mark.parametrize("ratio", sorted({combination[3] for combination in COMBINATIONS}))
@pytest.mark.parametrize("aggregation", sorted({combination[2] for combination in COMBINATIONS}))
def test_the_gradient_is_the_papers(one: dict[str, Any], aggregation: str, ratio: str) -> None:
    chosen = [combination for combination in COMBINATIONS if combination[2:] == (aggregation, ratio)]
    assert len(chosen) >= 7
    jacobian = one["jacobian"].double()
    for combination in chosen:
        wanted = float((jacobian.T @ token_coefficients(one, combination)).norm())
        assert wanted > 1e-3, combination
        assert one["steps"][combination]["grad_norm"] == pytest.approx(wanted, rel=TOLERANCE), combination


@pytest.mark.ranks
def test_a_rollouts_sequences_are_computed_as_if_alone(one: dict[str, Any]) -> None:
    """So the Jacobian above is that of rollouts of one to three sequences, and each rollout counts once."""
    assert (one["log_probs"] - one["alone"]).abs().max() < 1e-5


@pytest.mark.ranks
def test_ratios_leave_the_trust_region_on_all_sides(one: dict[str, Any]) -> None:
    """Otherwise all weights would be the same, and the test above would not see a wrong one."""
    for ratio in ("token", "sequence-product"):
        metrics = one["steps"][with_loss("clip", "token-mean", ratio)]["metrics"]
        for region in ("M", "LN", "HP", "LP", "HN"):
            assert metrics[f"region_share/{region}"] > 0, (ratio, region)


@pytest.mark.ranks
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_variance_is_that_of_the_micro_batches(one: dict[str, Any], aggregation: str) -> None:
    """Against gradients of each micro-batch that are all at hand: mean over parts of N/n |g|^2 around the sum."""
    combination = with_loss("dgpo", aggregation, "token")
    step = one["steps"][combination]
    _, responses, _ = make_rollouts()
    coefficients, jacobian = token_coefficients(one, combination), one["jacobian"].double()
    assert step["parts"] == len(one["rows"]) > 1
    tokens = [sum(len(responses[row]) for row in rows) for rows in one["rows"]]
    sizes = torch.tensor(tokens if aggregation == "token-mean" else [len(rows) for rows in one["rows"]]).double()
    cuts = torch.tensor(tokens).cumsum(0).tolist()[:-1]
    parts = torch.stack(
        [j.T @ c for j, c in zip(jacobian.tensor_split(cuts), coefficients.tensor_split(cuts), strict=True)]
    )
    assert len(set(sizes.tolist())) > 1
    per_unit = parts / sizes[:, None] - parts.sum(0) / sizes.sum()
    wanted = float((sizes * per_unit.square().sum(1)).sum() * sizes.sum() / (len(sizes) - 1))
    assert step["variance"] == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.ranks
@pytest.mark.parametrize("combination", SOME, ids="-".join)
def test_two_data_parallel_ranks_change_nothing(
    one: dict[str, Any], root: Path, combination: tuple[str, str, str, str]
) -> None:
    alone, two = one["steps"][combination], torch.load(root / "two.pt", weights_only=False)["steps"][combination]
    assert two["grad_norm"] == pytest.approx(alone["grad_norm"], rel=TOLERANCE)
    assert differing(two["metrics"], alone["metrics"]) == []
    assert two["parts"] >= 2
    assert two["variance"] > 0


def test_some_have_every_choice() -> None:
    for position in range(4):
        chosen = {combination[position] for combination in SOME}
        assert chosen == {combination[position] for combination in COMBINATIONS}
