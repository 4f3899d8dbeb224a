"""A task whose prompts a user's own generator makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_rl.config import load_recipe
from megatron_rl.rewards import Scorer
from megatron_rl.tasks import check_tasks, load_tasks

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")


def test_the_environment_shown_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printable: PreTrainedTokenizerFast
) -> None:
    """The file and the recipe from the page: checked, loaded, scored."""
    section = PAGE.partition("## Prompts of your own generator")[2].partition("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.S)
    [shown] = re.findall(r"```yaml\n(.*?)```", section, re.S)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sorting.py").write_text(code)
    (tmp_path / "recipe.yaml").write_text(shown)
    config = load_recipe("recipe.yaml", ["run_dir=run", "model.path=m", "tasks.train.sorting.exclude=[held_out]"])
    check_tasks(config.tasks)
    first, again = (load_tasks(config.tasks, printable) for _ in range(2))
    assert first == again
    assert len(first.train) > 9900
    assert len(first.eval["held_out"]) == 200
    assert all(3 <= sample.metadata["count"] <= 6 for sample in first.train)
    sample = first.train[0]
    scorer = Scorer(config.rewards)
    assert isinstance(sample.answer, list)
    right = ", ".join(map(str, sample.answer))
    assert [row["in_place"] for row in scorer.score([right, "no"], [sample, sample])] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("size=null", r"tasks\.train\.x\.size: is missing"),
        ("source=world.py:none", r"source: cannot load the source .* has no function 'none'"),
        ("source=away.py:rows", r"source: cannot load the source 'away\.py:rows'"),
        (
            "params={most: 3}",
            r"source: world\.py:rows is called with seed, most: got an unexpected keyword argument 'most'",
        ),
        ("source=world.py:numbers", r"source: world\.py:numbers, row 1 is int, must be a dictionary"),
        ("source=world.py:nothing", r"source: world\.py:nothing yields nothing"),
        ("source=world.py:forgets", r"source: world\.py:forgets: TypeError: 'NoneType' object is not iterable"),
        ("source=world.py:raises", r"source: world\.py:raises: KeyError: 'level' \(.*world\.py, line 11\)"),
        ("columns.prompt=question", r"columns\.prompt: world\.py:rows, row 1: .*'question'"),
        ("path=data.jsonl", r"path: has no effect with source: world\.py:rows"),
    ],
)
def test_a_generator_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "world.py").write_text(
        "def rows(seed):\n    yield {'prompt': 'a', 'answer': seed}\n"
        "def numbers(seed):\n    yield 1\n"
        "def nothing(seed):\n    return iter(())\n"
        "def forgets(seed):\n    [seed]\n"
        "def raises(seed):\n    yield {'prompt': 'a'}\n    raise KeyError('level')\n"
    )
    (tmp_path / "recipe.yaml").write_text('tasks: {train: {x: {source: "world.py:rows", size: 4}}}\n')
    config = load_recipe("recipe.yaml", ["run_dir=run", "model.path=m", f"tasks.train.x.{change}"])
    with pytest.raises(ValueError, match=message):
        check_tasks(config.tasks)
