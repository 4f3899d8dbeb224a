"""Generated images of coloured bars, and sums of their lengths: prompts that cannot be answered without the image.

`r+b-y=` asks for the length of the red bar plus the blue one's minus the yellow one's. It is a chain_sum of reasoning-gym
whose numbers are in the image, so chain_sum's demonstrations, verifier and rewards of working are its own too.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from megatron_rl.tasks.row_mapping import Item

COLOURS = {"r": (200, 40, 40), "g": (40, 160, 60), "b": (50, 80, 210), "y": (230, 200, 40), "k": (20, 20, 20)}
_WHITE = (255, 255, 255)


@dataclass(frozen=True)
class BarsParams:
    """Parameters of the source `bars`."""

    bars: Annotated[int, Field(ge=1, le=len(COLOURS))] = 3  # of as many colours
    longest: Annotated[int, Field(ge=1, le=9)] = 6  # units of the longest bar, and of the image's width
    min_terms: Annotated[int, Field(ge=1, le=len(COLOURS))] = 2
    max_terms: Annotated[int, Field(ge=1, le=len(COLOURS))] = 3
    unit: Annotated[int, Field(ge=1, le=64)] = 4  # pixels
    height: Annotated[int, Field(ge=4, le=64)] = 8  # pixels; a bar has a row of so many to itself
    shuffled: bool = True  # the order of the colours; false: as in `COLOURS`
    aligned: bool = True  # every bar begins at the left; false: anywhere in its row
    blank: bool = False  # leave the bars out: what can be answered without seeing

    def __post_init__(self) -> None:
        if not self.min_terms <= self.max_terms <= self.bars:
            raise ValueError(
                f"min_terms, max_terms and bars are {self.min_terms}, {self.max_terms} and {self.bars}: each must be at "
                "most the next"
            )


def make_item(params: BarsParams, rng: random.Random) -> Item:
    """`metadata` is chain_sum's, with `expression` (`3 + 5 - 2`)."""
    names = list(COLOURS)[: params.bars]
    if params.shuffled:
        rng.shuffle(names)
    lengths = {name: rng.randint(1, params.longest) for name in names}
    asked = rng.sample(names, rng.randint(params.min_terms, params.max_terms))
    operators = ["+", *rng.choices("+-", k=len(asked) - 1)]
    signed = list(zip(operators, asked, strict=True))
    answer = sum(lengths[name] if operator == "+" else -lengths[name] for operator, name in signed)
    expression = " ".join(f"{operator} {lengths[name]}" for operator, name in signed).removeprefix("+ ")
    prompt = "".join(f"{operator}{name}" for operator, name in signed).removeprefix("+")
    image = draw({} if params.blank else lengths, params, rng)
    metadata: dict[str, object] = {
        "source_dataset": "chain_sum",
        "source_params": {},
        "expression": expression,
        "lengths": lengths,
    }
    return Item(prompt=f"{prompt}=", answer=str(answer), metadata=metadata, images=(image,))


def draw(lengths: dict[str, int], params: BarsParams, rng: random.Random) -> bytes:
    """A PNG with a bar per name, from top to bottom."""
    from PIL import Image, ImageDraw

    unit = params.unit
    image = Image.new("RGB", (params.longest * unit, params.bars * params.height), _WHITE)
    pen = ImageDraw.Draw(image)
    for row, (name, length) in enumerate(lengths.items()):
        left = 0 if params.aligned else rng.randint(0, params.longest - length) * unit
        top, bottom = row * params.height, (row + 1) * params.height
        pen.rectangle((left, top + 1, left + length * unit - 1, bottom - 2), fill=COLOURS[name])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
