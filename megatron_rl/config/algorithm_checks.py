"""What the chosen estimator needs from the rest of a recipe, and which reward columns it makes the recipe compute."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.algorithm import check_algorithm
from megatron_rl.config.schema import Config
from megatron_rl.methods import ESTIMATOR, Needs, check_method, get_method, load_plugins


def _needs(config: Config) -> Needs:
    """What the estimator needs from the batch. ValueError where its name or a parameter is wrong."""
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
    yield from _needs(config).unmet(
        algorithm.estimator.name,
        group_size=config.rollout.group_size,
        prompts=config.trainer.prompts_per_step,
        columns=columns,
    )
    for column, is_on in (("kl", algorithm.kl.reward_coef > 0), ("overlong", algorithm.overlong.share > 0)):
        if is_on and column in config.rewards:
            yield f"`rewards.{column}`: `algorithm.{column}` adds a column of this name; rename the reward"
    for name in algorithm.signal_rewards or []:
        if name not in columns:
            yield f"`algorithm.signal_rewards` names {name!r}; the rewards computed here are {', '.join(columns)}"
    if algorithm.signal_rewards is not None and not algorithm.drop_no_signal_groups:
        yield "`algorithm.signal_rewards` has no effect while `algorithm.drop_no_signal_groups` is false"
