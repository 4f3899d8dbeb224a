"""The claims that are trained: what each paper says, which lines of which sweep decide it, and what must be gone without the
method's essential term. Recipes and sweeps: `recipes/cpu/claims/<name>.{yaml,sweep}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from reproduced.claims import MORE, NOT_MORE, SAME, Claim, Side, Statement
from reproduced.gradients import COUNTS, DISTANCE, ERROR, KINDS, LESS, WHEN, grid_line, line_at, lines_at

FIRST, LAST, ALL = "first", "last", "all"  # value of a metric: the earliest, the latest, the mean of all
Measure = tuple[str, str]
CONTROL = "control"
ACCURACY, BEFORE = "held-out accuracy", "before RL"
_HELD_OUT = {ACCURACY: ("eval/held_out/avg@4", LAST), BEFORE: ("eval/held_out/avg@4", FIRST)}


@dataclass(frozen=True)
class Trained:
    """A claim whose lines are those of a sweep.

    Attributes:
        measures: the metric behind each of the claim's numbers, and which of its values.
        lines: a short name for each line of the sweep.
        warm_up: line -> the line with whose warm-up it begins; without an entry, the first.
        weights: lines whose recorded tokens are drawn as in DGPO's Figure 4, with the paper's names.
        checkpoints: steps at which saved checkpoints are measured, by `gradients.study`, in place of the runs' metrics.
    """

    claim: Claim
    measures: Mapping[str, Measure]
    lines: Sequence[str]
    warm_up: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[int, str] = field(default_factory=dict)
    checkpoints: Sequence[int] = ()


def _trained(
    title: str,
    says: str,
    measures: Mapping[str, Measure],
    lines: Sequence[str],
    statements: Sequence[Statement],
    warm_up: Mapping[int, int] | None = None,
    weights: Mapping[int, str] | None = None,
) -> Trained:
    return Trained(Claim(title, says, tuple(measures), statements), measures, lines, warm_up or {}, weights or {})


def _compares(text: str, first: int, second: int, measure: str, expects: str, source: str) -> Statement:
    """Two lines, by the same measure."""
    return Statement(text, Side(first, measure), Side(second, measure), expects, source)


def _learns(text: str, line: int, measure: str, before: str, source: str) -> Statement:
    """A line, after RL and before it."""
    return Statement(text, Side(line, measure), Side(line, before), MORE, source)


_LARGE, _SMALL, _SUM = "large reward", "small reward", "both, last batch"
_REWARD, _BATCH = "reward of the last batch", "of the first"
_ENTROPY, _SHORT, _VARIANCE, _LAMBDA = "entropy", "short answers", "variance of the gradient", "lambda"
_LINES = [line for step in WHEN for line in lines_at(step)]


def _at(step: int, line: str) -> int:
    """The position of a line of the measured checkpoints."""
    return _LINES.index(line_at(step, line))


CLAIMS = {
    "gdpo": _trained(
        "GDPO: a small, rare reward beside a large one",
        "On the sum of two rewards GRPO learns one; GDPO, which normalises each, learns both, and earns more of each.",
        {
            _LARGE: ("eval/held_out/reward/right", LAST),
            f"{_LARGE}, {BEFORE}": ("eval/held_out/reward/right", FIRST),
            _SMALL: ("eval/held_out/reward/marked", LAST),
            _SUM: ("reward/mean", LAST),
        },
        (
            "GRPO on the sum",
            "GDPO",
            "GDPO, the sum normalised in place of each reward",
            "GDPO, not normalised over the batch",
        ),
        (
            _learns("GRPO learns the large reward", 0, _LARGE, f"{_LARGE}, {BEFORE}", "Fig. 1"),
            _learns("GDPO learns the large reward", 1, _LARGE, f"{_LARGE}, {BEFORE}", "Fig. 1"),
            _compares("GDPO earns more of the small reward than GRPO", 1, 0, _SMALL, MORE, "Table 1"),
            _compares("GRPO earns no more of the large reward than GDPO", 0, 1, _LARGE, NOT_MORE, "Table 1"),
            _compares("Not normalised over the batch it earns less", 1, 3, _SUM, MORE, "Fig. 8"),
            _compares("The sum normalised: no more of the small reward than GRPO", 2, 0, _SMALL, NOT_MORE, CONTROL),
        ),
    ),
    "length": _trained(
        "GDPO: a length reward, conditioned on the right answer",
        "Where a short answer is rewarded only if it is right, less accuracy is given up for it; GDPO makes more of that.",
        {**_HELD_OUT, _SHORT: ("eval/held_out/reward/short", LAST)},
        ("GRPO", "GRPO, conditioned", "GDPO", "GDPO, conditioned", "GDPO, conditioned on what is always met"),
        (
            _compares("GRPO, conditioned, answers more right", 1, 0, ACCURACY, MORE, "Table 4"),
            _compares("GDPO, conditioned, answers more right", 3, 2, ACCURACY, MORE, "Table 4"),
            _compares("GRPO, not conditioned, answers shorter", 0, 1, _SHORT, MORE, "Table 4"),
            _compares("GDPO, not conditioned, answers shorter", 2, 3, _SHORT, MORE, "Table 4"),
            _compares("Conditioned, GDPO answers more right than GRPO", 3, 1, ACCURACY, MORE, "Table 4"),
            _compares("Conditioned, GDPO answers shorter than GRPO", 3, 1, _SHORT, MORE, "Table 4"),
            _compares("A condition that is always met changes nothing", 4, 2, ACCURACY, SAME, CONTROL),
        ),
    ),
    "awpo": _trained(
        "AWPO: a judge beside the outcome",
        "A judge's reward that is added to the outcome competes with it; gated and weighed, it does not, and helps.",
        _HELD_OUT,
        (
            "GRPO, no judge",
            "GRPO, a judge who contradicts",
            "AWPO, contradicts",
            "AWPO without its gate, contradicts",
            "GRPO, agrees",
            "AWPO, agrees",
            "GRPO, independent",
            "AWPO, independent",
            "AWPO version 1, contradicts",
        ),
        (
            _compares("Judge contradicts: AWPO answers more right than GRPO", 2, 1, ACCURACY, MORE, "Table 4"),
            _compares("Judge knows nothing: AWPO answers more right than GRPO", 7, 6, ACCURACY, MORE, "Table 4"),
            _compares("Judge agrees: AWPO answers more right than GRPO", 5, 4, ACCURACY, MORE, "Table 4"),
            _compares(
                "Judge contradicts: GRPO without a judge is not above AWPO", 0, 2, ACCURACY, NOT_MORE, "section 1"
            ),
            _compares("Version 1, judge contradicts: more right than GRPO", 8, 1, ACCURACY, MORE, "v1, Table 5"),
            _compares("Without the gate: no more right than GRPO", 3, 1, ACCURACY, NOT_MORE, CONTROL),
        ),
    ),
    "dgpo": _trained(
        "DGPO: sixteen updates per batch",
        "Of the soft clips DGPO alone lowers its weight on the left: an update far from the sampling policy stays stable.",
        {
            _REWARD: ("reward/mean", LAST),
            _BATCH: ("reward/mean", FIRST),
            ACCURACY: ("eval/held_out/avg@4", LAST),
            _ENTROPY: ("actor/entropy", LAST),
        },
        ("DGPO", "hard clip (GRPO)", "ASPO", "CISPO", "GPPO", "CE-GPPO", "DGPO without decay on the left"),
        (
            _learns("DGPO learns", 0, _REWARD, _BATCH, "Fig. 3"),
            *(
                _compares(f"DGPO earns more than {name}", 0, line, _REWARD, MORE, "Table 3")
                for line, name in enumerate(("CISPO", "GPPO", "CE-GPPO"), start=3)
            ),
            _compares("DGPO earns more than the hard clip", 0, 1, _REWARD, MORE, "Table 3"),
            _compares("DGPO earns more than ASPO", 0, 2, _REWARD, MORE, "Table 3"),
            _compares("DGPO answers more right than the hard clip", 0, 1, ACCURACY, MORE, "Table 3"),
            _compares("DGPO keeps more entropy than the hard clip", 0, 1, _ENTROPY, MORE, "Fig. 3"),
            Statement("Without the decay: does not learn", Side(6, _REWARD), Side(6, _BATCH), NOT_MORE, CONTROL),
        ),
        weights={1: "GRPO", 4: "GPPO", 0: "DGPO"},
    ),
    "shrinkage": _trained(
        "Shrinkage baseline: variance of the gradient",
        "A baseline between the prompt's mean and the batch's has a smaller variance of the gradient than RLOO's.",
        {_VARIANCE: ("gradient/variance", ALL)},
        ("RLOO", "shrinkage", "the batch's mean alone (lambda 1)", "shrinkage with lambda 0"),
        (
            _compares("RLOO's variance is larger than shrinkage's", 0, 1, _VARIANCE, MORE, "Fig. 8"),
            _compares("With lambda 0 it is RLOO's", 3, 0, _VARIANCE, SAME, CONTROL),
        ),
    ),
    "mixtures": _trained(
        "Shrinkage baseline: prompts of unlike difficulty",
        "The more unlike the prompts are, the smaller lambda; with alike, middling and unlike ones it learns more than RLOO.",
        {**_HELD_OUT, _LAMBDA: ("shrinkage/lambda", ALL)},
        (
            "RLOO, alike",
            "shrinkage, alike",
            "RLOO, middling",
            "shrinkage, middling",
            "RLOO, unlike",
            "shrinkage, unlike",
            "shrinkage with lambda 0, alike",
        ),
        (
            _compares("Lambda is larger for alike prompts than for middling ones", 1, 3, _LAMBDA, MORE, "Fig. 11"),
            _compares("Lambda is larger for middling prompts than for unlike ones", 3, 5, _LAMBDA, MORE, "Fig. 11"),
            _compares("Alike: shrinkage answers more right than RLOO", 1, 0, ACCURACY, MORE, "Table 3"),
            _compares("Middling: shrinkage answers more right than RLOO", 3, 2, ACCURACY, MORE, "Table 3"),
            _compares("Unlike: shrinkage answers more right than RLOO", 5, 4, ACCURACY, MORE, "Table 3"),
            _compares("With lambda 0 it is RLOO", 6, 0, ACCURACY, SAME, CONTROL),
        ),
        warm_up={2: 2, 3: 2, 4: 4, 5: 4},
    ),
    "gradients": Trained(
        Claim(
            "Shrinkage baseline: error of baseline and gradient",
            "Shrinkage is closer than RLOO to the true values and to the true gradient, the more so with fewer rollouts; "
            "among prompts of two kinds the gain is smaller.",
            (ERROR, DISTANCE, LESS),
            (
                *(
                    Statement(
                        f"{when}, {count} rollouts: RLOO's {measure} is larger",
                        Side(_at(step, f"RLOO, {count} rollouts"), measure),
                        Side(_at(step, f"shrinkage, {count} rollouts"), measure),
                        MORE,
                        source,
                    )
                    for measure, source in ((ERROR, "Fig. 9"), (DISTANCE, "Fig. 10"))
                    for step, when in WHEN.items()
                    for count in COUNTS
                ),
                *(
                    Statement(
                        f"after RL, 4 rollouts: {baseline}'s {measure} is larger",
                        Side(_at(30, f"{baseline}, 4 rollouts"), measure),
                        Side(_at(30, "shrinkage, 4 rollouts"), measure),
                        MORE,
                        source,
                    )
                    for measure, source in ((ERROR, "Fig. 9"), (DISTANCE, "Fig. 10"))
                    for baseline in ("REINFORCE++ (batch mean)", "ReMax")
                ),
                *(
                    _compares(
                        f"Less is gained with {more} rollouts than with {fewer}",
                        _at(0, f"shrinkage, {fewer} rollouts"),
                        _at(0, f"shrinkage, {more} rollouts"),
                        LESS,
                        MORE,
                        "Fig. 10",
                    )
                    for fewer, more in pairwise(COUNTS)
                ),
                *(
                    _compares(
                        f"{kind}: closer to the gradient with lambda 0.4 than with 0",
                        _at(0, grid_line(kind, 0.0)),
                        _at(0, grid_line(kind, 0.4)),
                        DISTANCE,
                        MORE,
                        "Fig. 12",
                    )
                    for kind in KINDS
                ),
                _compares(
                    "sums: closer with lambda 0.4 than with 1",
                    _at(0, grid_line("sums", 1.0)),
                    _at(0, grid_line("sums", 0.4)),
                    DISTANCE,
                    MORE,
                    "Fig. 12",
                ),
                *(
                    _compares(
                        f"lambda 0.4 gains less on the mixture than on {kind} alone",
                        _at(0, grid_line(kind, 0.4)),
                        _at(0, grid_line("mixed", 0.4)),
                        LESS,
                        MORE,
                        "Fig. 12",
                    )
                    for kind in KINDS[:2]
                ),
                _compares(
                    "With lambda 0 it is RLOO",
                    _at(0, grid_line("sums", 0.0)),
                    _at(0, "RLOO, 4 rollouts"),
                    DISTANCE,
                    SAME,
                    CONTROL,
                ),
            ),
            tabulates=False,
        ),
        measures={},
        lines=_LINES,
        checkpoints=tuple(WHEN),
    ),
    "sft": _trained(
        "SFT, then RL",
        "GRPO from the fine-tuned model goes beyond what fine-tuning gives.",
        _HELD_OUT,
        ("SFT, then GRPO", "SFT, then GRPO on rewards of 0", "twice the SFT, then GRPO"),
        (
            _learns("GRPO adds to SFT", 0, ACCURACY, BEFORE, "AWPO, Tables 2, 3"),
            Statement(
                "It gives more than twice the SFT", Side(0, ACCURACY), Side(2, BEFORE), MORE, "AWPO, Tables 2, 3"
            ),
            Statement("On rewards of 0: adds nothing", Side(1, ACCURACY), Side(1, BEFORE), NOT_MORE, CONTROL),
        ),
        warm_up={2: 2},
    ),
}
