"""Every method against values computed in float64 from the papers' equations by an independent implementation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.algorithms import (
    REGIONS,
    GradientVariance,
    RewardTable,
    aggregate_loss,
    distinct_advantage_groups,
    make_advantage_estimator,
    make_surrogate,
    regions,
    whiten,
)
from megatron_rl.methods.surrogates.clip import ppo_objective

CASES = json.loads((Path(__file__).parent / "golden.json").read_text())
RTOL, ATOL = 1e-9, 1e-10
BOUNDS = ("eps_low", "eps_high")


def table(rewards: list[Any], *, weights: Any = None, greedy: Any = None, lengths: Any = None) -> RewardTable:
    """A ragged list of groups, each rollout a number or a list of one number per reward."""
    n, m = len(rewards), max(len(group) for group in rewards)
    k = len(rewards[0][0]) if isinstance(rewards[0][0], list) else 1
    values = torch.full((n, m, k), math.nan, dtype=torch.float64)
    valid = torch.zeros(n, m, dtype=torch.bool)
    tokens = torch.zeros(n, m)
    for i, group in enumerate(rewards):
        values[i, : len(group)] = torch.tensor(group, dtype=torch.float64).reshape(len(group), k)
        valid[i, : len(group)] = True
        if lengths is not None:
            tokens[i, : len(group)] = torch.tensor(lengths[i])
    names = tuple(f"r{index}" for index in range(k))
    return RewardTable(
        values,
        names,
        valid,
        dict(zip(names, weights, strict=True)) if weights is not None else None,
        tokens if lengths is not None else None,
        torch.tensor(greedy, dtype=torch.float64)[:, None] if greedy is not None else None,
    )


def ragged(values: torch.Tensor, rewards: list[Any]) -> list[list[float]]:
    return [values[i, : len(group)].tolist() for i, group in enumerate(rewards)]


def estimate(name: str, rewards: list[Any], of_table: dict[str, Any], **params: Any) -> list[list[float]]:
    return ragged(make_advantage_estimator(name, **params)(table(rewards, **of_table)).advantages, rewards)


def split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What belongs to the table, and what is a parameter."""
    of_table = {key: kwargs[key] for key in ("weights", "greedy", "lengths") if key in kwargs}
    params = {key: value for key, value in kwargs.items() if key not in of_table and key != "rewards"}
    if "lengths" in of_table:
        params["over"] = "tokens"
    return of_table, params


def shrinkage_parts(rewards: list[Any]) -> dict[str, Any]:
    given = table(rewards)
    result = make_advantage_estimator("shrinkage")(given)
    baseline = given.values[:, :, 0] - result.advantages
    return {
        "v": result.group["v"].tolist(),
        "s": result.group["s"].tolist(),
        "lambda": result.group["shrinkage"].tolist(),
        "loo_batch_mean": result.group["batch_mean"].tolist(),
        "baseline": ragged(baseline, rewards),
    }


def awpo(r_out: list[Any], r_mix: list[Any], running_max: float | None = None, **params: Any) -> dict[str, Any]:
    out, mix = table(r_out), table(r_mix)
    both = RewardTable(torch.cat([out.values, mix.values - out.values], 2), ("outcome", "judge"), out.valid)
    estimator = make_advantage_estimator("awpo", **params)
    if running_max is not None:
        estimator.load_state_dict({"r_out_max": running_max})
    result = estimator(both)
    normalise = make_advantage_estimator("grpo", ddof=0, eps=estimator.params["eps"])
    fixed = estimator.params["r_out_max"]
    assert result.clip_range is not None
    assert result.clip_range[0] == result.clip_range[1]
    return {
        "mean_out": result.group["mean_out"].tolist(),
        "sigma_out": result.group["sigma_out"].tolist(),
        "sigma_mix": result.group["sigma_mix"].tolist(),
        "rho": result.group["rho"].tolist(),
        "w_mix": result.group["w_mix"].tolist(),
        "d": result.group["difficulty"].tolist(),
        "a_out": ragged(normalise(out).advantages, r_out),
        "a_mix": ragged(normalise(mix).advantages, r_out),
        "a_hyper": ragged(result.advantages, r_out),
        "clip_eps": result.clip_range[0],
        "r_out_max": result.metrics["awpo/r_out_max"],
        "running_max": None if fixed is not None else estimator.state_dict()["r_out_max"],
    }


def weight(name: str, w: list[float], adv: list[float], **params: Any) -> dict[str, list[float]]:
    advantages = torch.tensor(adv, dtype=torch.float64)
    values = make_surrogate(name, **params)(torch.tensor(w, dtype=torch.float64).log(), advantages)
    return {"F": values.tolist(), "coef": (values * advantages).tolist()}


def aggregate(loss: Any, mask: Any, mode: str, max_len: int | None = None, count_empty: bool = False) -> float:
    mode = "seq-mean-token-sum-norm" if mode == "constant" else mode
    rows = len(mask) if count_empty else None
    token_loss, live = torch.tensor(loss, dtype=torch.float64), torch.tensor(mask)
    return float(aggregate_loss(token_loss, live, mode, max_length=max_len, num_sequences=rows))


