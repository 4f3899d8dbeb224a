"""The catalogue of methods: every estimator, gradient weight, aggregation mode and KL estimator, with its parameters.

One source of truth, without torch: recipes are checked against it on a login node, and `megatron_rl.algorithms` takes
names, defaults and bounds from it. A user's own estimator or weight enters the same catalogue (`register_function`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.user_code import is_module_name, load_file

ESTIMATOR = "advantage estimator"
WEIGHT = "gradient weight"

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "mse", "k3", "abs")
RATIOS = ("token", "sequence", "sequence-product")
CORRECTION_WEIGHTS = ("none", "token", "geometric", "sequence")
FILTER_LEVELS = ("token", "geometric", "sequence")
FILTER_STATISTICS = ("ratio", "k1", "k2", "k3")
TRUNCATED = ("keep", "mask", "drop")
EPS_MODES = ("std_add", "var_add", "var_clamp")
OVER = ("sequences", "tokens")


@dataclass(frozen=True)
class Param:
    """One parameter of a method.

    Attributes:
        type: `float`, `int`, `bool` or `str`. A float parameter takes integers too; a bool is never a number.
        default: its value where the recipe is silent.
        low, high: closed bounds; `above`, `below`: open ones.
        choices: the allowed strings.
        optional: None is allowed.
    """

    type: type
    default: Any
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None
    optional: bool = False

    def check(self, where: str, value: Any) -> None:
        """Raises ValueError, naming `where` and the value, if it is not allowed."""
        if value is None and self.optional:
            return
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        right_type = {
            float: number,
            int: number and isinstance(value, int),
            bool: isinstance(value, bool),
            str: isinstance(value, str),
        }[self.type]
        if not right_type:
            expected = self.type.__name__ + (" or null" if self.optional else "")
            raise ValueError(f"{where} must be {expected}, not {value!r}")
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"{where} must be one of {', '.join(self.choices)}{_hint(str(value), self.choices)}")
        bounds = (
            (self.low, "at least", lambda bound: value >= bound),
            (self.high, "at most", lambda bound: value <= bound),
            (self.above, "greater than", lambda bound: value > bound),
            (self.below, "less than", lambda bound: value < bound),
        )
        for bound, words, holds in bounds:
            if bound is not None and not holds(bound):
                raise ValueError(f"{where} must be {words} {bound:g}, not {value!r}")
        if number and value != value:
            raise ValueError(f"{where} must be a number, not nan")


@dataclass(frozen=True)
class Needs:
    """What a method needs from the batch; zero, empty and False mean nothing.

    Attributes:
        group_size: smallest number of rollouts per prompt.
        prompts: smallest number of prompts per step.
        columns: reward columns that must exist.
        other_columns: at least so many further columns.
        greedy: the reward of a greedy rollout for every prompt.
        lengths: response lengths.
    """

    group_size: int = 1
    prompts: int = 1
    columns: tuple[str, ...] = ()
    other_columns: int = 0
    greedy: bool = False
    lengths: bool = False


@dataclass(frozen=True)
class Method:
    """An entry of the catalogue. `needs` may depend on the (complete) parameters."""

    name: str
    summary: str
    params: Mapping[str, Param] = field(default_factory=dict)
    needs: Needs | Callable[[Mapping[str, Any]], Needs] = field(default_factory=Needs)
    check: Callable[[Mapping[str, Any]], None] | None = None  # conditions between parameters; raises ValueError

    def defaults(self) -> dict[str, Any]:
        return {name: param.default for name, param in self.params.items()}


def _number(default: float, **bounds: Any) -> Param:
    return Param(float, default, **bounds)


def _ddof() -> Param:
    return Param(int, 1, low=0, high=1)


def _over(params: Mapping[str, Any]) -> Needs:
    return Needs(lengths=params["over"] == "tokens")


def _ordered(low: str, high: str) -> Callable[[Mapping[str, Any]], None]:
    def check(params: Mapping[str, Any]) -> None:
        if params[low] > params[high]:
            raise ValueError(f"{low} ({params[low]}) must not exceed {high} ({params[high]})")

    return check


_WHITEN = {
    "normalize": Param(bool, True),
    "ddof": _ddof(),
    "eps": _number(1e-8, low=0),
    "eps_mode": Param(str, "var_add", choices=EPS_MODES),
    "over": Param(str, "sequences", choices=OVER),
}
_BOUNDS = {"eps_low": _number(0.2, low=0, below=1), "eps_high": _number(0.2, low=0)}


def _awpo_check(params: Mapping[str, Any]) -> None:
    for low, high in (("tau_low", "tau_high"), ("alpha_base", "alpha_prio"), ("eps_min", "eps_max")):
        _ordered(low, high)(params)


_ESTIMATORS = (
    Method("grpo", "(r - group mean) / (group std + eps)", {"ddof": _ddof(), "eps": _number(1e-6, low=0)}),
    Method("dr_grpo", "r - group mean"),
    Method("rloo", "r - mean of the group's other rollouts"),
    Method("bloo", "r - mean of the other prompts' means", needs=Needs(prompts=2)),
    Method("remax", "r - reward of the greedy rollout", needs=Needs(greedy=True)),
    Method("reinforce_pp", "r whitened over the batch", _WHITEN, _over),
    Method("reinforce_pp_baseline", "r - group mean, whitened over the batch", _WHITEN, _over),
    Method(
        "shrinkage",
        "r - James-Stein mixture of the group's and the batch's leave-one-out means",
        {"factor": Param(bool, True), "eps": _number(0.0, low=0)},
        Needs(group_size=2),
    ),
    Method(
        "gdpo",
        "each reward normalised in its group, weighted, summed, then normalised over the batch",
        {
            "ddof": _ddof(),
            "eps": _number(0.0, low=0),
            "batch_norm": Param(bool, True),
            "batch_ddof": _ddof(),
            "batch_eps": _number(1e-8, low=0),
            "batch_eps_mode": Param(str, "std_add", choices=EPS_MODES),
            "over": Param(str, "sequences", choices=OVER),
        },
        lambda params: Needs(lengths=params["batch_norm"] and params["over"] == "tokens"),
    ),
    Method(
        "awpo",
        "outcome advantage mixed with the judge's by a variance gate, weighted by difficulty; dynamic clip radius",
        {
            "reasoning": Param(str, "judge"),
            "eps_mix": _number(0.7, above=0),
            "tau_low": _number(0.5),
            "tau_high": _number(1.5),
            "alpha_base": _number(0.5, low=0),
            "alpha_prio": _number(1.5, low=0),
            "eps": _number(1e-6, low=0),
            "eps_std": _number(1e-6, low=0),
            "eps_min": _number(0.18, low=0, below=1),
            "eps_max": _number(0.20, low=0, below=1),
            "r_out_max": Param(float, None, optional=True),
        },
        lambda params: Needs(columns=(params["reasoning"],), other_columns=1),
        _awpo_check,
    ),
)

_WEIGHTS = (
    Method(
        "clip",
        "the ratio, 0 where PPO's clip stops the gradient",
        {**_BOUNDS, "dual_clip": Param(float, None, above=1, optional=True)},
    ),
    Method("cispo", "the ratio, clamped to the bounds for either sign of the advantage", _BOUNDS),
    Method("gppo", "the ratio, held at the bound where PPO would stop the gradient", _BOUNDS),
    Method(
        "ce_gppo",
        "gppo with the held values scaled by beta1 (left) and beta2 (right)",
        {"beta1": _number(0.75, low=0), "beta2": _number(1.0, low=0), **_BOUNDS},
    ),
    Method(
        "aspo",
        "the reversed ratio for positive advantages; clipped as PPO, capped",
        {"cap_pos": _number(3.0, above=0), "cap_neg": _number(3.0, above=0), **_BOUNDS},
    ),
    Method(
        "dgpo",
        "beyond the bounds the probability gradient decays as pi^n (left) and pi^(-1/m) (right)",
        {"n": Param(int, 1, low=1), "m": Param(int, 2, low=1), **_BOUNDS},
    ),
    Method("none", "the ratio, never clipped"),
)

_CATALOGUE: dict[str, dict[str, Method]] = {
    ESTIMATOR: {method.name: method for method in _ESTIMATORS},
    WEIGHT: {method.name: method for method in _WEIGHTS},
}


def _hint(name: str, known: Iterable[str]) -> str:
    return f", not {name!r}{_did_you_mean(name, known)}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name, swapped letters being nearest of all."""

    def nearness(candidate: str) -> tuple[bool, float]:
        return sorted(candidate) == sorted(name), difflib.SequenceMatcher(None, name, candidate).ratio()

    candidates = sorted(known)
    return f"; did you mean {max(candidates, key=nearness)!r}?" if candidates else ""


