"""The catalogue: one source of names and defaults, errors that name the nearest, the user's own methods, presets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import Field

from megatron_rl.algorithms import (
    RewardTable,
    advantage_estimator,
    list_advantage_estimators,
    make_advantage_estimator,
    make_algorithm,
    make_surrogate,
    surrogate,
)
from megatron_rl.config.load import algorithm_config
from megatron_rl.config.presets import PRESETS, get_preset
from megatron_rl.methods import ESTIMATOR, SURROGATE, catalogue, check_method, get_method, list_methods, load_plugins

CONTRACT = {
    "grpo": {"ddof": 1, "eps": 1e-6},
    "dr_grpo": {},
    "rloo": {},
    "bloo": {},
    "remax": {},
    "reinforce_pp": {"normalize": True, "ddof": 1, "eps": 1e-8, "eps_mode": "var_add", "over": "sequences"},
    "reinforce_pp_baseline": {"normalize": True, "ddof": 1, "eps": 1e-8, "eps_mode": "var_add", "over": "sequences"},
    "shrinkage": {"factor": True, "eps": 0.0, "weight": None},
    "gdpo": {
        "ddof": 1,
        "eps": 0.0,
        "batch_norm": True,
        "batch_ddof": 1,
        "batch_eps": 1e-8,
        "batch_eps_mode": "std_add",
        "over": "sequences",
    },
    "awpo": {
        "reasoning": "judge",
        "eps_mix": 0.7,
        "tau_low": 0.5,
        "tau_high": 1.5,
        "alpha_base": 0.5,
        "alpha_prio": 1.5,
        "eps": 1e-6,
        "eps_std": 1e-6,
        "eps_min": 0.18,
        "eps_max": 0.20,
        "r_out_max": None,
    },
}
BOUNDS = {"eps_low": 0.2, "eps_high": 0.2}
CONTRACT_WEIGHTS = {
    "clip": {**BOUNDS, "dual_clip": None},
    "cispo": BOUNDS,
    "gppo": BOUNDS,
    "ce_gppo": {"beta1": 0.75, "beta2": 1.0, **BOUNDS},
    "aspo": {"cap_pos": 3.0, "cap_neg": 3.0, **BOUNDS},
    "dgpo": {"n": 1, "m": 2, **BOUNDS},
    "none": {},
}


@pytest.fixture
def _own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what a test registers."""
    monkeypatch.setattr(catalogue, "CATALOGUE", dict(catalogue.CATALOGUE))


def test_names_and_defaults_are_the_contract() -> None:
    for kind, contract in ((ESTIMATOR, CONTRACT), (SURROGATE, CONTRACT_WEIGHTS)):
        listed = [
            name for name in list_methods(kind) if get_method(kind, name).function.__module__.startswith("megatron_rl.")
        ]
        assert listed == sorted(contract)  # besides plug-ins that other tests have loaded
    for name, params in CONTRACT.items():
        assert make_advantage_estimator(name).params == params
    for name, params in CONTRACT_WEIGHTS.items():
        assert make_surrogate(name).params == params


