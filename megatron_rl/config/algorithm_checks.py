"""Checks between the keys of `algorithm`, and of what its estimator needs from the rest of a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from megatron_rl.base.messages import errors_named
from megatron_rl.config.algorithm import AlgorithmConfig, CorrectionConfig
from megatron_rl.config.schema import Config
from megatron_rl.config.validate import problems
from megatron_rl.methods import ESTIMATOR, SURROGATE, Needs, check_method, get_method, load_plugins


def _needs(config: Config) -> Needs:
    """The estimator's needs from the batch. ValueError where its name or a parameter is wrong."""
    estimator = config.algorithm.estimator
    params = check_method(ESTIMATOR, estimator.name, estimator.params)
    return get_method(ESTIMATOR, estimator.name).needs_with(params)


def reward_columns(config: Config) -> list[str]:
    """Names of the reward columns this recipe computes; `when_needed` ones only where the estimator asks for them."""
    needed = _needs(config).columns
    return [name for name, reward in config.rewards.items() if not reward.when_needed or name in needed]


def check_method_choice(config: Config) -> Iterator[str]:
    """Yields a sentence per problem of the section `algorithm`, and per unmet need of the estimator."""
    algorithm = config.algorithm
    try:
        load_plugins(algorithm.plugins)
        check_algorithm(algorithm)
    except ValueError as error:
        yield str(error)
        return
    columns = reward_columns(config)
    if config.rollout.partial is not None and _needs(config).greedy:
        yield (
            f"`rollout.partial` does not go with `algorithm.estimator.name` {algorithm.estimator.name}, whose "
            "greedy responses would have to be drawn to their end in the same step; set rollout.partial=null, or choose "
            "another estimator"
        )
    yield from _needs(config).unmet(
        algorithm.estimator.name,
        group_size=config.rollout.group_size,
        prompts=config.trainer.prompts_per_step,
        columns=columns,
    )
    for column, is_on in (("kl", algorithm.kl.reward_coef > 0), ("overlong", algorithm.overlong.share > 0)):
        if is_on and column in config.rewards:
            yield f"`rewards.{column}`: `algorithm.{column}` adds a column of this name; rename the reward"
    for column in sorted({"mean", "std"} & config.rewards.keys()):
        yield f"`rewards.{column}`: the metric `reward/{column}` is of all rewards' weighted sum; rename the reward"
    for name in algorithm.zero_variance_rewards or []:
        if name not in columns:
            yield f"`algorithm.zero_variance_rewards` names {name!r}; the rewards computed here are {', '.join(columns)}"
    if algorithm.zero_variance_rewards is not None and not algorithm.drop_zero_variance_groups:
        yield "`algorithm.zero_variance_rewards` has no effect while `algorithm.drop_zero_variance_groups` is false"


def _check_credit(config: AlgorithmConfig) -> None:
    """ValueError: the estimator has no advantage of a turn."""
    if config.credit == "rollout":
        return
    name = config.estimator.name
    method = get_method(ESTIMATOR, name)
    why = None
    if method.token_part is not None:
        why = "gives each token an advantage"
    elif method.needs_with(check_method(ESTIMATOR, name, config.estimator.params)).greedy:
        why = "compares with a greedy rollout, whose turns are others"
    elif inspect.isclass(method.function):
        why = "remembers a statistic of whole rollouts from step to step"
    if why is not None:
        raise ValueError(
            f"algorithm.credit=turn: the estimator {name!r} {why}; set algorithm.credit=rollout, or choose another estimator"
        )


def check_algorithm(config: AlgorithmConfig) -> None:
    """Checks a complete section on its own: names, parameters, and options that would do nothing.

    The user's methods must be registered first (`load_plugins(config.plugins)`).

    Raises:
        ValueError: naming the key, its value and the remedy.
    """
    for problem in problems(config, "algorithm"):
        raise ValueError(problem)
    for kind, key, method in ((ESTIMATOR, "estimator", config.estimator), (SURROGATE, "surrogate", config.surrogate)):
        with errors_named(f"algorithm.{key}"):
            check_method(kind, method.name, method.params)
    _check_credit(config)
    _check_correction(config.correction)
    if config.max_length is not None and config.aggregation != "seq-mean-token-sum-norm":
        raise ValueError(
            f"algorithm.max_length ({config.max_length}) has no effect with aggregation {config.aggregation!r}; "
            "remove it, or use seq-mean-token-sum-norm"
        )
    if config.resample_rounds and not config.drop_zero_variance_groups:
        raise ValueError(
            f"algorithm.resample_rounds ({config.resample_rounds}) replaces dropped groups; "
            "it needs algorithm.drop_zero_variance_groups=true"
        )


def _check_correction(config: CorrectionConfig) -> None:
    for index, each in enumerate(config.filters):
        where = f"algorithm.correction.filters[{index}]"
        if each.low is None and each.high is None:
            raise ValueError(f"{where} has neither low nor high, so it would drop nothing; set at least one")
        if each.low is not None and each.high is not None and not each.low < each.high:
            raise ValueError(f"{where}: low ({each.low}) must be less than high ({each.high})")
