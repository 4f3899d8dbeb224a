"""Checks of split placement (`launch.generators`) against the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.schema import Config


def check_split(config: Config, processes: int) -> Iterator[str]:
    """Yields a sentence per key that split placement does not go with. `processes`: of both roles."""
    generators, engine = config.launch.generators, config.rollout.tensor_parallel
    if generators is None:
        return
    if generators >= processes:
        yield (
            f"`launch.generators` ({generators}) must leave some of the {processes} processes to learn; lower it, or raise "
            "launch.processes"
        )
        return
    if generators % engine or (processes - generators) % engine:
        yield (
            f"`launch.generators` ({generators}) and the {processes - generators} processes that learn must be multiples of "
            f"`rollout.tensor_parallel` ({engine}), so that no engine's processes are on two nodes"
        )
    refused = {
        "rollout.exact compares with the weights that drew, and these are a step older": config.rollout.exact,
        "actor.offload makes room for an engine, and the processes that learn have none": config.actor.offload,
    }
    for reason in (reason for reason, is_on in refused.items() if is_on):
        yield f"`launch.generators` does not go with this recipe: {reason}; set launch.generators=null, or change that"
