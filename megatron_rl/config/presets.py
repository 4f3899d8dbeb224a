"""Presets: a paper's choice of estimator, surrogate, aggregation and corrections, as plain data.

A preset holds only what it sets; everything else keeps the schema's defaults. `docs/algorithms/` says where each number
comes from. Keys are those of `AlgorithmConfig`.
"""

from __future__ import annotations

import copy

from megatron_rl.base.messages import unknown_name

Section = dict[str, object]


def _clip(low: float = 0.2, high: float = 0.2) -> Section:
    return {"name": "clip", "params": {"eps_low": low, "eps_high": high}}


def _preset(estimator: str, aggregation: str, surrogate: Section | None = None, **more: object) -> Section:
    return {"estimator": {"name": estimator}, "surrogate": surrogate or _clip(), "aggregation": aggregation, **more}


def _compared(surrogate: str, **params: float) -> Section:
    """The setting in which DGPO's paper compares surrogates: GRPO's advantages, token mean, no KL."""
    return _preset("grpo", "token-mean", {"name": surrogate, "params": {**params, "eps_low": 0.2, "eps_high": 0.2}})


_DYNAMIC_SAMPLING: Section = {"drop_zero_variance_groups": True, "resample_rounds": 10}

PRESETS: dict[str, Section] = {
    "grpo": _preset("grpo", "seq-mean-token-mean"),
    "dr_grpo": _preset("dr_grpo", "seq-mean-token-sum-norm"),
    "dapo": _preset("grpo", "token-mean", _clip(0.2, 0.28), overlong={"share": 0.2}, **_DYNAMIC_SAMPLING),
    "rloo": _preset("rloo", "seq-mean-token-sum"),
    "remax": _preset("remax", "seq-mean-token-sum"),
    "reinforce_pp": _preset("reinforce_pp", "token-mean"),
    "reinforce_pp_baseline": _preset("reinforce_pp_baseline", "token-mean"),
    "gspo": _preset("grpo", "seq-mean-token-mean", _clip(3e-4, 4e-4), ratio="sequence"),
    "awpo": _preset("awpo", "seq-mean-token-mean"),
    "awpo_v1": _preset("awpo", "seq-mean-token-mean") | {"estimator": {"name": "awpo", "params": {"r_out_max": 2.0}}},
    "gdpo": _preset("gdpo", "seq-mean-token-mean"),
    "gdpo_math": _preset(
        "gdpo", "seq-mean-token-mean", _clip(0.2, 0.28), kl={"coef": 0.0005, "estimator": "mse"}, **_DYNAMIC_SAMPLING
    ),
    "shrinkage": _preset("shrinkage", "seq-mean-token-mean", _clip(0.22, 0.22)),
    "dgpo": _compared("dgpo", n=1, m=2),
    "cispo": _compared("cispo"),
    "gppo": _compared("gppo"),
    "ce_gppo": _compared("ce_gppo", beta1=0.75, beta2=1.0),
    "aspo": _compared("aspo", cap_pos=3.0, cap_neg=3.0),
}


def list_presets() -> tuple[str, ...]:
    return tuple(sorted(PRESETS))


def get_preset(name: str) -> Section:
    """A copy of what the preset sets. ValueError with the nearest name if there is none."""
    if name in ("ppo", "gae"):
        raise ValueError(
            f"unknown preset {name!r}: there is no critic here. Presets without one: {', '.join(list_presets())}"
        )
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS))
    return copy.deepcopy(PRESETS[name])
