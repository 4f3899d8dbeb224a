"""Seconds of a matrix product, of attention, of bytes through memory, and of collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.planning.time.hardware import Hardware

_TILE = 128, 256  # rows and columns of the result that a streaming multiprocessor computes at a time
_RAMP = 256  # terms of the sum in whose time a tile is begun and written


def product_seconds(
    hardware: Hardware, rows: float, columns: float, terms: float, *, count: float = 1, fp8: bool = False
) -> float:
    """`count` products [rows, terms] x [terms, columns] in one launch, bf16 results: the slower of operations and bytes.

    Operations: at `product_share`, less where the last round of tiles leaves multiprocessors idle (a long-running mean: half
    a round), and where sums are short. Rows below a tile cost as much as a tile.
    """
    high, wide = _TILE
    tiles = max(1.0, rows / high) * max(1.0, columns / wide) * count
    rounds = tiles / hardware.processors
    full = rounds / (rounds + 0.5) if rounds > 1 else rounds / 1.5
    peak = hardware.fp8 * hardware.product_share_fp8 if fp8 else hardware.bf16 * hardware.product_share
    operations = 2 * max(rows, high) * columns * terms * count if rows > 16 else 2 * rows * columns * terms * count
    width = 1 if fp8 else 2
    moved = count * (width * (rows * terms + columns * terms) + 2 * rows * columns)
    busy = operations / (peak * full * terms / (terms + _RAMP)) if rows > 16 else 0.0
    return max(busy, memory_seconds(hardware, moved)) + hardware.launch


def attention_seconds(hardware: Hardware, operations: float) -> float:
    """Fused attention of so many operations, forwards."""
    return operations / (hardware.bf16 * hardware.attention_share)


def memory_seconds(hardware: Hardware, moved: float) -> float:
    """Bytes read or written in the GPU's memory."""
    return moved / (hardware.memory * hardware.memory_share)


def host_seconds(hardware: Hardware, moved: float) -> float:
    """Bytes to or from the host's memory."""
    return moved / (hardware.host_link * hardware.host_link_share)


@dataclass(frozen=True)
class CommGroup:
    """Ranks that communicate: every `stride`-th, `size` of them."""

    hardware: Hardware
    size: int
    stride: int = 1

    @property
    def near(self) -> int:
        """Its ranks in one NVLink domain."""
        return max(1, min(self.size, self.hardware.domain // self.stride))

    @property
    def far(self) -> bool:
        """Whether it spans several domains."""
        return self.near < self.size

    @property
    def latency(self) -> float:
        """Seconds of a collective without bytes: a tree within each domain, and one over the domains."""
        inside = math.log2(self.near) * self.hardware.message
        return inside + math.log2(self.size / self.near) * self.hardware.network_message

    @property
    def bandwidth(self) -> float:
        """Bytes per second and rank of a ring: across domains, each of its ranks in a domain brings its own port."""
        inside = self.hardware.nvlink * self.hardware.nvlink_share
        return min(inside, self.near * self.hardware.network * self.hardware.network_share) if self.far else inside

    def gather_seconds(self, whole: float) -> float:
        """An all-gather to `whole` bytes on every rank, or a reduce-scatter of as many."""
        if self.size == 1:
            return 0.0
        return self.latency + whole * (self.size - 1) / self.size / self.bandwidth

    def reduce_seconds(self, moved: float) -> float:
        """An all-reduce of as many bytes on every rank: twice an all-gather's traffic."""
        if self.size == 1:
            return 0.0
        return self.latency + 2 * moved * (self.size - 1) / self.size / self.bandwidth

    def send_seconds(self, moved: float) -> float:
        """Bytes from each rank to the next one in the group."""
        if self.size == 1:
            return 0.0
        inside = self.hardware.nvlink * self.hardware.nvlink_share
        outside = self.hardware.network * self.hardware.network_share
        if self.far:  # the slowest of them crosses
            return self.hardware.network_message + moved / outside
        return self.hardware.message + moved / inside

    def exchange_seconds(self, rows: float, row: float, copies: int, *, once_per_domain: bool = False) -> float:
        """An all-to-all: each rank sends `rows` of `row` bytes to `copies` ranks each, evenly drawn.

        `once_per_domain`: as in DeepEP, a row crosses the network once for each domain that needs it.
        """
        if self.size == 1:
            return 0.0
        share = self.hardware.exchange_share
        domains = self.size / self.near
        near = rows * row * copies * (self.near - 1) / self.size
        far = rows * row * copies * (self.size - self.near) / self.size
        if once_per_domain and self.far:
            far = rows * row * (domains - 1) * (1 - (1 - 1 / domains) ** copies)
        return self.latency + max(near / (self.hardware.nvlink * share), far / (self.hardware.network * share))
