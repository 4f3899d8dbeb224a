"""API-Bank's accuracy, for evaluation."""

from __future__ import annotations

from typing import Literal

from megatron_rl.data.sample import Call
from megatron_rl.rewards.kinds import UNIT, InlineReward, SampleMapping
from megatron_rl.rewards.registry import register_reward
from megatron_rl.rewards.tool_calls import equal
from megatron_rl.rewards.tool_parsers import CLOSE, OPEN, as_call, json_lines, load_json, parse_tool_calls


@register_reward("api_bank")
def api_bank(calls: Literal["any", "only"] = "any") -> InlineReward:
    """1 where the completion makes the gold call: the same API with exactly the same parameters, else 0.

    The accuracies of API-Bank's levels 1 to 3 in ToolRL and AWPO (Table 3) are means of it, in ToolRL's prompt format. The
    gold call is the first of the sample's `tool_calls`. Names and values are compared as JSON: "2" is not 2.

    Args:
        calls: `any`: one of the lines between the last `<tool_call>` and `</tool_call>` is the gold call, as in ToolRL's
            released evaluation; lines that are no JSON object are ignored, and an object without name and parameters
            is read as the parameters alone. `only`: the completion makes one call, in a closed block.
    """

    def gold_of(sample: SampleMapping) -> Call:
        if not sample.get("tool_calls"):
            raise ValueError("the api_bank reward needs the sample's tool_calls")
        return sample["tool_calls"][0]

    def score(completion: str, sample: SampleMapping) -> float:
        gold = gold_of(sample)
        if calls == "only":
            return float(equal(parse_tool_calls(completion), [as_call(gold)]))
        block = completion.rpartition(OPEN)[2].partition(CLOSE)[0]
        return float(any(_is_gold(load_json(line), gold) for line in json_lines(block)))

    return InlineReward(score, bounds=UNIT, check_sample=gold_of)


def _is_gold(call: object, gold: Call) -> bool:
    if not isinstance(call, dict):
        return False
    if "name" not in call or "parameters" not in call:
        return equal(call, gold["parameters"])
    return as_call(call) is not None and call["name"] == gold["name"] and equal(call["parameters"], gold["parameters"])
