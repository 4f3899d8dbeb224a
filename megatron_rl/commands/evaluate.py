"""`evaluate`: a model on a recipe's held-out tasks, given in one of three ways, or by a harness.

A checkpoint of a training run (`--model <run>/checkpoints/step_<n>`) or a Hugging Face folder (`--model DIR`, or the recipe's
own model) is answered by a colocated engine; a served model (`--endpoint URL`) by its server, from this process. With a
harness (`--harness NAME`, or the recipe's) the folder is served, and another project's package asks and grades.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.base.messages import errors_named
from megatron_rl.commands.packages import require_torch
from megatron_rl.commands.run_recipe import add_check, machine_asked_for, print_checked
from megatron_rl.config import Config, ConfigError, Machine, check_machine, load_recipe
from megatron_rl.config.actor import LoRAConfig
from megatron_rl.evaluation.harnesses import HARNESSES, programs
from megatron_rl.launch.ranks import RankLaunch, hold_run_folder, machine_here
from megatron_rl.models import HFConfig, read_hf_config
from megatron_rl.preflight.recipe import check_recipe
from megatron_rl.runtime import exit_codes


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help="YAML file with the tasks and how to sample; left out, that of the checkpoint's own run",
    )
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", default=[], help="overrides, e.g. trainer.eval_rollouts=16"
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a checkpoint of a training run (<run>/checkpoints/step_<n>) or a Hugging Face folder; "
        "with --endpoint the folder whose tokenizer and chat template the server uses",
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        action="append",
        help="base URL of a vLLM server, such as http://localhost:8000/v1; several share the requests",
    )
    parser.add_argument("--served-name", metavar="NAME", help="the model's name there, where it serves several")
    parser.add_argument(
        "--harness",
        metavar="bfcl|evalplus|lm_eval",
        help="another project's package that asks and grades (make eval-setup); needs no RECIPE",
    )
    add_check(parser)


@dataclass(frozen=True)
class _Checkpoint:
    folder: Path  # <run>/checkpoints/step_<n>
    recipe: Path  # <run>/recipe.yaml
    model: Path  # Hugging Face folder that the run started from: config and tokenizer
    dtype: str
    lora: LoRAConfig | None  # the adapters that it holds, if any


def run(args: argparse.Namespace) -> int:
    """Returns 0, 1 where too many requests failed, 2 for a bad recipe or model, 130 after Ctrl-C, or a process's code."""
    machine, world = machine_here()
    machine = machine_asked_for(args, machine)
    config, checkpoint = _resolve(args, machine)
    if args.check:
        return print_checked(config, machine if args.processes is None else None, args.command)
    harness = config.evaluation.harness.name
    if harness is not None and not (program := programs(harness) / HARNESSES[harness].program).exists():
        raise ConfigError(f"{program} is missing: make eval-setup installs the harnesses")
    if not args.endpoint:
        check_machine(config, machine, args.command)
    if args.endpoint or harness is not None:
        others = world is not None and world.rank > 0  # srun's further tasks: one process asks
        return exit_codes.OK if others else _ask(config, args.endpoint or [], args.served_name, machine.gpus)
    require_torch(args.command)
    return RankLaunch("evaluate", config, str(checkpoint.folder) if checkpoint else "never", machine, world).start()


def _resolve(args: argparse.Namespace, machine: Machine) -> tuple[Config, _Checkpoint | None]:
    if args.recipe is not None and "=" in args.recipe and not Path(args.recipe).exists():
        args.recipe, args.overrides = None, [args.recipe, *args.overrides]
    if args.served_name is not None and not args.endpoint:
        raise ConfigError(f"--served-name {args.served_name} has no effect without --endpoint")
    checkpoint = None
    overrides = []
    if args.model is not None:
        folder = Path(args.model).expanduser()
        is_model, is_checkpoint = (folder / "config.json").is_file(), (folder / "manifest.json").is_file()
        of_a_run = (folder.resolve().parent.parent / "recipe.yaml").is_file()
        if is_checkpoint and (of_a_run or not is_model) and not args.endpoint:
            checkpoint = _checkpoint(folder.resolve())
            overrides += [f"model.path={checkpoint.model}", f"model.dtype={checkpoint.dtype}"]
            if checkpoint.lora is not None:
                lora = {**asdict(checkpoint.lora), "path": None}  # what it began with is not needed
                overrides.append(f"actor.lora={json.dumps(lora)}")
        elif is_model:  # a Hugging Face folder, or a converted one
            overrides.append(f"model.path={folder}")
        else:
            raise ConfigError(_no_model(folder, bool(args.endpoint)))
    if args.harness is not None:
        overrides.append(f"evaluation.harness.name={args.harness}")
    recipe = args.recipe or (checkpoint.recipe if checkpoint else None)
    if recipe is None and args.harness is None:
        raise ConfigError("name a RECIPE with the tasks; only a checkpoint of a training run brings its own")
    given = {override.partition("=")[0] for override in args.overrides}
    if "run_dir" not in given:
        overrides += _own_run_dir(recipe, args, checkpoint)
    args.overrides = [*overrides, *args.overrides]
    config = check_recipe(load_recipe(recipe, args.overrides), args.command, machine, _served(args), recipe)
    _check_harness(config, args.endpoint, checkpoint)
    if args.endpoint and config.model.path is None:
        raise ConfigError("--endpoint needs --model DIR, the Hugging Face folder of the served model: its tokenizer")
    if (Path(config.run_dir) / "checkpoints").exists():
        raise ConfigError(
            f"`run_dir` {config.run_dir} holds a training run, which an evaluation would overwrite; give it a folder of its "
            "own, for example run_dir=runs/evaluation (and --model <training run>/checkpoints/step_<n>, or its export)"
        )
    return config, checkpoint


