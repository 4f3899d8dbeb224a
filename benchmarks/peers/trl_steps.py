"""Seconds of TRL's GRPO steps on the quick start's prompts; runs in the environment of `make bench-peers`, prints JSON.

python benchmarks/peers/trl_steps.py MODEL PROMPTS STEPS

MODEL is a Hugging Face folder, PROMPTS a jsonl file with `prompt` and `answer`, 64 a step in the order of use. As in the
quick start: groups of 8, at most 56 tokens, temperature 1, two updates per generation, both rewards, fp32. transformers
generates; TRL computes old log-probs too where there are two updates. No weight sync.
"""

import json
import re
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP, UPDATES = 64, 8, 2


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(text.rpartition("#")[2] == truth) for text, truth in zip(completions, answer, strict=True)]


def well_formed(completions: list[str], **_: object) -> list[float]:
    return [0.1 * bool(re.fullmatch(r"[^#]*#-?[0-9]+", text)) for text in completions]


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[float] = []

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if not self.times:
            self.times.append(time.perf_counter())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.times.append(time.perf_counter())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        logs = kwargs["logs"]
        if isinstance(logs, dict) and "completions/mean_length" in logs:
            self.tokens.append(logs["completions/mean_length"] * PROMPTS * GROUP)


def main(model: str, prompts: str, steps: int) -> None:
    rows = [json.loads(line) for line in Path(prompts).read_text(encoding="utf-8").splitlines()]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * GROUP // UPDATES,
            steps_per_generation=UPDATES,
            num_generations=GROUP,
            max_completion_length=56,
            max_steps=UPDATES * steps,
            learning_rate=1.5e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            shuffle_dataset=False,
            logging_steps=UPDATES,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[correct, well_formed],
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model, trust_remote_code=False),
            callbacks=[clock],
        )
        trainer.train()
    ends = clock.times[::UPDATES]
    seconds = [after - before for before, after in pairwise(ends)]
    print(json.dumps({"seconds": seconds, "tokens": clock.tokens}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
