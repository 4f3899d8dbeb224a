"""Tiny models and data in the places of the real ones, and the overrides with which every recipe runs on two CPU processes.

The folders have the names that recipes read (`$MODELS/<name>`, `$DATA/<set>/<split>.jsonl`), so recipes find them by
themselves. `overrides` is all that is changed in a recipe.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.model import CreateModelConfig, CreateVisionConfig
from megatron_rl.config.published import published_config
from megatron_rl.config.schema import TaskConfig
from megatron_rl.models import model_of
from megatron_rl.models.qwen2_5_vl import IMAGE_WORDS
from megatron_rl.tasks.sources import SOURCES
from megatron_rl.weights.create import random_weights, write_tokenizer
from megatron_rl.weights.files import save_tensors
from megatron_rl.weights.stacked import stacked
from tests.evaluation.test_recipes import ROWS, stored

MAX_TOKENS = 6
_COPIES = 120  # of each right response among the tokens
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
# Sizes in place of the published ones; a head of 32 is the smallest that vLLM's attention takes on a CPU.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,  # the smaller of the two that vLLM has on a CPU
    "linear_value_head_dim": 64,
    "first_k_dense_replace": 1,
}
# With latents: as many keys as heads, and of their widths those that vLLM takes on a CPU. Four experts have no eight groups.
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"n_group": 2, "topk_group": 1}
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 1, "fullatt_block_indexes": [0]}
TOWER |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 36}  # each where the published tower has it
MAZE = "******\n*..E**\n*....*\n**.*.*\n**S..*\n******"
CALL = {"name": "add", "parameters": {"a": 1}}


def drawn() -> bytes:
    from PIL import Image, ImageDraw

    image, file = Image.new("L", (48, 32), 255), io.BytesIO()
    ImageDraw.Draw(image).polygon([(4, 28), (44, 28), (4, 4)], outline=0)
    image.save(file, "PNG")
    return file.getvalue()


# Folder below $DATA -> a row as recipes/prepare.sh leaves it, and the form of right responses; {n} tells them apart.
SUMS = ({"prompt": "How much is 6 times 7?", "answer": "42"}, "{n}: #### \\boxed{{42}}")
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "toolrl": (
        {"prompt": [{"role": "user", "content": "Add 1."}], "tool_calls": [CALL], "needs_response": False},
        "<think> {n} </think>\n<tool_call>\n"
        + json.dumps(CALL).replace("{", "{{").replace("}", "}}")
        + "\n</tool_call>",
    ),
    "eurus2_code": (
        {
            "prompt": [{"role": "user", "content": "Add one."}],
            "metadata": {"tests": {"inputs": ["1\n"], "outputs": ["2\n"]}, "data_source": "apps"},
        },
        "```python\nprint(int(input()) + 1)  # {n}\n```",
    ),
    "maze": (
        {"prompt": f"## Maze\n{MAZE}", "answer": MAZE},
        "{n}: <answer>UUUR</answer>",
    ),
    "geometry3k": (
        {"images": [{"bytes": drawn(), "path": None}], "problem": "<image>Find x.", "answer": "7 \\sqrt { 3 }"},
        "{n}: \\boxed{{7\\sqrt{{3}}}}",
    ),
}


def kind(path: Path) -> tuple[dict[str, Any], str]:
    """Of a file below $DATA, see `KINDS`."""
    return KINDS.get(path.parent.name.replace("awpo_steps", "toolrl"), SUMS)


# -------------------------------------------------------------------------------------------------------------- sizes
def overrides(config: Config, data: Path) -> list[str]:
    """What is changed in a recipe so that it runs here; everything else of it runs as it is.

    Args:
        config: the recipe as it is.
        data: where sets of the hub are put, which `$DATA` does not have.
    """
    trainer, rollout, parallel = config.trainer, config.rollout, config.actor.parallel
    generators = config.launch.generators and 1  # of two processes, as everywhere
    tensor = min(parallel.tensor, 1 if generators else 2) if parallel.pipeline == 1 else 1
    expert = min(parallel.expert, 2) if tensor == parallel.pipeline == 1 else 1
    layout = {
        "tensor": tensor,
        "pipeline": min(parallel.pipeline, 2),
        "expert": expert,
        "context": 1,
        "expert_tensor": 1,
        "virtual_pipeline": 1,
    }
    # The models that recipes make are tiny already, and learn from demonstrations of full length.
    prompt = 2048 if config.model.create is None else rollout.max_prompt_tokens  # characters, where others have words
    response = MAX_TOKENS if config.model.create is None else rollout.max_tokens
    if any(task.chat_template is not None for task in config.tasks.train.values()):  # long, and begun anew by each turn
        prompt, response = 2 * prompt, 3 * prompt
    changed: dict[str, Any] = {
        # sizes
        "rollout.max_tokens": response,
        "rollout.max_prompt_tokens": prompt,
        "rollout.group_size": min(rollout.group_size, 8),
        "trainer.steps": 1,
        "trainer.prompts_per_step": 4,
        "trainer.minibatches": min(trainer.minibatches, 2),
        "trainer.eval_max_prompts": 2,
        "trainer.eval_rollouts": min(trainer.eval_rollouts, 2),
        "checkpoint.every": min(config.checkpoint.every, 1),
        "sft.steps": min(config.sft.steps, 2),
        "sft.batch_size": 8,
        "reward_model.epochs": 1 if config.reward_model.wanted else None,
        "reward_model.batch_size": 8,
        "actor.tokens_per_microbatch": 2 * (prompt + response),  # a pair
        **({"actor.lora.rank": min(config.actor.lora.rank, 16)} if config.actor.lora is not None else {}),
        # layout
        **{f"actor.parallel.{name}": size for name, size in layout.items()},
        "actor.parallel.sequence": parallel.sequence and tensor > 1,
        "rollout.tensor_parallel": min(rollout.tensor_parallel, 1 if generators else 2),
        "launch.generators": generators,
        "launch.processes": processes(config),
        # what only a GPU has
        "actor.offload": False,
        "actor.fp8": None,
        "rollout.fp8": "none",  # blocks of 128 do not fit into tiny models
        "rollout.cpu_cache_gib": 0.1,
        # drawn by tests of its own
        "logging.report": False,
    }
    for group, tasks in (("train", config.tasks.train), ("eval", config.tasks.eval)):
        for name, task in tasks.items():
            if (
                task.source in ("reasoning_gym", "tool_world", "tool_house", "python_maths", "bars")
                or ":" in task.source
            ):
                changed[f"tasks.{group}.{name}.size"] = size_of(task)
            if task.source == "split":
                changed[f"tasks.{group}.{name}.hold_out"] = 1
            if task.source == "huggingface":
                changed[f"tasks.{group}.{name}.path"] = data / name
                changed[f"tasks.{group}.{name}.subset"] = None
    return [f"{key}={'null' if value is None else value}" for key, value in changed.items()]


def size_of(task: TaskConfig) -> int:
    """Prompts of a generated task: enough for demonstrations or pairs, else one, whose answer the tiny model knows."""
    return 32 if task.demonstrations is not None or ":" in task.source else 1


def processes(config: Config) -> int:
    parallel = config.actor.parallel
    return min(2, max(parallel.tensor, parallel.pipeline, parallel.expert, config.rollout.tensor_parallel))


# --------------------------------------------------------------------------------------------------------------- data
def write_data(configs: Iterable[Config], hub: Path) -> None:
    """Every file that the recipes' tasks read."""
    for config in configs:
        evaluation = not config.tasks.train
        for tasks in (config.tasks.train, config.tasks.eval):
            for name, task in tasks.items():
                if evaluation and task.source in ("jsonl", "huggingface"):
                    stored(task, [row for row, _ in ROWS[name]], hub, name)
                elif task.source in ("jsonl", "parquet"):
                    write_rows(Path(str(task.path)))


