"""From the keys of a configuration to the text of a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from megatron_rl.base.messages import ConfigError, show
from megatron_rl.base.typed_params import fields, unwrap
from megatron_rl.config import elsewhere
from megatron_rl.config.schema import Config
from megatron_rl.migrate import common, nemo_rl, trl, verl
from megatron_rl.migrate.draft import Draft
from megatron_rl.migrate.read import Flat, read

_CONVERTERS: dict[str, Callable[[Draft], None]] = {"verl": verl.convert, "nemo": nemo_rl.convert, "trl": trl.convert}
_WIDTH = 120


def migrate(
    path: Path, overrides: Sequence[str] = (), *, framework: str | None = None, prompts: int | None = None
) -> str:
    """The recipe of a configuration, as YAML with comments.

    Args:
        path: a YAML file, or a launch script with `key=value`.
        overrides: `key=value` in the other framework's words, on top.
        framework: `verl`, `nemo` or `trl`; None: found by the keys.
        prompts: how many training prompts there are; None: counted where the files are here.

    Raises:
        ConfigError: the file cannot be read, or is none of the three's.
    """
    flat = read(path, overrides)
    draft = Draft(framework or framework_of(flat, path), flat, prompts)
    _CONVERTERS[draft.framework](draft)
    common.complete(draft)
    return _written(draft, path)


def framework_of(flat: Flat, path: Path) -> str:
    """Whose keys these are. ConfigError where they are nobody's."""
    heads = {name.partition(".")[0] for name in flat}
    if "actor_rollout_ref" in heads:
        return "verl"
    if {"policy", "grpo"} & heads and heads & {"policy", "loss_fn", "cluster"}:
        return "nemo"
    if {"base", "run_dir"} & heads:  # `model` and `seed` are TRL's words too
        raise ConfigError(f"{path} is a recipe already; to check it: megatron-rl train {path} --check")
    if sum(elsewhere.row_of("trl", name) is not None for name in heads) >= 2:
        return "trl"
    raise ConfigError(
        f"{path} has no keys of verl (actor_rollout_ref), NeMo-RL (policy, grpo) or TRL's GRPOConfig; --from says whose it is"
    )


def _written(draft: Draft, path: Path) -> str:
    recipe = _in_order(draft.recipe, Config)
    sections = list(recipe)
    lines = [
        f"# From {elsewhere.FRAMEWORKS[draft.framework]}'s {path.name}, by `megatron-rl migrate`; check it: --check"
    ]
    lines += _comments(draft.remarks.get("", []))
    for section in sections:
        lines += _comments(draft.remarks.get(section, []))
        lines += yaml.safe_dump({section: recipe[section]}, sort_keys=False, width=_WIDTH).splitlines()
    lines += [
        line for name, texts in draft.remarks.items() if name and name not in sections for line in _comments(texts)
    ]
    left = draft.left()
    if left:
        lines += ["", "# Not taken over:"]
        lines += [f"#   {name}: {show(value)}{f'   ({why})' if why else ''}" for name, value, why in left]
    return "\n".join(lines) + "\n"


def _in_order(section: dict[str, Any], cls: type) -> dict[str, Any]:
    """The keys as the schema has them."""
    hints, result = fields(cls), {}
    for name in sorted(section, key=list(hints).index):
        value, inner = section[name], unwrap(hints[name])[0]
        is_section = isinstance(value, dict) and dataclasses.is_dataclass(inner)
        result[name] = _in_order(value, cast(type, inner)) if is_section else value
    return result


def _comments(texts: Iterable[str]) -> list[str]:
    return [f"# {' '.join(text.split())}" for text in texts]
