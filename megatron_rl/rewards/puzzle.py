"""Puzzles, scored by the verifier of the reasoning-gym dataset they come from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

from megatron_rl.base.messages import unknown_name
from megatron_rl.rewards.isolation import Isolated, IsolatedReward, Timeout
from megatron_rl.rewards.kinds import UNIT, SampleMapping, stopped
from megatron_rl.rewards.registry import register_reward
from megatron_rl.seams import reasoning_gym

# Verifiers that only compare text and decimals. Every other one may evaluate the model's text (countdown's passes it to
# sympy, which evaluates Python) or never end on it: those run in a process of their own, with a deadline.
PLAIN_VERIFIERS = frozenset({"chain_sum", "knights_knaves"})

# Verifiers that evaluate the answer as an expression, by sympy, and the syntax that is allowed there. Anything else could
# look up or compute the solution (Integral(x, x) is an integral of x), or be nan, to which every complex number is near; it
# is replaced by _NONSENSE. Those that take a list read literals only, see `seams.reasoning_gym`.
# Arithmetic has + - * / between whole numbers: Python's ** and //, or a dot that joins two numbers, are other operations.
_ARITHMETIC = re.compile(r"(?:[\d\s+\-()]|\*(?!\*)|/(?!/)|\.(?!\s*\d))*+")
# Possessive: `x1` is one name or a name and a digit, and a text of many such would be tried in every combination.
_EXPRESSION = re.compile(r"(?:[\d\s.,+\-*/^()]|(?<![\w.])[A-Za-z]\w*+)*+")
_EVALUATED = {
    "countdown": _ARITHMETIC,
    "puzzle24": _ARITHMETIC,
    "simple_integration": _EXPRESSION,
    "intermediate_integration": _EXPRESSION,
    "polynomial_multiplication": _EXPRESSION,
    "complex_arithmetic": re.compile(r"[\d\s.+\-*()ijIJ]*"),
}
_LISTS = frozenset({"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"})
_EQUAL = frozenset({"game_of_life_halting"})  # True or False; its verifier takes any text for either (0.1.25)
_NAME = re.compile(r"[A-Za-z]\w*")
_FUNCTION = re.compile("a?(?:sin|cos|tan|cot|sec|csc)h?|exp|log|ln|sqrt|[Aa]bs|pi")
_NONSENSE = "?"
Entry: TypeAlias = dict[str, Any]  # `question`, `answer`, `metadata`: an item as the verifiers read it


@register_reward("puzzle")
def puzzle(
    after: str | None = None, partial: bool = False, require_stop: bool = True, timeout_seconds: Timeout = 5.0
) -> IsolatedReward:
    """1 for an answer that the dataset's own verifier gives full marks, else 0; with `partial` its score in [0, 1].

    The dataset is the sample's `metadata["source_dataset"]`, as the task source `reasoning_gym` leaves it.

    Args:
        after: the answer is the text after the last such marker, 0 without a marker; null: the whole completion.
        partial: keep the verifier's partial credit, which constant answers can earn; false: 1 for full marks, else 0.
        require_stop: a response cut at the token limit scores 0.
        timeout_seconds: a verifier that takes longer is stopped; the response scores 0 and counts as a timeout.
    """
    if after == "":
        raise ValueError("after must not be empty; null takes the whole completion")
    isolated = Isolated("megatron_rl.rewards.puzzle:verify", ("reasoning_gym",), timeout_seconds, UNIT)

    def dataset_of(sample: SampleMapping) -> str:
        dataset = (sample.get("metadata") or {}).get("source_dataset")
        if dataset is None:
            raise ValueError("the puzzle reward needs the sample's metadata['source_dataset'], a reasoning-gym dataset")
        return str(dataset)

    def score(completion: str, sample: SampleMapping) -> float:
        dataset, metadata = dataset_of(sample), sample["metadata"]
        if require_stop and not stopped(sample):
            return 0.0
        answer = completion
        if after is not None:
            _, found, answer = completion.rpartition(after)
            if not found:
                return 0.0
            answer = answer.strip()  # some verifiers compare text
        entry = {"question": metadata.get("question"), "answer": sample.get("answer"), "metadata": dict(metadata)}
        grade = verify(answer, entry) if dataset in PLAIN_VERIFIERS else isolated(answer, entry)
        return grade if partial else float(grade >= 1)

    return IsolatedReward(score, isolated, bounds=UNIT, check_sample=dataset_of)


def verify(answer: str, entry: Entry) -> float:
    """Score of `answer` for one item, by its dataset's verifier.

    Some verifiers raise on text that they did not expect. That is a wrong answer, 0, if the verifier accepts the item's own
    answer; if not, the item is at fault, and its exception is raised.
    """
    metadata = entry["metadata"]
    dataset, gold = metadata["source_dataset"], str(entry["answer"])
    if dataset in _EQUAL:
        return float(answer.strip().lower() == gold.lower())
    if not _is_plain(dataset, answer, gold):
        answer = _NONSENSE
    score = _verifier(dataset, json.dumps(metadata.get("source_params") or {}, sort_keys=True))
    try:
        return float(score(answer, entry))
    except Exception:
        score(entry["answer"], entry)
        return 0.0


def _is_plain(dataset: str, answer: str, gold: str) -> bool:
    """Whether an answer that is evaluated has the syntax its dataset asks for: arithmetic, an expression."""
    pattern = _EVALUATED.get(dataset)
    if pattern is None:
        return True
    if pattern.fullmatch(answer) is None:
        return False
    strange = {name for name in _NAME.findall(answer) if len(name) > 1 and _FUNCTION.fullmatch(name) is None}
    return pattern is not _EXPRESSION or strange <= set(_NAME.findall(gold))


@cache
def _verifier(dataset: str, params: str) -> Callable[[str, Entry], float]:
    reasoning_gym.load()  # fills the registry
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise ValueError(unknown_name("reasoning-gym dataset", dataset, DATASETS))
    dataset_class, config_class = DATASETS[dataset]
    score: Callable[[str, Entry], float] = dataset_class(config=config_class(**json.loads(params))).score_answer
    if dataset in _LISTS:
        reasoning_gym.read_literals_only(score)
    return score