@pytest.mark.parametrize(
    ("kind", "name", "params", "words"),
    [
        (ESTIMATOR, "gpro", {}, "did you mean 'grpo'"),
        (
            ESTIMATOR,
            "grpo",
            {"dof": 1},
            "unknown parameter of the advantage estimator 'grpo': 'dof'; did you mean 'ddof'",
        ),
        (ESTIMATOR, "rloo", {"eps": 1}, "'eps'; there is none"),
        (ESTIMATOR, "grpo", {"ddof": 2}, "`ddof` must be at most 1; it is 2"),
        (ESTIMATOR, "grpo", {"ddof": 1.0}, "`ddof` must be an integer, not 1.0"),
        (ESTIMATOR, "grpo", {"ddof": True}, "`ddof` must be an integer, not true"),
        (ESTIMATOR, "grpo", {"eps": "1e-6"}, "`eps` must be a number, not '1e-6'"),
        (ESTIMATOR, "grpo", {"eps": float("nan")}, "nan"),
        (ESTIMATOR, "gdpo", {"over": "token"}, "did you mean 'tokens'"),
        (ESTIMATOR, "gdpo", {"batch_norm": 1}, "`batch_norm` must be true or false, not 1"),
        (ESTIMATOR, "awpo", {"tau_low": 2.0}, "tau_low .2.0. must not exceed tau_high"),
        (ESTIMATOR, "awpo", {"r_out_max": "peak"}, "`r_out_max` must be a number or null, not 'peak'"),
        (SURROGATE, "clipp", {}, "did you mean 'clip'"),
        (SURROGATE, "clip", {"eps_low": 1.0}, "`eps_low` must be less than 1; it is 1.0"),
        (SURROGATE, "clip", {"dual_clip": 1.0}, "`dual_clip` must be greater than 1; it is 1.0"),
        (SURROGATE, "dgpo", {"n": 0}, "`n` must be at least 1; it is 0"),
        (SURROGATE, "none", {"eps_low": 0.2}, "unknown parameter"),
    ],
)
def test_errors_say_what_is_wrong(kind: str, name: str, params: dict[str, Any], words: str) -> None:
    make = make_advantage_estimator if kind == ESTIMATOR else make_surrogate
    with pytest.raises(ValueError, match=words):
        check_method(kind, name, params)
    with pytest.raises(ValueError, match=words):
        make(name, **params)


def unmet(name: str, params: dict[str, Any], **batch: Any) -> list[str]:
    complete = check_method(ESTIMATOR, name, params)
    return get_method(ESTIMATOR, name).needs_with(complete).unmet(name, **batch)


def test_unmet_needs_are_sentences() -> None:
    few = {"group_size": 1, "prompts": 1, "columns": ["math"]}
    enough = {"group_size": 4, "prompts": 8, "columns": ["math", "judge"]}
    assert unmet("shrinkage", {}, **few) == [
        "shrinkage needs at least 2 rollouts per prompt; `rollout.group_size` is 1"
    ]
    assert unmet("bloo", {}, **few) == [
        "bloo needs at least 2 prompts per step (`trainer.prompts_per_step`); there is 1"
    ]
    assert unmet("awpo", {}, **few) == ["awpo needs the reward column 'judge'; `rewards` has math"]
    assert "besides judge" in unmet("awpo", {}, group_size=4, prompts=8, columns=["judge"])[0]
    assert unmet("awpo", {"reasoning": "math"}, **enough) == []
    for name in list_advantage_estimators():
        assert unmet(name, {}, **enough) == []
    assert "response lengths" in unmet("gdpo", {"over": "tokens"}, **enough, lengths=False)[0]
    assert unmet("gdpo", {"over": "tokens", "batch_norm": False}, **enough, lengths=False) == []
    assert unmet("gdpo", {}, **enough, lengths=False) == []
    assert "a greedy rollout of every prompt" in unmet("remax", {}, **enough, greedy=False)[0]


@pytest.mark.usefixtures("_own_methods")
def test_own_methods_enter_the_catalogue() -> None:
    @advantage_estimator(group_size=2)
    def best_only(groups: Any, *, scale: float = 1.0, floor: float | None = None) -> torch.Tensor:
        """Only the best rollout counts."""
        return scale * (groups.rewards == groups.rewards.amax(1, keepdim=True)).double()

    @surrogate("half")
    def half(log_ratio: torch.Tensor, advantages: torch.Tensor, *, eps_low: float = 0.1, eps_high: float = 0.1) -> Any:
        return torch.full_like(log_ratio, eps_high)

    estimator = make_advantage_estimator("best_only", scale=2)
    result = estimator(RewardTable(torch.tensor([[[0.0], [3.0]]]), ("r",)))
    assert result.advantages.tolist() == [[0.0, 2.0]]
    assert estimator.params == {"scale": 2, "floor": None}
    assert "best_only" in list_advantage_estimators()
    with pytest.raises(ValueError, match="did you mean 'scale'"):
        make_advantage_estimator("best_only", scal=2)
    with pytest.raises(ValueError, match="at least 2 rollouts"):
        estimator(RewardTable(torch.tensor([[[0.0]]]), ("r",)))
    assert (
        make_surrogate("half")(torch.zeros(2), torch.ones(2), clip_range=(0.3, 0.4)).tolist()
        == [pytest.approx(0.4)] * 2
    )


