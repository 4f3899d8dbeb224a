"""A judge of three opinions beside a verifiable outcome, and AWPO without its essential term: for awpo.yaml.

Prompts and warm-up are those of two_rewards.py. The outcome is the paper's, form + value in [0, 2]; the judge says one of the
paper's six scores.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Literal

from megatron_rl.algorithms import Estimate, Groups, advantage_estimator

_NUMBER = re.compile(r"-?[0-9]{1,3}[.]?")
_SCORES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)

Reward = Callable[[str, Mapping[str, str]], float]


def exact() -> Reward:
    """1 for the right value, with or without a full stop."""
    return lambda response, sample: float(response.removesuffix(".") == sample["answer"])


def judge(opinion: Literal["agrees", "contradicts", "independent"] = "agrees") -> Reward:
    """How near a number is to the value, in the paper's scores (agrees); 1 less that (contradicts); or a score drawn for this
    prompt and response, whatever its value (independent). 0 for what is no number."""

    def score(response: str, sample: Mapping[str, str]) -> float:
        if _NUMBER.fullmatch(response) is None:
            return 0.0
        if opinion == "independent":
            return random.Random(f"{sample['prompt']} {response}").choice(_SCORES)
        error = abs(int(response.removesuffix(".")) - int(sample["answer"]))
        near = {0: 1.0, 1: 0.5, 2: 0.25}.get(error, 0.0)
        return near if opinion == "agrees" else 1.0 - near

    return score


@advantage_estimator("ungated", columns=("judge",))
def ungated(groups: Groups, *, tau_low: float = 0.5, tau_high: float = 1.5) -> object:
    """AWPO without its essential term, as in Table 4: the mixed reward's advantage in every group (Eq. 19), weighed by
    difficulty (Eq. 22), with AWPO's smallest clip radius (Eq. 24)."""
    mixed = groups.centred.values / (groups.std(groups.centred, 0) + 1e-6)
    outcome = groups.centre(*groups.weighted([name for name in groups.names if name != "judge"])).mean
    medium = (outcome > tau_low) & (outcome < tau_high)
    return Estimate(mixed * (0.5 + medium.double()), clip_range=(0.18, 0.18))
