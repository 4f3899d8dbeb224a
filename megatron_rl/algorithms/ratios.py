"""Importance ratios in the log domain: regions of DGPO's Table 1, and exponentials that never overflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bounded_exp(log_value: Tensor) -> Tensor:
    """exp, saturating where a product with an advantage and a log-prob might overflow: at e^80 (float32), e^700."""
    return torch.exp(log_value.clamp(max=700.0 if log_value.dtype == torch.float64 else 80.0))


def log_bounds(eps_low: float, eps_high: float) -> tuple[float, float]:
    """Logarithms of 1 - eps_low and 1 + eps_high."""
    return math.log(1.0 - eps_low), math.log(1.0 + eps_high)


def below(log_ratio: Tensor, bound: float) -> Tensor:
    """log_ratio < bound, strictly: one rounding unit of the bound does not count (Table 1 is strict)."""
    return log_ratio < bound - torch.finfo(log_ratio.dtype).eps * abs(bound)


def above(log_ratio: Tensor, bound: float) -> Tensor:
    """log_ratio > bound, strictly; see `below`."""
    return log_ratio > bound + torch.finfo(log_ratio.dtype).eps * abs(bound)


def left_negative(log_ratio: Tensor, advantages: Tensor, eps_low: float) -> Tensor:
    """LN: w < 1 - eps_low and A < 0."""
    return below(log_ratio, math.log(1.0 - eps_low)) & (advantages < 0)


def high_positive(log_ratio: Tensor, advantages: Tensor, eps_high: float) -> Tensor:
    """HP: w > 1 + eps_high and A > 0."""
    return above(log_ratio, math.log(1.0 + eps_high)) & (advantages > 0)


REGIONS = ("M", "LN", "HP", "LP", "HN")


def regions(log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Index into `REGIONS` for every token, int64, same shape. A = 0 is always M."""
    low, high = log_bounds(eps_low, eps_high)
    is_low, is_high = below(log_ratio, low), above(log_ratio, high)
    positive, negative = advantages > 0, advantages < 0
    code = torch.zeros_like(log_ratio, dtype=torch.int64)
    for index, where in enumerate((is_low & negative, is_high & positive, is_low & positive, is_high & negative), 1):
        code = torch.where(where, index, code)
    return code