def list_methods(kind: str) -> tuple[str, ...]:
    """Names known for `ESTIMATOR` or `WEIGHT`, sorted, the user's own included."""
    return tuple(sorted(_CATALOGUE[kind]))


def get_method(kind: str, name: str) -> Method:
    """The catalogue's entry. ValueError with the nearest name if there is none."""
    methods = _CATALOGUE[kind]
    if name not in methods:
        raise ValueError(f"the {kind} must be one of {', '.join(sorted(methods))}{_hint(str(name), methods)}")
    return methods[name]


def check_method(kind: str, name: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Checks a method's name and parameters, and returns the parameters completed with their defaults.

    Raises:
        ValueError: naming the nearest name or parameter, or the parameter, its value and what it may be.
    """
    method = get_method(kind, name)
    given = dict(params or {})
    for key in given:
        if key not in method.params:
            known = ", ".join(method.params) or "none"
            hint = _did_you_mean(str(key), method.params)
            raise ValueError(f"{kind} {name!r} has no parameter {key!r} (its parameters: {known}){hint}")
    complete = method.defaults() | given
    for key, value in complete.items():
        method.params[key].check(f"{kind} {name!r}: {key}", value)
    if method.check is not None:
        try:
            method.check(complete)
        except ValueError as error:
            raise ValueError(f"{kind} {name!r}: {error}") from error
    return complete


def method_needs(kind: str, name: str, params: Mapping[str, Any] | None = None) -> Needs:
    """What the method, with these parameters, needs from the batch."""
    needs = get_method(kind, name).needs
    return needs(check_method(kind, name, params)) if callable(needs) else needs


def unmet_needs(
    name: str,
    params: Mapping[str, Any] | None,
    *,
    group_size: int,
    prompts: int,
    rewards: Iterable[str],
    greedy: bool = True,
) -> list[str]:
    """What an advantage estimator lacks in a recipe, one sentence each; empty where it can run.

    Args:
        name, params: the estimator, as in `algorithm.estimator`.
        group_size: `rollout.group_size`.
        prompts: `trainer.prompts_per_step`.
        rewards: the reward columns' names, the keys of the section `rewards`.
        greedy: greedy rollouts can be had.
    """
    needs, columns, missing = method_needs(ESTIMATOR, name, params), tuple(rewards), []
    if group_size < needs.group_size:
        missing.append(
            f"{name} needs at least {needs.group_size} rollouts per prompt; `rollout.group_size` is {group_size}"
        )
    if prompts < needs.prompts:
        missing.append(
            f"{name} needs at least {needs.prompts} prompts per step; `trainer.prompts_per_step` is {prompts}"
        )
    for column in needs.columns:
        if column not in columns:
            missing.append(f"{name} needs the reward column {column!r}; `rewards` has {', '.join(columns) or 'none'}")
    if len(set(columns) - set(needs.columns)) < needs.other_columns:
        named = ", ".join(needs.columns)
        missing.append(f"{name} needs {needs.other_columns} reward column(s) besides {named}; add them to `rewards`")
    if needs.greedy and not greedy:
        missing.append(f"{name} needs a greedy rollout of every prompt")
    return missing


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """ValueError, naming the key and the nearest choice, unless `value` is one of them."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}{_hint(str(value), choices)}")


