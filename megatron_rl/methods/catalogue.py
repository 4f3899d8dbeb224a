"""The catalogue of methods: every advantage estimator and surrogate by name, the user's own included.

A method is declared once, by its function: its keyword-only parameters, with annotations and defaults, are what a recipe
may set, and the decorator says what it needs from the batch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from megatron_rl.base.messages import errors_named, unknown_name
from megatron_rl.base.plugins import is_module_name, load_file
from megatron_rl.base.typed_params import Params, check_types, hints_of, is_plain

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.methods.groups import Groups
    from megatron_rl.methods.tokens import RolloutTokens
else:  # for annotations only: importing a method loads no torch
    Tensor = Groups = RolloutTokens = object

ESTIMATOR = "advantage estimator"
SURROGATE = "surrogate"

# Types of parameters that several methods have.
Ddof = Annotated[int, Field(ge=0, le=1)]  # 1: sample, 0: population variance
EpsLow = Annotated[float, Field(ge=0, lt=1)]
EpsMode = Literal["std_add", "var_add", "var_clamp"]  # see `groups.whiten`
Over = Literal["sequences", "tokens"]  # what a batch statistic counts

Function = TypeVar("Function", bound=Callable[..., Any])
Objective = Callable[..., Tensor]  # of log-ratios, advantages and the weight's parameters: the value of each token
TokenPart = Callable[..., Tensor]  # of `RolloutTokens` and keyword-only parameters: one advantage per response token


@dataclass(frozen=True)
class Needs:
    """Needs of a method from the batch; the defaults stand for nothing.

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

    def unmet(
        self,
        name: str,
        *,
        group_size: int,
        prompts: int,
        columns: Iterable[str],
        greedy: bool = True,
        lengths: bool = True,
        smallest: str | None = None,
    ) -> list[str]:
        """Needs that the batch does not meet, one sentence each; empty where the method can run.

        Args:
            name: the method's.
            group_size: rollouts of the smallest group.
            prompts: prompts per step.
            columns: names of the reward columns.
            greedy, lengths: whether the batch has them.
            smallest: names the smallest group; None: all have `rollout.group_size`.
        """
        present, lacking = tuple(columns), []
        if group_size < self.group_size:
            least = smallest or f"`rollout.group_size` is {group_size}"
            lacking.append(f"at least {self.group_size} rollouts per prompt; {least}")
        if prompts < self.prompts:
            lacking.append(f"at least {self.prompts} prompts per step (`trainer.prompts_per_step`); there is {prompts}")
        for column in self.columns:
            if column not in present:
                lacking.append(f"the reward column {column!r}; `rewards` has {', '.join(present) or 'none'}")
        if len(set(present) - set(self.columns)) < self.other_columns:
            named = ", ".join(self.columns)
            lacking.append(f"{self.other_columns} reward column(s) besides {named}; add them to `rewards`")
        if self.greedy and not greedy:
            lacking.append("a greedy rollout of every prompt: RewardTable(greedy=[n, k])")
        if self.lengths and not lengths:
            lacking.append("response lengths for statistics over tokens: RewardTable(lengths=[n, m])")
        return [f"{name} needs {what}" for what in lacking]


@dataclass
class Estimate:
    """An advantage estimator's result for a reward table.

    Attributes:
        advantages: [n, m], 0 where invalid; float64 for a float64 table, otherwise float32.
        metrics: numbers for the step's log.
        clip_range: (eps_low, eps_high) that replaces the surrogate's own bounds for this batch, or None.
        group: quantities per prompt, [n] each.
    """

    advantages: Tensor
    metrics: dict[str, float] = field(default_factory=dict)
    clip_range: tuple[float, float] | None = None
    group: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """An entry of the catalogue.

    Attributes:
        kind: `ESTIMATOR` or `SURROGATE`.
        name: in recipes.
        function: the method itself; or a class, whose instances are called and keep state between steps.
        defaults: its parameters.
        needs: from the batch; a function of the complete parameters where they decide.
        token_part: of an estimator that gives each token an advantage of its own; None: all tokens have their rollout's.
        objective: of a weight that is the gradient of a known objective, which is logged; None: F A is.
    """

    kind: str
    name: str
    function: Callable[..., Any]
    defaults: Params
    needs: Needs | Callable[[Params], Needs]
    token_part: TokenPart | None = None
    objective: Objective | None = None

    @property
    def is_built_in(self) -> bool:
        return self.function.__module__.startswith(f"{__package__}.")

    def needs_with(self, params: Params) -> Needs:
        """Its needs from the batch with these (complete) parameters."""
        return self.needs(params) if callable(self.needs) else self.needs

    def params_of(self, function: Callable[..., Any], params: Params) -> dict[str, Any]:
        """Returns those of the parameters that `function`, the method or its token part, takes."""
        return {name: params[name] for name in _keyword_only(function)}


CATALOGUE: dict[tuple[str, str], Method] = {}


def list_methods(kind: str) -> tuple[str, ...]:
    """Names known for `ESTIMATOR` or `SURROGATE`, sorted, the user's own included."""
    return tuple(sorted(name for of, name in CATALOGUE if of == kind))


def get_method(kind: str, name: str) -> Method:
    """The catalogue's entry. ValueError with the nearest name if the name is unknown."""
    if (kind, name) not in CATALOGUE:
        raise ValueError(unknown_name(kind, name, list_methods(kind)))
    return CATALOGUE[kind, name]


