"""What `--for` writes: the files that Megatron-LM and Megatron-Bridge look for, read by Megatron-Core."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from models import tiny

from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.source import SourceModel, megatron_folder
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.checkpoint.convert.verify import compare
from megatron_rl.cli import main

from .convert import assert_same, tensors, to_hf
from .test_resume import contents, kill

MOE_LAYOUT = Layout(tensor=2, expert=4)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("programs") / "hf", "qwen3_moe", num_hidden_layers=2, dtype="bfloat16")


def convert(hf: Path, target: Path, program: str) -> ToMegatron:
    task = ToMegatron(hf, MOE_LAYOUT, program=program)
    jobs.run(task, target, 1, lambda _: None)
    return task


@pytest.mark.parametrize("program", ["megatron-lm", "bridge"])
def test_it_is_the_same_checkpoint_in_a_folder(hf: Path, tmp_path: Path, program: str) -> None:
    task = convert(hf, tmp_path / "out", program)
    inner = megatron_folder(tmp_path / "out")  # by its tracker
    assert inner == tmp_path / "out" / task.inside
    assert len(compare(task, tmp_path / "out", 1)) == len(tensors(hf))
    to_hf(inner, tmp_path / "back")
    assert_same(tensors(tmp_path / "back"), tensors(hf))
    assert not jobs.run(task, tmp_path / "out", 1, lambda _: None)  # it is there
    assert not (tmp_path / ".out.converting").exists()
    with pytest.raises(ValueError, match="is not the result of this conversion"):
        jobs.run(dataclasses.replace(task, program=None), tmp_path / "out", 1, lambda _: None)


def test_a_killed_conversion_continues(hf: Path, tmp_path: Path) -> None:
    task = ToMegatron(hf, MOE_LAYOUT, file_bytes=20_000, program="megatron-lm")
    jobs.run(task, tmp_path / "whole", 1, lambda _: None)
    kill(task, tmp_path / "out", 9)
    kill(task, tmp_path / "out", 10**6)  # when all is written, before it has its name
    assert not (tmp_path / "out").exists()
    jobs.run(task, tmp_path / "out", 1, lambda _: None)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_megatron_lm_finds_its_arguments(hf: Path, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    convert(hf, tmp_path / "out", "megatron-lm")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    inner = str(tmp_path / "out" / "release")
    assert dist_checkpointing.check_is_distributed_checkpoint(inner)
    state = dist_checkpointing.load_common_state_dict(inner)  # unpickles only what Megatron-Core calls safe
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, 0)
    found, model = vars(state["args"]), SourceModel.read(hf)
    same = {name: value for name, value in model.description.transformer.items() if name in found}
    assert {"num_layers", "num_query_groups", "kv_channels", "moe_ffn_hidden_size", "moe_router_topk"} < same.keys()
    assert same.items() <= found.items()
    assert (found["num_experts"], found["padded_vocab_size"], found["rotary_base"]) == (8, 62, 10000)
    assert (found["untie_embeddings_and_output_weights"], found["group_query_attention"]) == (True, True)
    assert found["params_dtype"] is torch.bfloat16
    assert (found["tensor_model_parallel_size"], found["expert_tensor_parallel_size"]) == (2, 1)


def test_bridge_finds_its_configuration(hf: Path, tmp_path: Path) -> None:
    from megatron.core.transformer import TransformerConfig

    convert(hf, tmp_path / "out", "bridge")
    inner = tmp_path / "out" / "iter_0000000"
    for state in (inner / "train_state.pt", tmp_path / "out" / "latest_train_state.pt"):
        assert torch.load(state, weights_only=True)["step"] == 0
    config = yaml.safe_load((inner / "run_config.yaml").read_text())
    provider = config["model"]
    assert provider.pop("_target_") == "megatron.bridge.models.gpt_provider.GPTModelProvider"
    assert provider.pop("activation_func") == {"_target_": "torch.nn.functional.silu", "_call_": False}
    assert provider["params_dtype"] == {"_target_": "torch.bfloat16", "_call_": False}
    shape = {name: value for name, value in SourceModel.read(hf).description.transformer.items() if name in provider}
    assert len(shape) > 15
    assert shape.items() <= provider.items()
    # What is not Megatron-Core's is GPTModelProvider's.
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert provider.keys() - known == {
        *("vocab_size", "should_pad_vocab", "make_vocab_size_divisible_by", "seq_length", "hf_model_id"),
        *("share_embeddings_and_output_weights", "position_embedding_type", "rotary_base", "rotary_percent"),
    }
    assert (provider["vocab_size"], provider["should_pad_vocab"], provider["make_vocab_size_divisible_by"]) == (
        61,
        True,
        1,
    )
    assert (config["checkpoint"]["save_optim"], config["checkpoint"]["save_rng"]) == (False, False)


@pytest.mark.parametrize("program", ["megatron-lm", "bridge"])
@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe", "qwen3_5", "gpt_oss"])
def test_what_their_files_cannot_describe_is_refused_before_anything_is_written(
    tmp_path: Path, variant: str, program: str
) -> None:
    hf = tiny.write(tmp_path / "hf", variant)
    with pytest.raises(ValueError, match=r"Megatron-LM and Megatron-Bridge .*leave (it|out --for)"):
        jobs.run(ToMegatron(hf, Layout(), program=program), tmp_path / "out", 1, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_command_says_how_to_load_it(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.write(tmp_path / "llama", "llama3", num_hidden_layers=1)
    out = tmp_path / "out"
    assert main(["convert", "to-megatron", "--hf", str(source), "--megatron", str(out), "--for", "megatron-lm"]) == 0
    said = capsys.readouterr().out
    assert f"--load {out} --use-checkpoint-args" in said
    assert "--norm-epsilon 1e-06 --use-rope-scaling --rope-scaling-factor 8" in said
    assert "--qk-layernorm" not in said
    assert main(["convert", "to-hf", "--megatron", str(out), "--hf", str(tmp_path / "back")]) == 0
    assert_same(tensors(tmp_path / "back"), tensors(source))


@pytest.mark.parametrize("program", ["megatron-lm", "bridge"])
def test_a_scaling_without_arguments_is_refused(tmp_path: Path, program: str) -> None:
    source = tiny.write(tmp_path / "yarn", "qwen3-yarn", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"no arguments for this model's yarn scaling .* leave out --for"):
        ToMegatron(source, Layout(), program=program).files()


def test_a_folder_of_bridge_stands_for_its_newest_iteration(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "out", "bridge")
    (tmp_path / "out" / "iter_0000000").rename(tmp_path / "out" / "iter_0000010")
    (tmp_path / "out" / "iter_0000002").mkdir()
    (tmp_path / "out" / "iter_0000002" / ".metadata").touch()
    assert megatron_folder(tmp_path / "out").name == "iter_0000010"
    assert ToHF(megatron_folder(tmp_path / "out"), tmp_path / "out" / "iter_0000010").names()