@pytest.mark.usefixtures("_own_methods")
def test_own_methods_must_be_well_formed() -> None:
    def nameless(groups: Any, *, scale=1.0) -> Any:
        return groups.rewards

    def required(groups: Any, *, scale: float) -> Any:
        return groups.rewards

    def wrong_shape(groups: Any) -> Any:
        return groups.rewards[:, :1]

    def infinite(groups: Any) -> Any:
        return groups.rewards / 0

    with pytest.raises(ValueError, match="needs an annotation"):
        advantage_estimator()(nameless)
    with pytest.raises(ValueError, match="needs a default"):
        advantage_estimator()(required)
    with pytest.raises(ValueError, match="choose another name"):
        advantage_estimator("grpo")(wrong_shape)
    table = RewardTable(torch.tensor([[[0.0], [3.0]]]), ("r",))
    for function, words in ((wrong_shape, "shape"), (infinite, "NaN or infinite")):
        advantage_estimator()(function)
        with pytest.raises(ValueError, match=words):
            make_advantage_estimator(function.__name__)(table)


@pytest.mark.usefixtures("_own_methods")
def test_own_methods_declare_choices_and_ranges_as_the_built_in_ones_do() -> None:
    @advantage_estimator()
    def bounded(
        groups: Any, *, mode: Literal["mean", "median"] = "mean", share: Annotated[float, Field(ge=0)] = 0.5
    ) -> torch.Tensor:
        return groups.rewards

    @advantage_estimator()
    class Remembering:
        def __init__(self, *, decay: float = 0.5) -> None:
            if decay > 1:
                raise ValueError(f"decay ({decay}) would grow")

    for params, words in (
        ({"mode": "meen"}, "`mode` must be one of mean, median; it is 'meen'; did you mean 'mean'"),
        ({"share": -1.0}, "`share` must be at least 0; it is -1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            check_method(ESTIMATOR, "bounded", params)
    with pytest.raises(ValueError, match="would grow"):
        check_method(ESTIMATOR, "Remembering", {"decay": 2.0})

    @surrogate()
    def wrong(log_ratio: Any, advantages: Any, *, half: Annotated[float, Field(le=1)] = 2.0) -> Any:
        return log_ratio

    with pytest.raises(ValueError, match=r"`half` must be at most 1; it is 2.0"):
        check_method(SURROGATE, "wrong")


@pytest.mark.usefixtures("_own_methods")
def test_plugins_are_loaded_once_and_must_exist(tmp_path: Path) -> None:
    source = (
        "from megatron_rl.algorithms import advantage_estimator\n"
        "@advantage_estimator()\n"
        "def from_file(groups, *, scale: float = 1.0):\n"
        "    return scale * groups.centred.values\n"
    )
    (tmp_path / "mine.py").write_text(source)
    section = {"plugins": [str(tmp_path / "mine.py")], "estimator": {"name": "from_file", "params": {"scale": 3.0}}}
    assert make_algorithm(section).estimator.params == {"scale": 3.0}
    assert make_algorithm(section).estimator.name == "from_file"
    with pytest.raises(ValueError, match="no file"):
        load_plugins([str(tmp_path / "absent.py")])
    with pytest.raises(ValueError, match="no module"):
        load_plugins(["absent_module_of_mine"])
    (tmp_path / "broken.py").write_text("raise RuntimeError('mine')")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mine"):
            load_plugins([str(tmp_path / "broken.py")])


def test_methods_and_presets_import_no_torch() -> None:
    code = (
        "import sys; import megatron_rl.config.presets; from megatron_rl.methods import *; "
        "assert 'torch' not in sys.modules; assert check_method(SURROGATE, 'dgpo')['m'] == 2; "
        "assert check_method(ESTIMATOR, 'awpo')['eps_mix'] == 0.7; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------------------- presets
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_complete_and_run(name: str) -> None:
    preset = get_preset(name)
    assert {"estimator", "surrogate", "aggregation"} <= set(preset)
    algorithm = make_algorithm(name, max_tokens=100)
    assert algorithm.config.preset == name
    for kind, key in ((ESTIMATOR, "estimator"), (SURROGATE, "surrogate")):
        check_method(kind, preset[key]["name"], preset[key].get("params"))


def test_contract_presets_exist() -> None:
    contract = "grpo dr_grpo dapo rloo remax reinforce_pp awpo awpo_v1 gdpo dgpo shrinkage cispo gppo ce_gppo aspo"
    assert set(contract.split()) <= set(PRESETS)


def test_what_presets_say() -> None:
    dapo = algorithm_config({"preset": "dapo"})
    assert dapo.surrogate.params == {"eps_low": 0.2, "eps_high": 0.28}
    assert dapo.aggregation == "token-mean"
    assert dapo.drop_zero_variance_groups
    assert dapo.resample_rounds > 0
    assert dapo.overlong.share == 0.2
    assert algorithm_config({"preset": "awpo_v1"}).estimator.params == {"r_out_max": 2.0}
    assert algorithm_config({"preset": "awpo"}).estimator.params == {}
    assert algorithm_config({"preset": "dgpo"}).surrogate.params["m"] == 2
    assert algorithm_config({"preset": "gdpo_math"}).kl.coef == 0.0005


def test_recipe_keys_win_over_the_preset() -> None:
    own = {"preset": "dapo", "surrogate": {"params": {"eps_high": 0.3}}, "overlong": {"share": 0.0}}
    config = algorithm_config(own)
    assert config.surrogate.name == "clip"
    assert config.surrogate.params == {"eps_low": 0.2, "eps_high": 0.3}
    assert config.overlong.share == 0.0
    assert config.drop_zero_variance_groups
    assert own["surrogate"] == {"params": {"eps_high": 0.3}}  # untouched
    other = algorithm_config({"preset": "dapo", "surrogate": {"name": "dgpo"}})
    assert other.surrogate.params == {}
    assert algorithm_config({}).preset == "grpo"
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        algorithm_config({"preset": "gpro"})
    with pytest.raises(ValueError, match="agregation"):
        algorithm_config({"agregation": "token-mean"})


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"aggregation": "mean"}, "aggregation` must be one of"),
        ({"ratio": "tokens"}, "did you mean 'token'"),
        ({"kl": {"estimator": "k9"}}, "kl.estimator"),
        ({"kl": {"coef": -1.0}}, "kl.coef` must be at least 0"),
        ({"truncated": "masked"}, "did you mean 'mask'"),
        ({"correction": {"weight": "seq"}}, "correction.weight"),
        ({"correction": {"weight": "token", "cap": 0.0}}, "cap"),
        ({"correction": {"filters": [{"level": "token"}]}}, "neither low nor high"),
        ({"correction": {"filters": [{"low": 2.0, "high": 1.0}]}}, "must be less than high"),
        ({"correction": {"filters": [{"level": "word", "low": 1.0}]}}, "level` must be one of"),
        ({"max_length": 100}, "has no effect with aggregation"),
        ({"overlong": {"share": 2.0}}, "share` must be at most 1"),
        ({"resample_rounds": 2}, "drop_zero_variance_groups"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "max_tokens"),
        ({"overlong": {"share": 0.2}}, "max_tokens"),
        ({"estimator": {"name": "grpo", "params": {"epsilon": 1}}}, "unknown parameter of .*'epsilon'"),
    ],
)
def test_bad_sections_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_algorithm(section)