def write_rows(path: Path) -> None:
    """Four prompts: batches have several groups."""
    row, _ = kind(path)
    column = "problem" if "problem" in row else "prompt"
    prompt = row[column]
    rows = []
    for extra in ("", "!", "!!", "!!!"):
        varied = (
            [{**turn, "content": turn["content"] + extra} for turn in prompt]
            if isinstance(prompt, list)
            else prompt + extra
        )
        rows.append({**row, column: varied})
    save_rows(path, rows)


def save_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ------------------------------------------------------------------------------------------------------------- models
def right_responses(config: Config) -> set[str]:
    """Forms of right responses to the prompts of a recipe's train tasks."""
    forms = set()
    for task in config.tasks.train.values():
        if task.source in ("jsonl", "parquet"):
            forms.add(kind(Path(str(task.path)))[1])
        elif task.source == "tool_house":  # the first of the gold calls
            for item in SOURCES[task.source].items(replace(task, size=1)):
                call = json.dumps((item.tool_calls or [CALL])[0]).replace("{", "{{").replace("}", "}}")
                forms.add(f"<think> {{n}} </think>\n<tool_call>\n{call}\n</tool_call>")
        elif task.source == "reasoning_gym":
            [item] = SOURCES[task.source].items(replace(task, size=1))
            forms.add("{n}: Answer: " + str(item.answer).replace("{", "{{").replace("}", "}}"))
    return forms