def running_variance(grads: list[list[float]]) -> float:
    total, tracker = torch.zeros(len(grads[0]), dtype=torch.float64), GradientVariance()
    for grad in grads:
        one = torch.tensor(grad, dtype=torch.float64)
        total += one
        tracker.add(float(one.square().sum()))
    return tracker.value(float(total.square().sum()))


def region_names(w: list[float], adv: list[float], eps_low: float, eps_high: float) -> list[str]:
    log_ratio = torch.tensor(w, dtype=torch.float64).log()
    return [REGIONS[code] for code in regions(log_ratio, torch.tensor(adv, dtype=torch.float64), eps_low, eps_high)]


def distinct(rollouts: int, n_rewards: int, method: str) -> int:
    estimators = {
        "grpo": make_advantage_estimator("grpo", eps=0.0),
        "grpo_no_std": make_advantage_estimator("dr_grpo"),
        "gdpo": make_advantage_estimator("gdpo", batch_norm=False),
    }
    return distinct_advantage_groups(rollouts, n_rewards, estimators[method])


def run(fn: str, kwargs: dict[str, Any]) -> Any:
    of_table, params = split(kwargs)
    rewards = kwargs.get("rewards", [])
    match fn:
        case "grpo" | "rloo" | "bloo" | "remax" | "shrinkage" | "reinforce_pp" | "reinforce_pp_baseline" | "gdpo":
            return estimate(fn, rewards, of_table, **params)
        case "grpo_no_std":
            return estimate("dr_grpo", rewards, of_table)
        case "gdpo_group":
            return estimate("gdpo", rewards, of_table, batch_norm=False)
        case "multi_reward_grpo":
            plain = kwargs.get("use_std", True) is False
            return estimate("dr_grpo" if plain else "grpo", rewards, of_table, **({} if plain else {"eps": 1e-6}))
        case "shrinkage_parts":
            return shrinkage_parts(rewards)
        case "awpo":
            return awpo(**kwargs)
        case "whiten":
            values = torch.tensor(kwargs["values"], dtype=torch.float64)
            counts = torch.tensor(kwargs["weights"]) if "weights" in kwargs else None
            settings = {key: kwargs[key] for key in ("ddof", "eps", "eps_mode")}
            return whiten(values, torch.ones_like(values, dtype=torch.bool), counts=counts, **settings).tolist()
        case "f_grpo":
            return weight("clip", **kwargs)
        case "f_dapo":
            return weight("clip", eps_low=0.2, eps_high=0.28, **kwargs)
        case "f_cispo" | "f_gppo" | "f_ce_gppo" | "f_aspo" | "f_dgpo":
            return weight(fn.removeprefix("f_"), **kwargs)
        case "w_dgpo":  # W = F / pi
            pi, old = torch.tensor(kwargs["pi"]).double(), torch.tensor(kwargs["pi_old"]).double()
            pi, old = (torch.tensor(kwargs[key], dtype=torch.float64) for key in ("pi", "pi_old"))
            adv = torch.tensor(kwargs["adv"], dtype=torch.float64)
            factor = make_surrogate("dgpo", n=kwargs["n"], m=kwargs["m"])((pi / old).log(), adv)
            return (factor / pi).tolist()
        case "region":
            return region_names(**kwargs)
        case "ppo_token_objective":
            log_ratio = torch.tensor(kwargs["w"], dtype=torch.float64).log()
            adv = torch.tensor(kwargs["adv"], dtype=torch.float64)
            return ppo_objective(log_ratio, adv, kwargs["eps_low"], kwargs["eps_high"]).tolist()
        case "aggregate":
            return aggregate(**kwargs)
        case "gradient_variance" | "gradient_variance_running":
            return running_variance(kwargs["grads"])
        case "distinct_advantage_groups":
            return distinct(**kwargs)
    raise NotImplementedError(fn)


def rounding(given: Any) -> float:
    """Error of a mean of the largest number given, in float64: numbers of 1e6 are 1.2e-10 apart, their sums more."""
    if isinstance(given, dict | list):
        return max(map(rounding, given.values() if isinstance(given, dict) else given), default=0.0)
    return 16 * 2**-53 * abs(given) if isinstance(given, int | float) and math.isfinite(given) else 0.0


def assert_close(actual: Any, expected: Any, absolute: float, path: str = "") -> None:
    if isinstance(expected, dict):
        assert set(expected) <= set(actual), path
        for key, value in expected.items():
            assert_close(actual[key], value, absolute, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), path
        for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, b, absolute, f"{path}[{index}]")
    elif expected is None or isinstance(expected, str):
        assert actual == expected, path
    else:
        assert actual == pytest.approx(expected, rel=RTOL, abs=absolute), path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_golden(case: dict[str, Any]) -> None:
    if "raises" in case:
        with pytest.raises(ValueError, match="needs"):
            run(case["fn"], case["kwargs"])
        return
    assert_close(run(case["fn"], case["kwargs"]), case["expected"], max(ATOL, rounding(case["kwargs"])))
