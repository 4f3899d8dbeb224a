"""A fixed rubric with the judge's dimensions, constraints and tiers: arithmetic, for runs and tests without a model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from megatron_rl.rewards.judge import nearest_tier
from megatron_rl.rewards.kinds import UNIT, InlineReward, SampleMapping
from megatron_rl.rewards.registry import register_reward
from megatron_rl.rewards.tool_calls import equal
from megatron_rl.rewards.tool_parsers import Call, ParserName, calls_of_sample

PATH, TOOLS, PARAMETERS, STRATEGY = 0.35, 0.30, 0.25, 0.10  # weights: AWPO, Figure 4


@register_reward("rubric")
def rubric(rationale_key: str = "rationale", parser: ParserName = "toolrl") -> InlineReward:
    """One of the tiers 0, 0.25, 0.5, 0.75, 0.9, 1.0, by counting words and comparing calls.

    Args:
        rationale_key: the sample's metadata key with the reference rationale; a sample may lack it.
        parser: the format of the calls, as in `tool_format`.
    """

    def score(completion: str, sample: SampleMapping) -> float:
        rationale = str((sample.get("metadata") or {}).get(rationale_key) or "")
        return grade(completion, sample.get("tool_calls") or [], rationale, parser, sample)

    return InlineReward(score, bounds=UNIT)


def grade(
    completion: str,
    gold: Sequence[Call],
    rationale: str,
    parser: ParserName = "toolrl",
    sample: SampleMapping | None = None,
) -> float:
    """The tier of a completion.

    Four dimensions in [0, 1]: words of the thinking against those of the rationale (without one: whether there is any
    thinking); tool names, in order; parameters, for calls paired by name; no call twice, and none too many. Then caps:
    calls that cannot be read 0, an invented tool 0.25, all tools missing 0.25, one missing 0.5, a parameter that deviates
    0.75.
    """
    calls = calls_of_sample(completion, parser, sample or {})
    if calls is None:
        return 0.0
    thinking = completion.partition("<think>")[2].partition("</think>")[0].split()
    reasons = _overlap(thinking, rationale.split()) if rationale else float(bool(thinking))
    gold_names, named = [call["name"] for call in gold], [call["name"] for call in calls]
    pairs = _pairs(gold, calls)
    tools = _ratio(_common_order(gold_names, named), len(gold_names) + len(named))
    agree = sum(_agreement(want, have) for want, have in pairs)
    strategy = float(len(calls) <= len(gold) and not any(equal(*two) for two in itertools.combinations(calls[:200], 2)))
    total = PATH * reasons + TOOLS * tools + PARAMETERS * _ratio(agree, 2 * len(gold)) + STRATEGY * strategy
    missing, invented = Counter(gold_names) - Counter(named), Counter(named) - Counter(gold_names)
    if any(name not in gold_names for name in invented):
        total = min(total, 0.25)
    if missing:
        total = min(total, 0.25 if missing == Counter(gold_names) else 0.5)
    if any(_agreement(want, have) < 1 for want, have in pairs):
        total = min(total, 0.75)
    return nearest_tier(total)


def _pairs(gold: Sequence[Call], calls: Sequence[Call]) -> list[tuple[Call, Call]]:
    """Each gold call with the best call of its name that is still free, in order."""
    free, pairs = list(calls), []
    for want in gold:
        same = [call for call in free if call["name"] == want["name"]]
        if same:
            best = max(same, key=lambda call: _agreement(want, call))
            free = [call for call in free if call is not best]
            pairs.append((want, best))
    return pairs


def _agreement(want: Call, have: Call) -> float:
    """Share of the parameters, of either call, that both have with equal values."""
    left, right = want["parameters"], have["parameters"]
    keys = {*left, *right}
    if not keys:
        return 1.0
    return sum(key in left and key in right and equal(left[key], right[key]) for key in keys) / len(keys)


def _overlap(left: Sequence[str], right: Sequence[str]) -> float:
    return _ratio(float(sum((Counter(left) & Counter(right)).values())), len(left) + len(right))


def _common_order(left: Sequence[str], right: Sequence[str]) -> float:
    """Length of the longest common subsequence; the right one is cut to 200."""
    row = [0] * (min(len(right), 200) + 1)
    for one in left:
        before = 0
        for j, other in enumerate(right[:200], 1):
            before, row[j] = row[j], before + 1 if one == other else max(row[j], row[j - 1])
    return float(row[-1])


def _ratio(common: float, sizes: int) -> float:
    """Twice what two lists share over their sizes; 1 for two empty lists."""
    return 2 * common / sizes if sizes else 1.0
