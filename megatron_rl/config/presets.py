"""Presets: a paper's choice of estimator, gradient weight, aggregation and corrections, as plain data.

A preset holds only what it sets; everything else keeps the schema's defaults. `docs/algorithms/` says where each number
comes from. Keys are those of `AlgorithmConfig`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.methods import (
    AGGREGATIONS,
    CORRECTION_WEIGHTS,
    FILTER_LEVELS,
    FILTER_STATISTICS,
    KL_ESTIMATORS,
    RATIOS,
    TRUNCATED,
    check_choice,
)
from megatron_rl.config.schema import AlgorithmConfig, CorrectionConfig
from megatron_rl.methods import ESTIMATOR, WEIGHT, check_method

_CLIP: dict[str, Any] = {"name": "clip", "params": {"eps_low": 0.2, "eps_high": 0.2}}


def _group_normalised(weight: dict[str, Any]) -> dict[str, Any]:
    """The setting in which DGPO's paper compares gradient weights: GRPO's advantages, token mean, no KL."""
    return {"estimator": {"name": "grpo"}, "weight": weight, "aggregation": "token-mean"}


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"estimator": {"name": "grpo"}, "weight": _CLIP, "aggregation": "seq-mean-token-mean"},
    "dr_grpo": {"estimator": {"name": "dr_grpo"}, "weight": _CLIP, "aggregation": "seq-mean-token-sum-norm"},
    "dapo": {
        "estimator": {"name": "grpo"},
        "weight": {"name": "clip", "params": {"eps_low": 0.2, "eps_high": 0.28}},
        "aggregation": "token-mean",
        "overlong": {"share": 0.2},
        "drop_no_signal_groups": True,
        "resample_rounds": 10,
    },
    "rloo": {"estimator": {"name": "rloo"}, "weight": _CLIP, "aggregation": "seq-mean-token-sum"},
    "remax": {"estimator": {"name": "remax"}, "weight": _CLIP, "aggregation": "seq-mean-token-sum"},
    "reinforce_pp": {"estimator": {"name": "reinforce_pp"}, "weight": _CLIP, "aggregation": "token-mean"},
    "reinforce_pp_baseline": {
        "estimator": {"name": "reinforce_pp_baseline"},
        "weight": _CLIP,
        "aggregation": "token-mean",
    },
    "gspo": {
        "estimator": {"name": "grpo"},
        "weight": {"name": "clip", "params": {"eps_low": 3e-4, "eps_high": 4e-4}},
        "ratio": "sequence",
        "aggregation": "seq-mean-token-mean",
    },
    "awpo": {"estimator": {"name": "awpo"}, "weight": _CLIP, "aggregation": "seq-mean-token-mean"},
    "awpo_v1": {
        "estimator": {"name": "awpo", "params": {"r_out_max": 2.0}},
        "weight": _CLIP,
        "aggregation": "seq-mean-token-mean",
    },
    "gdpo": {"estimator": {"name": "gdpo"}, "weight": _CLIP, "aggregation": "seq-mean-token-mean"},
    "gdpo_math": {
        "estimator": {"name": "gdpo"},
        "weight": {"name": "clip", "params": {"eps_low": 0.2, "eps_high": 0.28}},
        "aggregation": "seq-mean-token-mean",
        "kl": {"coef": 0.0005, "estimator": "mse"},
        "drop_no_signal_groups": True,
        "resample_rounds": 10,
    },
    "shrinkage": {
        "estimator": {"name": "shrinkage"},
        "weight": {"name": "clip", "params": {"eps_low": 0.22, "eps_high": 0.22}},
        "aggregation": "seq-mean-token-mean",
    },
    "dgpo": _group_normalised({"name": "dgpo", "params": {"n": 1, "m": 2, "eps_low": 0.2, "eps_high": 0.2}}),
    "cispo": _group_normalised({"name": "cispo", "params": {"eps_low": 0.2, "eps_high": 0.2}}),
    "gppo": _group_normalised({"name": "gppo", "params": {"eps_low": 0.2, "eps_high": 0.2}}),
    "ce_gppo": _group_normalised(
        {"name": "ce_gppo", "params": {"beta1": 0.75, "beta2": 1.0, "eps_low": 0.2, "eps_high": 0.2}}
    ),
    "aspo": _group_normalised(
        {"name": "aspo", "params": {"cap_pos": 3.0, "cap_neg": 3.0, "eps_low": 0.2, "eps_high": 0.2}}
    ),
}


def list_presets() -> tuple[str, ...]:
    return tuple(sorted(PRESETS))


def get_preset(name: str) -> dict[str, Any]:
    """A copy of what the preset sets. ValueError with the nearest name if there is none."""
    check_choice("algorithm.preset", name, list_presets())
    return copy.deepcopy(PRESETS[name])


def apply_preset(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Puts the preset's values under a recipe's own `algorithm` section.

    A recipe that names another estimator or weight than the preset gets that method's defaults, not the preset's
    parameters; one that names the same, or only parameters, keeps those of the preset that it does not set itself.

    Args:
        algorithm: the section as plain nested data, only with the keys that the recipe sets.

    Returns:
        The merged section, still without the schema's defaults.
    """
    own = copy.deepcopy(dict(algorithm))
    merged = get_preset(own.setdefault("preset", "grpo"))
    for key in ("estimator", "weight"):
        named = (own.get(key) or {}).get("name")
        if named is not None and named != merged[key]["name"]:
            merged.pop(key)
    return _merge(merged, own)


