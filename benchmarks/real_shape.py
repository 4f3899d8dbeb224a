"""A model of real size through the whole product on a CPU: convert, train, kill, resume, evaluate, export.

python -m benchmarks.real_shape [--folder DIR] [--layers N] [--json FILE]

Makes a folder in the shape of Qwen3-0.6B (its published sizes, tied embeddings, random bf16 weights, a byte-level BPE
tokenizer trained on this repository's documentation, a chat template), then runs the commands that a user runs, each in a
process of its own, and prints seconds and peak resident memory of each beside what `megatron-rl plan` counts.
It takes 17 GiB of memory, 20 GB of disk and, on two cores, half an hour and more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.others import told

REPOSITORY = Path(__file__).resolve().parent.parent
# The sizes in the config.json that Qwen publishes for Qwen3-0.6B.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
NAMED_TOKENS = 151669  # of the published tokenizer; the rows above have no name
END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Random weights answer with noise: a reward that differs between responses gives the update something to do.
REWARD = """
def letters():
    return lambda completion, sample: sum(c.isascii() and c.isalpha() for c in completion) / max(1, len(completion))
"""
RECIPE = """
run_dir: {run}
model: {{path: {model}, dtype: bfloat16}}
tasks:
  train: {{questions: {{source: jsonl, path: {data}, chat: true}}}}
  eval: {{held_out: {{source: jsonl, path: {data}, chat: true}}}}
rewards:
  letters: {{reward: "{reward}:letters"}}
algorithm: {{preset: grpo}}
rollout: {{group_size: 2, max_prompt_tokens: 128, max_tokens: {tokens}, tensor_parallel: 1}}
actor: {{tokens_per_microbatch: 1024, recompute: full, optimizer: {{lr: 1.0e-6, distributed: false}}}}
trainer: {{steps: 2, prompts_per_step: 2, eval_every: 0, eval_max_prompts: 2}}
checkpoint: {{every: 1, asynchronous: false}}  # written from where it is: no copy in memory
launch: {{processes: 1}}
"""


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float
    peak_gib: float  # resident memory of all its processes together, sampled five times a second
    code: int


def make_model(folder: Path, layers: int) -> None:
    """Writes config.json, random weights and tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=torch.bfloat16, trust_remote_code=False
    )
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}, indent=1))
    PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(), eos_token=END, pad_token=PAD, chat_template=TEMPLATE
    ).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": NAMED_TOKENS - 1}))


def _byte_level_bpe() -> Any:
    """A tokenizer of Qwen's kind and size: merges from the documentation, then names for the rest of the ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    trained.train([str(path) for path in sorted(REPOSITORY.glob("docs/**/*.md"))], trainer)
    state = json.loads(trained.to_str())["model"]
    vocabulary = dict(state["vocab"])
    special = [PAD, START, END]
    for number in range(len(vocabulary), NAMED_TOKENS - len(special)):
        vocabulary[f"<unused_{number}>"] = number
    merges = [tuple(merge) for merge in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def resident_gib(root: int) -> float:
    """Of a process and all below it, shared pages counted once for each (PSS)."""
    total, pending = 0, [root]
    while pending:
        pid = pending.pop()
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
        pending += [int(child) for child in children]
    return total / 2**20


def run(name: str, command: Sequence[str], until: Callable[[], bool] | None = None) -> Stage:
    """Runs a command to its end, or kills its whole process group as soon as `until` says so."""
    print(f"{name}: {' '.join(command)}", flush=True)
    begin, peak = time.perf_counter(), 0.0
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    killed = False
    while process.poll() is None:
        peak = max(peak, resident_gib(process.pid))
        if until is not None and until():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed = True
            break
        threading.Event().wait(0.2)
    seconds = time.perf_counter() - begin
    return Stage(name + (" (killed)" if killed else ""), seconds, peak, process.returncode)


def measure(root: Path, layers: int, tokens: int) -> list[Stage]:
    """All stages in order.

    Raises:
        RuntimeError: a stage failed.
    """
    model, recipe = root / "model", root / "recipe.yaml"
    make_model(model, layers)
    data, reward = root / "questions.jsonl", root / "reward.py"
    rows = ({"prompt": f"What is {n} times {n + 7}? Explain.", "answer": str(n * (n + 7))} for n in range(3, 19))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(REWARD)
    recipe.write_text(RECIPE.format(run=root / "run", model=model, data=data, reward=reward, tokens=tokens))
    program = [str(Path(sys.executable).parent / "megatron-rl")]
    checkpoints = root / "run" / "checkpoints"
    train = [*program, "train", str(recipe)]
    stages: list[Stage] = []

    def stage(*arguments: Any, until: Callable[[], bool] | None = None) -> None:
        done = run(arguments[0], arguments[1], until)
        stages.append(done)
        if done.code != (0 if until is None else -signal.SIGKILL):  # also where it ended before it was to be killed
            raise RuntimeError(f"{done.name} ended with exit code {done.code}")

    megatron = root / "megatron"
    stage("convert to Megatron", [*program, "convert", "to-megatron", "--hf", str(model), "--megatron", str(megatron)])
    back = ["--megatron", str(megatron), "--hf", str(root / "back"), "--verify"]
    stage("convert back, verify", [*program, "convert", "to-hf", *back])
    stage("train, until step 1 is saved", train, until=(checkpoints / "step_1" / "manifest.json").exists)
    stage("resume, step 2, export", train)
    step = str(checkpoints / "step_2")
    stage("evaluate the checkpoint", [*program, "evaluate", str(recipe), "--model", step])
    evaluate = [*program, "evaluate", str(recipe), "--model", str(root / "run" / "export")]
    stage("evaluate the export", [*evaluate, f"run_dir={root / 'run_of_export'}"])
    stage("checkpoint to Hugging Face", [*program, "convert", "to-hf", "--megatron", step, "--hf", str(root / "hf")])
    return stages


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary folder")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="fewer, for a quick try")
    parser.add_argument("--tokens", type=int, default=512, help="per response (default 512)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="real-shape-") as folder:
        stages = measure(Path(folder), args.layers, args.tokens)
        metrics = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        plan = [str(Path(sys.executable).parent / "megatron-rl"), "plan", str(Path(folder) / "recipe.yaml")]
        subprocess.run([*plan, "--gpus-per-node", "1"], cwd=REPOSITORY, check=False)
    if args.json:
        args.json.write_text(json.dumps([asdict(stage) for stage in stages], indent=1) + "\n")
    console = Console(highlight=False)
    table = Table("stage", "seconds", "peak GiB")
    for stage in stages:
        table.add_row(stage.name, f"{stage.seconds:.0f}", f"{stage.peak_gib:.1f}")
    console.print(table)
    for row in map(json.loads, metrics):
        timing = {key.removeprefix("timing_s/"): round(v, 1) for key, v in row.items() if key.startswith("timing_s/")}
        console.print(f"step {row['step']}: {timing}")
    return 0


if __name__ == "__main__":
    with told():
        sys.exit(main())
