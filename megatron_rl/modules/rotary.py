"""Frequencies of rotary embeddings, in the order of operations of transformers and vLLM: what is rounded is rounded alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron_rl.models.rope import Rope


def set_frequencies(rotary: nn.Module, rope: Rope, head_dim: int) -> None:
    """Gives one of Megatron-Core's rotary embeddings the frequencies of a scaling; the default's are its own."""
    if rope.kind != "default":
        before = rotary.inv_freq
        assert isinstance(before, Tensor)
        rotary.inv_freq = inverse_frequencies(rope, int(rope.share * head_dim)).to(before.device)


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """Radians per position of each pair of the `dim` turning dimensions; float32 [dim / 2], on the CPU."""
    with torch.device("cpu"):
        powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if rope.kind == "yarn":
            return _yarn(rope, powers)
        frequencies = 1.0 / powers
        if rope.kind == "linear":
            return frequencies / rope.factor
        return _llama3(rope, frequencies) if rope.kind == "llama3" else frequencies


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Llama 3.1's: divided where a sequence of `original` tokens has few turns, kept where it has many, mixed between."""
    lengths = 2 * math.pi / frequencies
    mix = (rope.original / lengths - rope.low) / (rope.high - rope.low)
    mixed = (1 - mix) * frequencies / rope.factor + mix * frequencies
    scaled = torch.where(lengths > rope.original / rope.low, frequencies / rope.factor, mixed)
    return torch.where(lengths < rope.original / rope.high, frequencies, scaled)


def _yarn(rope: Rope, powers: Tensor) -> Tensor:
    """YaRN's (https://arxiv.org/abs/2309.00071, section 3.2): the ramp between kept and divided is over dimensions."""
    pairs = powers.shape[0]

    def dimension(turns: float) -> float:
        return pairs * math.log(rope.original / (turns * 2 * math.pi)) / math.log(rope.theta)

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001
    kept = 1 - torch.clamp((torch.arange(pairs, dtype=torch.float32) - first) / (last - first), 0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
