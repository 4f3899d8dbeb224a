"""`megatron-rl evaluate --harness`: the real packages, vLLM's server of a random model, questions in their own formats."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rewards.tiny_models import CHAT_TEMPLATE, chat_model

from megatron_rl.cli import main
from megatron_rl.evaluation.harnesses import HARNESSES, programs

from .serving import VllmServer

pytestmark = pytest.mark.engine
SUBJECTS = ("biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history")
SUBJECTS += ("law", "math", "other", "philosophy", "physics", "psychology")


def needs(name: str) -> pytest.MarkDecorator:
    installed = (programs(name) / HARNESSES[name].program).exists()
    return pytest.mark.skipif(not installed, reason=f"{name} is not installed (make eval-setup)")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = chat_model(tmp_path_factory.mktemp("served") / "model")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    """Base URL; the name is the folder, as BFCL wants it."""
    served = VllmServer(model, model.parent / "server.log", "--served-model-name", str(model))
    try:
        yield served.url()
    finally:
        served.stop()


def evaluated(run_dir: Path, *arguments: str) -> dict[str, Any]:
    """The command's evaluation.json, whose metrics are those of metrics.jsonl."""
    assert main(["evaluate", "--check", *arguments, f"run_dir={run_dir}", "model.dtype=float32"]) == 0
    assert main(["evaluate", *arguments, f"run_dir={run_dir}", "model.dtype=float32"]) == 0
    content: dict[str, Any] = json.loads((run_dir / "evaluation.json").read_text())
    [row] = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert {name: value["value"] for name, value in content["metrics"].items()}.items() <= row.items()
    assert not (run_dir / "responses").exists()
    return content


@needs("lm_eval")
def test_mmlu_pro_on_questions_of_its_format(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is the command's own. Guided to one answer, the model is right where that is the answer."""
    data = tmp_path / "TIGER-Lab" / "MMLU-Pro"
    data.mkdir(parents=True)
    for split, each in (("validation", 5), ("test", 2)):
        rows = [
            {
                "question": f"What is {i}?",
                "options": ["this", "that"],
                "answer": "B" if i or subject == "law" else "A",
                "cot_content": "A: Let's think step by step. The answer is (A).",
                "category": subject,
            }
            for subject in SUBJECTS
            for i in range(each)
        ]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "of another service")
    guided = {"structured_outputs": {"choice": ["the answer is (B)"]}, "max_gen_toks": 20}
    more = json.dumps(["--gen_kwargs", json.dumps(guided)])
    given = ("--harness", "lm_eval", "--model", str(model), f"evaluation.harness.arguments={more}")
    content = evaluated(tmp_path / "run", *given)
    assert content["tasks"]["mmlu_pro"]["prompts"] == 28
    assert content["metrics"]["eval/mmlu_pro/avg@1"]["value"] == 15 / 28
    own = json.loads(next((tmp_path / "run" / "harness").rglob("results_*.json")).read_text())
    assert own["results"]["mmlu_pro"]["exact_match,custom-extract"] == pytest.approx(15 / 28)


@needs("bfcl")
def test_bfcl_on_two_of_its_categories(model: Path, server: str, tmp_path: Path) -> None:
    """A random model calls nothing: right where no tool helps, wrong where one does. Its tokenizer does not know every
    character of the questions, which fails one request in each."""
    section = "evaluation.harness"
    given = (f"{section}.handler=Qwen/Qwen3-8B-FC", f"{section}.sets=[irrelevance, live_relevance]")
    sampled = f'{section}.arguments=["--temperature", "1.0"]'  # greedy, it never ends
    asked = (
        "--harness",
        "bfcl",
        "--model",
        str(model),
        "--endpoint",
        server,
        "evaluation.endpoint.max_failed_share=0.02",
    )
    content = evaluated(tmp_path / "run", *asked, *given, sampled)
    found = {name: (value["value"], value["prompts"]) for name, value in content["metrics"].items() if "/avg@" in name}
    assert found == {"eval/bfcl_irrelevance/avg@1": (1.0, 240), "eval/bfcl_live_relevance/avg@1": (0.0, 16)}
    assert content["failed_requests"] == 2
    strict = [*asked[:-1], *given, sampled, f"run_dir={tmp_path / 'run'}"]
    assert main(["evaluate", *strict[:6], "--served-name", "other", *strict[6:]]) == 2


@needs("evalplus")
def test_humaneval_on_problems_of_its_format(
    model: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {"add": "return a + b", "first": "return a", "larger": "return max(a, b)"}
    problems = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f'def {name}(a: int, b: int) -> int:\n    """Do it."""\n',
            "contract": "",
            "canonical_solution": f"    {body}\n",
            "entry_point": name,
            "base_input": [[1, 2]],
            "plus_input": [[5, 2]],
            "atol": 0,
        }
        for i, (name, body) in enumerate(bodies.items())
    ]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", str(tmp_path / "problems.jsonl"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sampled = ("trainer.eval_rollouts=2", "trainer.eval_temperature=1.0")
    asked = ("--harness", "evalplus", "--model", str(model), "--endpoint", server)
    content = evaluated(tmp_path / "run", *asked, "evaluation.harness.sets=[humaneval]", *sampled)
    assert {name: value["value"] for name, value in content["metrics"].items() if "humaneval" in name} == {
        f"eval/humaneval{plus}/{name}@{n}": 0
        for plus in ("", "_plus")
        for name, n in (("avg", 2), ("pass", 1), ("pass", 2))
    }

    # What a model that solves some of them would have left, graded by the package.
    written = tmp_path / "own" / "humaneval"
    written.mkdir(parents=True)
    solutions = [problems[0]["prompt"] + "    return a + b", "def first(a, b): return 1", "def larger(a, b): return a"]
    rows = [{"task_id": f"HumanEval/{i}", "solution": text} for i, text in enumerate(solutions)]
    (written / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        programs("evalplus") / "evalplus.evaluate",
        "--dataset",
        "humaneval",
        "--samples",
        written / "some.jsonl",
    ]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ})
    job: Any = SimpleNamespace(folder=tmp_path / "own", sets=["humaneval"])
    graded = {one.name: one.grades for one in HARNESSES["evalplus"].read(job)}
    assert graded == {"humaneval": [[1], [1], [0]], "humaneval_plus": [[1], [0], [0]]}
    shutil.rmtree(tmp_path / "own")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--harness", "bfcl"), r"`evaluation.harness.handler` names none"),
        (("--harness", "lm_eval", "evaluation.harness.handler=x"), "is bfcl's"),
        (("--harness", "lm_eval", "evaluation.harness.sets=[]"), "is an empty list"),
        (("--harness", "evalplus", "evaluation.harness.sets=[mmlu_pro]"), "evalplus has humaneval and mbpp"),
        (
            ("--harness", "lm_eval", "trainer.eval_rollouts=2", "trainer.eval_temperature=1.0"),
            "asks each question once",
        ),
        (("--harness", "other"), "evaluation.harness.name"),
    ],
)
def test_a_harness_that_cannot_run_is_refused(
    model: Path, tmp_path: Path, given: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "--check", "--model", str(model), f"run_dir={tmp_path / 'run'}", *given]) == 2
    assert reason.strip("r") in capsys.readouterr().err
