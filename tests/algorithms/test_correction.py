"""Train/rollout mismatch: weights, filters and gauges against loops."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms import correct, make_algorithm
from megatron_rl.config.algorithm import CorrectionFilterConfig

IDS = torch.tensor([0, 0, 0, 1, 1, 2])
MASK = torch.tensor([1, 1, 0, 1, 1, 1]) > 0
LOG_RATIO = torch.tensor([0.5, -0.2, 9.0, 0.1, 0.1, -2.0], dtype=torch.float64)
ROLLOUT = torch.tensor([-1.0, -2.0, -3.0, -0.5, -0.1, -4.0], dtype=torch.float64)
OLD = ROLLOUT + LOG_RATIO


def run(weight: str = "none", cap: float = 2.0, **bounds: object) -> tuple[list[float] | None, list[bool]]:
    filters = [CorrectionFilterConfig(**bounds)] if bounds else []  # type: ignore[arg-type]
    weights, mask = correct(OLD, ROLLOUT, MASK, IDS, weight=weight, cap=cap, filters=filters)
    return None if weights is None else weights[MASK].tolist(), mask.tolist()


def exps(*values: float) -> list[float]:
    return pytest.approx([math.exp(value) for value in values])


def test_weights() -> None:
    assert run("none")[0] is None
    assert run("token", cap=1.5)[0] == exps(math.log(1.5), -0.2, 0.1, 0.1, -2.0)
    assert run("geometric")[0] == exps(0.15, 0.15, 0.1, 0.1, -2.0)
    assert run("sequence")[0] == exps(0.3, 0.3, 0.2, 0.2, -2.0)
    assert run("sequence", cap=1.25)[0] == exps(math.log(1.25), math.log(1.25), 0.2, 0.2, -2.0)


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"level": "token", "low": 0.9, "high": 1.2}, [0, 0, 0, 1, 1, 0]),
        ({"level": "token", "high": 1.2}, [0, 1, 0, 1, 1, 1]),
        ({"level": "geometric", "low": 0.9, "high": 1.15}, [0, 0, 0, 1, 1, 0]),
        ({"level": "sequence", "low": 0.5}, [1, 1, 0, 1, 1, 0]),
        ({"level": "token", "by": "k1", "high": 0.0}, [1, 0, 0, 1, 1, 0]),
        ({"level": "token", "by": "k2", "high": 0.05}, [0, 1, 0, 1, 1, 0]),
        ({"level": "token", "by": "k3", "high": 0.05}, [0, 1, 0, 1, 1, 0]),
        ({"level": "geometric", "by": "k2", "high": 0.08}, [1, 1, 0, 1, 1, 0]),
        ({"level": "sequence", "by": "k2", "high": 0.08}, [0, 0, 0, 1, 1, 0]),
        ({"level": "geometric", "by": "k1", "low": -0.12}, [0, 0, 0, 1, 1, 1]),
    ],
)
def test_filters(bounds: dict[str, object], kept: list[int]) -> None:
    assert run(**bounds)[1] == [bool(each) for each in kept]


def test_filters_combine_and_are_judged_on_the_given_mask() -> None:
    filters = [CorrectionFilterConfig("token", "ratio", None, 1.2), CorrectionFilterConfig("sequence", "ratio", 1.3)]
    _, mask = correct(OLD, ROLLOUT, MASK, IDS, filters=filters)
    assert mask.tolist() == [False, True, False, False, False, False]  # rollout 0's product 1.35 counts its first token


def test_huge_mismatch_stays_finite() -> None:
    for gap in (1e3, -1e3):
        old = torch.tensor([gap, gap], dtype=torch.float32)
        for level in ("token", "geometric", "sequence"):
            weights, _ = correct(old, torch.zeros(2), torch.ones(2) > 0, torch.zeros(2).long(), weight=level, cap=2.0)
            assert weights is not None
            assert torch.isfinite(weights).all()
            assert (weights <= 2.0).all()


def test_denominators_count_what_the_filters_leave() -> None:
    algorithm = make_algorithm({"correction": {"filters": [{"level": "sequence", "low": 0.5}]}})
    counted = algorithm.count(MASK, IDS, old_log_probs=OLD, rollout_log_probs=ROLLOUT)
    assert (float(counted.num_tokens), float(counted.num_sequences)) == (4.0, 2.0)
    plain = make_algorithm("grpo").count(MASK, IDS)
    assert (float(plain.num_tokens), float(plain.num_sequences)) == (5.0, 3.0)


def test_gauges_are_logged_without_any_correction() -> None:
    log_probs = OLD.clone().requires_grad_()
    algorithm = make_algorithm("grpo")
    _, metrics = algorithm.policy_loss(
        log_probs,
        OLD,
        ROLLOUT,
        None,
        None,
        torch.ones(6, dtype=torch.float64),
        MASK,
        sequence_ids=IDS,
        denominators=algorithm.count(MASK, IDS),
    )
    values, live = metrics.values(), LOG_RATIO[MASK]
    assert values["mismatch/kl_k1"] == pytest.approx(float(-live.mean()))
    assert values["mismatch/kl_k3"] == pytest.approx(float((live.exp() - 1 - live).mean()))
    assert values["mismatch/abs_log_ratio_max"] == 2.0
    assert values["mismatch/log_perplexity_gap"] == pytest.approx(-(0.15 + 0.1 - 2.0) / 3)
    assert values["correction/dropped_share"] == 0.0
