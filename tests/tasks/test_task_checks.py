"""What is said about a recipe's tasks before anything starts."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.schema import AgentConfig, ColumnsConfig, TaskConfig, TasksConfig
from megatron_rl.tasks import check_tasks
from megatron_rl.tasks.puzzle_checks import dataset_files, dataset_params


def check(train: dict[str, Any] | None = None, evaluation: dict[str, Any] | None = None) -> None:
    generated = {"source": "reasoning_gym", "name": "chain_sum", "size": 5}
    check_tasks(
        TasksConfig(
            train={"sums": TaskConfig(**(train or generated))},
            eval={"test": TaskConfig(**(evaluation or generated))},
        )
    )


def test_good_tasks_pass(tmp_path: Path) -> None:
    check()
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"q": "1", "a": "2", "metadata": {"unit": "cm"}}) + "\n")
    check(
        {
            "source": "jsonl",
            "path": str(path),
            "columns": ColumnsConfig(prompt="q", answer="a"),
            "prompt": "{prompt} {unit}",
        }
    )


def test_the_first_rows_have_to_make_prompts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": [[{"role": "user", "content": "q"}]]}) + "\n")
    with pytest.raises(
        ValueError, match=r"tasks\.train\.sums\.columns: .*'question' must be text or a list of chat messages"
    ):
        check({"source": "jsonl", "path": str(path), "columns": ColumnsConfig(prompt="question"), "chat": True})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "reasoning_gim"}, r"tasks\.train\.sums\.source: .*did you mean 'reasoning_gym'"),
        ({"name": None}, r"tasks\.train\.sums\.name: is missing"),
        ({"name": "chain_sums"}, r"name: unknown reasoning-gym dataset 'chain_sums'; did you mean 'chain_sum'"),
        ({"params": {"max_term": 5}}, r"unknown parameter of chain_sum 'max_term'; did you mean 'max_terms'"),
        ({"params": {"seed": 5}}, r"params\.seed: belongs one level up"),
        ({"size": None}, r"size: is missing"),
        ({"path": "x.jsonl"}, r"path: has no effect with source: reasoning_gym"),
        ({"prompt": "{expression"}, r"prompt: .*write a literal brace twice"),
        ({"prompt": "{}"}, r"every field needs a name"),
        ({"exclude": ["tests"]}, r"exclude: unknown eval task 'tests'; did you mean 'test'"),
        ({"demonstrations": "chain_sum"}, r"demonstrations: .*did you mean 'chain_sum_steps'"),
        ({"demonstration_params": {"share": 1}}, r"demonstration_params: has no effect"),
    ],
)
def test_a_generated_task_with_a_mistake(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check({"source": "reasoning_gym", "name": "chain_sum", "size": 5, **keys})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": None}, "path: is missing"),
        ({"path": "/nowhere/x.jsonl"}, r"path: cannot read /nowhere/x\.jsonl: No such file"),
        (
            {"columns": ColumnsConfig(prompt="questoin")},
            r"columns.prompt: .*line 1: unknown column 'questoin'; did you mean 'question'",
        ),
        (
            {"columns": ColumnsConfig(prompt="question", answer="solutoin")},
            r"columns.answer: .*did you mean 'solution'",
        ),
        ({"prompt": "{prompt} {solutionn}"}, r"prompt: .*did you mean 'solution'"),
        ({"demonstrations": "column:solutio"}, r"demonstrations: .*did you mean 'solution'"),
        ({"name": "chain_sum"}, "name: has no effect with source: jsonl"),
        ({"params": {"a": 1}}, "params: has no effect with source: jsonl"),
    ],
)
def test_a_file_task_with_a_mistake(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "1", "solution": "2"}) + "\n")
    with pytest.raises(ValueError, match=message):
        check(
            {
                "source": "jsonl",
                "path": str(path),
                "columns": ColumnsConfig(prompt="question", answer="solution"),
                **keys,
            }
        )


def test_a_file_that_is_empty_or_broken(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        check({"source": "jsonl", "path": str(path)})
    path.write_text("{")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        check({"source": "jsonl", "path": str(path)})


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"source": "huggingface", "path": "gorilla-llm/Berkeley-Function-Calling-Leaderboard"}, "path"),
        ({"source": "jsonl", "path": "data/BFCL_v4_multi_turn_base.json"}, "path"),
        (
            {"agent": AgentConfig("tools", params={"environment": "bfcl_eval.multi_turn:GorillaFileSystem"})},
            "agent.params.environment",
        ),
    ],
)
def test_a_benchmark_is_not_trained_on(keys: dict[str, Any], key: str) -> None:
    task = {"source": "reasoning_gym", "name": "chain_sum", "size": 5, **keys}
    with pytest.raises(
        ValueError, match=rf"^tasks\.train\.sums\.{re.escape(key)} \(.*BFCL's, by which models are judged"
    ):
        check(task)


def test_tasks_that_contradict_one_another() -> None:
    config = TaskConfig(source="reasoning_gym", name="chain_sum", size=5)
    with pytest.raises(ValueError, match="both have a task 'a'"):
        check_tasks(TasksConfig(train={"a": config}, eval={"a": config}))
    with pytest.raises(ValueError, match="only train tasks can leave out"):
        check(None, {"source": "reasoning_gym", "name": "chain_sum", "size": 5, "exclude": ["test"]})


def test_names_and_parameters_read_from_source_are_those_of_the_package() -> None:
    from reasoning_gym.factory import DATASETS

    files = dataset_files()
    assert files is not None
    assert files.keys() == DATASETS.keys()
    for name, path in files.items():
        assert dataset_params(path) == {field.name for field in dataclasses.fields(DATASETS[name][1])}


def test_checking_needs_neither_torch_nor_the_puzzles() -> None:
    code = (
        "import sys; from megatron_rl.config.schema import *; from megatron_rl.tasks import check_tasks;"
        "from megatron_rl.rewards import check_rewards;"
        "check_tasks(TasksConfig(train={'a': TaskConfig(source='reasoning_gym', name='countdown', size=3)}));"
        "check_rewards({'c': RewardConfig(reward='puzzle'), 'm': RewardConfig(reward='math')});"
        "heavy = {'torch', 'numpy', 'sympy', 'reasoning_gym', 'transformers', 'math_verify'} & sys.modules.keys();"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
