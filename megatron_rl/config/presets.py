"""Presets: a paper's choice of estimator, gradient weight, aggregation and corrections, as plain data.

A preset holds only what it sets; everything else keeps the schema's defaults. `docs/algorithms/` says where each number
comes from. Keys are those of `AlgorithmConfig`.
"""

from __future__ import annotations

import copy

from megatron_rl.names import unknown_name

_CLIP: dict[str, object] = {"name": "clip", "params": {"eps_low": 0.2, "eps_high": 0.2}}


def _group_normalised(weight: dict[str, object]) -> dict[str, object]:
    """The setting in which DGPO's paper compares gradient weights: GRPO's advantages, token mean, no KL."""
    return {"estimator": {"name": "grpo"}, "weight": weight, "aggregation": "token-mean"}


PRESETS: dict[str, dict[str, object]] = {
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


def get_preset(name: str) -> dict[str, object]:
    """A copy of what the preset sets. ValueError with the nearest name if there is none."""
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS))
    return copy.deepcopy(PRESETS[name])
