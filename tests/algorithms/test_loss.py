"""The packed loss: equations, denominators, and that a minibatch may be cut anywhere."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms import (
    Denominators,
    Metrics,
    RewardTable,
    aggregate_loss,
    aggregate_packed,
    count_live,
    kl_divergence,
    list_advantage_estimators,
    list_surrogates,
    make_algorithm,
    make_surrogate,
)
from megatron_rl.config.algorithm import Aggregation, KLEstimator, Ratio

MAX_TOKENS = 8


def packed(seed: int = 0, sizes: tuple[int, ...] = (3, 1, 5, 2, 4)) -> dict[str, Tensor]:
    """A minibatch of rollouts: float64, some tokens masked, the second rollout entirely."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(sum(sizes), generator=generator, dtype=torch.float64)

    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    log_probs = -normal().abs()
    old = log_probs + normal(0.4)
    mask = torch.rand(len(ids), generator=generator) > 0.2
    mask &= ids != 1
    return {
        "log_probs": log_probs,
        "old_log_probs": old,
        "rollout_log_probs": old + normal(0.2),
        "ref_log_probs": log_probs + normal(0.3),
        "entropy": normal().abs(),
        "advantages": torch.randn(len(sizes), generator=generator, dtype=torch.float64)[ids],
        "mask": mask,
        "sequence_ids": ids,
    }


def part(batch: dict[str, Tensor], rollouts: list[int]) -> dict[str, Tensor]:
    """Some of the rollouts, renumbered."""
    where = torch.isin(batch["sequence_ids"], torch.tensor(rollouts))
    cut = {name: tensor[where] for name, tensor in batch.items()}
    cut["sequence_ids"] = torch.searchsorted(torch.tensor(rollouts), cut["sequence_ids"])
    return cut


def denominators(algorithm: Any, batch: dict[str, Tensor]) -> Denominators:
    old, rollout = batch["old_log_probs"], batch["rollout_log_probs"]
    return algorithm.count(batch["mask"], batch["sequence_ids"], old_log_probs=old, rollout_log_probs=rollout)


def loss_and_gradient(
    algorithm: Any, batch: dict[str, Tensor], whole: Denominators, **extra: Any
) -> tuple[float, Tensor, Metrics]:
    log_probs = batch["log_probs"].clone().requires_grad_()
    entropy = batch["entropy"] * (1 + 0 * log_probs) + log_probs  # some function of the parameters
    given = {**batch, "log_probs": log_probs, "entropy": entropy}
    loss, metrics = algorithm.policy_loss(**given, denominators=whole, **extra)
    loss.backward()
    return float(loss.detach()), log_probs.grad, metrics


CORRECTIONS = {
    "none": {},
    "tis": {"weight": "token", "cap": 1.1},
    "mis": {"filters": [{"level": "sequence", "low": 0.7, "high": 1.4}]},
    "icepop": {"weight": "geometric", "filters": [{"level": "token", "low": 0.8, "high": 1.25}]},
    "k3": {"weight": "sequence", "filters": [{"level": "geometric", "by": "k3", "high": 0.03}]},
}


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("ratio", get_args(Ratio))
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_any_cut_of_the_minibatch_gives_the_same_loss_gradient_and_metrics(
    aggregation: str, ratio: str, correction: str
) -> None:
    algorithm = make_algorithm(
        {
            "aggregation": aggregation,
            "ratio": ratio,
            "correction": CORRECTIONS[correction],
            "kl": {"coef": 0.1},
            "entropy_coef": 0.01,
        },
        max_tokens=MAX_TOKENS,
    )
    batch = packed()
    whole = denominators(algorithm, batch)
    loss, gradient, metrics = loss_and_gradient(algorithm, batch, whole)
    assert gradient.abs().sum() > 0
    for cut in ([[0], [1], [2], [3], [4]], [[0, 3], [1, 2, 4]], [[1], [0, 2, 3, 4]]):
        parts = [part(batch, rollouts) for rollouts in cut]
        counted = denominators(algorithm, parts[0])
        for each in parts[1:]:
            counted = counted + denominators(algorithm, each)
        assert counted == whole
        total, pieces, seen = 0.0, torch.zeros_like(gradient), Metrics()
        for rollouts, each in zip(cut, parts, strict=True):
            value, piece, more = loss_and_gradient(algorithm, each, counted)
            total += value
            pieces[torch.isin(batch["sequence_ids"], torch.tensor(rollouts))] = piece
            seen = seen + more
        assert total == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(pieces, gradient, rtol=1e-12, atol=1e-15)
        assert seen.values() == pytest.approx(metrics.values(), rel=1e-9)


