"""Every metric of docs/metrics.md a second time: from what a run recorded, in float64 by NumPy and transformers, without the
package's functions.

`TABLE` has an entry for each documented name: how it is recomputed from a row's `Step`, or which test does that
(`Elsewhere`), or why it can only be measured, and what must hold all the same (`Measured`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .recorded_steps import Step

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
UNIT = 2.0**-23  # float32's


def documented() -> set[str]:
    """Names of the page's tables, with `<x>` as they stand there."""
    names: set[str] = set()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            names |= set(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return names


def matches(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(re.sub(r"<\w+>", r"([\\w.-]+)", pattern.replace(".", r"\.")), name)


Expected = float | tuple[float, float] | None  # a value; or two that it must lie between; None: this step has none


@dataclass(frozen=True)
class Recomputed:
    """`value`: of a step and the parts that `<x>` stands for. `rel`, `abs`: what the run's float32 arithmetic may be off."""

    value: Callable[..., Expected]
    rel: float = 1e-6
    abs: float = 1e-9


@dataclass(frozen=True)
class Elsewhere:
    """Recomputed by this test: `file::name`."""

    test: str


@dataclass(frozen=True)
class Measured:
    """Nothing recorded says it again; `why`, and what must hold: the same as for `Recomputed`."""

    why: str
    holds: Callable[..., Expected]


# ------------------------------------------------------------------------------------------------------- rewards and lengths
def _column(step: Step, name: str) -> np.ndarray | None:
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


def _total(step: Step) -> np.ndarray:
    """[n, m]: the weighted sum; what was not scored counts as its group's mean."""
    columns = [_column(step, name) for name in step.file["names"].tolist()]
    filled = [np.where(np.isnan(one), np.nanmean(one, axis=1, keepdims=True), one) for one in columns]
    return sum(weight * one for weight, one in zip(step.file["weights"], filled, strict=True))


def _signal(step: Step) -> np.ndarray:
    chosen = step.algorithm["zero_variance_rewards"] or step.file["names"].tolist()
    varies = [
        np.nanmax(_column(step, name), 1) > np.nanmin(_column(step, name), 1)
        for name, weight in zip(step.file["names"].tolist(), step.file["weights"], strict=True)
        if weight != 0 and name in chosen
    ]
    return np.any(varies, axis=0)


def _reward_column(step: Step, name: str) -> Expected:
    column = _column(step, name)
    return None if column is None else float(np.nanmean(column))


def _varies(step: Step, name: str) -> Expected:
    column = _column(step, name)
    return None if column is None else float(np.mean(np.nanmax(column, 1) > np.nanmin(column, 1)))


def _spread(step: Step, name: str) -> Expected:
    column = _column(step, name)
    return None if column is None else float(np.mean(np.nanstd(column, axis=1)))


def _trained_groups(step: Step) -> np.ndarray:
    left = np.ones(step.lengths.shape, dtype=bool)
    if step.algorithm["truncated"] == "drop":
        left &= ~step.file["truncated"]
    if step.algorithm["drop_zero_variance_groups"]:
        left &= _signal(step)[:, None]
    return left


def _prompts(step: Step) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(step.run_dir / "model")
    own = [one for one in step.samples if one["rollout"] == 0]
    assert len(own) == len(step.lengths), "the samples hold every group"
    return [len(tokenizer(one["prompt"], add_special_tokens=False)["input_ids"]) for one in own]


def _tokens(step: Step) -> float:
    return float(step.lengths.sum() + step.lengths.shape[1] * sum(_prompts(step)))


# ----------------------------------------------------------------------------------------------------------------- advantages
def _seen(step: Step) -> np.ndarray:
    return step.file["advantages"][_trained_groups(step)]


def _silent(step: Step) -> float:
    part = _trained_groups(step)
    groups = [a[own] for a, own in zip(step.file["advantages"], part, strict=True) if own.any()]
    return float(np.mean([not group.any() for group in groups]))


def _distinct(step: Step) -> float:
    part = _trained_groups(step)
    groups = [a[own] for a, own in zip(step.file["advantages"], part, strict=True) if own.any()]
    return float(len({tuple(sorted((np.round(group * 1e6) + 0.0).tolist())) for group in groups}))


def _shrinkage(step: Step) -> Expected:
    """Eq. 13 to 15 of the paper."""
    if step.algorithm["estimator"]["name"] != "shrinkage":
        return None
    r = _total(step)
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


def _awpo(step: Step) -> Mapping[str, float] | None:
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


def _awpo_value(name: str) -> Callable[[Step], Expected]:
    return lambda step: None if (found := _awpo(step)) is None else float(found[name])


def _awpo_top(step: Step) -> Expected:
    """The run's running maximum: of the step before, or of this one."""
    found = _awpo(step)
    if found is None:
        return None
    if step.before is None or "awpo/r_out_max" not in step.before:
        return float(found["top"]), math.inf
    return max(float(found["top"]), step.before["awpo/r_out_max"])


# ----------------------------------------------------------------------------------------------------------------- the update
def _plain_ratio(step: Step) -> np.ndarray:
    return (step.tokens["log_probs"] - step.tokens["old_log_probs"])[step.live]


def _objective(step: Step) -> float:
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


def _region_share(step: Step, name: str) -> float:
    return float(np.mean(step.region == name))


def _region_weight(step: Step, name: str) -> float:
    return float(step.weight[step.region == name].mean())


def _updates(step: Step) -> float:
    groups = len(set((step.tokens["row"] // step.lengths.shape[1]).tolist()))
    return float(min(groups, step.recipe["trainer"]["minibatches"]) * step.recipe["trainer"]["epochs"])


def _entropy(step: Step) -> Expected:
    return None if step.policy is None else float(step.policy_of("policy")[1][step.sampled].mean())


def _gradient_norm(step: Step) -> Expected:
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


def _reference(step: Step, name: str) -> Expected:
    if step.reference is None or name != step.algorithm["kl"]["estimator"]:
        return None
    d = (step.tokens["log_probs"] - step.policy_of("reference")[0][step.sampled])[step.live]
    return float({"k1": d, "k2": d**2 / 2, "k3": np.expm1(-d) + d, "abs": np.abs(d)}[name].mean())


def _rate(step: Step) -> Expected:
    optimizer = step.recipe["actor"]["optimizer"]
    return (
        optimizer["lr"]
        if optimizer["schedule"] == "constant" and not optimizer["warmup_steps"]
        else (0, optimizer["lr"])
    )


# -------------------------------------------------------------------------------------------------------- trainer and engine
def _from_position(step: Step, first: str) -> Expected:
    later = [at for at in (0, 16, 64, 256, 1024, 4096, 16384) if at > int(first)]
    end = later[0] if later else None
    parts = [np.abs(own[int(first) : end]) for own in step.by_rollout(step.mismatch)]
    return float(np.concatenate(parts).mean())


def _mismatch_kl(step: Step, name: str) -> float:
    d = step.mismatch
    return float(np.mean({"k1": -d, "k3": np.expm1(d) - d}[name]))


def _at_cap(step: Step) -> Expected:
    """Between what is surely at the cap and what may be, as float32 rounds cap and weights."""
    if step.importance is None:
        return None
    raw, cap = np.exp(step.mismatch[step.live]), step.algorithm["correction"]["cap"]
    return float(np.mean(raw > cap * (1 + UNIT))), float(np.mean(raw > cap * (1 - UNIT)))


def _importance(power: int) -> Callable[[Step], Expected]:
    return lambda step: None if step.importance is None else float((step.importance**power).mean())


def _effective(step: Step) -> Expected:
    w = step.importance
    return None if w is None else float(w.mean() ** 2 / (w**2).mean())


# -------------------------------------------------------------------------------------------------------------------- times
def _phases(step: Step) -> Expected:
    """The phases are most of a step, and no more than it."""
    left = {"timing_s/step"} | (
        {"timing_s/ref_log_prob"} if step.algorithm["kl"]["reward_coef"] else set()
    )  # in estimate
    parts = [value for name, value in step.row.items() if name.startswith("timing_s/") and name not in left]
    return sum(parts) / 1.001, max(sum(parts) / 0.5, sum(parts) + 1.0)


def _phase(step: Step, *_: str) -> Expected:
    return 0.0, step.row["timing_s/step"] * 1.001


def _memory(step: Step, *_: str) -> Expected:
    return 0.01, step.row["memory/host_peak_gib"] * (1 + 1e-9)


def _below(name: str, factor: float = 1.0) -> Callable[[Step], Expected]:
    return lambda step: (0.0, step.row[name] * factor)


_TIMED = (
    "generate",
    "reward",
    "switch",
    "estimate",
    "old_log_prob",
    "ref_log_prob",
    "update",
    "checkpoint",
    "sync",
    "sync_check",
)
_STEPS = "tests/trainer/test_steps.py"
_ENGINES = "tests/agents/test_engines.py"
_JUDGE = "tests/e2e/test_judge.py::test_a_run_with_a_judge_and_its_resume_without_one"
_PAIRS = "tests/actor/test_preferences.py::test_loss_and_gradients_are_those_of_transformers_in_float64"
_SCORES = "tests/trainer/test_reward_model.py::test_the_export_scores_the_held_out_pairs_as_the_run_did"
_EVALUATION = "tests/evaluation/test_recomputed.py::test_every_number_of_an_evaluation_a_second_time"
_HERE = "tests/e2e/test_figures.py::"
_SAVES = _HERE + "test_what_saves_took_is_what_lies_there"

Entry = Recomputed | Elsewhere | Measured
TABLE: dict[str, Entry] = {
    "step": Recomputed(lambda step: float(step.number)),
    "time": Measured("a clock's", lambda step: (1.7e9, 4e9)),
    # Rewards and lengths
    "reward/mean": Recomputed(lambda step: float(_total(step).mean())),
    "reward/std": Recomputed(lambda step: float(_total(step).std())),
    "reward/<x>": Recomputed(_reward_column, abs=2e-5),
    "reward/overlong": Recomputed(lambda step: _reward_column(step, "overlong")),
    "reward/kl": Recomputed(lambda step: _reward_column(step, "kl"), rel=1e-3, abs=2e-5),
    "reward_signal_share/<x>": Recomputed(_varies),
    "reward_group_std/<x>": Recomputed(_spread, rel=1e-3, abs=2e-5),
    "response_length/mean": Recomputed(lambda step: float(step.lengths.mean())),
    "response_length/max": Recomputed(lambda step: float(step.lengths.max())),
    "response_length/truncated_share": Recomputed(
        lambda step: float(np.mean([one["finish_reason"] == "length" for one in step.samples]))
    ),
    "prompt_length/mean": Recomputed(lambda step: float(np.mean(_prompts(step)))),
    "rollouts/sampled": Recomputed(
        lambda step: (
            float(step.lengths.size * step.row.get("rollouts/rounds", 1.0))
            if not step.algorithm["resample_rounds"]
            else (step.lengths.size, math.inf)
        )
    ),
    "rollouts/rounds": Measured(
        "groups that were replaced are not recorded",
        lambda step: (math.ceil(step.lengths.shape[0] / step.recipe["trainer"]["prompts_per_step"]), math.inf),
    ),
    "rollouts/truncated_share": Recomputed(lambda step: float(step.file["truncated"].mean())),
    **{
        f"rollouts/{name}": Elsewhere("tests/seams/test_decoding.py::test_the_short_way_and_drafts_draw_the_same")
        for name in ("draft_acceptance", "drafted_share")
    },
    "reward_timeouts/<column>": Elsewhere(
        "tests/rewards/test_scorer.py::test_a_call_that_hangs_is_given_up_counted_and_in_nobodys_way"
    ),
    **{
        f"conversation/{name}": Elsewhere(
            "tests/agents/test_tool_loop.py::test_the_metrics_of_conversations_are_those_counted_in_their_text"
        )
        for name in (
            *(
                "turns",
                "turns_max",
                "turn_reward/<column>/<k>",
                "turn_<k>/share",
                "turn_<k>/tokens",
                "environment_tokens",
            ),
            *("tool_calls", "calls/<tool>", "failed_model", "failed_infrastructure"),
        )
    },
    "conversation/sequences": Elsewhere(f"{_ENGINES}::test_a_step_trains_on_the_conversations_and_writes_them"),
    "conversation/prefix_hit_share": Elsewhere(
        f"{_ENGINES}::test_turns_find_the_earlier_ones_in_the_cache_of_their_engine"
    ),
    **{
        f"rollouts/{name}": Elsewhere("tests/rollout/test_partial.py::test_metrics_of_partial_rollouts_a_second_time")
        for name in (
            *("staleness_mean", "staleness_max", "staleness_<k>", "partial_ratio", "chunks"),
            *("drawn_tokens", "recomputed_tokens", "waiting_groups", "waiting_tokens"),
        )
    },
    "reward_overlap/share": Elsewhere("tests/rewards/test_scorer.py::test_some_started_and_some_not"),
    **{
        f"<x>/{name}": Elsewhere(_JUDGE)
        for name in ("scored", "cache_hits", "no_score", "retries", "tokens", "latency_p95")
    },
    # Signal and advantages
    "groups/signal_share": Recomputed(lambda step: float(_signal(step).mean())),
    "groups/turns_alone_share": Elsewhere(
        "tests/algorithms/test_credit.py::test_every_estimator_sees_the_kth_turns_as_a_batch"
    ),
    "groups/trained": Recomputed(lambda step: float(_trained_groups(step).any(1).sum())),
    "groups/incomplete": Recomputed(lambda step: 0.0),
    "advantage/mean": Recomputed(lambda step: float(_seen(step).mean()), abs=1e-12),
    "advantage/std": Recomputed(lambda step: float(_seen(step).std())),
    "advantage/abs_mean": Recomputed(lambda step: float(np.abs(_seen(step)).mean())),
    "advantage/max": Recomputed(lambda step: float(np.abs(_seen(step)).max())),
    "advantage/silent_group_share": Recomputed(_silent),
    "advantage/distinct_groups": Recomputed(_distinct),
    **{
        f"token_advantage/{name}": Elsewhere(
            f"{_STEPS}::test_metrics_of_a_token_part_are_over_the_tokens_of_all_micro_batches"
        )
        for name in ("mean", "abs_mean", "max")
    },
    "distillation/reverse_kl": Elsewhere(
        f"{_STEPS}::test_metrics_of_rewards_per_token_are_means_over_the_tokens_that_were_scored"
    ),
    "shrinkage/lambda": Recomputed(_shrinkage),
    "awpo/rho": Recomputed(_awpo_value("rho"), rel=1e-4),
    "awpo/sigma_out": Recomputed(_awpo_value("sigma_out")),
    "awpo/sigma_mix": Recomputed(_awpo_value("sigma_mix")),
    "awpo/r_out_max": Recomputed(_awpo_top),
    "awpo/w_mix": Recomputed(_awpo_value("w_mix")),
    "awpo/gate_open_share": Recomputed(_awpo_value("gate_open_share")),
    "awpo/difficulty": Recomputed(_awpo_value("difficulty")),
    "awpo/clip_radius": Recomputed(lambda step: None if _awpo(step) is None else step.bounds[0]),
    # The update
    "actor/updates": Recomputed(_updates),
    "actor/grad_norm": Recomputed(_gradient_norm, rel=1e-4),
    "actor/grad_norm_max": Recomputed(_gradient_norm, rel=1e-4),
    "actor/lr": Recomputed(_rate),
    "actor/entropy": Recomputed(_entropy, rel=1e-4),
    "policy/entropy": Recomputed(
        lambda step: _entropy(step) if step.recipe["trainer"]["minibatches"] == 1 else None, rel=1e-4
    ),
    "loss/objective": Recomputed(_objective, rel=1e-4, abs=2e-6),
    "loss/silent_token_share": Recomputed(lambda step: float(np.mean(step.weight * step.advantage[step.live] == 0))),
    "ratio/mean": Recomputed(lambda step: float(np.exp(step.log_ratio).mean())),
    "ratio/max": Recomputed(lambda step: float(np.exp(step.log_ratio).max()), rel=1e-5),
    "old_policy/kl_k1": Recomputed(lambda step: float(-_plain_ratio(step).mean()), rel=1e-4, abs=1e-8),
    "old_policy/kl_k3": Recomputed(
        lambda step: float((np.expm1(_plain_ratio(step)) - _plain_ratio(step)).mean()), rel=1e-3, abs=UNIT
    ),
    "region_share/<x>": Recomputed(_region_share),
    "region_weight/<x>": Recomputed(_region_weight, rel=1e-5),
    **dict.fromkeys(
        ("gradient/variance", "gradient/variance_share", "gradient/parts"),
        Elsewhere("tests/actor/test_every_method.py::test_the_variance_is_that_of_the_micro_batches"),
    ),
    "experts/load": Elsewhere("tests/e2e/test_moe.py::test_experts_are_trained_and_reach_the_engine_after_every_step"),
    "experts/load_max": Elsewhere(
        "tests/e2e/test_moe.py::test_experts_are_trained_and_reach_the_engine_after_every_step"
    ),
    "reference/kl_<x>": Recomputed(_reference, rel=2e-3, abs=2e-6),
    # Trainer and engine agree
    "sync/logprob_mean_diff": Measured("the engine's second scoring is not recorded", _below("sync/logprob_p99_diff")),
    "sync/logprob_p99_diff": Measured("the same", _below("sync/logprob_max_diff")),
    "sync/logprob_max_diff": Measured("the same; fp32 here", lambda step: (0.0, 1e-4)),
    "mismatch/abs_log_ratio": Recomputed(lambda step: float(np.abs(step.mismatch).mean())),
    "mismatch/abs_log_ratio_max": Recomputed(lambda step: float(np.abs(step.mismatch).max())),
    "mismatch/abs_log_ratio_from_<x>": Recomputed(_from_position),
    "mismatch/kl_<x>": Recomputed(_mismatch_kl, rel=1e-3, abs=1e-11),
    "mismatch/log_perplexity_gap": Recomputed(
        lambda step: float(np.mean([-own.mean() for own in step.by_rollout(step.mismatch)])), rel=1e-4, abs=1e-10
    ),
    "correction/dropped_share": Recomputed(lambda step: float(np.mean(~step.live))),
    "correction/weight": Recomputed(_importance(1)),
    "correction/weight_squared": Recomputed(_importance(2)),
    "correction/truncated_share": Recomputed(_at_cap),
    "correction/effective_sample_share": Recomputed(_effective),
    # Evaluation
    **{
        f"eval/<task>/{name}": Elsewhere(_EVALUATION)
        for name in (
            "avg@<n>",
            "stderr",
            "pass@<k>",
            "reward/<x>",
            "response_length",
            "truncated_share",
            "exceed_share",
            "format_ratio",
            "bug_ratio",
            "win_rate",
            "win_rate_controlled",
            "pass_rate",
            "unscored",
        )
    },
    "eval_macro/<x>": Elsewhere(_EVALUATION),
    "eval_micro/<x>": Elsewhere(_EVALUATION),
    "eval/<set>/avg@<n>": Elsewhere("tests/e2e/test_harnesses.py::test_mmlu_pro_on_questions_of_its_format"),
    "eval/<set>/pass@<k>": Elsewhere("tests/e2e/test_harnesses.py::test_humaneval_on_problems_of_its_format"),
    "eval/<task>/loss": Elsewhere(_SCORES),
    "eval/<task>/accuracy": Elsewhere(_SCORES),
    "eval/<task>/margin": Elsewhere(_SCORES),
    # Time, speed, memory
    "timing_s/step": Measured("a clock's; its phases add up to it", _phases),
    **{f"timing_s/{name}": Measured("a clock's", _phase) for name in _TIMED},
    "timing_s/wait": Elsewhere("tests/e2e/test_split.py::test_the_metrics_say_how_old_the_batch_is"),
    "perf/generated_tokens_per_s": Recomputed(lambda step: step.lengths.sum() / step.row["timing_s/generate"]),
    "perf/tokens_per_s": Recomputed(lambda step: _tokens(step) / step.row["timing_s/step"]),
    "perf/total_tokens": Recomputed(_tokens),
    "memory/host_peak_gib": Measured("the kernel's count", lambda step: (0.05, 64.0)),
    "memory/<phase>/host_peak_gib": Measured("the kernel's count", _memory),
    "memory/device_peak_gib": Measured("a GPU's; none here", lambda step: None),
    "memory/<phase>/device_peak_gib": Measured("a GPU's; none here", lambda step, phase: None),
    # Checkpoints
    **{f"checkpoint/{name}": Elsewhere(_SAVES) for name in ("blocked_s", "write_s", "bytes")},
    "checkpoint/failed": Elsewhere("tests/e2e/test_faults.py::test_a_full_disk_costs_a_run_that_goes_on_only_the_save"),
    # Fine-tuning and reward models
    "sft/loss": Elsewhere(_HERE + "test_a_step_of_fine_tuning_a_second_time"),
    "sft/tokens": Elsewhere(_HERE + "test_a_step_of_fine_tuning_a_second_time"),
    "timing_s/update": Measured("a clock's", _phase),
    **{f"reward_model/{name}": Elsewhere(_PAIRS) for name in ("loss", "accuracy", "margin", "chosen", "rejected")},
    "reward_model/tokens": Elsewhere(_SCORES),
}


def of_name(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The documented name that a written one has, the most literal first, and what `<x>` stands for."""
    found = [(pattern, match.groups()) for pattern in TABLE if (match := matches(pattern, name))]
    return min(found, key=lambda one: len(one[1])) if found else None


def expected(step: Step) -> dict[str, tuple[str, Expected]]:
    """Written name -> the documented one, and what the record says; without those that are recomputed elsewhere."""
    found = {}
    for name in step.row:
        if name.startswith(("eval/", "eval_")):
            continue
        known = of_name(name)
        assert known is not None, f"{name} is in no table"
        pattern, parts = known
        entry = TABLE[pattern]
        if not isinstance(entry, Elsewhere):
            own = entry.value(step, *parts) if isinstance(entry, Recomputed) else entry.holds(step, *parts)
            if own is not None:
                found[name] = pattern, own
    return found


def agrees(pattern: str, own: Expected, value: float) -> bool:
    entry = TABLE[pattern]
    assert own is not None
    if isinstance(own, tuple):
        room = 1e-6 * max(abs(own[0]), abs(value))
        return own[0] - room <= value <= own[1] + room
    rel, absolute = (entry.rel, entry.abs) if isinstance(entry, Recomputed) else (0.0, 0.0)
    return math.isclose(value, own, rel_tol=rel, abs_tol=absolute)


def wrong(step: Step, found: Mapping[str, tuple[str, Expected]]) -> list[str]:
    """The metrics that are something else than the record says."""
    return [
        f"step {step.number}: {name} is {step.row[name]!r}, and {own!r} from what was recorded"
        for name, (pattern, own) in found.items()
        if not agrees(pattern, own, step.row[name])
    ]
