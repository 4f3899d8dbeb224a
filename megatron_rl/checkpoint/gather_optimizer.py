"""The distributed optimizer's state, from every data-parallel rank's shard to whole tensors in host memory.

Megatron-Core's own way makes new host memory for all of the state at every save, several times over, and gathers it whole on
the device. Here Megatron plans the checkpoint with stand-ins, tensors that are neither read nor written; then only what this
rank has to write is filled in, through a staging area of fixed size, into host memory that stays from one save to the next.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_rl.runtime import device
from megatron_rl.seams import megatron
from megatron_rl.seams.megatron import Optimizer, OptimizerPart, Ranges

KEYS = megatron.PER_ELEMENT
_STAGED = 2**24  # elements that all data-parallel ranks together hold on the device at a time

Span = tuple[int, int, Tensor]  # elements [start, stop) of a buffer, and the 1-D tensor that holds (or is to hold) them


@dataclass
class StandIns:
    """Placeholders for the optimizer's state while Megatron plans: one tensor for each key of each of its buffers."""

    _places: dict[int, tuple[Tensor, OptimizerPart, int, str]] = field(default_factory=dict)  # by address
    _wanted: dict[tuple[int, int, str], list[Span]] = field(default_factory=dict)  # by optimizer, buffer, key

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While entered, Megatron's distributed optimizers give stand-ins for their state."""
        with megatron.standing_in(self._new):
            yield

    def _new(self, optimizer: OptimizerPart, number: int, key: str) -> Tensor:
        # NumPy does not touch what it allocates, so it takes no memory.
        tensor = torch.from_numpy(np.empty(optimizer.buffers[number].numel, dtype=np.float32))
        self._places[tensor.untyped_storage().data_ptr()] = (tensor, optimizer, number, key)
        return tensor

    def __bool__(self) -> bool:
        """Whether there are any: the plain optimizer has none."""
        return bool(self._places)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._places

    def want(self, view: Tensor, host: Tensor) -> None:
        """Makes `gather` write what the contiguous `view` of a stand-in stands for into `host`."""
        _, optimizer, number, key = self._places[view.untyped_storage().data_ptr()]
        start = int(view.storage_offset())
        spans = self._wanted.setdefault((id(optimizer), number, key), [])
        spans.append((start, start + view.numel(), host.view(-1)))

    def gather(self, optimizer: Optimizer) -> None:
        """Fills in what is wanted; every rank calls it. Complete after the device has been synchronised."""
        for part in megatron.optimizer_parts(optimizer):
            for number in range(len(getattr(part, "gbuf_ranges", ()))):
                wanted = {key: sorted(self._wanted.get((id(part), number, key), ()), key=itemgetter(0)) for key in KEYS}
                _gather(part, number, wanted)


def _gather(optimizer: OptimizerPart, number: int, requests: dict[str, list[Span]]) -> None:
    group, ranks = optimizer.data_parallel_group, optimizer.data_parallel_group.size()
    length = max(_STAGED // ranks, 1)
    shard = torch.empty(length, dtype=torch.float32, device=device.device())
    everyone = torch.empty(ranks * length, dtype=torch.float32, device=shard.device) if ranks > 1 else shard
    [buckets] = optimizer.gbuf_ranges[number].values()
    for bucket, ranges in zip(optimizer.buffers[number].buckets, buckets, strict=True):
        size = bucket.grad_data.numel() // ranks  # of one rank's shard
        shards = _shards(optimizer, ranges["param_map"])
        for key, begin in ((key, begin) for key in KEYS for begin in range(0, size, length)):
            count = min(length, size - begin)
            staged, gathered = shard[:count], everyone[: ranks * count].view(ranks, count)
            _copy_overlap(shards[key], [(begin, begin + count, staged)])
            if ranks > 1:
                dist.all_gather(list(gathered.unbind()), staged, group=group)
            starts = [bucket.offset + rank * size + begin for rank in range(ranks)]
            _copy_overlap(
                [(start, start + count, part) for start, part in zip(starts, gathered, strict=True)], requests[key]
            )


def _shards(optimizer: OptimizerPart, param_map: dict[nn.Parameter, Ranges]) -> dict[str, list[Span]]:
    """This rank's shard of a bucket, per key: where in the shard each parameter's part lies."""
    shards: dict[str, list[Span]] = {key: [] for key in KEYS}
    for parameter, place in param_map.items():
        tensors, local = megatron.states_of(optimizer, parameter), place["gbuf_local"]
        for key in KEYS:
            shards[key].append((local.start, local.end, tensors[key].detach().view(-1)))
    return {key: sorted(spans, key=itemgetter(0)) for key, spans in shards.items()}


def _copy_overlap(sources: Sequence[Span], targets: Sequence[Span]) -> None:
    """Copies what both have. Of each the spans are sorted and do not overlap."""
    few, many = sorted((sources, targets), key=len)
    for start, stop, tensor in few:
        at = max(bisect.bisect_right(many, start, key=itemgetter(0)) - 1, 0)
        for other_start, other_stop, other in many[at:]:
            if other_start >= stop:
                break
            low, high = max(start, other_start), min(stop, other_stop)
            if low < high:
                one, two = tensor[low - start : high - start], other[low - other_start : high - other_start]
                source, target = (one, two) if few is sources else (two, one)
                target.copy_(source, non_blocking=True)
