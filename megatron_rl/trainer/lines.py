"""A step's line on the terminal, as long as that is wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """`label` and value of a metric. `room`: characters that a usual value takes; `rank`: the lowest stay where space is
    short."""

    label: str
    metric: str
    spec: str
    room: int
    rank: int


STEP = (
    Field("reward", "reward/mean", ".3f", 6, 0),
    Field("length", "response_length/mean", ".1f", 6, 2),
    Field("signal", "groups/signal_share", ".2f", 4, 3),
    Field("entropy", "actor/entropy", ".3f", 5, 4),
    Field("ref kl", "reference/kl_*", ".1e", 7, 5),
    Field("kl_old", "old_policy/kl_k3", ".1e", 7, 7),
    Field("grad", "actor/grad_norm", ".3f", 6, 6),
    Field("lr", "actor/lr", ".1e", 7, 9),
    Field("tok/s", "perf/tokens_per_s", ",.0f", 7, 8),
    Field("s", "timing_s/step", ".2f", 5, 1),
)
STAGE = (
    Field("loss", "sft/loss", ".4f", 6, 0),
    Field("loss", "reward_model/loss", ".4f", 6, 0),
    Field("accuracy", "reward_model/accuracy", ".3f", 5, 1),
    Field("margin", "reward_model/margin", ".3f", 6, 3),
    Field("grad", "actor/grad_norm", ".3f", 6, 4),
    Field("lr", "actor/lr", ".1e", 7, 5),
    Field("s", "timing_s/step", ".2f", 5, 2),
)


def line(head: str, fields: Sequence[Field], metrics: Mapping[str, float], width: int | None) -> str:
    """`head` and the fields that are among the metrics, in their order.

    `width`: the terminal's columns, None where the line has no end. The fields of the lowest rank that fit with values of
    their usual size are shown, so that the steps' lines are alike; of a line that is too long all the same, fewer.
    """
    values = {one: value for one in fields if (value := _value(one, metrics)) is not None}
    chosen, taken = list[Field](), len(head)
    for one in sorted(values, key=lambda field: field.rank):
        taken += len(one.label) + one.room + 3
        if width is None or taken <= width:
            chosen.append(one)
    while width is not None and len(chosen) > 1 and len(_shown(head, fields, chosen, values)) > width:
        chosen.pop()
    return _shown(head, fields, chosen, values)


def _value(field: Field, metrics: Mapping[str, float]) -> str | None:
    beginning, star, _ = field.metric.partition("*")
    name = next((name for name in metrics if name.startswith(beginning)), None) if star else field.metric
    return None if name is None or name not in metrics else format(metrics[name], field.spec)


def _shown(head: str, fields: Sequence[Field], chosen: Sequence[Field], values: Mapping[Field, str]) -> str:
    return "  ".join([head, *(f"{one.label} {values[one]}" for one in fields if one in chosen)])
