"""Rewards, lengths and advantages of a recorded step a second time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from .recorded_steps import Expected, Step


def column_of(step: Step, name: str) -> np.ndarray | None:
    """[n, m], NaN without a score; the algorithm's own columns too."""
    names = step.file["names"].tolist()
    if name in names:
        values = step.rewards[:, :, names.index(name)]
        return (
            np.where(step.file["scored"][:, :, names.index(name)], values, np.nan) if "scored" in step.file else values
        )
    if name == "overlong":
        limit, share = step.recipe["rollout"]["max_tokens"], step.algorithm["overlong"]["share"]
        return -np.clip((step.lengths - (1 - share) * limit) / (share * limit), 0, 1)
    assert name == "kl"
    if step.reference is None:
        return None
    assert step.algorithm["kl"]["reward_estimator"] == "k1"
    d = step.tokens["old_log_probs"] - step.policy_of("reference")[0][step.sampled]
    assert len(set(step.tokens["row"].tolist())) == step.lengths.size, "every rollout is trained on"
    return -np.array([d[step.tokens["row"] == row].sum() for row in range(step.lengths.size)]).reshape(
        step.lengths.shape
    )


def total(step: Step) -> np.ndarray:
    """[n, m]: the weighted sum; what was not scored counts as its group's mean."""
    columns = [column_of(step, name) for name in step.file["names"].tolist()]
    filled = [np.where(np.isnan(one), np.nanmean(one, axis=1, keepdims=True), one) for one in columns]
    return sum(weight * one for weight, one in zip(step.file["weights"], filled, strict=True))


def signal(step: Step) -> np.ndarray:
    chosen = step.algorithm["zero_variance_rewards"] or step.file["names"].tolist()
    varies = [
        np.nanmax(column_of(step, name), 1) > np.nanmin(column_of(step, name), 1)
        for name, weight in zip(step.file["names"].tolist(), step.file["weights"], strict=True)
        if weight != 0 and name in chosen
    ]
    return np.any(varies, axis=0)


def reward_column(step: Step, name: str) -> Expected:
    column = column_of(step, name)
    return None if column is None else float(np.nanmean(column))


def varies(step: Step, name: str) -> Expected:
    column = column_of(step, name)
    return None if column is None else float(np.mean(np.nanmax(column, 1) > np.nanmin(column, 1)))


def spread(step: Step, name: str) -> Expected:
    column = column_of(step, name)
    return None if column is None else float(np.mean(np.nanstd(column, axis=1)))


def trained_groups(step: Step) -> np.ndarray:
    left = np.ones(step.lengths.shape, dtype=bool)
    if step.algorithm["truncated"] == "drop":
        left &= ~step.file["truncated"]
    if step.algorithm["drop_zero_variance_groups"]:
        left &= signal(step)[:, None]
    return left


def prompts(step: Step) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(step.run_dir / "model")
    own = [one for one in step.samples if one["rollout"] == 0]
    assert len(own) == len(step.lengths), "the samples hold every group"
    return [len(tokenizer(one["prompt"], add_special_tokens=False)["input_ids"]) for one in own]


def tokens(step: Step) -> float:
    return float(step.lengths.sum() + step.lengths.shape[1] * sum(prompts(step)))


def seen(step: Step) -> np.ndarray:
    return step.file["advantages"][trained_groups(step)]


def silent(step: Step) -> float:
    part = trained_groups(step)
    groups = [a[own] for a, own in zip(step.file["advantages"], part, strict=True) if own.any()]
    return float(np.mean([not group.any() for group in groups]))


def distinct(step: Step) -> float:
    part = trained_groups(step)
    groups = [a[own] for a, own in zip(step.file["advantages"], part, strict=True) if own.any()]
    return float(len({tuple(sorted((np.round(group * 1e6) + 0.0).tolist())) for group in groups}))


def shrinkage(step: Step) -> Expected:
    """Eq. 13 to 15 of the paper."""
    if step.algorithm["estimator"]["name"] != "shrinkage":
        return None
    r = total(step)
    n, m = r.shape
    found = []
    for i in range(n):
        others = np.delete(r, i, axis=0)
        v = (others.var(axis=1, ddof=1) / m).mean()
        means = others.mean(axis=1)
        s = ((means - means.mean()) ** 2).sum() / (n - 1)
        found.append(v / (v + s) if v > 0 else 0.0)
    factor = (n - 1) / n if step.algorithm["estimator"]["params"].get("factor", True) else 1.0
    return float(np.mean(found)) * factor


def awpo(step: Step) -> Mapping[str, float] | None:
    """Eq. 18 to 22 of the paper. The gate and the thresholds are strict; the record's numbers lie on none of them."""
    section = step.algorithm["estimator"]
    if section["name"] != "awpo":
        return None
    p = {"reasoning": "judge", "eps_std": 1e-6, "eps_mix": 0.7, "tau_low": 0.5, "tau_high": 1.5}
    p |= {"alpha_base": 0.5, "alpha_prio": 1.5} | section["params"]
    names, weights = step.file["names"].tolist(), step.file["weights"]
    kept = [i for i, name in enumerate(names) if name != p["reasoning"]]
    out = sum(weights[i] * step.rewards[:, :, i] for i in kept)
    mixed = sum(weight * step.rewards[:, :, i] for i, weight in enumerate(weights))
    s_out, s_mix, mean = out.std(1), mixed.std(1), out.mean(1)
    rho = s_mix / (s_out + s_mix + p["eps_std"])
    top = step.row["awpo/r_out_max"]  # recomputed itself
    w = np.where((top - mean > 1e-9) & (p["eps_mix"] - rho > 1e-9), rho, 0.0)
    medium = (mean - p["tau_low"] > 1e-9) & (p["tau_high"] - mean > 1e-9)
    return {
        "sigma_out": s_out.mean(),
        "sigma_mix": s_mix.mean(),
        "rho": rho.mean(),
        "top": mean.max(),
        "w_mix": w.mean(),
        "gate_open_share": np.mean(w > 0),
        "difficulty": np.where(medium, p["alpha_prio"], p["alpha_base"]).mean(),
    }


def awpo_value(name: str) -> Callable[[Step], Expected]:
    return lambda step: None if (found := awpo(step)) is None else float(found[name])


def awpo_top(step: Step) -> Expected:
    """The run's running maximum: of the step before, or of this one."""
    found = awpo(step)
    if found is None:
        return None
    if step.before is None or "awpo/r_out_max" not in step.before:
        return float(found["top"]), math.inf
    return max(float(found["top"]), step.before["awpo/r_out_max"])
