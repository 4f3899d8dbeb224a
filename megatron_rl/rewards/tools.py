"""The rewards on tool calls: structure, correctness in [-3, 3], execution score in [0, 1], AWPO's outcome in [0, 2]."""

from __future__ import annotations

from typing import Literal

from megatron_rl.rewards.kinds import UNIT, InlineReward, NumberFunction, Remark, RemarkFunction, SampleMapping
from megatron_rl.rewards.registry import register_reward
from megatron_rl.rewards.tool_calls import Matching, Names, call_remarks, match_share
from megatron_rl.rewards.tool_parsers import FORMATS, ParserName, Thinking, calls_of_sample


@register_reward("tool_format")
def tool_format(strict: bool = True, parser: ParserName = "toolrl", think: Thinking = "required") -> InlineReward:
    """1 where the completion has the fields its gold answer asks for, each once and in order, else 0 (GDPO, Eq. 9).

    Thinking always; calls where the sample has gold calls; a response where it `needs_response` (default: where it has
    no gold call). Only white space may be before, between or after them. The content of the fields is not checked.

    Args:
        strict: the line breaks must be those of ToolRL's prompt, as its released reward wants: one newline between
            fields, and calls on lines of their own. False: any white space, or none. The other parsers' formats leave
            white space open: it has no effect there.
        parser: `toolrl`: `<tool_call>` once, `<response>` around the response. `hermes`: `<tool_call>` once per call;
            the response is text, before them. `llama`: calls as JSON; the response is text, and before calls only where
            `<|python_tag|>` parts the two. The other parsers: as their chat templates write.
        think: `required`: `<think>...</think>` first. `opened`: the prompt ends with `<think>`, the completion closes it.
            `none`: no thinking.
    """
    return InlineReward(_has_format(strict, parser, think), bounds=UNIT)


def _has_format(strict: bool, parser: ParserName, think: Thinking) -> NumberFunction:
    wanted_format = FORMATS[parser]

    def score(completion: str, sample: SampleMapping) -> float:
        calls = bool(sample.get("tool_calls"))
        response = sample.get("needs_response")
        return float(wanted_format(completion, calls, not calls if response is None else bool(response), think, strict))

    return score


@register_reward("tool_correctness")
def tool_correctness(
    matching: Matching = "greedy",
    names: Names = "multiset",
    same_name: bool = True,
    parser: ParserName = "toolrl",
    no_call_wanted: Literal["compare", "zero"] = "compare",
) -> InlineReward:
    """6 * R_max / S_max - 3, in [-3, 3]: names, parameter names and parameter values of the calls (GDPO, appendix C).

    The gold calls are the sample's `tool_calls`. A completion without a call, or whose calls cannot be read, scores -3
    where the gold turn calls a tool. Where it calls none: 3 for calling none, -3 otherwise; or `no_call_wanted`.

    Args:
        matching: `greedy` as in ToolRL's released reward, or `optimal` as the paper writes.
        names: `multiset` as in the released reward, or `set` as the paper writes.
        same_name: only calls of the same tool can be matched, as both codes do; false: any two calls.
        parser: how the completion writes calls, see `tool_parsers`.
        no_call_wanted: the score where the gold turn calls no tool: `compare` as above, or `zero`: always 0, as in ToolRL's
            released reward.
    """

    def score(completion: str, sample: SampleMapping) -> float:
        gold = sample.get("tool_calls") or []
        if not gold and no_call_wanted == "zero":
            return 0.0
        calls = calls_of_sample(completion, parser, sample)
        if calls is None:
            return -3.0
        return 6 * match_share(gold, calls, matching, names, same_name) - 3

    return InlineReward(score, bounds=(-3.0, 3.0), remarks=_remarks(parser, matching, same_name))


@register_reward("tool_exec")
def tool_exec(matching: Matching = "optimal", names: Names = "set", parser: ParserName = "toolrl") -> InlineReward:
    """The execution score in [0, 1] (AWPO, Eq. 13-16); with `tool_format` added, AWPO's outcome reward in [0, 2].

    1 where the gold turn calls no tool and neither does the completion; 0 for calls that cannot be read.

    Args:
        matching: `optimal` or `greedy`, as in `tool_correctness`.
        names: `set` as in Eq. 13, or `multiset`.
        parser: as in `tool_correctness`.
    """
    return InlineReward(_execution(matching, names, parser), bounds=UNIT, remarks=_remarks(parser, matching))


def _execution(matching: Matching, names: Names, parser: ParserName) -> NumberFunction:
    def score(completion: str, sample: SampleMapping) -> float:
        calls = calls_of_sample(completion, parser, sample)
        if calls is None:
            return 0.0
        return match_share(sample.get("tool_calls") or [], calls, matching, names)

    return score


def _remarks(parser: ParserName, matching: Matching, same_name: bool = True) -> RemarkFunction:
    def remarks(completion: str, sample: SampleMapping) -> list[Remark]:
        gold, calls = sample.get("tool_calls") or [], calls_of_sample(completion, parser, sample)
        unread: list[Remark] = [("the calls cannot be read", False)] if calls is None else []
        return unread + call_remarks(gold, calls or [], matching, same_name)

    return remarks


@register_reward("tool_outcome")
def tool_outcome(
    strict: bool = True,
    matching: Matching = "optimal",
    names: Names = "set",
    parser: ParserName = "toolrl",
    think: Thinking = "required",
) -> InlineReward:
    """`tool_format` + `tool_exec`, AWPO's outcome reward in [0, 2] as one number (AWPO, Eq. 11)."""
    has_format = _has_format(strict, parser, think)
    execution = _execution(matching, names, parser)

    def score(completion: str, sample: SampleMapping) -> float:
        return has_format(completion, sample) + execution(completion, sample)

    return InlineReward(score, bounds=(0.0, 2.0), remarks=_remarks(parser, matching))