def check_method(kind: str, name: str, params: Params | None = None) -> dict[str, Any]:
    """Checks a method's name and parameters, and returns the parameters completed with their defaults.

    A method that is a class is made once: what its constructor refuses is refused here.

    Raises:
        ValueError: naming the nearest name or parameter, or the parameter, its value and what it may be.
    """
    method = get_method(kind, name)
    for key in params or {}:
        if key not in method.defaults:
            raise ValueError(unknown_name(f"parameter of the {kind} {name!r}:", key, method.defaults))
    complete = {**method.defaults, **(params or {})}
    with errors_named(f"{kind} {name!r}"):
        for function in (method.function, *filter(None, [method.token_part])):
            check_types(function, method.params_of(function, complete))
        if inspect.isclass(method.function):
            method.function(**method.params_of(method.function, complete))
    return complete


# -------------------------------------------------------------------------------------------------------- registering
def advantage_estimator(
    name: str | None = None,
    *,
    group_size: int = 1,
    prompts: int = 1,
    columns: tuple[str, ...] = (),
    greedy: bool = False,
    lengths: bool = False,
    needs: Callable[[Params], Needs] | None = None,
    tokens: TokenPart | None = None,
) -> Callable[[Function], Function]:
    """Registers a function of `Groups` (and keyword-only parameters) as an advantage estimator.

    The function returns advantages [n, m], or an `Estimate`. The arguments say what it needs from the batch, `needs` as a
    function of the parameters; recipes that cannot provide it are refused when loaded. See
    docs/algorithms/adding-an-estimator.md.

    Args:
        tokens: the token part, a function of `RolloutTokens` that returns one advantage per response token. Its keyword-only
            parameters are the method's too; one that both name is given to both, and has one default.
    """
    fixed = Needs(group_size=group_size, prompts=prompts, columns=columns, greedy=greedy, lengths=lengths)
    return _registers(ESTIMATOR, name, needs or fixed, tokens)


def surrogate(name: str | None = None, objective: Objective | None = None) -> Callable[[Function], Function]:
    """Registers a function of (log_ratio, advantages), and keyword-only parameters, as a surrogate: its gradient weight F.

    It receives float32 or float64 tensors without gradient and returns a tensor of the same shape. With parameters
    `eps_low` and `eps_high` it also follows an estimator's clip range.

    Args:
        objective: whose gradient it is, a function of the same arguments: its value per token is logged in place of F A.
    """
    return _registers(SURROGATE, name, Needs(), objective=objective)


def _registers(
    kind: str,
    name: str | None,
    needs: Needs | Callable[[Params], Needs],
    token_part: TokenPart | None = None,
    objective: Objective | None = None,
) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        key = (kind, name or function.__name__)
        if key in CATALOGUE and CATALOGUE[key].is_built_in:
            raise ValueError(f"the {kind} {key[1]!r} is one of megatron_rl's own; choose another name")
        what = f"{kind} {key[1]!r}"
        defaults = _defaults(what, function)
        of_tokens = _defaults(f"{what}, token part", token_part) if token_part is not None else {}
        for shared in sorted(defaults.keys() & of_tokens.keys()):
            if defaults[shared] != of_tokens[shared]:
                raise ValueError(f"{what}: {shared!r} has another default in the token part")
        CATALOGUE[key] = Method(*key, function, defaults | of_tokens, needs, token_part, objective)
        return function

    return register


def _defaults(what: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters and their defaults.

    Raises:
        ValueError: a parameter without default, or without a usable annotation. `check_method` checks the defaults.
    """
    hints, defaults = hints_of(function), {}
    for name, parameter in _keyword_only(function).items():
        if parameter.default is parameter.empty:
            raise ValueError(f"{what}: parameter {name!r} needs a default value")
        if not is_plain(hints.get(name)):
            raise ValueError(
                f"{what}: parameter {name!r} needs an annotation: float, int, bool, str or Literal, or one of them "
                "with `| None`"
            )
        defaults[name] = parameter.default
    return defaults


def _keyword_only(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.items()
    return {name: parameter for name, parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def load_plugins(plugins: Iterable[str]) -> None:
    """Imports `algorithm.plugins`: paths of Python files (ending in .py), or module names. Each once per process.

    Raises:
        ValueError: where a file or module does not exist, or imports a module that does not.
    """
    for plugin in plugins:
        try:
            _load_plugin(plugin)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"algorithm.plugins: {plugin!r} imports {error.name!r}, which is not installed here; import it in the "
                "function that needs it, or check the recipe where it is installed"
            ) from error


def _load_plugin(plugin: str) -> None:
    if not plugin.endswith(".py"):
        if not is_module_name(plugin):
            raise ValueError(f"algorithm.plugins: {plugin!r} names neither a Python file nor a module")
        try:
            importlib.import_module(plugin)
        except ModuleNotFoundError as error:
            if error.name != plugin:
                raise
            raise ValueError(f"algorithm.plugins: no module {plugin!r}; is its folder on PYTHONPATH?") from error
        return
    # A name that is too long, a user that does not exist.
    with errors_named(f"algorithm.plugins: {plugin!r}", OSError, RuntimeError):
        path = Path(plugin).expanduser().resolve()
        found = path.is_file()
    if not found:
        raise ValueError(f"algorithm.plugins: no file {str(path)!r}")
    load_file(path)