@pytest.mark.parametrize("name", list_surrogates())
def test_gradient_is_weight_times_advantage_times_score(name: str) -> None:
    batch = packed()
    algorithm = make_algorithm({"surrogate": {"name": name}, "aggregation": "token-mean"})
    whole = denominators(algorithm, batch)
    _, gradient, _ = loss_and_gradient(algorithm, batch, whole)
    weight = make_surrogate(name)(batch["log_probs"] - batch["old_log_probs"], batch["advantages"])
    expected = -weight * batch["advantages"] * batch["mask"] / batch["mask"].sum()
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("correction", ["tis", "mis", "icepop", "k3"])
def test_correction_weighs_and_drops_tokens(correction: str) -> None:
    batch = packed()
    algorithm = make_algorithm(
        {"surrogate": {"name": "dgpo"}, "aggregation": "token-mean", "correction": CORRECTIONS[correction]}
    )
    corrected = algorithm.correct(
        batch["old_log_probs"], batch["rollout_log_probs"], batch["mask"], batch["sequence_ids"]
    )
    assert corrected.mask.any()
    if correction != "tis":
        assert corrected.mask.sum() < batch["mask"].sum()
    _, gradient, metrics = loss_and_gradient(algorithm, batch, denominators(algorithm, batch))
    weight = make_surrogate("dgpo")(batch["log_probs"] - batch["old_log_probs"], batch["advantages"])
    if corrected.weights is not None:
        weight = weight * corrected.weights
    expected = -weight * batch["advantages"] * corrected.mask / corrected.mask.sum()
    torch.testing.assert_close(gradient, expected)
    values = metrics.values()
    assert values["loss/objective"] == pytest.approx(float(-expected.sum()))
    dropped = 1 - float(corrected.mask.sum() / batch["mask"].sum())
    assert values["correction/dropped_share"] == pytest.approx(dropped)


def test_ppo_objective_is_logged_beside_the_surrogate() -> None:
    batch = packed()
    algorithm = make_algorithm({"surrogate": {"name": "clip"}, "aggregation": "seq-mean-token-mean"})
    _, _, metrics = loss_and_gradient(algorithm, batch, denominators(algorithm, batch))
    ratio, adv = (batch["log_probs"] - batch["old_log_probs"]).exp(), batch["advantages"]
    value = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    rows = [value[(batch["sequence_ids"] == i) & batch["mask"]] for i in (0, 2, 3, 4)]
    expected = torch.stack([row.mean() for row in rows if len(row)]).mean()
    assert metrics.values()["loss/objective"] == pytest.approx(float(expected))


def test_gspo_gradient() -> None:
    """Mean over rollouts of s_i A_i, s_i the geometric mean ratio: autograd through s_i itself."""
    batch = packed()
    algorithm = make_algorithm({"ratio": "sequence", "surrogate": {"name": "none"}})
    _, gradient, _ = loss_and_gradient(algorithm, batch, denominators(algorithm, batch))
    log_probs = batch["log_probs"].clone().requires_grad_()
    terms = []
    for i in range(5):
        live = (batch["sequence_ids"] == i) & batch["mask"]
        if live.any():
            ratio = (log_probs - batch["old_log_probs"])[live].mean().exp()
            terms.append(ratio * batch["advantages"][live][0])
    (expected,) = torch.autograd.grad(-torch.stack(terms).mean(), log_probs)
    torch.testing.assert_close(gradient, expected)


def test_product_ratio_gradient() -> None:
    """AWPO's Eq. 25 as written: mean over rollouts of r_i A_i, r_i the product of the tokens' ratios."""
    batch = packed()
    algorithm = make_algorithm(
        {"ratio": "sequence-product", "surrogate": {"name": "none"}, "aggregation": "seq-mean-token-sum"}
    )
    _, gradient, _ = loss_and_gradient(algorithm, batch, denominators(algorithm, batch))
    log_probs = batch["log_probs"].clone().requires_grad_()
    terms = []
    for i in range(5):
        live = (batch["sequence_ids"] == i) & batch["mask"]
        if live.any():
            ratio = (log_probs - batch["old_log_probs"])[live].sum().exp()
            terms.append(ratio * batch["advantages"][live][0])
    (expected,) = torch.autograd.grad(-torch.stack(terms).mean(), log_probs)
    torch.testing.assert_close(gradient, expected)


