"""The reference policy: copies of what training changes, and these in the model's place for a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_rl.actor.routing import is_bias
from megatron_rl.seams.megatron import Chunk
from megatron_rl.seams.transformer_engine import holding, host_copy


def copies(chunks: Sequence[Chunk]) -> list[dict[str, Tensor]]:
    """The trained parameters of each chunk and the biases of its routers, by name, in host memory."""
    return [
        {name: host_copy(value) for name, value in _named(chunk) if value.requires_grad or is_bias(name)}
        for chunk in chunks
    ]


@contextlib.contextmanager
def in_place(chunks: Sequence[Chunk], reference: Sequence[dict[str, Tensor]] | None) -> Iterator[None]:
    """While entered, the chunks have the values of `reference`; None: their own."""
    current = []
    with torch.no_grad():
        for chunk, values in zip(chunks, reference or (), strict=reference is not None):
            tensors = dict(_named(chunk))
            for name, value in values.items():
                current.append(holding(tensors[name]))
                tensors[name].copy_(value)
    try:
        yield
    finally:
        for restore in current:
            restore()


def _named(chunk: Chunk) -> Iterator[tuple[str, Tensor]]:
    yield from chunk.named_parameters()
    yield from chunk.named_buffers()