def _merge(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(under.get(key), dict):
            _merge(under[key], value)
        else:
            under[key] = value
    return under


def algorithm_config(section: Mapping[str, Any]) -> AlgorithmConfig:
    """A complete `AlgorithmConfig` from the keys a recipe sets: schema defaults, then the preset, then the keys.

    Raises:
        ValueError: on an unknown key or a value of the wrong type.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), apply_preset(section))
    except OmegaConfBaseException as error:
        raise ValueError(f"algorithm: {error}") from error
    config = OmegaConf.to_object(merged)
    assert isinstance(config, AlgorithmConfig)
    return config


def check_algorithm(config: AlgorithmConfig) -> None:
    """Checks a complete section on its own: names, parameters, and options that would do nothing.

    The user's methods must be registered first (`load_plugins(config.plugins)`).

    Raises:
        ValueError: naming the key, its value and the remedy.
    """
    check_method(ESTIMATOR, config.estimator.name, config.estimator.params)
    check_method(WEIGHT, config.weight.name, config.weight.params)
    check_choice("algorithm.ratio", config.ratio, RATIOS)
    check_choice("algorithm.aggregation", config.aggregation, AGGREGATIONS)
    check_choice("algorithm.kl.estimator", config.kl.estimator, KL_ESTIMATORS)
    check_choice("algorithm.kl.reward_estimator", config.kl.reward_estimator, KL_ESTIMATORS)
    check_choice("algorithm.truncated", config.truncated, TRUNCATED)
    _check_correction(config.correction)
    for key, value in (("kl.coef", config.kl.coef), ("kl.reward_coef", config.kl.reward_coef)):
        if not 0 <= value < math.inf:
            raise ValueError(f"algorithm.{key} must be at least 0 and finite, not {value!r}")
    if config.max_length is not None and config.aggregation != "seq-mean-token-sum-norm":
        raise ValueError(
            f"algorithm.max_length ({config.max_length}) has no effect with aggregation {config.aggregation!r}; "
            "remove it, or use seq-mean-token-sum-norm"
        )
    if not 0 <= config.overlong.share <= 1:
        raise ValueError(f"algorithm.overlong.share must be from 0 to 1, not {config.overlong.share!r}")
    if config.overlong.max_length is not None and not config.overlong.share:
        raise ValueError("algorithm.overlong.max_length has no effect while algorithm.overlong.share is 0; set both")
    if config.resample_rounds < 0:
        raise ValueError(f"algorithm.resample_rounds must be at least 0, not {config.resample_rounds}")
    if config.resample_rounds and not config.drop_no_signal_groups:
        raise ValueError(
            f"algorithm.resample_rounds ({config.resample_rounds}) replaces dropped groups; "
            "it needs algorithm.drop_no_signal_groups=true"
        )


def _check_correction(config: CorrectionConfig) -> None:
    check_choice("algorithm.correction.weight", config.weight, CORRECTION_WEIGHTS)
    if not config.cap > 0:
        raise ValueError(f"algorithm.correction.cap must be greater than 0, not {config.cap!r}")
    for index, each in enumerate(config.filters):
        where = f"algorithm.correction.filters[{index}]"
        check_choice(f"{where}.level", each.level, FILTER_LEVELS)
        check_choice(f"{where}.by", each.by, FILTER_STATISTICS)
        if each.low is None and each.high is None:
            raise ValueError(f"{where} has neither low nor high, so it would drop nothing; set at least one")
        for name in ("low", "high"):
            if getattr(each, name) is not None and math.isnan(getattr(each, name)):
                raise ValueError(f"{where}.{name} is not a number; set one, or null for no bound")
        if each.low is not None and each.high is not None and not each.low < each.high:
            raise ValueError(f"{where}: low ({each.low}) must be less than high ({each.high})")
