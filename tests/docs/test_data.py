"""docs/data.md names every source, converter and parameter there is, and its recipes are good."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from omegaconf import OmegaConf
from public_data import FORMATS

from megatron_rl.config.schema import TasksConfig
from megatron_rl.tasks import check_tasks
from megatron_rl.tasks.python_maths import MathsParams
from megatron_rl.tasks.sources import SOURCES, SPLIT
from megatron_rl.tasks.tool_house import HouseParams
from megatron_rl.tasks.tool_world import WorldParams

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")


def first_column(heading: str) -> list[str]:
    """The names in the first column of the table that begins with this row."""
    table = PAGE.partition(heading)[2].partition("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_tables_are_complete() -> None:
    assert set(first_column("| source | what |")) == {*SOURCES, SPLIT}  # and `file.py:function`
    assert set(first_column("| format | dataset | rows |")) == set(FORMATS)
    assert defaults_of("| parameter | default |") == dataclasses.asdict(WorldParams())
    assert defaults_of("| name | default |") == dataclasses.asdict(HouseParams())
    assert defaults_of("| name in python_maths | default |") == dataclasses.asdict(MathsParams())


def defaults_of(heading: str) -> dict[str, float]:
    """Parameters and defaults of the table that begins with this row."""
    shown: dict[str, float] = {}
    for row in PAGE.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]:
        names, defaults = (cell.strip() for cell in row.split("|")[1:3])
        shown |= zip(re.findall(r"`(\w+)`", names), map(float, defaults.split(", ")), strict=True)
    return shown


def test_its_recipes_are_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (row,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    rows = {"data/arithmetic.jsonl": row, "maths.jsonl": '{"prompt": "q"}', "code.jsonl": '{"prompt": "q"}'}
    Path("data/rlla_4k").mkdir(parents=True)
    for name, text in rows.items():
        assert json.loads(text)
        Path(name).write_text(text)
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        Path(name).write_text(code)
    toolrl = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "<response>"}}
    table = pyarrow.Table.from_pylist([{**toolrl, "extra_info": {"index": 0}}])
    pyarrow.parquet.write_table(table, "data/rlla_4k/train.parquet")
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 4
    for text in blocks:
        tasks = OmegaConf.to_object(OmegaConf.merge(TasksConfig, yaml.safe_load(text)["tasks"]))
        assert isinstance(tasks, TasksConfig)
        check_tasks(tasks)
        assert tasks.train
