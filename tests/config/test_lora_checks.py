"""What of `actor.lora` is refused before a run, and that adapters are not taken for those of another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.config import ConfigError, check, load_recipe
from megatron_rl.config.actor import LoRAConfig
from megatron_rl.config.machine import Machine
from megatron_rl.config.published import published_config
from megatron_rl.models import model_of
from megatron_rl.models.lora import adapters_of, check_lora, peft_config, peft_modules, targets_of
from megatron_rl.trainer.adapter_facts import AdapterFacts
from megatron_rl.trainer.adapter_facts import check as check_adapters

QUICKSTART = Path(__file__).parents[2] / "recipes" / "cpu" / "quickstart.yaml"
OWN: AdapterFacts = {
    "rank": 8,
    "scale": 1.0,
    "modules": ["q_proj"],
    "experts": False,
    "base": "model",
    "base_weights": "a",
}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rank=8", "targets=[q_porj]"],
            "has 'q_porj', and the model's linear layers are q_proj, k_proj.*mean 'q_proj'",
        ),
        (["rank=8", "targets=[]"], "targets` is empty"),
        (["rank=0"], "`actor.lora.rank` must be at least 1; it is 0"),
        (["alpha=16"], "`actor.lora.rank` must be set"),
        (["rank=65"], r"\(65\) is larger than the model's k_proj, 64 x 128; make it at most 64"),
        (["rank=8", "experts=true"], "for experts, and the model has none"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(load_recipe(QUICKSTART, [f"actor.lora.{each}" for each in overrides]), machine=Machine(gpus=0))


def test_the_smallest_matrix_of_a_name_bounds_the_rank() -> None:
    """DeepSeek-V3's dense layers, shared experts and experts have matrices of the same names."""
    config = published_config("DeepSeek-V3")
    assert config is not None
    model = model_of({**config, "moe_intermediate_size": 64, "n_shared_experts": 4})
    assert list(check_lora(LoRAConfig(rank=128, targets=["gate_proj"]), model)) == []
    [refused] = check_lora(LoRAConfig(rank=128, targets=["gate_proj"], experts=True), model)
    assert "(128) is larger than the model's gate_proj, 64 x 7168; make it at most 64" in refused


def test_gated_delta_layers_have_adapters_and_their_narrow_matrices_may_be_left_out() -> None:
    config = published_config("Qwen3.5-35B-A3B")
    assert config is not None
    model = model_of(config)
    assert list(check_lora(LoRAConfig(rank=32), model)) == []
    assert {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"} < {*targets_of(LoRAConfig(rank=8), model)}
    refused = list(check_lora(LoRAConfig(rank=64), model))
    assert [sentence.partition(",")[0].split()[-1] for sentence in refused] == ["in_proj_b", "in_proj_a"]
    assert "32 x 2048; make it at most 32, or set actor.lora.targets=[in_proj_qkv, in_proj_z, out_proj" in refused[0]
    named = refused[0].rpartition("[")[2].removesuffix("]").split(", ")
    assert list(check_lora(LoRAConfig(rank=64, targets=named), model)) == []


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("DeepSeek-V3", ["mlp", "shared_experts"]),
        ("Qwen3.5-35B-A3B", ["shared_expert"]),
        ("Qwen3-30B-A3B", []),
        ("Qwen3-8B", []),
    ],
)
def test_peft_reads_feed_forwards_beside_experts_by_their_weights_names(model: str, parameters: list[str]) -> None:
    config, lora = published_config(model), LoRAConfig(rank=8, dropout=0.5)
    assert config is not None
    names = [tensor.name for rule in adapters_of(model_of(config), lora).weights() for tensor in rule.hf]
    about = peft_config(lora, names, "base")
    ends = [f"{module}.{kind}_proj.weight" for module in parameters for kind in ("down", "gate", "up")]
    assert about.get("target_parameters", []) == ends
    assert about["lora_dropout"] == (0.0 if parameters else 0.5)
    assert peft_modules(about) == {*targets_of(lora, model_of(config))}


