"""`megatron-rl evaluate --harness`: the real packages, vLLM's server of a random model, questions in their own formats."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rewards.tiny_models import CHAT_TEMPLATE, chat_model

from megatron_rl.cli import main
from megatron_rl.evaluation.harnesses import HARNESSES, programs
from tests.evaluation.server import serving

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


def knows_one_question(data: Path) -> Callable[[dict[str, Any], int], tuple[int, dict[str, Any]]]:
    """Makes the calls of BFCL's answers to the second question of `multi_turn_base`, as Qwen3 writes them, turn by turn; to
    others, and once its calls are answered, it only talks."""
    name = "BFCL_v4_multi_turn_base.json"
    [question, answers] = (
        json.loads(file.read_text().splitlines()[1]) for file in (data / name, data / "possible_answer" / name)
    )
    asked = [turn[0]["content"] for turn in question["question"]]

    def written(call: str) -> str:
        node: Any = ast.parse(call, mode="eval").body
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        return f"<tool_call>\n{json.dumps({'name': node.func.id, 'arguments': arguments})}\n</tool_call>"

    def rule(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        *_, last = (said.partition("<|im_end|>")[0] for said in request["prompt"].split("<|im_start|>user\n")[1:])
        calls = [*map(written, answers["ground_truth"][asked.index(last)])] if last in asked else []
        text = "\n".join(calls) or "There is no more to do."
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return 200, {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}], "usage": usage}

    return rule


@needs("bfcl")
def test_bfcl_holds_conversations(model: Path, tmp_path: Path) -> None:
    """Of two questions per category; a model that knows one is right there, where all of its functions are at hand."""
    [data] = programs("bfcl").parent.glob("lib/python*/site-packages/bfcl_eval/data")
    section = "evaluation.harness"
    with serving(knows_one_question(data), str(model)) as server:
        given = (f"{section}.handler=Qwen/Qwen3-8B-FC", f"{section}.sets=[multi_turn]", f"{section}.limit=2")
        content = evaluated(
            tmp_path / "run", "--harness", "bfcl", "--model", str(model), "--endpoint", server.url, *given
        )
    found = {name: (value["value"], value["prompts"]) for name, value in content["metrics"].items() if "/avg@" in name}
    half, none = (0.5, 2), (0.0, 2)
    by_set = {"_base": half, "_long_context": half, "_miss_func": none, "_miss_param": none, "": (0.25, 0)}
    assert found == {f"eval/bfcl_multi_turn{name}/avg@1": numbers for name, numbers in by_set.items()}
    turns = next((tmp_path / "run" / "harness" / "result").rglob("*multi_turn_base_result.json")).read_text()
    assert [len(json.loads(line)["result"]) for line in turns.splitlines()] == [4, 4]


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
        (("--harness", "evalplus", "evaluation.harness.limit=3"), "asks all of its questions"),
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