def write_model(folder: Path, name: str, forms: Iterable[str], temperature: float) -> None:
    """A random model of the published one's family, whose tokenizer knows characters and some right responses.

    Each form stands many times among the tokens: a model that has learned nothing is right now and then, so that groups
    have a signal.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    published = published_config(name)
    assert published is not None, name
    words = [form.format(n=n) for form in sorted(forms) for n in range(_COPIES)]
    characters = "".join(map(chr, range(32, 127))) + "\n"
    sees = "vision_config" in published
    first = len(characters) + len(words) + 2
    vocabulary = 64 * (1 + (first + len(IMAGE_WORDS) * sees) // 64)
    published_text = published.get("text_config", published)  # of a model that reads images its own section, or not
    sizes: dict[str, Any] = {key: value for key, value in SIZES.items() if key in published_text or key == "head_dim"}
    if "kv_lora_rank" in published_text:
        sizes |= LATENT
        del sizes["head_dim"]
    folder.mkdir(parents=True)
    text = published_text | sizes | {"vocab_size": vocabulary, "eos_token_id": 1, "pad_token_id": 0}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    config = text if published_text is published else {**published, "text_config": text}
    created = CreateModelConfig(vocab_size=vocabulary, characters=characters, words=words)
    created.max_positions = text["max_position_embeddings"]
    if sees:
        created.vision = CreateVisionConfig()  # the tokenizer has words for images
        Qwen2VLImageProcessorPil(patch_size=published["vision_config"]["patch_size"]).save_pretrained(folder)
        config |= {name: first + number for number, name in enumerate(IMAGE_WORDS.values())}
        text["rope_scaling"] = {**text["rope_scaling"], "mrope_section": [4, 6, 6]}
        tower = {key: value for key, value in TOWER.items() if key in published["vision_config"]}
        config["vision_config"] = {**published["vision_config"], **tower, "out_hidden_size": text["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, created)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    weights = random_weights(folder, 0.02, seed=1)
    # All hidden states have something in common, to which the row of <eos> answers: drawn at the temperature of the recipes,
    # half of the tokens are <eos>, and responses end after a few.
    embedding = next(value for key, value in weights.items() if key.endswith("embed_tokens.weight"))
    embedding += 0.2
    weights.get("lm_head.weight", embedding)[1] += temperature * math.log(vocabulary) / text["hidden_size"]
    for key in weights:
        if key.endswith(".bias"):
            weights[key].zero_()
    model = model_of(config)
    if model.description.transformer.get("layernorm_zero_centered_gamma"):  # with ones every token would be <eos>
        weights["model.norm.weight"].zero_()
    save_tensors(
        folder / "model.safetensors", dict(stacked(weights.items(), model.family.stacking, model.expert_count))
    )