def _check_harness(config: Config, urls: list[str] | None, checkpoint: _Checkpoint | None) -> None:
    name = config.evaluation.harness.name
    if name is None:
        return
    if checkpoint is not None:
        raise ConfigError(
            f"--model {checkpoint.folder}: a harness asks a server, which takes a Hugging Face folder; make one with "
            f"megatron-rl convert to-hf --megatron {checkpoint.folder} --hf DIR"
        )
    if config.model.path is None:
        raise ConfigError("a harness asks the model of a Hugging Face folder: give --model DIR")
    if urls is not None and len(urls) > 1:
        raise ConfigError(f"{name} asks one server, and --endpoint is given {len(urls)} times")


def _served(args: argparse.Namespace) -> HFConfig | None:
    """The served model's config.json: its weights need not be here."""
    if not args.endpoint or args.model is None:
        return None
    with errors_named(f"--model {args.model}: config.json cannot be read", OSError, ValueError, as_error=ConfigError):
        return read_hf_config(Path(args.model).expanduser())


def _own_run_dir(recipe: str | Path | None, args: argparse.Namespace, checkpoint: _Checkpoint | None) -> list[str]:
    """A training run's recipe, with a model to evaluate: a folder below the run's, named after the model. Without a recipe,
    where the model is a run's export: below that run's, named after the harness."""
    if args.model is None and not args.endpoint:
        return []
    if recipe is None:
        run_dir = Path(args.model or "").resolve().parent
        if not (run_dir / "recipe.yaml").is_file():
            raise ConfigError("give run_dir=FOLDER, where the results go: the model is no training run's export")
        return [f"run_dir={run_dir / 'evaluation' / args.harness}"]
    run_dir = Path(load_recipe(recipe, args.overrides).run_dir).expanduser()
    if checkpoint is not None and args.recipe is None:
        run_dir = checkpoint.recipe.parent
    elif not (run_dir / "checkpoints").exists():
        return []
    name = "endpoint" if args.endpoint else Path(args.model).resolve().name
    return [f"run_dir={run_dir / 'evaluation' / name}"]


def _checkpoint(folder: Path) -> _Checkpoint:
    run = folder.parent.parent
    if not (run / "recipe.yaml").is_file():
        raise ConfigError(
            f"--model {folder}: a checkpoint is read with its run's recipe, and {run / 'recipe.yaml'} is missing"
        )
    recipe = load_recipe(run / "recipe.yaml")
    model = recipe.model
    base = run / "model" if model.path is None else Path(model.path).expanduser()
    if not (base / "config.json").is_file():
        raise ConfigError(
            f"--model {folder}: its run started from the model in {base}, whose config.json and tokenizer are needed"
        )
    return _Checkpoint(folder, run / "recipe.yaml", base, model.dtype, recipe.actor.lora)


def _no_model(folder: Path, endpoint: bool) -> str:
    if not folder.is_dir():
        return f"--model {folder} does not exist"
    if endpoint:
        return (
            f"--model {folder}: with --endpoint it is a Hugging Face folder (config.json, tokenizer), which this is not"
        )
    return (
        f"--model {folder} is neither a Hugging Face folder (it has no config.json) nor a checkpoint of a training run (no "
        f"manifest.json), such as {folder / 'checkpoints' / 'step_100'}"
    )


def _ask(config: Config, urls: list[str], name: str | None, gpus: int) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with hold_run_folder(config):
        from megatron_rl.evaluation.harnessed import evaluate_by_harness
        from megatron_rl.runtime.distributed import ALONE
        from megatron_rl.trainer.evaluate import evaluate_endpoint
        from megatron_rl.trainer.report import Reporter

        log = Reporter(config, Path(config.run_dir), ALONE, "evaluate")
        if config.evaluation.harness.name is not None:
            return evaluate_by_harness(log, urls, name, gpus)
        return evaluate_endpoint(log, urls, name)
