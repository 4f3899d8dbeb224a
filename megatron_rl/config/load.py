"""Recipes: YAML files that build on one another, dotted overrides, presets; resolved into one typed `Config`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import os
import pickle
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from megatron_rl.base import shipped
from megatron_rl.base.messages import ConfigError, errors_named, leaves, shorten, show
from megatron_rl.base.plugins import MOST_VALUES, MOST_YAML_BYTES, NOT_OF_YAML, expanded, read_text
from megatron_rl.base.typed_params import fields, locate, unwrap
from megatron_rl.config.algorithm import AlgorithmConfig, MethodConfig
from megatron_rl.config.inactive import inactive
from megatron_rl.config.keys import MOST_LEVELS, Section, choices, entry_type
from megatron_rl.config.presets import get_preset
from megatron_rl.config.schema import Config, RewardConfig, SupervisedConfig, TaskConfig
from megatron_rl.config.validate import Tree, check_source, validated

# Keys that name something, and the key with that thing's parameters: parameters go with the name they were written for.
_NAMED: dict[object, tuple[tuple[str, str], ...]] = {
    MethodConfig: (("name", "params"),),
    RewardConfig: (("reward", "params"),),
    TaskConfig: (("source", "params"), ("name", "params"), ("demonstrations", "demonstration_params")),
}
_LONGEST_CHAIN = 100  # recipes, each the base of the previous one


@dataclasses.dataclass
class _Layer:
    source: str  # for messages: the file, or "override"
    tree: Tree


def load_recipe(path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a recipe with its bases, applies overrides and the preset, and checks every key and type.

    Later sources win: schema defaults, the preset, the files under `base:` (depth first, each file once), the recipe,
    the overrides. Five rules go beyond merging key by key:

    - `null` for an entry of `rewards`, `tasks.train` or `tasks.eval` removes the entry;
    - a source that names another method, reward, dataset or demonstration writer drops the parameters that earlier
      sources gave for the old one;
    - a source that names `algorithm.preset` drops what earlier sources said in `algorithm`, except `plugins`: a preset
      is a paper's choice as a whole;
    - of `steps` and `epochs` of `sft` and `reward_model`, the one that the later source sets counts;
    - a source that switches a feature off drops what earlier sources said of it (`inactive`).

    Args:
        path: the YAML file, or the name of a recipe that comes with the package (`cpu/quickstart.yaml`). `base:` in it names
            one or more other files, relative to it, or by such a name. None: there are overrides only.
        overrides: `a.b=value`; the value is YAML (numbers, lists, mappings), except that text keys take it verbatim.

    Raises:
        ConfigError: naming the file or override, the key, its value, and the nearest valid key or the remedy.
    """
    layers = [] if path is None else _read(_found(Path(path)), ())
    if overrides:
        layers.append(_parse_overrides(overrides))
    source, tree = "the overrides" if path is None else str(path), _merged(layers)
    config = _resolve(Config(run_dir=""), tree, source)
    trees = [layer.tree for layer in layers]
    switched_off = [key for key, _, only in inactive(config, switched=True) if _is_later(trees, only.by, key)]
    for key in switched_off:
        section, _, name = key.rpartition(".")
        _lookup(tree, section).pop(name)
    return _resolve(Config(run_dir=""), tree, source) if switched_off else config


def algorithm_config(section: Mapping[str, object]) -> AlgorithmConfig:
    """A complete section `algorithm` from the keys that a recipe sets: schema defaults, then the preset, then the keys.

    Raises:
        ConfigError: on an unknown key or a value of the wrong type.
    """
    tree = {"algorithm": copy.deepcopy(dict(section))}
    check_source(tree, "algorithm")
    return _resolve(AlgorithmConfig(), _merged([_Layer("algorithm", tree)])["algorithm"], "algorithm", "algorithm")


def to_yaml(config: Config) -> str:
    """The resolved recipe as YAML; `load_recipe` of it gives an equal `Config`."""
    return _written(pickle.dumps(_escape(dataclasses.asdict(config))))


