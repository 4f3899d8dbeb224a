"""Sections that configurations of all three have in common: batches, steps, lengths, data, and what a recipe needs
besides."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from megatron_rl.migrate.draft import Draft, rows_of

_TOKENS = 8192  # the default of actor.tokens_per_microbatch


def put_model(draft: Draft, name: object) -> None:
    if isinstance(name, str):
        is_path = "$" in name or name.startswith(("/", "~")) or os.path.isdir(name)
        is_hub = name.count("/") == 1 and not is_path
        folder = f"models/{name.partition('/')[2]}" if is_hub else name
        remark = f"a folder: hf download {name} --local-dir {folder}" if is_hub else ""
        draft.put("model.path", folder, remark)


def put_batch(draft: Draft, prompts: int, prompts_per_minibatch: float | None) -> None:
    """Prompts per step, and in how many minibatches."""
    draft.put("trainer.prompts_per_step", prompts)
    if not prompts_per_minibatch:
        return
    minibatches = max(1, round(prompts / prompts_per_minibatch))
    while prompts % minibatches:
        minibatches -= 1
    exact = minibatches * prompts_per_minibatch == prompts
    remark = "" if exact else f"{prompts_per_minibatch:g} prompts in each there, which does not divide {prompts}"
    draft.put("trainer.minibatches", minibatches, remark)


def put_steps(draft: Draft, steps: int | None, epochs: float | None) -> None:
    """RL steps, by themselves or by epochs where the number of prompts is known. Call it after `put_batch` and the data."""
    per_step = draft.get("trainer.prompts_per_step") or 1
    if steps is not None and steps > 0:
        draft.put("trainer.steps", steps)
        return
    if epochs is None:
        return
    if draft.prompts is None:
        draft.remark(
            "trainer",
            f"steps: {epochs:g} epochs there, and how many prompts there are is not known here: set epochs x prompts / "
            f"{per_step}, or give --prompts N",
        )
        return
    total = max(1, math.floor(epochs * (draft.prompts // per_step)))
    draft.put("trainer.steps", total, f"{epochs:g} epochs of {draft.prompts} prompts, {per_step} a step")


def put_lengths(draft: Draft, prompt: int, response: int, tokens: int | None) -> None:
    """`tokens`: of a packed micro-batch, if it is said."""
    draft.put("rollout.max_prompt_tokens", prompt)
    draft.put("rollout.max_tokens", response)
    longest = prompt + response
    if tokens is not None and tokens < longest:
        draft.put("actor.tokens_per_microbatch", longest, f"{tokens} there, less than the longest sequence here")
    elif tokens is not None or longest > _TOKENS:
        draft.put("actor.tokens_per_microbatch", tokens or longest)


def put_data(draft: Draft, group: str, files: object, columns: dict[str, str], chat: bool) -> list[str]:
    """A task per file of a list, or for one name; returns the files."""
    paths = [str(file) for file in files] if isinstance(files, list) else [str(files)] if files is not None else []
    for number, file in enumerate(paths):
        suffix = Path(file).suffix
        source = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(suffix, "huggingface")
        name = ("data" if group == "train" else "held_out") + (f"_{number + 1}" if number else "")
        task: dict[str, Any] = {"source": source, "path": file}
        if columns:
            task["columns"] = dict(columns)
        if chat:
            task["chat"] = True
        draft.put(f"tasks.{group}.{name}", task)
    if group == "train" and draft.prompts is None and paths:
        draft.prompts = rows_of(paths)
    return paths


def put_kl(draft: Draft, coef: float | None, kind: str | None) -> None:
    """The loss term; `kind` in our words."""
    if coef:
        draft.put("algorithm.kl.coef", coef)
        draft.put("algorithm.kl.estimator", kind)


def put_saving(draft: Draft, every: float | None, evaluate: float | None) -> None:
    """Steps between checkpoints and evaluations; none, or below 0: never."""
    if every is not None:
        draft.put("checkpoint.every", max(0, int(every)))
    if evaluate is not None:
        draft.put("trainer.eval_every", max(0, int(evaluate)))


def complete(draft: Draft) -> None:
    """Adds what every recipe needs, and drops what does not go together."""
    recipe = draft.recipe
    if not draft.get("run_dir"):
        draft.put("run_dir", "runs/migrated")
    if not draft.get("tasks.train"):
        draft.put("tasks.train.data", {"source": "jsonl", "path": "data/train.jsonl"})
        draft.remark("tasks", "train.data: a stand-in, since no training file was named there")
    if not draft.get("rewards"):
        draft.put("rewards.correct.reward", "math")
        draft.remark(
            "rewards",
            "correct: a guess; docs/rewards/README.md lists them, docs/rewards/your-own.md says how to write one",
        )
    recipe.setdefault("algorithm", {}).setdefault("preset", "grpo")
    if draft.get("algorithm.surrogate.params"):
        draft.put("algorithm.surrogate.name", "clip")
        if (low := draft.get("algorithm.surrogate.params.eps_low") or 0) >= 1:
            draft.put(
                "algorithm.surrogate.params.eps_low", 0.999, f"{low:g} there, which is no bound: ratios are above 0"
            )
    if not draft.get("actor.lora.rank"):
        recipe.get("actor", {}).pop("lora", None)
    if (draft.get("actor.parallel.tensor") or 1) == 1 and draft.get("actor.parallel.sequence") is not None:
        recipe["actor"]["parallel"].pop("sequence")
    if not draft.get("checkpoint.every"):
        recipe.get("checkpoint", {}).pop("keep", None)
    rollouts, temperature = draft.get("trainer.eval_rollouts") or 1, draft.get("trainer.eval_temperature") or 0
    if rollouts == 1 and temperature > 0:
        for name in ("eval_temperature", "eval_top_p"):
            recipe["trainer"].pop(name, None)
        draft.remark(
            "trainer", f"eval_temperature: {temperature:g} there; one response per prompt is decoded greedily here"
        )
    elif rollouts > 1 and not temperature:
        draft.put("trainer.eval_rollouts", 1, f"{rollouts} there, which at temperature 0 are all the same")
        recipe["trainer"].pop("eval_top_p", None)
    elif not temperature:
        recipe.get("trainer", {}).pop("eval_top_p", None)