@pytest.mark.parametrize(
    ("model", "rank", "words"),
    [
        ("Qwen3-30B-A3B", 8, ["a mixture of experts"]),
        ("Qwen2.5-VL-3B-Instruct", 8, ["a model that reads images"]),
        ("Qwen3.5-35B-A3B", 8, ["a mixture of experts", "a model with gated-delta layers"]),
        ("Qwen3-8B", 513, ["a rank above 512"]),
        ("Qwen3-8B", 512, []),
    ],
)
def test_models_beside_which_the_engine_adds_no_adapters(model: str, rank: int, words: list[str]) -> None:
    lora, config = LoRAConfig(rank=rank, sync="adapters"), published_config(model)
    assert config is not None
    refused = [f"`actor.lora.sync=adapters` is not for {each}; set it to merged" for each in words]
    assert list(check_lora(lora, model_of(config))) == refused


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.fp8=blockwise", "is not for weights in FP8"),
        ("rollout.sync=whole", "`rollout.sync` has no effect with `actor.lora.sync=adapters`"),
    ],
)
def test_what_adapters_in_the_engine_rule_out(override: str, words: str) -> None:
    lora = ["actor.lora.rank=8", "actor.lora.sync=adapters"]
    check(load_recipe(QUICKSTART, lora), machine=Machine(gpus=0))
    with pytest.raises(ConfigError, match=words):
        check(load_recipe(QUICKSTART, [*lora, override]), machine=Machine(gpus=0))


def test_a_warm_up_that_the_reference_policy_would_not_have_is_refused() -> None:
    lora = ["actor.lora.rank=8", "actor.lora.targets=[q_proj, down_proj]"]
    check(load_recipe(QUICKSTART, lora), machine=Machine(gpus=0))
    with pytest.raises(ConfigError, match="before RL trains the adapters"):
        check(load_recipe(QUICKSTART, [*lora, "algorithm.kl.coef=0.1"]), machine=Machine(gpus=0))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of the same sizes and other weights."""
    from tests.models import tiny

    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("begin", "another")):
        tiny.write(folder / name, "qwen3", seed=seed, head_dim=32, max_position_embeddings=512)
        (folder / name / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("overrides", "about", "words"),
    [
        ([], {"base_model_name_or_path": "Qwen/other"}, "belong to Qwen/other, which is not the model in .*begin"),
        ([], {"base_model_name_or_path": "{another}"}, "belong to .*another, which is not the model in .*begin"),
        ([], {"r": 16, "lora_alpha": 16}, "`actor.lora.rank` is 8, and that of the adapters in .* is 16"),
        ([], {"lora_alpha": 32}, "`actor.lora.alpha` is 8, and that of the adapters in .* is 32"),
        (
            [],
            {"target_modules": ["v_proj"]},
            "`actor.lora.targets` are q_proj, and those of the adapters in .* are v_proj",
        ),
        ([], {"use_dora": True}, "has use_dora = True"),
        ([], {"target_parameters": ["experts.gate_up_proj"]}, "has target_parameters = "),
        ([], {"peft_type": "IA3"}, "does not describe LoRA's adapters"),
        ([], None, "has no adapter_config.json"),
        (["algorithm.kl.coef=0.1"], {}, "set model.path to their run's export"),
    ],
)
def test_adapters_that_are_not_this_recipes_are_refused_before_the_run(
    models: Path, tmp_path: Path, overrides: list[str], about: dict[str, object] | None, words: str
) -> None:
    right = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    right["base_model_name_or_path"] = str(models / "begin")
    own = [f"model.path={models / 'begin'}", f"actor.lora.path={tmp_path}", "sft.steps=0"]
    own += ["actor.lora.rank=8", "actor.lora.targets=[q_proj]"]
    file = tmp_path / "adapter_config.json"
    if about is not None:
        changed = {name: str(models / "another") if value == "{another}" else value for name, value in about.items()}
        file.write_text(json.dumps(right | changed))
    with pytest.raises(ConfigError, match=words):
        check(load_recipe(QUICKSTART, [*own, *overrides]), machine=Machine(gpus=0))
    file.write_text(json.dumps(right))
    check(load_recipe(QUICKSTART, own), machine=Machine(gpus=0))


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (None, "trained every parameter, and this recipe trains adapters only"),
        ({**OWN, "rank": 16}, "actor.lora.rank is 16 there and 8 here"),
        ({**OWN, "modules": ["v_proj"]}, r"actor.lora.targets is \['v_proj'\] there"),
        ({**OWN, "base": "other", "base_weights": "b"}, "beside other, whose weights are not those of model"),
    ],
)
def test_other_adapters_or_those_of_another_model_are_refused(
    tmp_path: Path, saved: AdapterFacts | None, words: str
) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    manifest.write(tmp_path, {"adapters": saved}, {}, [])
    with pytest.raises(CheckpointError, match=words):
        check_adapters(tmp_path, OWN)
    if saved is not None:
        check_adapters(tmp_path, saved)
        with pytest.raises(CheckpointError, match="trained adapters only, and this recipe trains every parameter"):
            check_adapters(tmp_path, None)
    assert json.loads((tmp_path / manifest.MANIFEST).read_text())["adapters"] == saved
