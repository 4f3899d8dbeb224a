"""Mathematical answers, compared by math-verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_rl.config.keys import Finite
from megatron_rl.rewards.gold_checks import doubtful_golds
from megatron_rl.rewards.isolation import Isolated, IsolatedReward, Timeout
from megatron_rl.rewards.kinds import UNIT, SampleMapping, stopped
from megatron_rl.rewards.registry import register_reward

_LONGEST = 100_000  # characters of a completion that are looked at, from its end


@register_reward("math")
def math_reward(
    correct: Finite = 1.0,
    wrong: Finite = 0.0,
    boxes: Literal["last", "all"] = "last",
    require_stop: bool = False,
    strict: bool = False,
    gold_after: str | None = None,
    timeout_seconds: Timeout = 5.0,
) -> IsolatedReward:
    r"""`correct` where the completion's final answer equals the sample's `answer`, else `wrong`.

    The final answer is what stands in a `\boxed{}`; without one, the last LaTeX or plain expression. math-verify
    compares it as mathematics: `\frac{1}{2}` equals `0.5`. It runs in a process of its own, so its deadline holds for any
    expression.

    Args:
        correct: value of a right answer.
        wrong: value of a wrong one; -1 gives the +-1 reward of DGPO, appendix.
        boxes: of several `\boxed{}`, the `last` is the answer, or `all` of them are, as a set (math-verify's own way).
        require_stop: a response cut at the token limit is wrong.
        strict: for evaluation; only a closed box counts, and the answer's form as well (`maths_strict`).
        gold_after: the gold answer is what follows the last such text, for example `####` in GSM8K's solutions.
        timeout_seconds: a comparison that takes longer is stopped; the answer is wrong and counts as a timeout.
    """
    if strict and boxes != "last":
        raise ValueError("boxes = 'all' has no effect with strict: the last box is the answer")
    if gold_after == "":
        raise ValueError("gold_after must not be empty; null takes the whole answer")
    compare = "maths_strict:strictly_same" if strict else "maths_lenient:same_answer"
    more = () if strict else (boxes,)
    isolated = Isolated(f"megatron_rl.rewards.{compare}", ("math_verify",), timeout_seconds, UNIT)

    def gold_of(sample: SampleMapping) -> str:
        if sample.get("answer") is None:
            raise ValueError("the math reward needs the sample's answer")
        return gold_text(sample["answer"], gold_after)

    def doubts(golds: Sequence[tuple[str, SampleMapping]]) -> list[str]:
        return doubtful_golds(
            [(key, gold_of(sample)) for key, sample in golds], lambda c, g: bool(isolated(c, g, *more))
        )

    def score(completion: str, sample: SampleMapping) -> float:
        gold = gold_of(sample)
        if require_stop and not stopped(sample):
            return wrong
        return correct if isolated(completion[-_LONGEST:], gold, *more) else wrong

    return IsolatedReward(
        score, isolated, bounds=(min(correct, wrong), max(correct, wrong)), check_sample=gold_of, doubts=doubts
    )


def gold_text(answer: object, after: str | None) -> str:
    """The gold answer as text: of a list its only entry, or all of them with commas (OlympiadBench's `final_answer`).

    Raises:
        ValueError: `after` is not in it, nothing is left, or it is a whole solution of GSM8K's.
    """
    text = ", ".join(map(str, answer)) if isinstance(answer, list | tuple) else str(answer)
    if after is None and "####" in text:
        raise ValueError(
            f"the gold answer {text!r:.200} is a solution with ####; set gold_after: '####' to read what follows it"
        )
    if after is not None:
        _, found, text = text.rpartition(after)
        if not found:
            raise ValueError(f"the gold answer {text!r:.200} has no {after!r} (gold_after)")
    if not text.strip():
        raise ValueError("the gold answer is empty")
    return text.strip()
