"""docs/rewards has a page per reward with all its parameters, and its recipes and code work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from megatron_rl.config.schema import RewardConfig, TasksConfig
from megatron_rl.rewards import check_rewards, list_rewards, make_reward, registry
from megatron_rl.tasks import check_tasks

PAGES = Path(__file__).parents[2] / "docs" / "rewards"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("name", list_rewards())
def test_a_reward_has_a_page_with_its_parameters(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", page, re.MULTILINE))
    parameters = registry._ENTRIES[name].parameters()
    assert list(rows) == list(parameters)
    for key, parameter in parameters.items():
        shown = rows[key].strip("`")
        default = parameter.default
        if default is parameter.empty:
            assert shown == "required"
        else:
            assert (default if isinstance(default, str) else json.dumps(default)) == shown
    assert f"]({name}.md)" in (PAGES / "README.md").read_text("utf-8")


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_recipes_in_the_docs_are_good(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks(page, "python"):
        if "def word_limit" in code:
            Path("my_rewards.py").write_text(code)
    for text in blocks(page, "yaml"):
        tree: dict[str, Any] = yaml.safe_load(text)
        rewards = {name: OmegaConf.merge(RewardConfig, entry) for name, entry in tree.get("rewards", {}).items()}
        check_rewards({name: OmegaConf.to_object(entry) for name, entry in rewards.items()})  # type: ignore[misc]
        tasks = OmegaConf.to_object(OmegaConf.merge(TasksConfig, tree.get("tasks", {})))
        assert isinstance(tasks, TasksConfig)
        check_tasks(tasks)
        assert rewards or tasks.train


def test_links_lead_somewhere() -> None:
    for page in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tests_shown_are_tests() -> None:
    (shown,) = blocks(PAGES / "code_pass_rate.md", "json")
    program = "```python\nprint(sum(map(int, input().split())))\n```"
    assert make_reward("code_pass_rate")(program, {"answer": shown}) == 1.0


def test_code_in_the_docs_works() -> None:
    for code in blocks(PAGES / "your-own.md", "python"):
        scope: dict[str, Any] = {}
        exec(code, scope)
        if "parts" in scope:
            assert scope["parts"]()("please!", {}) == {"polite": 1.0, "calm": 0.0}
        if "word_limit" in scope:
            assert scope["word_limit"](2)("one two three", {}) == 0.0
    assert make_reward("math")(r"so \boxed{\frac{1}{2}}", {"answer": "0.5"}) == 1.0
