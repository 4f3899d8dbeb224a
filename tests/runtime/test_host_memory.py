"""Host memory is made once, in powers of two, and hardly more of it than is needed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest import mock

import pytest

from megatron_rl.runtime import device
from megatron_rl.runtime.host_memory import HostMemory, pinned_bytes

# What a rank copies: many tensors of a few sizes just above a power of two, or a large one among small ones.
NEEDS = {
    "equal": [130 * 2**12] * 100,
    "one large": [2**24 + 5, *[3000] * 9000],
    "mixed": random.Random(0).choices([4, 300, 5000, 40_000, 2**20 + 1], k=2000),
}


@pytest.fixture
def made() -> Iterator[mock.Mock]:
    with mock.patch.object(device, "host_buffer", side_effect=device.host_buffer) as buffer:
        yield buffer


@pytest.mark.parametrize("sizes", NEEDS.values(), ids=NEEDS.keys())
def test_little_more_is_pinned_than_is_needed(made: mock.Mock, sizes: list[int]) -> None:
    HostMemory().take(sizes)
    pinned = [call.args[0] for call in made.call_args_list]
    assert all(size.bit_count() == 1 for size in pinned), "what torch would round up"
    aligned = sum(-(-size // 256) * 256 for size in sizes)
    assert aligned <= sum(pinned) <= 1.06 * aligned
    assert pinned_bytes(sizes) == sum(pinned)


def test_what_is_taken_overlaps_nothing_until_it_is_free_and_comes_back_in_its_places(made: mock.Mock) -> None:
    memory, sizes = HostMemory(), [700, 0, 5000, 256, 3]
    first, second = memory.take(sizes), memory.take(sizes)
    for number, tensor in enumerate([*first, *second]):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "what is written is the storage"
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate([*first, *second]))
    blocks = made.call_count
    memory.free()
    again = memory.take(sizes)
    assert [tensor.data_ptr() for tensor in again if len(tensor)] == [t.data_ptr() for t in first if len(t)]
    assert made.call_count == blocks
