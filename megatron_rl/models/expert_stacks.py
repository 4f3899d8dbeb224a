"""Stacked experts: files have those of a layer in one tensor, rules name each expert's own matrices. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.(?P<kind>weight|bias)")
_STACKED = re.compile(r"(?P<layer>.*\.experts)\.(?P<part>gate_up|down)_proj(?P<bias>_bias)?")


class ExpertPart(NamedTuple):
    """The place of one expert's matrix, or bias, in a file.

    Attributes:
        stacked: name of the tensor that has it, [experts, ...].
        expert: its number there.
        half: 0: the gate projection of both; 1: the up projection; None: the tensor has nothing else of the expert.
        is_bias: it is a vector.
    """

    stacked: str
    expert: int
    half: int | None
    is_bias: bool


@dataclass(frozen=True)
class Stacking:
    """A family's way of stacking: `...experts.gate_up_proj` and `...experts.down_proj`, biases with `_bias` behind.

    Attributes:
        transposed: matrices are [experts, in, out], else [experts, out, in].
        interleaved: gate and up projection alternate along their outputs, else the gate's come first.
    """

    transposed: bool
    interleaved: bool

    def part(self, name: str) -> ExpertPart | None:
        """The place of a rule's tensor in a file; None where files have it under its own name."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        bias, half = match["kind"] == "bias", {"gate": 0, "up": 1}.get(match["part"])
        part = "down" if half is None else "gate_up"
        stacked = f"{match['layer']}.{part}_proj{'_bias' if bias else ''}"
        return ExpertPart(stacked, int(match["expert"]), half, bias)

    def names(self, stacked: str, experts: int) -> list[str]:
        """The names in rules of what a stacked tensor has: by expert, gate before up. [] of any other tensor's name."""
        match = _STACKED.fullmatch(stacked)
        if match is None:
            return []
        parts, kind = match["part"].split("_"), "bias" if match["bias"] else "weight"
        return [f"{match['layer']}.{expert}.{part}_proj.{kind}" for expert in range(experts) for part in parts]

    def stacked_shape(self, shape: tuple[int, ...], part: ExpertPart, experts: int) -> tuple[int, ...]:
        """The stacked tensor's shape, from the shape of one part."""
        outputs = shape[0] * (1 if part.half is None else 2)
        whole = (outputs, *shape[1:])
        return (experts, *(whole[::-1] if self.transposed else whole))
