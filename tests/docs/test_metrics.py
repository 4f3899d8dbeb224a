"""docs/metrics.md names every metric that the code writes, and none that it does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
CODE = [
    path
    for folder in ("methods", "algorithms", "actor", "evaluation", "rewards", "rollout", "trainer", "runtime")
    for path in sorted((ROOT / "megatron_rl" / folder).rglob("*.py"))
]
NAME = re.compile(r"(?:[a-z_]+|\*)(/[\w@*]+)+")

# Names of rows of a real quick start run (preset grpo), steps 0 and 1.
QUICKSTART = """
step time eval/chain_sum_test/avg@1 eval/chain_sum_test/pass@1 eval/chain_sum_test/stderr
eval/chain_sum_test/response_length
eval/chain_sum_test/reward/correct eval/chain_sum_test/reward/format eval/chain_sum_test/truncated_share actor/entropy
actor/grad_norm actor/grad_norm_max actor/lr actor/updates advantage/abs_mean advantage/distinct_groups advantage/max
advantage/mean advantage/silent_group_share correction/dropped_share groups/incomplete groups/signal_share groups/trained
loss/objective loss/silent_token_share memory/host_peak_gib mismatch/abs_log_ratio mismatch/abs_log_ratio_max
mismatch/kl_k1 mismatch/kl_k3 mismatch/log_perplexity_gap old_policy/kl_k1 old_policy/kl_k3 perf/generated_tokens_per_s
perf/tokens_per_s perf/total_tokens prompt_length/mean ratio/max ratio/mean region_share/HN region_share/HP region_share/LN
region_share/LP region_share/M region_weight/M response_length/max response_length/mean response_length/truncated_share
reward/correct reward/format reward/mean reward/std reward_group_std/correct reward_group_std/format
reward_signal_share/correct reward_signal_share/format rollouts/sampled sync/logprob_mean_diff sync/logprob_p99_diff
sync/logprob_max_diff timing_s/estimate
timing_s/generate timing_s/old_log_prob timing_s/reward timing_s/step timing_s/switch timing_s/sync timing_s/sync_check
timing_s/update
"""


def text_of(node: ast.expr | None) -> str:
    """A string, or an f-string with `*` for what it fills in; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return ""


def written(tree: ast.Module) -> Iterator[str]:
    """Names in the places where the code gives a metric its name: keys of dictionaries, `Metrics` methods, phases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from (text_of(key) for key in node.keys)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield text_of(node.slice)
        elif isinstance(node, ast.DictComp):
            yield text_of(node.key)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("mean", "total", "maximum"):
                yield text_of(node.args[0])
            elif node.func.attr == "timer":
                yield f"timing_s/{text_of(node.args[0])}"


def metrics_of_the_code() -> set[str]:
    names = {name for path in CODE for name in written(ast.parse(path.read_text(encoding="utf-8")))}
    # The one that stands for all phases says nothing: they are found by name.
    return {name for name in names if NAME.fullmatch(name)} - {"timing_s/*"}


def metrics_of_the_page() -> set[str]:
    """First cells of the page's tables, `*` for each `<x>`."""
    names = set()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            names |= set(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return {re.sub(r"<\w+>", "*", name) for name in names}


def matches(pattern: str, name: str) -> bool:
    """Whether a documented name covers a written one; either may have `*`, for one part of a name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[\w*.-]+"), name) is not None


def test_every_metric_of_the_code_is_documented() -> None:
    page = metrics_of_the_page()
    found = metrics_of_the_code()
    assert len(found) > 60, "the search through the code has lost its way"
    missing = sorted(name for name in found if not any(matches(pattern, name) for pattern in page))
    assert not missing, f"docs/metrics.md does not say what these are: {missing}"


def test_every_documented_metric_is_written() -> None:
    code = metrics_of_the_code() | {"step", "time", "correction/effective_sample_share"}
    stale = sorted(
        name for name in metrics_of_the_page() if not any(matches(name, one) or matches(one, name) for one in code)
    )
    assert not stale, f"docs/metrics.md describes what nothing writes: {stale}"


@pytest.mark.parametrize("name", QUICKSTART.split())
def test_a_real_runs_metrics_are_documented(name: str) -> None:
    assert any(matches(pattern, name) for pattern in metrics_of_the_page())
