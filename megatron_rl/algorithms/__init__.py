"""Advantage estimators, surrogates, loss aggregation, KL, corrections and presets: pure functions of tensors.

Importing this package loads no torch. What a plug-in takes from here (`advantage_estimator`, `surrogate`, `Groups`,
`RolloutTokens`, `Estimate`, `whiten`, `bounded_exp`, `regions`) needs none either; the modules behind the other names are
imported with the first use of a name.
"""

import importlib
from typing import TYPE_CHECKING

from megatron_rl.methods import Estimate, advantage_estimator, surrogate
from megatron_rl.methods.groups import Groups, whiten
from megatron_rl.methods.numerics import bounded_exp
from megatron_rl.methods.ratios import REGIONS, regions
from megatron_rl.methods.tokens import RolloutTokens

if TYPE_CHECKING:
    from megatron_rl.algorithms.aggregation import (
        Denominators,
        aggregate_loss,
        aggregate_packed,
        count_live,
        token_coefficients,
    )
    from megatron_rl.algorithms.algorithm import Algorithm, StepAdvantages, make_algorithm
    from megatron_rl.algorithms.correction import Correction, correct, correction_metrics
    from megatron_rl.algorithms.diagnostics import GradientVariance, count_advantage_groups, distinct_advantage_groups
    from megatron_rl.algorithms.kl import kl_divergence, sequence_kl
    from megatron_rl.algorithms.metrics import Metrics
    from megatron_rl.algorithms.registry import (
        AdvantageEstimator,
        Surrogate,
        list_advantage_estimators,
        list_surrogates,
        make_advantage_estimator,
        make_surrogate,
    )
    from megatron_rl.algorithms.shaping import add_column, groups_with_variance, overlong_penalty
    from megatron_rl.data.rewards import RewardTable

# Modules that need torch, and what of them is offered here: as above.
_WITH_TORCH = {
    "algorithms.aggregation": "Denominators aggregate_loss aggregate_packed count_live token_coefficients",
    "algorithms.algorithm": "Algorithm StepAdvantages make_algorithm",
    "algorithms.correction": "Correction correct correction_metrics",
    "algorithms.diagnostics": "GradientVariance count_advantage_groups distinct_advantage_groups",
    "algorithms.kl": "kl_divergence sequence_kl",
    "algorithms.metrics": "Metrics",
    "algorithms.registry": "AdvantageEstimator Surrogate list_advantage_estimators list_surrogates "
    "make_advantage_estimator make_surrogate",
    "algorithms.shaping": "add_column overlong_penalty groups_with_variance",
    "data.rewards": "RewardTable",
}
_HOMES = {name: f"megatron_rl.{module}" for module, names in _WITH_TORCH.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
