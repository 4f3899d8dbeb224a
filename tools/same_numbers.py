"""Proves that two commits compute the same numbers: metrics and exported weights of short CPU runs, bit for bit.

    python -m tools.same_numbers main                     # that commit against the working tree
    python -m tools.same_numbers HEAD~1 HEAD --only moe

Each side runs its own code and its own recipes; `RUNS` lists the runs. What a commit computed on this machine is kept in
`--cache`. Exit code 1: some number differs, and the first of each run is printed; 2: a run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from megatron_rl.config.model import CreateModelConfig
from megatron_rl.resume_proof.proof import untimed_rows
from megatron_rl.weights.create import create_model

ROOT = Path(__file__).resolve().parent.parent
WORKING_TREE = "working-tree"
METRICS = ("metrics.jsonl", "sft/metrics.jsonl")
QUICKSTART = "recipes/cpu/quickstart.yaml"
STEPS, SHORT_WARM_UP = "{steps}", ("sft.steps=60", "trainer.prompts_per_step=16", "trainer.eval_every=4")
TENSOR = ("actor.parallel={tensor: 2, sequence: true}", "rollout.tensor_parallel=2")
PIPELINE = ("actor.parallel.pipeline=2",)
EXPERT = (
    "actor.parallel={tensor: 2, expert: 2, sequence: true}",
    "rollout.tensor_parallel=2",
    "rollout.expert_parallel=true",
)


@dataclass(frozen=True)
class Job:
    """One run: a command, a recipe and overrides, in which `{steps}` is the number of steps and `{moe}` a small model."""

    command: str
    recipe: str
    overrides: tuple[str, ...]


def _rl(preset: str, *overrides: str, recipe: str = QUICKSTART) -> Job:
    return Job("train", recipe, (f"algorithm.preset={preset}", *SHORT_WARM_UP, f"trainer.steps={STEPS}", *overrides))


RUNS: dict[str, Job] = {
    "quickstart": Job("train", QUICKSTART, ()),
    "awpo": _rl("awpo", *TENSOR),
    "gdpo": _rl("gdpo", *PIPELINE),
    "dgpo": _rl("dgpo", "algorithm.kl.coef=0.01", "trainer.minibatches=4"),
    "shrinkage": _rl("shrinkage"),
    "dapo": _rl("dapo", "algorithm.resample_rounds=2", "algorithm.correction.weight=token"),
    "lora": _rl("grpo", *TENSOR, "actor.lora.rank=4"),
    "moe": _rl("grpo", *EXPERT, "model.create=null", "model.path={moe}", "actor.moe.routing_replay=rollout"),
    "vision": _rl("grpo", *PIPELINE, recipe="recipes/cpu/visual.yaml"),
    "reward-model": Job(
        "reward-model",
        "recipes/cpu/preference_reward.yaml",
        ("tasks.train.pairs.size={pairs}", "reward_model.eval_every=1"),
    ),
    "sft": Job("sft", QUICKSTART, ("sft.steps={steps}", "sft.log_every=1", *PIPELINE)),
}
QUIET = ("logging.tensorboard=false", "logging.report=false", "checkpoint.asynchronous=false")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="commit")
    parser.add_argument("after", nargs="?", default=WORKING_TREE, help="commit; default: the working tree")
    parser.add_argument(
        "--only", action="append", choices=RUNS, metavar="NAME", help=f"of {', '.join(RUNS)}; repeatable"
    )
    parser.add_argument("--steps", type=int, default=8, help="of every run but the quick start; default 8")
    parser.add_argument(
        "--renamed", action="append", default=[], metavar="OLD=NEW", help="a metric's new name; repeatable"
    )
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "same_numbers", help="results of commits")
    options = parser.parse_args()
    renamed = dict(text.split("=", 1) for text in options.renamed)
    table, is_same = Table("run", "numbers", "tensors", "first difference"), True
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(Checkout.of(name, options.cache)) for name in (options.before, options.after)]
        for name in options.only or RUNS:
            before, after = (side.results(name, options.steps) for side in sides)
            numbers, tensors, difference = compare(before, after, renamed)
            is_same = is_same and not difference
            table.add_row(name, str(numbers), str(tensors), difference or "none")
            print(f"{name}: {numbers} numbers, {tensors} tensors, {difference or 'the same'}", flush=True)
    Console(soft_wrap=True).print(table)
    return 0 if is_same else 1


@dataclass(frozen=True)
class Checkout:
    """A side of the comparison: a folder with its code, and the folder for its results."""

    folder: Path
    results_folder: Path

    @classmethod
    @contextlib.contextmanager
    def of(cls, name: str, cache: Path) -> Iterator[Checkout]:
        """Of a commit: a git worktree that is removed at the end. The working tree runs where it is, and is run anew."""
        with tempfile.TemporaryDirectory(prefix="same-numbers-") as temporary:
            if name == WORKING_TREE:
                yield cls(ROOT, Path(temporary))
                return
            commit, folder = _git("rev-parse", "--short=12", f"{name}^{{commit}}"), Path(temporary) / "checkout"
            _git("worktree", "add", "--detach", str(folder), commit)
            try:
                yield cls(folder, cache.absolute() / commit)
            finally:
                _git("worktree", "remove", "--force", str(folder))

    def results(self, name: str, steps: int) -> Path:
        """The folder with the metrics and the export of a run, which is started where they are not there yet."""
        results = self.results_folder / (name if name == "quickstart" else f"{name}-{steps}")
        if results.exists():
            return results
        with tempfile.TemporaryDirectory(prefix="same-numbers-") as temporary:
            run_dir = Path(temporary) / "run"
            self._run(RUNS[name], steps, run_dir)
            kept = Path(temporary) / "kept"
            for path in [*(run_dir / each for each in METRICS), *(run_dir / "export").rglob("*.safetensors")]:
                if path.exists():
                    target = kept / path.relative_to(run_dir)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, target)
            results.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(kept, results)
        return results

    def _run(self, job: Job, steps: int, run_dir: Path) -> None:
        words = {"{steps}": str(steps), "{pairs}": str(64 * steps), "{moe}": str(run_dir.with_name("moe"))}
        overrides = [*job.overrides, *QUIET, f"run_dir={run_dir}"]
        for word, text in words.items():
            overrides = [each.replace(word, text) for each in overrides]
        if any("{moe}" in each for each in job.overrides):
            write_mixture_of_experts(run_dir.with_name("moe"))
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "megatron_rl", job.command, job.recipe, *overrides]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{self.folder}: {' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}", file=sys.stderr)
            raise SystemExit(2)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def write_mixture_of_experts(folder: Path) -> None:
    """A small Qwen3-MoE of seeded random weights, with the tokenizer of `create_model`."""
    import transformers

    create_model(folder, CreateModelConfig(layers=1, hidden_size=64, heads=4, ffn_size=64), seed=0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        initializer_range=0.08,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder)


def compare(before: Path, after: Path, renamed: Mapping[str, str]) -> tuple[int, int, str]:
    """Two folders of results.

    Args:
        renamed: new names of metrics, by the old ones. Metrics that only `after` has are no difference.

    Returns:
        How many numbers and how many tensors were compared; and the first difference, "" where there is none.
    """
    numbers = tensors = 0
    for name in METRICS:
        rows_before, rows_after = untimed_rows(before, name), untimed_rows(after, name)
        for old, new in zip(rows_before, rows_after, strict=False):
            for key, value in old.items():
                other = new.get(renamed.get(key, key), "missing")
                numbers += 1
                if repr(value) != repr(other):  # of floats: exact, and NaN is like NaN
                    return numbers, tensors, f"{name}, step {old['step']}: {key} {value!r} -> {other!r}"
        if len(rows_before) != len(rows_after):
            return numbers, tensors, f"{name}: {len(rows_before)} rows -> {len(rows_after)}"
    names = {path.relative_to(folder) for folder in (before, after) for path in folder.rglob("*.safetensors")}
    for path in sorted(names):
        if not all((folder / path).exists() for folder in (before, after)):
            return numbers, tensors, f"{path} is on one side only"
        old_tensors, new_tensors = load_file(before / path), load_file(after / path)
        if old_tensors.keys() != new_tensors.keys():
            return numbers, tensors, f"{path}: tensors {sorted(old_tensors.keys() ^ new_tensors.keys())[:3]}"
        for name, tensor in old_tensors.items():
            tensors += 1
            if _bytes(tensor) != _bytes(new_tensors[name]):
                return numbers, tensors, f"{path}: {name} {tensor.dtype} {list(tensor.shape)} differs"
    return numbers, tensors, "" if numbers and tensors else "nothing to compare"


def _bytes(tensor: torch.Tensor) -> bytes:
    header = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return header + tensor.flatten().view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    sys.exit(main())
