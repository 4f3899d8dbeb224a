"""Gradient weights F(w, A), one file per method. All work on log-ratios; none overflows for finite input."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
