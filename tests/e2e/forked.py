"""Whole runs of many models from one process that has imported torch, Megatron-Core and vLLM: every rank is a fork of it.

Started with a folder that holds `lanes.json` and a folder per model with its `recipe.yaml`. Each model is trained, most
are continued from their first checkpoint, and of most the export evaluated (of some also the last checkpoint), each time by
what a rank runs, `trainer.main.main`. Models of one rank go through two lanes at once; those of two ranks follow one by one.
What a rank prints is in `<model>/<part>.log`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.runtime.attempts import free_port
from megatron_rl.seams.vllm_images import register_text_only

if TYPE_CHECKING:
    from megatron_rl.rollout.vllm_probe import VllmProbe

LAST = "step_2"
CHECKPOINTS = ("qwen3-tied", "qwen3-tied-TP-2")  # models of which the last checkpoint is evaluated too
# Models whose export is not: what one rank exports of the same family is, and at every sync vLLM's loaders in this layout get
# the tensors that an export writes (`compare_syncs`).
SAME_EXPORT = (
    *("qwen2-tied-PP-2", "qwen3_moe-EP-2", "qwen2_5_vl-TP-2-lora", "qwen2_5_vl-tied-PP-2-frozen"),
    *("qwen3_vl-tied-TP-2-lora", "deepseek_v3-TP-2-EP-2"),
)
# Models that are not continued from a checkpoint: one of their family is, and one that is tied where they are.
NOT_RESUMED = (
    *("qwen2-tied", "qwen3-stretched", "qwen3-tied-with-a-copy", "qwen3_moe-tied", "llama3-tied", "mistral-tied"),
    "ministral",
)
# Architecture -> its module in vLLM.
REGISTERED = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "Glm4MoeForCausalLM": "glm4_moe",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "TransformersForCausalLM": "transformers",  # Ministral's
}


def main(root: Path) -> None:
    lanes = json.loads((root / "lanes.json").read_text())
    os.setsid()
    register()
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    (root / "head_sizes.json").write_text(json.dumps(CPUAttentionBackend.get_supported_head_sizes()))
    wait([fork(models, root, names, 1) for names in lanes["one rank"]])
    models(root, lanes["two ranks"], 2)


def register() -> None:
    from vllm import ModelRegistry

    register_text_only("Qwen3_5ForCausalLM")
    for architecture, name in REGISTERED.items():
        module = importlib.import_module(f"vllm.model_executor.models.{name}")
        # The class that is registered already under its name, which vLLM would first look at in a process of its own.
        ModelRegistry.register_model(architecture, getattr(module, architecture))
    gc.collect()
    gc.freeze()  # vLLM collects garbage several times as it starts; what was imported is none


def models(root: Path, names: list[str], world: int) -> None:
    for name in names:
        model(root / name, world)


def model(folder: Path, world: int) -> None:
    """Train, continue, evaluate; ends at the first that fails."""
    run = folder / "run"
    if not command(folder, "train", world, "train"):
        return
    shutil.copytree(run, folder / "straight")
    if folder.name not in NOT_RESUMED:
        shutil.rmtree(run / "checkpoints" / LAST)
        shutil.rmtree(run / "export")
        if not command(folder, "resumed", world, "train"):
            return
    if folder.name not in SAME_EXPORT:
        export = (f"run_dir={folder / 'export'}", f"model.path={run / 'export'}")
        command(folder, "export", world, "evaluate", *export)
        if folder.name in CHECKPOINTS:
            newest = str(run / "checkpoints" / LAST)
            command(folder, "checkpoint", world, "evaluate", f"run_dir={folder / 'checkpoint'}", resume=newest)


def command(folder: Path, part: str, world: int, name: str, *overrides: str, resume: str | None = None) -> bool:
    """Whether all ranks of `megatron-rl <name>` on the folder's recipe ended well.

    Args:
        resume: null: the newest checkpoint of a training run, none of an evaluation.
    """
    from megatron_rl.config import check, load_recipe, to_yaml

    config = check(load_recipe(folder / "recipe.yaml", overrides), command=name)
    run_dir = Path(config.run_dir)
    run_dir.mkdir(exist_ok=True)
    (run_dir / "recipe.yaml").write_text(to_yaml(config))
    variables = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> int:
        from megatron_rl.runtime.rank_job import RankJob
        from megatron_rl.trainer.rank import main

        compare_syncs()
        os.environ.update(variables, RANK=str(number), LOCAL_RANK=str(number))
        log = os.open(folder / f"{part}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        recipe = str(run_dir / "recipe.yaml")
        return main.main(RankJob(name, str(run_dir), recipe, resume or ("auto" if name == "train" else "never")))

    codes = wait([fork(rank, number) for number in range(world)])
    (folder / f"{part}.code").write_text(str(max(codes)))
    return not any(codes)


def compare_syncs() -> None:
    """From here on every weight sync is done in slices, then with whole tensors, and the log says what the engine holds
    otherwise after the second."""
    from megatron_rl.rollout.sync import SlicedSync, WholeSync
    from megatron_rl.rollout.vllm_probe import VllmProbe

    push = SlicedSync.push

    def both(self: SlicedSync) -> None:
        push(self)
        probe = VllmProbe(self.engine, self.grid)
        sliced = held(probe)
        WholeSync.push(self)  # type: ignore[arg-type]
        whole = held(probe)
        differ = sorted(name for name in {**sliced, **whole} if not torch.equal(sliced[name], whole[name]))
        print(f"slices and whole tensors: {len(whole)} weights, {len(differ)} differ {differ[:3]}", flush=True)

    SlicedSync.push = both  # type: ignore[method-assign]


def held(probe: VllmProbe) -> dict[str, Tensor]:
    """All that an engine on a CPU holds, and computes with."""
    found = {name: tensor.clone() for name, tensor in probe.parameters().items()}
    return found | {f"packed {name}": read() for name, read in probe.packed_weights().items()}


def fork(function: Callable[..., int | None], *arguments: object) -> int:
    """Process id of a child that ends with what the function returns as its exit code, or with 1 after an error."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = function(*arguments) or 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
