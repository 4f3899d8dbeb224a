"""Advantage estimators and gradient weights, one file per paper: names, parameters, needs and equations.

Importing this package loads no torch, so that recipes are checked on a login node: the files of methods compute with tensors'
own methods.
"""

import importlib
import pkgutil

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

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    if ".estimators." in _module.name or ".weights." in _module.name:  # importing a method's file registers it
        importlib.import_module(_module.name)

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
