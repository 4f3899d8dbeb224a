"""Every recipe of recipes/eval passes its check, and its columns and rewards take rows of the form that its dataset has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_rl.cli import main
from megatron_rl.config import load_recipe
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.evaluation.summary import deciding_column
from megatron_rl.rewards import Scorer
from megatron_rl.tasks import load_task
from megatron_rl.weights.create import create_model
from tests.rewards.chat_server import serving

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.name for path in (ROOT / "recipes" / "eval").glob("[a-z]*.yaml"))
CALL = {"name": "GetToken", "parameters": {"user": "ada"}}
CALLED = f"<think> x </think>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
BOX = "so it is \\boxed{%s}."

# Task -> rows as the dataset has them (made up), and a response to each that is right.
ROWS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "aime24": [({"id": 60, "problem": "1+1?", "solution": "\\boxed{002}", "url": "u"}, BOX % "2")],
    "aime25": [({"problem": "1+1?", "answer": "2", "id": "0"}, BOX % "2")],
    "amc23": [({"id": 0, "question": "1+1?", "answer": "2.0", "url": "u"}, BOX % "2")],
    "math500": [({"problem": "1/2?", "solution": "s", "answer": "\\frac{1}{2}", "subject": "Algebra"}, BOX % "1/2")],
    "minerva": [({"question": "c?", "answer": "3e8"}, BOX % "3.0\\times 10^8")],
    "olympiadbench": [({"question": "1+1?", "final_answer": ["2"], "is_multiple_answer": False}, BOX % "2")],
    "gsm8k": [({"question": "1+1?", "answer": "It is 1+1 = <<1+1=2>>2.\n#### 2"}, BOX % "2")],
    "level1": [({"system": "You have tools.", "user": "Log me in.", "answer": [CALL], "other": {"id": 1}}, CALLED)],
    "level2": [({"system": "You have tools.", "user": "Log me in.", "answer": CALL, "other": {"id": 1}}, CALLED)],
    "level3": [({"system": "You have tools.", "user": "Log me in.", "answer": [CALL], "other": {"id": 1}}, CALLED)],
}
for judged in ("arena_hard_v01", "arena_hard_v2", "creative_writing"):
    row = {"prompt": [{"role": "user", "content": "Tell me."}], "metadata": {"baseline": "It is so."}}
    ROWS[judged] = [(row, "A good answer.")]
PROGRAM = "```python\nprint(int(input()) + 1)\n```"
for source in ("apps", "codecontests", "codeforces", "taco"):
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    ROWS[source] = [({"prompt": [{"role": "user", "content": "Add one."}], "metadata": {"tests": tests}}, PROGRAM)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with room for 32k tokens, a character tokenizer that knows ASCII, and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    printable = "".join(map(chr, range(32, 127))) + "\n"
    sizes = CreateModelConfig(layers=1, hidden_size=32, ffn_size=32, vocab_size=128, characters=printable)
    sizes.max_positions = 65536
    create_model(folder, sizes, seed=0)
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def stored(task: Any, rows: list[dict[str, Any]], folder: Path, name: str) -> Path:
    """The rows where the task looks for them: its file, or a folder in place of the dataset on the hub."""
    path = Path(task.path) if task.source == "jsonl" else folder / name / f"{task.split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path if task.source == "jsonl" else path.parent


def judgment(number: int, body: dict[str, Any]) -> str:
    """Of a judge who likes what is good, and dislikes who does not know."""
    a, b = body["messages"][-1]["content"].split("<answer_a_")[1].split("<answer_b_")
    return "say:[[A>B]]" if "good" in a or "not know" in b else "say:[[B>A]]"


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    with serving(judgment) as server:
        yield server.url


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_checked_and_takes_its_datasets_rows(
    name: str, model: Path, data: Path, judge: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DATA", str(data))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JUDGE_URL", judge)
    path = str(ROOT / "recipes" / "eval" / name)
    config = load_recipe(path)
    for task, settings in config.tasks.eval.items():
        if settings.source != "reasoning_gym":
            rows = [row for row, _ in ROWS[task]]
            place = stored(settings, rows, data, task)
            if settings.source == "huggingface":
                settings.path, settings.subset = str(place), None
    assert main(["evaluate", path, "--model", str(model), "--check"]) == 0, capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(model)
    scorer = Scorer(config.rewards)
    for task, settings in config.tasks.eval.items():
        if settings.source == "reasoning_gym":
            settings.size = 2
        samples = load_task(task, settings, tokenizer)
        if settings.source == "reasoning_gym":
            responses = [f"I see.\nAnswer: {sample.answer}" for sample in samples]
        else:
            responses = [response for _, response in ROWS[task]]
        longest = max(len(sample.prompt_ids) for sample in samples)
        assert longest < 4 * config.rollout.max_prompt_tokens, f"{task}: {longest} characters for one prompt"
        lengths = [100] * len(samples)
        right = scorer.score(responses, samples, ["stop"] * len(samples), lengths)
        wrong = scorer.score(["I do not know."] * len(samples), samples, ["stop"] * len(samples), lengths)
        column = deciding_column(config, task, list(right[0]))
        assert [row[column] for row in right] == [1.0] * len(samples), task
        assert all(row[column] < config.trainer.eval_threshold for row in wrong), task
