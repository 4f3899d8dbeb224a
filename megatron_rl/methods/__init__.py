"""Advantage estimators and surrogates, one file per paper: names, parameters, needs and equations.

Importing this package loads no torch, so that recipes are checked on a login node: the files of methods compute with tensors'
own methods.
"""

import importlib
import pkgutil

from megatron_rl.methods.catalogue import (
    ESTIMATOR,
    SURROGATE,
    Estimate,
    Method,
    Needs,
    advantage_estimator,
    check_method,
    get_method,
    list_methods,
    load_plugins,
    surrogate,
)

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    if ".estimators." in _module.name or ".surrogates." in _module.name:  # importing a method's file registers it
        importlib.import_module(_module.name)

__all__ = [
    "ESTIMATOR",
    "SURROGATE",
    "Estimate",
    "Method",
    "Needs",
    "advantage_estimator",
    "check_method",
    "get_method",
    "list_methods",
    "load_plugins",
    "surrogate",
]
