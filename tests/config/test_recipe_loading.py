from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_rl.config import Config, ConfigError, load_recipe, to_yaml
from megatron_rl.config.presets import PRESETS


# ------------------------------------------------------------------------------------------------------------- values
def test_defaults_recipe_and_overrides_in_that_order(recipe) -> None:
    config = recipe("trainer.steps=5", "actor.optimizer.lr=1e-3", "actor.optimizer.betas=[0.9, 0.99]")
    assert isinstance(config, Config)
    assert config.model.dtype == "float32"  # the recipe's
    assert (config.trainer.steps, config.actor.optimizer.lr, config.actor.optimizer.betas) == (5, 1e-3, [0.9, 0.99])
    assert config.trainer.epochs == 1  # the schema's
    assert config.tasks.train["sums"].size == 10


def test_values_have_the_declared_types(recipe) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # OmegaConf warns where it has to convert
        config = recipe("rollout.temperature=1", "launch.timeout_minutes=5", "rewards.correct.weight=2")
    assert type(config.rollout.temperature) is float
    assert type(config.rewards["correct"].weight) is float


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("007", "007"),
        ("1e5", "1e5"),
        ("Solve: {prompt}", "Solve: {prompt}"),
        ("{prompt}=", "{prompt}="),
        ("'a: b'", "a: b"),
        ("# {prompt}", "# {prompt}"),
        ("", ""),
        ("a=b", "a=b"),
    ],
)
def test_text_keys_take_an_override_verbatim(recipe, text: str, value: str) -> None:
    assert recipe(f"tasks.train.sums.prompt={text}").tasks.train["sums"].prompt == value


def test_mappings_and_nulls_in_overrides(recipe) -> None:
    config = recipe("tasks.train.sums.params={min_terms: 2, deep: {x: [1, null]}}", "actor.fp8.recipe=delayed")
    assert config.tasks.train["sums"].params == {"min_terms": 2, "deep": {"x": [1, None]}}
    assert config.actor.fp8 is not None
    assert recipe("algorithm.surrogate.params.dual_clip=null").algorithm.surrogate.params["dual_clip"] is None
    assert recipe("model.create=null").model.create is None
    phases = recipe("watchdog.phases.update=7").watchdog.phases
    assert (phases["update"], phases["start"]) == (7.0, 40.0), "the others keep their defaults"


def test_null_removes_an_entry(recipe) -> None:
    config = recipe("rewards.brief.reward=length", "rewards.correct=null")
    assert list(config.rewards) == ["brief"]
    with pytest.raises(ConfigError, match=r"`rewards.corect=null` removes nothing; `rewards` has correct"):
        recipe("rewards.corect=null")


def test_interpolations_are_resolved_and_typed(recipe) -> None:
    assert recipe("sft.optimizer.lr=${actor.optimizer.lr}", "actor.optimizer.lr=0.5").sft.optimizer.lr == 0.5
    with pytest.raises(
        ConfigError, match=r"`rollout\.temperature` \('\$\{nowhere\}'\): Interpolation key 'nowhere' not found"
    ):
        recipe("rollout.temperature=${nowhere}")
    with pytest.raises(ConfigError, match=r"\('\$\{oc\.env:NOWHERE\}'\): \"Environment variable 'NOWHERE' not found"):
        recipe("rollout.temperature=${oc.env:NOWHERE}")
    with pytest.raises(ConfigError, match=r"it is 'e4m3'$"):  # no choice is near
        recipe("rollout.fp8=e4m3")
    with pytest.raises(ConfigError, match=r"trainer\.steps"):
        recipe("trainer.steps=${model.dtype}")


