"""A case of which some things are others: by overrides on a command line, and smaller where it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from .cases import FAMILIES, Case, Cut, possible, refusals
from .draw import draw


def overridden(case: Case, overrides: Mapping[str, str]) -> Case:
    """A case of which some things are others: `world=2`, `cut.tensor=1`, `then=null`, `sizes.num_hidden_layers=2`."""
    for key, text in overrides.items():
        name, _, inner = key.partition(".")
        value, section = yaml.safe_load(text), getattr(case, name)
        if inner and isinstance(section, dict):
            value = {**section, inner: value}
        elif inner:
            value = replace(section or Cut(), **{inner: value})
        case = replace(case, **{name: value})
    return case


def overrides_of(case: Case) -> dict[str, str]:
    """What `overridden` needs to make this case of its number's."""
    found, drawn = dict[str, str](), draw(case.number)
    before, after = _flat(drawn), _flat(case)
    for name in ("actor", "sizes"):  # of which something is gone
        if not (removed := getattr(drawn, name)).keys() <= getattr(case, name).keys():
            before = {key: value for key, value in before.items() if key not in {f"{name}.{k}" for k in removed}}
            after = {f"{name}": {}, **after}
    for name, value in after.items():
        if name not in before or before[name] != value:
            found[name] = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    return found


def _flat(case: Case) -> dict[str, Any]:
    flat = dict[str, Any]()
    for own in dataclasses.fields(case):
        value = getattr(case, own.name)
        inner = value if isinstance(value, dict) else vars(value) if isinstance(value, Cut) else None
        flat |= {own.name: value} if inner is None else {f"{own.name}.{key}": part for key, part in inner.items()}
    return flat


def command(case: Case) -> str:
    """What runs it again."""
    return " ".join(
        ("python -m tests.random_layouts", str(case.number), *(f"'{k}={v}'" for k, v in overrides_of(case).items()))
    )


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the greatest steps first, as far as the checks let them pass."""
    cut, steps = case.cut, list[Case]()
    if case.then is not None:
        steps.append(replace(case, then=None))
    for name in ("context", "pipeline", "tensor", "expert", "expert_tensor"):
        size, freed = getattr(cut, name), {"virtual": 1} if name == "pipeline" else {}
        freed |= {"sequence": False} if name == "tensor" else {}
        if size > 1:
            rest = replace(cut, **{name: 1, **freed})
            dense = name in ("context", "pipeline", "tensor")
            steps += [replace(case, cut=rest, world=case.world // size if dense else case.world)]
    model = cut.tensor * cut.pipeline * cut.context
    if (replicas := case.world // model) > 1:
        steps.append(replace(case, world=case.world // replicas))
    steps += [
        replace(case, actor={}),
        replace(case, replay="none"),
        replace(case, lora=0, lora_experts=False),
        replace(case, biases=False),
        replace(case, frozen=False),
        replace(case, bucket=0),
        replace(case, cut=replace(cut, virtual=1)),
        replace(case, cut=replace(cut, sequence=False)),
        replace(case, cut=replace(cut, distributed=True)),
        replace(case, tokens=4096),
        replace(case, decay=False, aggregation="token-mean"),
        replace(case, groups=2, group_size=2) if case.family in FAMILIES else case,
        replace(case, sizes={**case.sizes, "tie_word_embeddings": False}),
        *(
            replace(case, sizes={**case.sizes, "num_hidden_layers": n})
            for n in range(1, case.sizes["num_hidden_layers"])
        ),
    ]
    for step in steps:
        if step != case and possible(step) and not refusals(step):
            yield step


def shrunk(case: Case, fails: Callable[[Case], object]) -> Case:
    """A smaller case that fails too, of which no smaller one does."""
    while (step := next((step for step in smaller(case) if fails(step)), None)) is not None:
        case = step
    return case