@functools.lru_cache(maxsize=8)
def _written(tree: bytes) -> str:
    """A pickled tree as YAML. OmegaConf takes 20 ms for a recipe, which a rank writes or compares seven times."""
    return OmegaConf.to_yaml(OmegaConf.create(pickle.loads(tree)))


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Dotted key, value before and value after, of every key in which two recipes, as plain trees, differ."""
    old, new = dict(leaves(before)), dict(leaves(after))
    return [
        (key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    ]


def as_tree(config: Config) -> Tree:
    """The recipe as YAML has it: mappings, lists and plain values."""
    tree = yaml.safe_load(to_yaml(config))
    assert isinstance(tree, dict)
    return tree


# ----------------------------------------------------------------------------------------------------------- sources
def _read(path: Path, chain: tuple[Path, ...], seen: set[Path] | None = None) -> list[_Layer]:
    """The layers of a file and its bases, lowest first; a file that several others build on counts once."""
    seen = set() if seen is None else seen
    name = os.path.normpath(path)
    # A NUL in it, a link to itself.
    with errors_named(f"{name!r} is no path of a file", ValueError, OSError, RuntimeError, as_error=ConfigError):
        real = path.resolve()
    if len(chain) > _LONGEST_CHAIN:
        raise ConfigError(f"{name}: more than {_LONGEST_CHAIN} recipes build on one another; write fewer `base`")
    if real in chain:
        circle = " -> ".join(os.path.relpath(step) for step in (*chain[chain.index(real) :], real))
        raise ConfigError(f"{name}: `base` goes round in a circle: {circle}")
    if real in seen:
        return []
    seen.add(real)
    tree = read_sections(path, f"{name}, the `base` of {os.path.relpath(chain[-1])}," if chain else name)
    bases = tree.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{name}: `base` must be the path of a recipe, or a list of them, not {show(bases)}")
    layers = [layer for base in bases for layer in _read(_base(path.parent, base), (*chain, real), seen)]
    check_source(tree, name)
    return [*layers, _Layer(name, tree)]


def _found(path: Path) -> Path:
    """The file that a recipe's name stands for. ConfigError where there is none."""
    try:
        path.resolve()
        file = shipped.find_recipe(path)
        is_there = file.exists() or file.is_symlink()
    except (OSError, ValueError, RuntimeError):  # no name of a file: reading it says why
        return path
    if not is_there:
        near = shipped.like(path)
        hint = "" if near is None else f"; did you mean {near}?"
        raise ConfigError(f"{os.path.normpath(path)} does not exist{shipped.missing(path)}{hint}")
    return file


def _base(folder: Path, name: str) -> Path:
    with contextlib.suppress(OSError, ValueError):  # as above
        if not (folder / name).exists() and (found := shipped.find_recipe(Path(name))).exists():
            return found
    return folder / name


def read_sections(path: Path, what: str) -> dict[Any, Any]:
    """The mapping that a YAML file holds, with its interpolations as they stand. `what`: the file is, in messages.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        text = read_text(path, MOST_YAML_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} is not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{what} cannot be read: {error}") from None
    with _reading(text, what, " is", " cannot be read"):
        try:
            tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
        except OSError:  # OmegaConf's word for a document that is a number
            tree = None
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else "a single value"
        raise ConfigError(f"{what} must hold a mapping of sections, not {kind}")
    return tree


def _parse_overrides(overrides: Sequence[str]) -> _Layer:
    """All overrides as one source: their order only matters for a key that is given twice, where the last wins."""
    merged: Tree = {}
    for override in overrides:
        source = f"override `{shorten(override)}`"
        key, equals, text = override.partition("=")
        parts = key.split(".")
        if not equals or not all(parts) or key != key.strip() or len(parts) > MOST_LEVELS:
            raise ConfigError(f"{source}: overrides have the form section.key=value")
        if parts[0] == "base":
            raise ConfigError(f"{source}: `base` is a key of files; write it in a recipe, and give that")
        tree: Any = _parse_value(text, unwrap(locate(Config, parts)[1])[0], source)
        for part in reversed(parts):
            tree = {part: tree}
        check_source(tree, source)
        _deep_update(merged, tree)
    return _Layer("override", merged)


def _parse_value(text: str, hint: object, source: str) -> object:
    if (hint is str or choices(hint)) and text[:1] not in ("'", '"'):
        return None if text in ("null", "~") else text
    if not text.strip():
        raise ConfigError(f"{source} has no value; for none write null, for empty text ''")
    return yaml_value(text, source)


def yaml_value(text: str, source: str) -> object:
    """The value that YAML sees in a text. Raises ConfigError, naming `source`, where it sees none."""
    with _reading(text, source, ": the value is"):
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[call-overload, index]


@contextlib.contextmanager
def _reading(text: str, what: str, value_is: str, failed: str = "") -> Iterator[None]:
    """Refuses text that repeats its anchors too often, and turns what YAML and OmegaConf raise into a ConfigError."""
    try:
        if "*" in text and expanded(yaml.compose(text), {}) > MOST_VALUES:
            raise ConfigError(f"{what} repeats its anchors more than {MOST_VALUES:,} times in all")
        yield
    except ConfigError:
        raise
    except (yaml.YAMLError, *NOT_OF_YAML) as error:
        raise ConfigError(f"{what}{value_is} not valid YAML: {_yaml_problem(error)}") from None
    except GrammarParseError as error:
        raise ConfigError(f"{what}{failed}: an interpolation is not well formed: {_first_line(error)}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{what}{failed}: {_first_line(error)}") from None


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return _first_line(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# ----------------------------------------------------------------------------------------------------------- merging
def _merged(layers: list[_Layer]) -> Tree:
    tree: Tree = {}
    for layer in _with_preset(layers):
        _overlay(tree, layer.tree, Config, "", layer.source)
    return tree


def _with_preset(layers: list[_Layer]) -> list[_Layer]:
    """The layers with the preset's below them, and without `algorithm` in the sources before the one that names it. Below
    all: what another key than `algorithm.preset` makes a default."""
    name, start, source = "grpo", 0, ""
    for index, layer in enumerate(layers):
        section = layer.tree.get("algorithm")
        if isinstance(section, dict) and "preset" in section:
            name, start, source = section["preset"], index, layer.source
    with errors_named(f"{source}: `algorithm.preset`", as_error=ConfigError):
        preset = get_preset(name)
    result = [_Layer(f"preset {name}", {"algorithm": {"preset": name, **preset}})]
    for section, key, off in (("rollout", "fp8", "none"), ("rollout", "partial", None), ("launch", "generators", None)):
        trees = [layer.tree[section] for layer in layers if isinstance(layer.tree.get(section), dict)]
        if next((tree[key] for tree in reversed(trees) if key in tree), off) != off:
            result.insert(0, _Layer(f"{section}.{key}", {"algorithm": {"correction": {"weight": "token"}}}))
    for index, layer in enumerate(layers):
        tree = dict(layer.tree)
        if index < start and isinstance(tree.get("algorithm"), dict):
            tree["algorithm"] = {key: value for key, value in tree["algorithm"].items() if key == "plugins"}
        result.append(_Layer(layer.source, tree))
    return result


def _lookup(tree: Tree, key: str) -> Any:
    """The value of a nested mapping at a dotted key; None where it has nothing."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_later(trees: Sequence[Tree], first: Sequence[str], second: str) -> bool:
    """Whether the last source that sets one of the keys `first` comes after the last that sets the key `second`."""

    def last(keys: Sequence[str]) -> int:
        found = (number for number, tree in enumerate(trees) if any(_lookup(tree, key) is not None for key in keys))
        return max(found, default=-1)

    return last(first) > last([second])


