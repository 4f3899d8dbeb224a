"""The rewards on tool calls: structure, correctness in [-3, 3], execution score in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.rewards.registry import Reward, choice, flag, register_reward
from megatron_rl.rewards.tool_calls import match_share, predicted_calls

# (call tags, response tags) wanted -> pattern of the whole completion. Strict: newlines exactly as in ToolRL's prompt.
_STRICT = {
    (False, False): r"<think>.*?</think>",
    (False, True): r"<think>.*?</think>\n<response>.*?</response>",
    (True, False): r"<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>",
    (True, True): r"<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>\n<response>.*?</response>",
}
_LENIENT = {
    (False, False): r"<think>.*?</think>",
    (False, True): r"<think>.*?</think>\s*<response>.*?</response>",
    (True, False): r"<think>.*?</think>\s*<tool_call>.*?</tool_call>",
    (True, True): r"<think>.*?</think>\s*<tool_call>.*?</tool_call>\s*<response>.*?</response>",
}
_PATTERNS = {
    strict: {wanted: re.compile(pattern, re.DOTALL) for wanted, pattern in patterns.items()}
    for strict, patterns in ((True, _STRICT), (False, _LENIENT))
}


@register_reward("tool_format")
def tool_format(strict: bool = True) -> Reward:
    """1 where the completion has the fields its gold answer asks for, each once and in order, else 0 (GDPO, Eq. 9).

    `<think>` always; `<tool_call>` where the sample has gold calls; `<response>` where it `needs_response` (default:
    where it has no gold call). Nothing may stand before, between or after them but white space. What is inside the
    fields is not looked at.

    Args:
        strict: the line breaks must be those of ToolRL's prompt, as its released reward wants: one newline between
            fields, and calls on lines of their own. False: any white space, or none.
    """
    patterns = _PATTERNS[flag("strict", strict)]

    def score(completion: str, sample: Mapping[str, Any]) -> float:
        calls = bool(sample.get("tool_calls"))
        response = sample.get("needs_response")
        if response is None:
            response = not calls
        tags = (("<tool_call>", "</tool_call>"), calls), (("<response>", "</response>"), response)
        for pair, wanted in tags:
            if wanted and any(completion.count(tag) != 1 for tag in pair):
                return 0.0
        return float(patterns[calls, bool(response)].fullmatch(completion.strip()) is not None)

    return score


@register_reward("tool_correctness")
def tool_correctness(matching: str = "greedy", names: str = "multiset", same_name: bool = True) -> Reward:
    """6 * R_max / S_max - 3, in [-3, 3]: names, parameter names and parameter values of the calls (GDPO, appendix C).

    The gold calls are the sample's `tool_calls`. A completion without a call, or whose calls cannot be read, scores -3
    where the gold turn calls a tool. Where it calls none: 3 for calling none, -3 otherwise.

    Args:
        matching: `greedy` as in ToolRL's released reward, or `optimal` as the paper writes.
        names: `multiset` as in the released reward, or `set` as the paper writes.
        same_name: only calls of the same tool can be matched, as both codes do; false: any two calls.
    """
    choice("matching", matching, ("greedy", "optimal"))
    choice("names", names, ("multiset", "set"))
    flag("same_name", same_name)

    def score(completion: str, sample: Mapping[str, Any]) -> float:
        calls = predicted_calls(completion)
        if calls is None:
            return -3.0
        return 6 * match_share(sample.get("tool_calls") or [], calls, matching, names, same_name) - 3

    return score


@register_reward("tool_exec")
def tool_exec(matching: str = "optimal", names: str = "set") -> Reward:
    """The execution score in [0, 1] (AWPO, Eq. 13-16); with `tool_format` beside it, AWPO's outcome reward in [0, 2].

    1 where the gold turn calls no tool and neither does the completion; 0 for calls that cannot be read.

    Args:
        matching: `optimal` or `greedy`, as in `tool_correctness`.
        names: `set` as in Eq. 13, or `multiset`.
    """
    choice("matching", matching, ("greedy", "optimal"))
    choice("names", names, ("multiset", "set"))

    def score(completion: str, sample: Mapping[str, Any]) -> float:
        calls = predicted_calls(completion)
        if calls is None:
            return 0.0
        return match_share(sample.get("tool_calls") or [], calls, matching, names)

    return score