# ------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.step=5", "unknown key `trainer.step` (set to 5); did you mean `trainer.steps`?"),
        ("algorithm.weight.name=dgpo", "unknown key `algorithm.weight`; that is `algorithm.surrogate` here"),
        ("algorithm.drop_no_signal_groups=true", "that is `algorithm.drop_zero_variance_groups` here"),
        ("trainer.group_size=5", "did you mean `rollout.group_size`?"),
        ("sft.lr=1", "did you mean `sft.optimizer.lr`?"),
        ("tasks.train.sums.szie=3", "`tasks.train.sums.szie` (set to 3); did you mean `tasks.train.sums.size`?"),
        ("rewards.correct.wieght=3", "did you mean `rewards.correct.weight`?"),
        ("zzz=1", "a recipe has the keys run_dir, seed, model"),
        ("trainer.steps=ten", "`trainer.steps` must be an integer, not 'ten'"),
        ("trainer.steps=1.5", "must be an integer, not 1.5"),
        ("trainer.steps=true", "must be an integer, not true"),
        ("trainer.steps=null", "must be an integer, not null"),
        ("launch.processes=two", "must be an integer or null, not 'two'"),
        ("rollout.temperature=hot", "must be a number, not 'hot'"),
        ("actor.parallel.sequence=1", "must be true or false, not 1"),
        ("actor.optimizer.betas=0.9", "must be a list, not 0.9"),
        ("actor.optimizer.betas=[0.9, x]", "`actor.optimizer.betas[1]` must be a number, not 'x'"),
        ("trainer=5", "`trainer` is a section with keys of its own, not 5"),
        ("rewards=5", "`rewards` is a mapping from names to values, not 5"),
        ("tasks.train.sums.params={1: 2}", "the name 1 in `tasks.train.sums.params` is not text"),
        ("algorithm.correction.filters=[{levle: token}]", "did you mean `algorithm.correction.filters[0].level`?"),
        ("algorithm.preset=grop", "`algorithm.preset`: unknown preset 'grop'; did you mean 'grpo'?"),
        ("algorithm.overlong.max_length=9", "that is `rollout.max_tokens` here"),
        ("actor.lora.rank=0", "must be at least 1; it is 0; without adapters it is `actor.lora: null`"),
        ("rewards.größe.reward=math", "the name 'größe' in `rewards` must be letters (a to z), digits"),
        ("base=other.yaml", "`base` is a key of files; write it in a recipe, and give that"),
        ("trainer.steps=${seed", "an interpolation is not well formed"),
        ("trainer.steps", "overrides have the form section.key=value"),
        ("trainer..steps=1", "overrides have the form section.key=value"),
        ("trainer.steps=", "has no value; for none write null"),
        ("trainer.steps=[1", "the value is not valid YAML"),
    ],
)  # fmt: skip
def test_a_bad_override_is_one_clear_message(recipe, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(override)
    assert message in str(caught.value)
    assert "override" in str(caught.value)
    assert "omegaconf" not in str(caught.value).lower()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  step: 5\n", "recipe.yaml: unknown key `trainer.step` (set to 5); did you mean `trainer.steps`?"),
        ("trainer:\n", "recipe.yaml: `trainer` is a section with keys of its own, not null"),
        ("trainer: {steps: '5'}\n", "`trainer.steps` must be an integer, not '5'"),
        ("run_dir: 5\n", "`run_dir` must be text, not 5; put it in quotes"),
        ("a: [1\n", "recipe.yaml is not valid YAML: line 2, column 1"),
        ("seed: 1\nseed: 2\n", "recipe.yaml is not valid YAML: line 2"),
        ("- a\n", "recipe.yaml must hold a mapping of sections, not a list"),
        ("{}\n", "`run_dir` must be set"),
        ("yes: 1\n", "recipe.yaml: the key true is not text; put it in quotes"),
        ("trainer: {5: 1}\n", "recipe.yaml: the key 5 in `trainer` is not text; put it in quotes"),
        ("base: [1]\n", "recipe.yaml: `base` must be the path of a recipe"),
        ("base: nowhere.yaml\n", "nowhere.yaml, the `base` of recipe.yaml, does not exist"),
        ("rewards: {x: {weight: 1}}\nrun_dir: a\n", "`rewards.x.reward` must be set"),
    ],
)
def test_a_bad_file_is_one_clear_message(write, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: .* is a folder, not a file"):
        load_recipe(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a text file in UTF-8"):
        load_recipe(tmp_path / "binary.yaml")


# -------------------------------------------------------------------------------------------------------------- bases
def test_bases_are_merged_depth_first(write) -> None:
    write({"run_dir": "root", "seed": 1, "trainer": {"steps": 1, "epochs": 2}}, "common/root.yaml")
    write({"base": "root.yaml", "seed": 2, "trainer": {"steps": 2}}, "common/middle.yaml")
    write({"trainer": {"minibatches": 4, "steps": 3}}, "other.yaml")
    path = write({"base": ["common/middle.yaml", "other.yaml"], "seed": 3})
    config = load_recipe(path)
    assert (config.run_dir, config.seed) == ("root", 3)
    assert dataclasses.astuple(config.trainer)[:4] == (3, 64, 4, 2)


def test_a_file_that_two_bases_share_does_not_undo_the_first(write) -> None:
    write({"run_dir": "a", "seed": 1}, "shared.yaml")
    write({"base": "shared.yaml", "seed": 2}, "first.yaml")
    write({"base": "shared.yaml"}, "second.yaml")
    assert load_recipe(write({"base": ["first.yaml", "second.yaml"]})).seed == 2


def test_bases_in_a_circle_are_refused(write) -> None:
    write({"base": "b.yaml"}, "a.yaml")
    write({"base": "recipe.yaml"}, "b.yaml")
    with pytest.raises(ConfigError, match=r"circle: recipe\.yaml -> a\.yaml -> b\.yaml -> recipe\.yaml"):
        load_recipe(write({"base": "a.yaml"}))


def test_an_error_in_a_base_names_the_base(write) -> None:
    write({"trainer": {"step": 5}}, "common/base.yaml")
    with pytest.raises(ConfigError, match=r"^common/base\.yaml: unknown key"):
        load_recipe(write({"base": "common/base.yaml"}))


def test_a_recipe_removes_what_its_base_has(write) -> None:
    write({"run_dir": "a", "rewards": {"x": {"reward": "math"}, "y": {"reward": "math"}}}, "base.yaml")
    assert list(load_recipe(write({"base": "base.yaml", "rewards": {"x": None}})).rewards) == ["y"]


def test_parameters_stay_with_the_name_they_were_written_for(write) -> None:
    reward = {"reward": "tool_correctness", "params": {"matching": "optimal"}, "weight": 2}
    write({"run_dir": "a", "rewards": {"x": reward}}, "base.yaml")
    path = write({"base": "base.yaml"})
    assert load_recipe(path, ["rewards.x.params.names=set"]).rewards["x"].params == {
        "matching": "optimal",
        "names": "set",
    }
    changed = load_recipe(path, ["rewards.x.reward=math"]).rewards["x"]
    assert (changed.params, changed.weight) == ({}, 2.0)


# ------------------------------------------------------------------------------------------------------------ presets
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_fills_in_what_it_sets(recipe, name: str) -> None:
    algorithm = dataclasses.asdict(recipe(f"algorithm.preset={name}").algorithm)
    assert algorithm["preset"] == name
    for key, value in PRESETS[name].items():
        if isinstance(value, dict):
            assert value.items() <= algorithm[key].items()
        else:
            assert algorithm[key] == value


def test_the_recipes_own_keys_win_over_the_preset(recipe) -> None:
    algorithm = recipe("algorithm.preset=dapo", "algorithm.surrogate.params.eps_high=0.3").algorithm
    assert algorithm.surrogate.params == {"eps_low": 0.2, "eps_high": 0.3}
    assert algorithm.drop_zero_variance_groups


def test_another_method_does_not_inherit_the_presets_parameters(recipe) -> None:
    algorithm = recipe(
        "algorithm.surrogate.params.beta1=0.5", "algorithm.preset=dgpo", "algorithm.surrogate.name=ce_gppo"
    ).algorithm
    assert algorithm.surrogate.params == {"beta1": 0.5}
    assert algorithm.estimator.name == "grpo"


def test_a_later_preset_starts_the_algorithm_afresh(write) -> None:
    own = {"preset": "dapo", "estimator": {"name": "dr_grpo"}, "kl": {"coef": 0.1}, "plugins": ["mine"]}
    write({"run_dir": "a", "algorithm": own}, "base.yaml")
    path = write({"base": "base.yaml"})
    kept, changed = load_recipe(path).algorithm, load_recipe(path, ["algorithm.preset=gdpo"]).algorithm
    assert (kept.estimator.name, kept.kl.coef) == ("dr_grpo", 0.1)
    assert (changed.estimator.name, changed.kl.coef, changed.drop_zero_variance_groups) == ("gdpo", 0.0, False)
    assert changed.plugins == ["mine"]


# --------------------------------------------------------------------------------------------------------- round trip
def test_a_saved_recipe_reads_back_the_same(recipe, write) -> None:
    config = recipe(
        "algorithm.preset=dapo",
        "algorithm.surrogate.name=none",
        "actor.optimizer.lr=1.5e-4",
        "tasks.train.sums.prompt='a \\${b} 1e5\n#\t'",
        "algorithm.correction.filters=[{level: token, high: 2}]",
    )
    assert load_recipe(write(to_yaml(config), "saved.yaml")) == config


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text() | st.text(alphabet="\\${}a:#'\" \n"), number=st.floats(allow_nan=False))
@example(text=r"\${a} \\${b} \ ${", number=1e-06)
def test_any_text_and_number_reads_back_the_same(recipe, write, text: str, number: float) -> None:
    config = recipe()
    config.tasks.train["sums"].prompt = text
    config.tasks.train["sums"].params = {"x": [text, {"y": number}], "z": None, "w": "1e5"}
    assert load_recipe(write(to_yaml(config), "saved.yaml")) == config
