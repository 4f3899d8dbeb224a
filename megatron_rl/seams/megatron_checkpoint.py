"""Parts of Megatron-Core's `dist_checkpointing` that its own `save` and `load` are made of. Written for 0.19.2."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from megatron_rl.seams import check_parameters
from megatron_rl.seams.megatron import State

SHARDED_KEYS = "sharded_state_dict keep_only_main_replica"


def split(state: State, check: bool) -> tuple[State, State]:
    """Splits a state in what ranks hold in parts and what is the same on all of them. `check`: that every shard has exactly
    one writer."""
    sharded, common = save_preprocess(state, validate_access_integrity=check)
    return sharded, common


def requests(state: State) -> Iterator[ShardedBase]:
    """Every tensor and object that loading a sharded state asks for."""
    return (value for value in nested_values(load_preprocess(state)[0]) if isinstance(value, ShardedBase))


def merge_into(state: State, other: State) -> None:
    """Adds what `other` has, at its keys."""
    merge(state, other)


class Division:
    """How data-parallel ranks, those of context parallelism included, divide what all of them hold; alike in every save."""

    def __init__(self) -> None:
        self._wrapper: FullyParallelSaveStrategyWrapper | None = None

    def apply(self, sharded: State) -> None:
        """Leaves this rank's part in place."""
        if self._wrapper is None:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
            self._wrapper = FullyParallelSaveStrategyWrapper(strategy, group, do_cache_distribution=True)
        self._wrapper.apply_saving_parallelization(sharded)


def save_planner(sharded: State, is_coordinator: bool) -> MCoreSavePlanner:
    """Megatron's planner of what this rank saves, set up; its own way to it writes files at once."""
    check_parameters(_replace_state_dict_keys_with_sharded_keys, SHARDED_KEYS)
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(mcore_to_pyt_state_dict(flat, False), is_coordinator=is_coordinator)
    return planner
