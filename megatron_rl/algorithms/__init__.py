"""Advantage estimators, gradient weights, loss aggregation, KL, corrections and presets: pure functions of tensors."""

from megatron_rl.algorithms.aggregation import (
    Denominators,
    aggregate_loss,
    aggregate_packed,
    count_live,
    token_coefficients,
)
from megatron_rl.algorithms.algorithm import Algorithm, StepEstimate, make_algorithm, ppo_objective
from megatron_rl.algorithms.correction import Correction, correct, correction_metrics
from megatron_rl.algorithms.diagnostics import GradientVariance, count_advantage_groups, distinct_advantage_groups
from megatron_rl.algorithms.kl import kl_divergence, sequence_kl
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.algorithms.registry import (
    AdvantageEstimator,
    GradientWeight,
    list_advantage_estimators,
    list_gradient_weights,
    make_advantage_estimator,
    make_gradient_weight,
)
from megatron_rl.algorithms.shaping import add_column, overlong_penalty, signal_groups
from megatron_rl.data import RewardTable
from megatron_rl.methods import Estimate, advantage_estimator, gradient_weight
from megatron_rl.methods.groups import Groups, whiten
from megatron_rl.methods.numerics import bounded_exp
from megatron_rl.methods.ratios import REGIONS, regions
