"""Arithmetic that stays finite and exact on degenerate input. Importing it loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 where the denominator is 0."""
    zero = denominator == 0
    return (numerator / denominator.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def bounded_exp(log_value: Tensor) -> Tensor:
    """exp, saturating where a product with an advantage and a log-prob might overflow: at e^80 (float32), e^700."""
    return log_value.clamp(max=700.0 if log_value.dtype.itemsize == 8 else 80.0).exp()


def below(log_ratio: Tensor, bound: float) -> Tensor:
    """log_ratio < bound, strictly: one rounding unit of the bound does not count (Table 1 of DGPO is strict)."""
    return log_ratio < bound - rounding_unit(log_ratio) * abs(bound)


def above(log_ratio: Tensor, bound: float) -> Tensor:
    """log_ratio > bound, strictly; see `below`."""
    return log_ratio > bound + rounding_unit(log_ratio) * abs(bound)


def rounding_unit(values: Tensor) -> float:
    """Relative rounding error of the values' dtype."""
    import torch

    return torch.finfo(values.dtype).eps