def test_clip_range_reaches_the_loss() -> None:
    batch = packed()
    algorithm = make_algorithm("awpo")
    whole = denominators(algorithm, batch)
    _, wide, _ = loss_and_gradient(algorithm, batch, whole)
    _, narrow, _ = loss_and_gradient(algorithm, batch, whole, clip_range=(0.05, 0.05))
    assert (narrow == 0).sum() > (wide == 0).sum()


def test_kl_and_entropy_terms() -> None:
    batch = packed()
    for name in get_args(KLEstimator):
        plain = make_algorithm({"aggregation": "token-mean"})
        regular = make_algorithm(
            {"aggregation": "token-mean", "kl": {"coef": 0.3, "estimator": name}, "entropy_coef": 0.02}
        )
        whole = denominators(plain, batch)
        base, _, _ = loss_and_gradient(plain, batch, whole)
        loss, _, _ = loss_and_gradient(regular, batch, whole)
        kl = kl_divergence(batch["log_probs"], batch["ref_log_probs"], name)[batch["mask"]].mean()
        entropy = (batch["entropy"] + batch["log_probs"])[batch["mask"]].mean()
        assert loss - base == pytest.approx(float(0.3 * kl - 0.02 * entropy))


def test_masked_tokens_may_hold_anything() -> None:
    batch = packed()
    algorithm = make_algorithm(
        {"kl": {"coef": 0.1}, "ratio": "sequence", "correction": CORRECTIONS["icepop"]}, max_tokens=MAX_TOKENS
    )
    whole = denominators(algorithm, batch)
    loss, gradient, metrics = loss_and_gradient(algorithm, batch, whole)
    for garbage in (math.nan, -math.inf):
        spoiled = dict(batch)
        for name in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages"):
            spoiled[name] = torch.where(batch["mask"], batch[name], garbage)
        value, piece, more = loss_and_gradient(algorithm, spoiled, whole)
        assert value == loss
        assert torch.equal(piece[batch["mask"]], gradient[batch["mask"]])
        assert more.values() == metrics.values()


def test_micro_batch_without_live_tokens() -> None:
    batch = {name: tensor.clone() for name, tensor in packed().items()}
    batch["mask"][:] = False
    algorithm = make_algorithm("grpo")
    whole = Denominators(torch.tensor(10.0).double(), torch.tensor(3.0).double())
    loss, gradient, metrics = loss_and_gradient(algorithm, batch, whole)
    assert loss == 0.0
    assert (gradient == 0).all()
    assert metrics.values()["ratio/max"] == 0.0


@pytest.mark.parametrize("ratio", get_args(Ratio))
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_micro_batch_without_tokens_keeps_the_graph(aggregation: str, ratio: str) -> None:
    """A rank without rollouts still takes part in every collective of the backward pass."""
    section = {"aggregation": aggregation, "ratio": ratio, "correction": CORRECTIONS["mis"], "kl": {"coef": 0.1}}
    algorithm = make_algorithm(section, max_tokens=MAX_TOKENS)
    batch = {name: tensor[:0] for name, tensor in packed().items()}
    assert denominators(algorithm, batch) == Denominators(0.0, 0.0)
    loss, gradient, metrics = loss_and_gradient(algorithm, batch, Denominators(10.0, 3.0))
    assert loss == 0.0
    assert gradient.shape == (0,)
    assert metrics.values()["ratio/max"] == 0.0
    full = loss_and_gradient(algorithm, packed(), denominators(algorithm, packed()))[2]
    assert (metrics + full).values() == full.values()


def test_missing_inputs_are_named() -> None:
    batch = packed()
    for section, absent, words in (
        ({"kl": {"coef": 0.1}}, "ref_log_probs", "ref_log_probs"),
        ({"entropy_coef": 0.1}, "entropy", "entropy"),
        ({"correction": {"weight": "token"}}, "rollout_log_probs", "correction"),
    ):
        algorithm = make_algorithm(section)
        whole = count_live(batch["mask"], batch["sequence_ids"])
        with pytest.raises(ValueError, match=words):
            algorithm.policy_loss(**{**batch, absent: None}, denominators=whole)
    with pytest.raises(ValueError, match="advantages must be"):
        algorithm.policy_loss(**{**batch, "advantages": batch["advantages"][:-1]}, denominators=whole)


def test_metrics_of_halves_add_up() -> None:
    batch = packed()
    algorithm = make_algorithm({"correction": {"weight": "token"}})
    whole = denominators(algorithm, batch)
    halves = [loss_and_gradient(algorithm, part(batch, ids), whole)[2] for ids in ([0, 1], [2, 3, 4])]
    reduced = halves[0] + pickle.loads(pickle.dumps(halves[1]))
    assert reduced.values() == (halves[0] + halves[1]).values()
    share = reduced.values()["correction/effective_sample_share"]
    weights = (batch["old_log_probs"] - batch["rollout_log_probs"])[batch["mask"]].exp().clamp(max=2.0)
    assert share == pytest.approx(float(weights.mean() ** 2 / weights.square().mean()))


