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

from . import rewards_again as rewards
from . import updates_again as updates
from .recorded_steps import Expected, Step

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"


def documented() -> set[str]:
    """Names of the page's tables, with `<x>` as they stand there."""
    names: set[str] = set()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            names |= set(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return names


def matches(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(re.sub(r"<\w+>", r"([\\w.-]+)", pattern.replace(".", r"\.")), name)


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
    "reward/mean": Recomputed(lambda step: float(rewards.total(step).mean())),
    "reward/std": Recomputed(lambda step: float(rewards.total(step).std())),
    "reward/<x>": Recomputed(rewards.reward_column, abs=2e-5),
    "reward/overlong": Recomputed(lambda step: rewards.reward_column(step, "overlong")),
    "reward/kl": Recomputed(lambda step: rewards.reward_column(step, "kl"), rel=1e-3, abs=2e-5),
    "reward_signal_share/<x>": Recomputed(rewards.varies),
    "reward_group_std/<x>": Recomputed(rewards.spread, rel=1e-3, abs=2e-5),
    "response_length/mean": Recomputed(lambda step: float(step.lengths.mean())),
    "response_length/max": Recomputed(lambda step: float(step.lengths.max())),
    "response_length/truncated_share": Recomputed(
        lambda step: float(np.mean([one["finish_reason"] == "length" for one in step.samples]))
    ),
    "prompt_length/mean": Recomputed(lambda step: float(np.mean(rewards.prompts(step)))),
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
        for name in ("draft_acceptance", "drafted_share", "drafted_share_below")
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
    "groups/signal_share": Recomputed(lambda step: float(rewards.signal(step).mean())),
    "groups/turns_alone_share": Elsewhere(
        "tests/algorithms/test_credit.py::test_every_estimator_sees_the_kth_turns_as_a_batch"
    ),
    "groups/trained": Recomputed(lambda step: float(rewards.trained_groups(step).any(1).sum())),
    "groups/incomplete": Recomputed(lambda step: 0.0),
    "advantage/mean": Recomputed(lambda step: float(rewards.seen(step).mean()), abs=1e-12),
    "advantage/std": Recomputed(lambda step: float(rewards.seen(step).std())),
    "advantage/abs_mean": Recomputed(lambda step: float(np.abs(rewards.seen(step)).mean())),
    "advantage/max": Recomputed(lambda step: float(np.abs(rewards.seen(step)).max())),
    "advantage/silent_group_share": Recomputed(rewards.silent),
    "advantage/distinct_groups": Recomputed(rewards.distinct),
    **{
        f"token_advantage/{name}": Elsewhere(
            f"{_STEPS}::test_metrics_of_a_token_part_are_over_the_tokens_of_all_micro_batches"
        )
        for name in ("mean", "abs_mean", "max")
    },
    "distillation/reverse_kl": Elsewhere(
        f"{_STEPS}::test_metrics_of_rewards_per_token_are_means_over_the_tokens_that_were_scored"
    ),
    "shrinkage/lambda": Recomputed(rewards.shrinkage),
    "awpo/rho": Recomputed(rewards.awpo_value("rho"), rel=1e-4),
    "awpo/sigma_out": Recomputed(rewards.awpo_value("sigma_out")),
    "awpo/sigma_mix": Recomputed(rewards.awpo_value("sigma_mix")),
    "awpo/r_out_max": Recomputed(rewards.awpo_top),
    "awpo/w_mix": Recomputed(rewards.awpo_value("w_mix")),
    "awpo/gate_open_share": Recomputed(rewards.awpo_value("gate_open_share")),
    "awpo/difficulty": Recomputed(rewards.awpo_value("difficulty")),
    "awpo/clip_radius": Recomputed(lambda step: None if rewards.awpo(step) is None else step.bounds[0]),
    # The update
    "actor/updates": Recomputed(updates.updates),
    "actor/grad_norm": Recomputed(updates.gradient_norm, rel=1e-4),
    "actor/grad_norm_max": Recomputed(updates.gradient_norm, rel=1e-4),
    "actor/lr": Recomputed(updates.rate),
    "actor/entropy": Recomputed(updates.entropy, rel=1e-4),
    "policy/entropy": Recomputed(
        lambda step: updates.entropy(step) if step.recipe["trainer"]["minibatches"] == 1 else None, rel=1e-4
    ),
    "loss/objective": Recomputed(updates.objective, rel=1e-4, abs=2e-6),
    "loss/silent_token_share": Recomputed(lambda step: float(np.mean(step.weight * step.advantage[step.live] == 0))),
    "ratio/mean": Recomputed(lambda step: float(np.exp(step.log_ratio).mean())),
    "ratio/max": Recomputed(lambda step: float(np.exp(step.log_ratio).max()), rel=1e-5),
    "old_policy/kl_k1": Recomputed(lambda step: float(-updates.plain_ratio(step).mean()), rel=1e-4, abs=1e-8),
    "old_policy/kl_k3": Recomputed(
        lambda step: float((np.expm1(updates.plain_ratio(step)) - updates.plain_ratio(step)).mean()),
        rel=1e-3,
        abs=updates.UNIT,
    ),
    "region_share/<x>": Recomputed(updates.region_share),
    "region_weight/<x>": Recomputed(updates.region_weight, rel=1e-5),
    **dict.fromkeys(
        ("gradient/variance", "gradient/variance_share", "gradient/parts"),
        Elsewhere("tests/actor/test_every_method.py::test_the_variance_is_that_of_the_micro_batches"),
    ),
    "experts/load": Elsewhere("tests/e2e/test_moe.py::test_experts_are_trained_and_reach_the_engine_after_every_step"),
    "experts/load_max": Elsewhere(
        "tests/e2e/test_moe.py::test_experts_are_trained_and_reach_the_engine_after_every_step"
    ),
    "reference/kl_<x>": Recomputed(updates.reference, rel=2e-3, abs=2e-6),
    # Trainer and engine agree
    "sync/logprob_mean_diff": Measured("the engine's second scoring is not recorded", _below("sync/logprob_p99_diff")),
    "sync/logprob_p99_diff": Measured("the same", _below("sync/logprob_max_diff")),
    "sync/logprob_max_diff": Measured("the same; fp32 here", lambda step: (0.0, 1e-4)),
    "sync/experts_max_diff": Elsewhere(f"{_ENGINES}::test_a_router_that_chooses_otherwise_is_seen_and_named"),
    "mismatch/abs_log_ratio": Recomputed(lambda step: float(np.abs(step.mismatch).mean())),
    "mismatch/abs_log_ratio_max": Recomputed(lambda step: float(np.abs(step.mismatch).max())),
    "mismatch/abs_log_ratio_from_<x>": Recomputed(updates.from_position),
    "mismatch/kl_<x>": Recomputed(updates.mismatch_kl, rel=1e-3, abs=1e-11),
    "mismatch/log_perplexity_gap": Recomputed(
        lambda step: float(np.mean([-own.mean() for own in step.by_rollout(step.mismatch)])), rel=1e-4, abs=1e-10
    ),
    "correction/dropped_share": Recomputed(lambda step: float(np.mean(~step.live))),
    "correction/weight": Recomputed(updates.importance(1)),
    "correction/weight_squared": Recomputed(updates.importance(2)),
    "correction/truncated_share": Recomputed(updates.at_cap),
    "correction/effective_sample_share": Recomputed(updates.effective),
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
    "perf/tokens_per_s": Recomputed(lambda step: rewards.tokens(step) / step.row["timing_s/step"]),
    "perf/total_tokens": Recomputed(rewards.tokens),
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
