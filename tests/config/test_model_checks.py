"""What a recipe may ask of the model that it names: the folder's files, its sizes, scalings, families and quantisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import ConfigError, Machine, check, check_machine
from megatron_rl.config.published import published_config
from megatron_rl.models.rope import scaled

from .test_recipe_checks import CPU, problems


@pytest.fixture
def model(write) -> Path:
    """A Hugging Face folder as far as the checks look."""
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
    }
    write("", "model/model.safetensors")
    write("{}", "model/tokenizer.json")
    return write(json.dumps(sizes), "model/config.json").parent


def test_a_model_folder_wins_over_create(recipe, model: Path) -> None:
    checked = check(recipe("model.path=model"), machine=CPU)
    assert (checked.model.path, checked.model.create) == ("model", None)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "does not hold a JSON object"),
        ("config.json", '{"architectures": ["GPT2LMHeadModel"]}', "'GPT2LMHeadModel', which is not supported"),
        ("config.json", '{"architectures": ["LlamaForCausalLM"], "hidden_size": 0}', "`hidden_size` = 0, expected a pos"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("model.safetensors", None, "has no *.safetensors files"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "x-1.safetensors", "b": "model.safetensors"}}',
         "lacks 1 of 2 weight files, first x-1.safetensors"),
        ("model.safetensors.index.json", "{}", "cannot be read"),
    ],
)  # fmt: skip
def test_an_incomplete_model_folder(recipe, model: Path, file: str, text: str | None, message: str) -> None:
    if text is None:
        (model / file).unlink()
    else:
        (model / file).write_text(text)
    assert any(message in problem for problem in problems(recipe("model.path=model")))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.parallel.pipeline=2", "actor.parallel.virtual_pipeline=4"],
            "the model's 4 layers cannot be spread over 2 stages of 4 chunks each (1 for 2); lower `actor.par",
        ),
        (["actor.parallel.tensor=4"], "key/value heads (2)"),
        (["rollout.max_tokens=100"], "exceeds the model's 128 positions; lower one of them"),
    ],
)
def test_a_layout_that_the_model_cannot_take(recipe, model: Path, overrides: list[str], message: str) -> None:
    assert any(message in problem for problem in problems(recipe("model.path=model", *overrides)))


STRETCH = "model.rope_scaling={factor: 4, original_max_position_embeddings: 100}"


def test_a_scaling_of_the_recipe_makes_room_for_longer_sequences(recipe, model: Path) -> None:
    longer = ("model.path=model", "rollout.max_tokens=300")
    assert any("128 positions; lower one of them; or set model.rope_scaling" in p for p in problems(recipe(*longer)))
    check(recipe(*longer, STRETCH), machine=CPU)
    assert any(
        "exceeds the model's 400 positions" in p for p in problems(recipe(*longer, STRETCH, "rollout.max_tokens=400"))
    )
    check(recipe("model.create.max_positions=128", "rollout.max_tokens=300", STRETCH), machine=CPU)


@pytest.mark.parametrize(
    ("scaling", "own", "message"),
    [
        ("{factor: 1.1, original_max_position_embeddings: 100}", {}, "times factor = 1.1 must exceed the model's"),
        ("{factor: 2, original_max_position_embeddings: 200}", {}, "max_position_embeddings = 128, which 200 must not"),
        ("{factor: 4}", {}, "original_max_position_embeddings"),
        ("{factor: 4, original_max_position_embeddings: 100, rope_type: linear}", {}, "rope_type"),
        ("{factor: 4, original_max_position_embeddings: 100, beta_fast: 0.5}", {}, "must be at most beta_fast"),
        ("{factor: 4, original_max_position_embeddings: 100}",
         {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "a scaling of its own, `rope_scaling` = {'rope_type"),
        ("{factor: 4, original_max_position_embeddings: 100}",
         {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "a scaling of its own, `rope_parameters`"),
        ("{factor: 4, original_max_position_embeddings: 32}",
         {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 30}},
         "a scaling of its own"),
        ("{factor: 4, original_max_position_embeddings: 100}", {"text_config": {}}, "`text_config` cannot be given one yet"),
    ],
)  # fmt: skip
def test_a_scaling_that_contradicts_the_model(
    recipe, model: Path, scaling: str, own: dict[str, Any], message: str
) -> None:
    sizes = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(sizes | own))
    try:
        found = problems(recipe("model.path=model", f"model.rope_scaling={scaling}"))
    except ConfigError as error:  # of the key alone
        found = [str(error)]
    assert any("model.rope_scaling" in problem and message in problem for problem in found), found


def test_a_model_that_has_the_recipes_scaling_already(recipe, model: Path) -> None:
    """A checkpoint or an export of a run with the same recipe."""
    sizes = json.loads((model / "config.json").read_text())
    scaling = {"factor": 4, "original_max_position_embeddings": 100, "rope_type": "yarn"}
    (model / "config.json").write_text(json.dumps(dict(scaled(sizes, scaling))))
    check(recipe("model.path=model", "rollout.max_tokens=300", STRETCH), machine=CPU)


def test_a_harness_asks_a_model_whose_folder_has_the_scaling(recipe, model: Path) -> None:
    asked = recipe("model.path=model", STRETCH, "evaluation.harness.name=lm_eval")
    with pytest.raises(ConfigError, match=r"`model.rope_scaling`: a harness asks .* name a run's export"):
        check(asked, command="evaluate", machine=CPU)


def test_a_served_model_may_be_one_that_cannot_be_trained(recipe) -> None:
    served = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    check(recipe("actor.parallel.tensor=2"), command="evaluate", machine=CPU, model=served)
    with pytest.raises(ConfigError, match="exceeds the model's 16 positions"):
        check(recipe(), command="evaluate", machine=CPU, model=served | {"max_position_embeddings": 16})


def test_the_engine_may_have_more_ranks_than_the_model_has_key_value_heads(recipe, model: Path) -> None:
    check(recipe("model.path=model", "rollout.tensor_parallel=4"), machine=CPU)


def test_rollouts_in_fp8_are_corrected_unless_the_recipe_says_no(recipe) -> None:
    on = ("rollout.fp8=blockwise", "model.create.hidden_size=128", "model.create.kv_heads=4")
    assert recipe().algorithm.correction.weight == "none"
    assert check(recipe(*on), machine=CPU).algorithm.correction.weight == "token"
    assert recipe(*on, "algorithm.preset=gspo").algorithm.correction.weight == "token"
    assert recipe(*on, "algorithm.correction.weight=none").algorithm.correction.weight == "none"
    assert recipe(*on, "rollout.fp8=none").algorithm.correction.weight == "none"
    with pytest.raises(ConfigError, match="activations in bf16"):
        check_machine(check(recipe(*on, "model.dtype=float32"), machine=CPU), Machine(gpus=8))


def test_an_engine_stays_within_a_node(recipe) -> None:
    two_nodes = Machine(gpus=2, world_size=4, local_world_size=2)
    found = problems(recipe("rollout.tensor_parallel=4"), machine=two_nodes)
    assert any("(4) must divide the 2 processes of a node" in problem for problem in found)
    check(recipe("rollout.tensor_parallel=2"), machine=two_nodes)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.parallel.context=2", "passes no keys and values around where attention has sinks; set it to 1"),
        ("actor.parallel.expert_tensor=2", "does not cut experts that have biases; set it to 1"),
        ("actor.lora={rank: 4, experts: true}", "family `gpt_oss` stacks them; set it to false"),
        ("rollout.fp8=blockwise", "is not for stacked experts, which family `gpt_oss` has; set it to none"),
    ],
)
def test_what_sinks_and_stacked_experts_rule_out(recipe, model: Path, override: str, message: str) -> None:
    (model / "config.json").write_text(json.dumps(published_config("gpt-oss-20b")))
    whole = ("model.path=model", "launch.processes=2")
    check(recipe(*whole), machine=CPU)
    assert any(message in problem for problem in problems(recipe(*whole, override)))


def test_heads_of_gated_delta_layers_are_cut_by_tensor_and_context_parallelism(recipe, model: Path) -> None:
    """Qwen3.5-0.8B has 16 of them. Found by number 100019 of tests/random_layouts."""
    (model / "config.json").write_text(json.dumps(published_config("Qwen3.5-0.8B") | {"linear_num_key_heads": 2}))
    cut = ("model.path=model", "actor.parallel.tensor=2", "actor.parallel.sequence=true", "launch.processes=4")
    cut += ("actor.optimizer.distributed=true",)
    message = "key heads (2) must be a multiple of `actor.parallel.tensor` x `context` (4): linear_num_key_heads"
    assert [message in problem for problem in problems(recipe(*cut, "actor.parallel.context=2"))].count(True) == 1
    check(recipe(*cut), machine=CPU)
    three = ("model.path=model", "actor.parallel.tensor=4", "actor.parallel.sequence=true")
    assert not any("context" in problem for problem in problems(recipe(*three)))


def test_what_a_folder_of_which_only_the_language_model_is_read_rules_out(recipe, model: Path) -> None:
    text = published_config("Qwen3.5-35B-A3B")
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    (model / "config.json").write_text(json.dumps({**whole, "text_config": text, "vision_config": {"depth": 27}}))
    found = problems(
        recipe("model.path=model", "tasks.train.sums.columns.images=x", "actor.lora={rank: 4, sync: adapters}")
    )
    for message in (
        "read, which Qwen3.5's is not",
        "`actor.lora.sync=adapters`: the engine would",
    ):
        assert any(message in problem for problem in found), found
    (model / "config.json").write_text(json.dumps(whole))
    assert any("text_config" in problem for problem in problems(recipe("model.path=model")))


def test_experts(recipe, model: Path) -> None:
    sizes = json.loads((model / "config.json").read_text()) | {"architectures": ["Qwen3MoeForCausalLM"]}
    sizes |= {"num_experts": 6, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    (model / "config.json").write_text(json.dumps(sizes))
    assert check(recipe("model.path=model", "actor.parallel.expert=3"), machine=CPU).launch.processes == 3
    assert any("6 experts" in p for p in problems(recipe("model.path=model", "actor.parallel.expert=4")))
    split = ("model.path=model", "actor.parallel.tensor=2", "rollout.tensor_parallel=2")
    assert any("set actor.parallel.sequence=true" in p for p in problems(recipe(*split)))
    split += ("actor.parallel.sequence=true",)
    check(recipe(*split), machine=CPU)
    # Experts lie on tensor-parallel ranks too: 3 of the 6 whole on each, or half of each on both.
    assert check(recipe(*split, "actor.parallel.expert=2"), machine=CPU).launch.processes == 2
    halves = (*split, "actor.parallel.expert_tensor=2")
    assert check(recipe(*halves), machine=CPU).launch.processes == 2
    adapted = problems(recipe(*halves, "actor.lora.rank=4", "actor.lora.alpha=8", "actor.lora.experts=true"))
    assert "`actor.lora.experts` needs whole experts on every rank; set actor.parallel.expert_tensor=1" in adapted
    assert check(recipe(*split, "actor.parallel.expert=3"), machine=CPU).launch.processes == 6
    assert any(
        "`rollout.tensor_parallel` is 1" in p
        for p in problems(recipe("model.path=model", "rollout.expert_parallel=true"))
    )
    spread = ("model.path=model", "rollout.expert_parallel=true", "rollout.tensor_parallel=4")
    assert any("6 experts must be a multiple of `rollout.tensor_parallel` (4)" in p for p in problems(recipe(*spread)))
    check(recipe(*spread[:2], "rollout.tensor_parallel=2"), machine=CPU)
    (model / "config.json").write_text(json.dumps(sizes | {"num_experts_per_tok": 7}))
    assert any("num_experts_per_tok = 7: the model has 6 experts" in p for p in problems(recipe("model.path=model")))
    (model / "config.json").write_text(json.dumps(sizes))
    cut = ("launch.processes=6", "actor.parallel.expert=2", "actor.parallel.expert_tensor=2")
    assert problems(recipe("model.path=model", *cut)) == [
        "`actor.parallel.expert` x `expert_tensor` (2 x 2) must divide the 6 ranks of a pipeline stage (tensor x context x "
        "data = 6 processes / 1); a number of processes that fits is 8"
    ]
    uneven = problems(recipe("model.path=model", "actor.parallel.expert_tensor=5"))
    sentence = (
        "moe_intermediate_size = 32 does not divide over 5 tensor-parallel ranks (`actor.parallel.expert_tensor`)"
    )
    assert f"the model's {sentence}" in uneven


def test_home_in_paths(recipe, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    checked = check(recipe("run_dir=~/run", "model.path=~/model"), machine=CPU)
    assert checked.run_dir == f"{tmp_path}/run"
    assert checked.model.path == f"{tmp_path}/model"


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, 16),
        ({"head_dim": 48}, 48),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, None),
        ({"architectures": ["Qwen3ForCausalLM"]}, None),  # 128 where it says nothing
    ],
)
def test_an_engine_on_a_cpu_has_kernels_for_some_head_sizes_only(
    recipe, model: Path, config: dict[str, object], size: int | None
) -> None:
    sizes = json.loads((model / "config.json").read_text()) | {"num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps(sizes | config))
    checked = check(recipe(f"model.path={model}"), machine=CPU)
    check_machine(checked, Machine(gpus=8))
    checked.tasks.eval = {}
    check_machine(checked, CPU, "sft")  # which then starts no engine
    if size is None:
        check_machine(checked, CPU)
    else:
        with pytest.raises(ConfigError, match=rf"the model's head_dim \({size}\) is none of the sizes"):
            check_machine(checked, CPU)
