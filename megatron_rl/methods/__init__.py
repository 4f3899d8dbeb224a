"""Advantage estimators and gradient weights, one file each: names, parameters, needs and equations.

Importing this package loads no torch, so that recipes are checked on a login node: the files of methods compute with tensors'
own methods.
"""

from megatron_rl.methods import estimators, weights
from megatron_rl.methods.catalogue import (
    ESTIMATOR,
    WEIGHT,
    Estimate,
    Method,
    Needs,
    advantage_estimator,
    check_method,
    get_method,
    gradient_weight,
    list_methods,
    load_plugins,
)

__all__ = [
    "ESTIMATOR",
    "WEIGHT",
    "Estimate",
    "Method",
    "Needs",
    "advantage_estimator",
    "check_method",
    "get_method",
    "gradient_weight",
    "list_methods",
    "load_plugins",
]