# ------------------------------------------------------------------------------------------------- the user's methods
def register_function(kind: str, function: Callable[..., Any], name: str, needs: Needs) -> Method:
    """Adds a user's function to the catalogue; its keyword-only parameters become the method's.

    Args:
        kind: `ESTIMATOR` or `WEIGHT`.
        function: a function, or a class (one with state) whose instances are called; every keyword-only parameter
            needs a default, and an annotation `float`, `int`, `bool`, `str` (or one
            of them with `| None`).
        name: its name in recipes. A name of this package's own methods is refused; one's own may be replaced.
        needs: what it needs from the batch.

    Raises:
        ValueError: on a taken name, or a parameter without default or usable annotation.
    """
    known = _CATALOGUE[kind]
    if name in known and name in {method.name for method in (_ESTIMATORS if kind == ESTIMATOR else _WEIGHTS)}:
        raise ValueError(f"the {kind} {name!r} is one of megatron_rl's own; choose another name")
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    params = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            params[key] = _param(f"{kind} {name!r}: parameter {key!r}", parameter.default, hints.get(key))
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    known[name] = Method(name, summary, params, needs)
    return known[name]


def _param(where: str, default: Any, annotation: Any) -> Param:
    if default is inspect.Parameter.empty:
        raise ValueError(f"{where} needs a default value")
    optional = False
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        arms = typing.get_args(annotation)
        optional = type(None) in arms
        arms = tuple(arm for arm in arms if arm is not type(None))
        annotation = arms[0] if len(arms) == 1 else None
    if annotation not in (float, int, bool, str):
        raise ValueError(f"{where} needs an annotation: float, int, bool or str, or one of them with `| None`")
    param = Param(annotation, default, optional=optional)
    param.check(where, default)
    return param


def load_plugins(plugins: Iterable[str]) -> None:
    """Imports `algorithm.plugins`: paths of Python files (ending in .py), or module names. Each once per process.

    Raises:
        ValueError: where a file or module does not exist.
    """
    for plugin in plugins:
        if not plugin.endswith(".py"):
            if not is_module_name(plugin):
                raise ValueError(f"algorithm.plugins: {plugin!r} names neither a Python file nor a module")
            try:
                importlib.import_module(plugin)
            except ModuleNotFoundError as error:
                if error.name != plugin:
                    raise
                raise ValueError(f"algorithm.plugins: no module {plugin!r}; is its folder on PYTHONPATH?") from error
            continue
        try:
            path = Path(plugin).expanduser().resolve()
            found = path.is_file()
        except (OSError, RuntimeError) as error:  # a name that is too long, a user that does not exist
            raise ValueError(f"algorithm.plugins: {plugin!r}: {error}") from None
        if not found:
            raise ValueError(f"algorithm.plugins: no file {str(path)!r}")
        load_file(path)