def _choose_length(under: Tree, over: Mapping[str, object], key: str, source: str) -> None:
    """Chooses of `steps` and `epochs`, which a source may both set only where one is none, the later source's wins."""
    steps, epochs = over.get("steps"), over.get("epochs")
    if steps and epochs:
        raise ConfigError(f"{source}: `{key}.steps` and `{key}.epochs` say the same twice; keep one")
    if "steps" in over and epochs is None:
        under.pop("epochs", None)
    elif epochs is not None and "steps" not in over:
        under.pop("steps", None)


def _overlay(under: Tree, over: Mapping[str, object], cls: type, key: str, source: str) -> None:
    """Puts the section `over` on top of `under`, in place."""
    if issubclass(cls, SupervisedConfig):
        _choose_length(under, over, key, source)
    for named, params in _NAMED.get(cls, ()):
        if named in over and under.get(named) not in (None, over[named]):
            under.pop(params, None)
    for name, value in over.items():
        hint, inner = unwrap(fields(cls)[name])[0], f"{key}.{name}" if key else name
        if not isinstance(value, dict) or not isinstance(under.get(name), dict):
            under[name] = {} if isinstance(value, dict) else copy.deepcopy(value)
        if not isinstance(value, dict):
            continue
        if dataclasses.is_dataclass(hint):
            _overlay(under[name], value, typing.cast(type, hint), inner, source)
        elif dataclasses.is_dataclass(entry_type(hint)):
            _overlay_entries(under[name], value, typing.cast(type, entry_type(hint)), inner, source)
        else:
            _deep_update(under[name], value)


def _overlay_entries(under: Tree, over: Mapping[str, object], cls: type, key: str, source: str) -> None:
    for name, value in over.items():
        if value is None and name not in under:
            known = ", ".join(under) or "no entries"
            raise ConfigError(f"{source}: `{key}.{name}=null` removes nothing; `{key}` has {known}")
        if value is None:
            del under[name]
        elif isinstance(value, dict):
            if not isinstance(under.get(name), dict):
                under[name] = {}
            _overlay(under[name], value, cls, f"{key}.{name}", source)
        else:
            under[name] = value


def _deep_update(under: Tree, over: Mapping[str, object]) -> None:
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(name), dict):
            _deep_update(under[name], value)
        else:
            under[name] = copy.deepcopy(value)


# --------------------------------------------------------------------------------------------------------- resolving
def _resolve[S: Section](defaults: S, tree: Tree, source: str, key: str = "") -> S:
    complete = dataclasses.asdict(typing.cast(Any, defaults))
    complete.pop("run_dir", None)  # has no default
    _deep_update(complete, tree)
    if "${" in repr(complete):  # an interpolation, or text that is protected from being one
        try:
            complete = typing.cast(Tree, OmegaConf.to_container(OmegaConf.create(complete), resolve=True))
        except OmegaConfBaseException as error:
            text = _lookup(complete, str(error.full_key))
            shown = f" ({show(text)})" if isinstance(text, str) else ""
            problem = _first_line(error).rpartition("while resolving interpolation: ")[2]
            raise ConfigError(f"{source}: `{error.full_key}`{shown}: {problem}") from None
    return validated(type(defaults), complete, source, key)


def _escape(value: Any) -> Any:
    """Protects literal `${` in text, which OmegaConf would otherwise resolve when the recipe is read again."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