@settings(max_examples=30, deadline=None)
@given(
    mode=st.sampled_from(get_args(Aggregation)),
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_packed_aggregation_equals_padded(mode: str, seed: int, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = max(sizes)
    loss = torch.randn(len(sizes), width, generator=generator, dtype=torch.float64)
    inside = torch.arange(width)[None, :] < torch.tensor(sizes)[:, None]
    mask = inside & (torch.rand(loss.shape, generator=generator) > 0.3)
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    whole = count_live(mask[inside], ids)
    padded = aggregate_loss(torch.where(inside, loss, math.nan), mask, mode, max_length=width)
    flat = aggregate_packed(loss[inside], mask[inside], ids, mode, whole, max_length=width)
    torch.testing.assert_close(padded, flat)
    rows = [row[live] for row, live in zip(loss, mask, strict=True) if live.any()]
    if rows:
        by_hand = {
            "token-mean": torch.cat(rows).mean(),
            "seq-mean-token-mean": torch.stack([row.mean() for row in rows]).mean(),
            "seq-mean-token-sum": torch.stack([row.sum() for row in rows]).mean(),
            "seq-mean-token-sum-norm": torch.stack([row.sum() for row in rows]).mean() / width,
        }[mode]
        torch.testing.assert_close(padded, by_hand)
    else:
        assert padded == 0


def test_aggregation_with_global_denominators() -> None:
    loss, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1, 1], [1, 0]])
    assert float(aggregate_loss(loss, mask, "token-mean", num_tokens=12)) == 0.5
    assert float(aggregate_loss(loss, mask, "seq-mean-token-mean", num_sequences=3)) == 1.5
    assert float(aggregate_loss(loss, mask, "seq-mean-token-sum-norm", max_length=4, num_sequences=3)) == 0.5
    for bad, words in (
        ({"mode": "token-men"}, "did you mean 'token-mean'"),
        ({"mode": "seq-mean-token-sum-norm"}, "max_length"),
    ):
        with pytest.raises(ValueError, match=words):
            aggregate_loss(loss, mask, **bad)
    with pytest.raises(ValueError, match=r"\[b, t\]"):
        aggregate_loss(loss, mask[:1], "token-mean")


COMBINATIONS = list(
    itertools.product(list_advantage_estimators(), list_surrogates(), get_args(Aggregation), get_args(Ratio)),
)


@pytest.mark.parametrize(("estimator", "weight", "aggregation", "ratio"), COMBINATIONS, ids="-".join)
def test_every_combination_takes_a_step(estimator: str, weight: str, aggregation: str, ratio: str) -> None:
    """A bandit with one token per position: two updates on the same batch make better answers likelier."""
    algorithm = make_algorithm(
        {
            "estimator": {"name": estimator},
            "surrogate": {"name": weight},
            "aggregation": aggregation,
            "ratio": ratio,
        },
        max_tokens=2,
    )
    generator = torch.Generator().manual_seed(0)
    n, m, length, vocabulary = 3, 4, 2, 5
    actions = torch.randint(vocabulary, (n, m, length), generator=generator)
    outcome = (actions == 0).double().mean(2)
    judge = 0.1 * (actions[:, :, 0] == 0).double()
    table = RewardTable(torch.stack([outcome, judge], 2), ("outcome", "judge"), greedy=torch.zeros(n, 2).double())
    step = algorithm.compute_advantages(table)
    logits = torch.zeros(vocabulary, dtype=torch.float64, requires_grad=True)
    flat = actions.reshape(-1)
    ids = torch.arange(n * m).repeat_interleave(length)
    mask = step.train.reshape(-1)[ids]
    old = torch.log_softmax(logits, 0)[flat].detach()
    before = float(torch.softmax(logits, 0)[0].detach())
    for _ in range(2):
        log_probs = torch.log_softmax(logits, 0)[flat]
        loss, _ = algorithm.policy_loss(
            log_probs,
            old,
            None,
            None,
            None,
            step.advantages.reshape(-1)[ids],
            mask,
            sequence_ids=ids,
            denominators=algorithm.count(mask, ids),
            clip_range=step.clip_range,
        )
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - 0.1 * gradient).detach().requires_grad_()
    assert torch.isfinite(logits).all()
    assert float(torch.softmax(logits, 0)[0].detach()) > before
