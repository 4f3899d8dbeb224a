"""A run's checkpoint as a Hugging Face folder, vLLM on it, and the next run from a Megatron checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from megatron_rl.weights.files import SafetensorsFolder
from tests.warm import run

from .conftest import Finished
from .job import RECIPE, Job, rows

pytestmark = pytest.mark.engine
STEPS = RECIPE["trainer"]["steps"]
PROMPTS = [[5, 12, 3, 14], [9, 9, 12, 7, 12, 2, 14]]
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])], params, use_tqdm=False)
    print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""
LOGITS = """
import sys, torch
from pathlib import Path
from megatron_rl.checkpoint.convert.megatron_logits import megatron_logits
checkpoint, config, asked = map(Path, sys.argv[1:])
torch.save([megatron_logits(checkpoint, config, tokens) for tokens in torch.load(asked)], asked.with_name("logits.pt"))
"""
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def command(*arguments: str | Path) -> str:
    """What `megatron-rl convert` prints."""
    done = run(["-m", "megatron_rl", "convert", *map(str, arguments)])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def converted(straight: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of the run (tensor parallel 2) as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("converted") / "hf"
    shown = command(
        "to-hf", "--megatron", straight.run_dir / "checkpoints" / f"step_{STEPS}", "--hf", folder, "--verify"
    )
    assert "verified: the checksums of all" in shown
    assert "verified: logits of transformers and Megatron-Core differ by at most" in shown
    return folder


def test_a_checkpoint_converts_to_what_the_run_exported(straight: Finished, converted: Path) -> None:
    found, export = SafetensorsFolder(converted), SafetensorsFolder(straight.run_dir / "export")
    assert found.names() == export.names()
    for name in export.names():
        size = export.shape(name)[0]
        assert torch.equal(found.read(name, 0, 0, size), export.read(name, 0, 0, size)), name
    assert (converted / "tokenizer.json").read_bytes() == (straight.run_dir / "export" / "tokenizer.json").read_bytes()


def test_vllm_on_the_conversion_generates_the_actors_greedy_tokens(
    straight: Finished, converted: Path, tmp_path: Path
) -> None:
    (tmp_path / "generate.py").write_text(GENERATE)
    done = run([str(tmp_path / "generate.py"), str(converted), json.dumps(PROMPTS)], os.environ | QUIET)
    assert done.returncode == 0, done.stderr
    generated = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOKENS"))[7:])
    checkpoint = straight.run_dir / "checkpoints" / f"step_{STEPS}"
    tokens = [torch.tensor([prompt + response]) for prompt, response in zip(PROMPTS, generated, strict=True)]
    torch.save(tokens, tmp_path / "tokens.pt")
    (tmp_path / "logits.py").write_text(LOGITS)
    arguments = [str(path) for path in (tmp_path / "logits.py", checkpoint, converted, tmp_path / "tokens.pt")]
    done = run(arguments, os.environ | QUIET)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "logits.pt")
    for prompt, response, logits in zip(PROMPTS, generated, found, strict=True):
        greedy = logits[len(prompt) - 1 : -1].argmax(-1)
        assert greedy.tolist() == response
        assert len(response) == 24


def test_a_run_starts_from_a_converted_checkpoint(straight: Finished, converted: Path, tmp_path: Path) -> None:
    """At another layout than it was cut for; the first evaluation is the last one of the run it comes from."""
    command("to-megatron", "--hf", converted, "--megatron", tmp_path / "megatron", "--tensor", "1")
    job = Job(
        tmp_path,
        *(f"model.path={tmp_path / 'megatron'}", "model.create=null"),
        *("sft.steps=0", "trainer.steps=1", "checkpoint.every=0"),
    )
    job.succeed()
    before, after = rows(straight.run_dir)[-1], rows(job.run_dir)
    assert [row["step"] for row in after] == [0, 1]
    name = "eval/held_out/response_length"
    assert after[0][name] == before[name]
    assert SafetensorsFolder(job.run_dir / "export").names() == SafetensorsFolder(converted).names()
