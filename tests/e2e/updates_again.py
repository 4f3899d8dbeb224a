"""A recorded step's update, and how far trainer and engine agreed, a second time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .recorded_steps import Expected, Step

UNIT = 2.0**-23  # float32's


def plain_ratio(step: Step) -> np.ndarray:
    return (step.tokens["log_probs"] - step.tokens["old_log_probs"])[step.live]


def objective(step: Step) -> float:
    """The pooled objective: by tokens, or by rollouts, of all minibatches."""
    low, high = step.bounds
    w, a = np.exp(step.log_ratio), step.advantage[step.live]
    if step.algorithm["surrogate"]["name"] == "clip":
        value = np.minimum(w * a, np.clip(w, 1 - low, 1 + high) * a)
    else:
        value = step.weight * a
    if step.importance is not None:
        value = value * step.importance
    mode = step.algorithm["aggregation"]
    if mode == "token-mean":
        return float(value.mean())
    rows = step.tokens["row"][step.live]
    groups = [value[rows == row] for row in dict.fromkeys(rows.tolist())]
    if mode == "seq-mean-token-mean":
        return float(np.mean([group.mean() for group in groups]))
    norm = {"seq-mean-token-sum": 1.0, "seq-mean-token-sum-norm": float(step.recipe["rollout"]["max_tokens"])}[mode]
    return float(np.mean([group.sum() / norm for group in groups]))


def region_share(step: Step, name: str) -> float:
    return float(np.mean(step.region == name))


def region_weight(step: Step, name: str) -> float:
    return float(step.weight[step.region == name].mean())


def updates(step: Step) -> float:
    groups = len(set((step.tokens["row"] // step.lengths.shape[1]).tolist()))
    return float(min(groups, step.recipe["trainer"]["minibatches"]) * step.recipe["trainer"]["epochs"])


def entropy(step: Step) -> Expected:
    return None if step.policy is None else float(step.policy_of("policy")[1][step.sampled].mean())


def gradient_norm(step: Step) -> Expected:
    """By autograd through transformers, of the recorded weights of the log-probs, and of the entropy bonus."""
    if step.policy is None or step.recipe["trainer"]["minibatches"] * step.recipe["trainer"]["epochs"] != 1:
        return None
    torch, model = step.policy.torch, step.policy.model
    model.zero_grad()
    loss, count = 0.0, len(step.tokens["row"])
    starts = dict.fromkeys(step.tokens["row"].tolist())
    for row in starts:
        own = step.tokens["row"] == row
        log_probs, entropies = step.policy.score(step.samples[row]["prompt"], step.samples[row]["pieces"])
        loss = loss - (torch.tensor(step.tokens["gradient_weights"][own]) * log_probs).sum()
        if step.algorithm["entropy_coef"]:
            assert step.algorithm["aggregation"] == "token-mean"
            loss = loss - step.algorithm["entropy_coef"] * entropies.sum() / count
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    model.zero_grad()
    return norm


def reference(step: Step, name: str) -> Expected:
    if step.reference is None or name != step.algorithm["kl"]["estimator"]:
        return None
    d = (step.tokens["log_probs"] - step.policy_of("reference")[0][step.sampled])[step.live]
    return float({"k1": d, "k2": d**2 / 2, "k3": np.expm1(-d) + d, "abs": np.abs(d)}[name].mean())


def rate(step: Step) -> Expected:
    optimizer = step.recipe["actor"]["optimizer"]
    return (
        optimizer["lr"]
        if optimizer["schedule"] == "constant" and not optimizer["warmup_steps"]
        else (0, optimizer["lr"])
    )


# -------------------------------------------------------------------------------------------------------- trainer and engine
def from_position(step: Step, first: str) -> Expected:
    later = [at for at in (0, 16, 64, 256, 1024, 4096, 16384) if at > int(first)]
    end = later[0] if later else None
    parts = [np.abs(own[int(first) : end]) for own in step.by_rollout(step.mismatch)]
    return float(np.concatenate(parts).mean())


def mismatch_kl(step: Step, name: str) -> float:
    d = step.mismatch
    return float(np.mean({"k1": -d, "k3": np.expm1(d) - d}[name]))


def at_cap(step: Step) -> Expected:
    """Between what is surely at the cap and what may be, as float32 rounds cap and weights."""
    if step.importance is None:
        return None
    raw, cap = np.exp(step.mismatch[step.live]), step.algorithm["correction"]["cap"]
    return float(np.mean(raw > cap * (1 + UNIT))), float(np.mean(raw > cap * (1 - UNIT)))


def importance(power: int) -> Callable[[Step], Expected]:
    return lambda step: None if step.importance is None else float((step.importance**power).mean())


def effective(step: Step) -> Expected:
    w = step.importance
    return None if w is None else float(w.mean() ** 2 / (w**2).mean())
