"""The harnesses of `megatron-rl evaluate --harness`: each one's commands, what it is told, and where its figures lie.

They are other projects' packages, each in an environment of its own below `.venv-eval` (`make eval-setup`), and ask a
served model.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.schema import Config

if TYPE_CHECKING:  # the recipe check reads this without torch
    from megatron_rl.rollout.endpoint_engine import Server

ENVIRONMENTS = Path(__file__).resolve().parents[2] / ".venv-eval"


@dataclass(frozen=True)
class Job:
    """A harness's task: its sets on a served model, with its files in `folder`."""

    config: Config
    server: Server
    folder: Path

    @property
    def sets(self) -> Sequence[str]:
        section = self.config.evaluation.harness
        assert section.name is not None
        return section.sets or HARNESSES[section.name].sets

    @property
    def arguments(self) -> list[str]:
        return self.config.evaluation.harness.arguments

    @property
    def limit(self) -> int | None:
        return self.config.evaluation.harness.limit

    @property
    def url(self) -> str:
        return self.server.urls[0]


@dataclass(frozen=True)
class Graded:
    """A set's grades.

    Attributes:
        grades: a list per question, of its responses' grades; 1 is right.
        graded_by: the harness's own metric.
        failed: questions whose request failed, which the harness counts as wrong.
    """

    name: str
    grades: list[list[float]]
    graded_by: str
    failed: int = 0


@dataclass(frozen=True)
class Harness:
    """One package.

    Attributes:
        package: its name in the index.
        program: what its first command runs, below the environment's `bin`.
        sets: what is run where the recipe does not say.
        commands: the programs' names and arguments, one after the other.
        read: the grades in the files that they left.
        prepare: writes what the commands read.
        key: the variable from which the package takes the server's key.
        variables: further ones.
        totals: the package's own means over several sets.
    """

    package: str
    program: str
    sets: tuple[str, ...]
    commands: Callable[[Job], list[list[str]]]
    read: Callable[[Job], Iterator[Graded]]
    prepare: Callable[[Job], None] = field(default=lambda job: None)
    key: str = "OPENAI_API_KEY"
    variables: Callable[[Job], Mapping[str, str]] = field(default=lambda job: {})
    totals: Callable[[Job], Mapping[str, float]] = field(default=lambda job: {})


def programs(name: str) -> Path:
    """The folder with a harness's programs."""
    return ENVIRONMENTS / name / "bin"


def version(name: str) -> str:
    """The version of the package that is installed there."""
    places = [str(path) for path in (ENVIRONMENTS / name).glob("lib/python*/site-packages")]
    installed = importlib.metadata.distributions(name=HARNESSES[name].package, path=places)
    return next(iter(installed)).version


def _rows(path: Path) -> list[dict[str, object]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _number(row: Mapping[str, object], key: str) -> float:
    value = row[key]
    if not isinstance(value, int | float):
        raise ValueError(
            f"evaluation.harness.sets: one has {key}={value!r:.80} for a question, and a grade is a number; leave it out"
        )
    return float(value)


# ------------------------------------------------------------------------------------------------------------ lm_eval
def _lm_eval_commands(job: Job) -> list[list[str]]:
    model_args = {
        "model": job.server.name,
        "base_url": f"{job.url}/completions",
        "tokenizer": job.config.model.path,
        "max_length": job.server.room,  # without it 2,048 tokens for prompt and answer, and prompts are cut
        "num_concurrent": job.config.evaluation.endpoint.max_in_flight,
        "timeout": int(job.config.evaluation.endpoint.request_seconds),
    }
    model = ",".join(f"{key}={value}" for key, value in model_args.items() if value is not None)
    options = ["--tasks", ",".join(job.sets), "--output_path", str(job.folder), "--log_samples", "--model_args", model]
    options += [] if job.limit is None else ["--limit", str(job.limit)]
    return [["lm-eval", "run", "--model", "local-completions", *options, *job.arguments]]


def _lm_eval_grades(job: Job) -> Iterator[Graded]:
    """A set is a task, or a group with its tasks' questions together; graded by the task's first metric and filter."""
    newest = max(job.folder.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    date = newest.stem.removeprefix("results_")
    groups = json.loads(newest.read_text(encoding="utf-8")).get("group_subtasks", {})

    def tasks(name: str) -> list[str]:
        return [task for part in groups[name] for task in tasks(part)] if groups.get(name) else [name]

    for name in job.sets:
        grades, graded_by = [], ""
        for task in tasks(name):
            rows = _rows(newest.parent / f"samples_{task}_{date}.jsonl")
            metrics, chosen = rows[0]["metrics"], rows[0]["filter"]
            assert isinstance(metrics, list)
            metric = str(metrics[0])
            grades += [[_number(row, metric)] for row in rows if row["filter"] == chosen]
            graded_by = f"{metric}, {chosen}"
        yield Graded(name, grades, graded_by)


# --------------------------------------------------------------------------------------------------------------- BFCL
# Columns of its table of totals that do not need `memory` or `web_search`.
_AGENTIC = ("memory", "web_search", "format_sensitivity")


def _is(name: str) -> Callable[[str], bool]:
    return lambda category: category == name


_BFCL_SETS: Mapping[str, Callable[[str], bool]] = {  # collections by the names of their categories
    "live": lambda category: category.startswith("live_"),
    "multi_turn": lambda category: category.startswith("multi_turn_"),
    "non_live": lambda category: not category.startswith(("live_", "multi_turn_", *_AGENTIC)),
}
_TOTALS = {"Non-Live AST Acc": "non_live", "Live Acc": "live", "Multi Turn Acc": "multi_turn"}


def _bfcl_commands(job: Job) -> list[list[str]]:
    which = ["--model", str(job.config.evaluation.harness.handler), "--test-category", ",".join(job.sets)]
    some, partial = ([], []) if job.limit is None else (["--run-ids"], ["--partial-eval"])
    served = ["--backend", "vllm", "--skip-server-setup", "--local-model-path", str(job.config.model.path)]
    threads = ["--num-threads", str(job.config.evaluation.endpoint.max_in_flight)]
    return [
        ["bfcl", "generate", *which, *some, *served, *threads, *job.arguments],
        ["bfcl", "evaluate", *which, *partial],
    ]


def _choose_bfcl(job: Job) -> None:
    """Names the first questions of each category, in the file that `--run-ids` reads."""
    if job.limit is None:
        return
    [data] = programs("bfcl").parent.glob("lib/python*/site-packages/bfcl_eval/data")
    files = {path.stem.split("_", 2)[2]: path for path in sorted(data.glob("BFCL_v*.json"))}
    chosen = dict[str, list[str]]()
    for name in job.sets:
        categories = [category for category in files if _BFCL_SETS.get(name, _is(name))(category)]
        if not categories:
            raise ValueError(f"evaluation.harness.sets: BFCL has no {name}; with `limit` there are {', '.join(files)}")
        chosen |= {category: [str(row["id"]) for row in _rows(files[category])[: job.limit]] for category in categories}
    (job.folder / "test_case_ids_to_generate.json").write_text(json.dumps(chosen), encoding="utf-8")


def _bfcl_grades(job: Job) -> Iterator[Graded]:
    """A set is a category of BFCL's, also where a collection of them was asked for."""
    for path in sorted((job.folder / "score").rglob("BFCL_v*_score.json")):
        head = _rows(path)[0]
        right, total = int(_number(head, "correct_count")), int(_number(head, "total_count"))
        results = next((job.folder / "result").rglob(path.name.replace("_score", "_result")))
        failed = sum("Error during inference" in json.dumps(row.get("result")) for row in _rows(results))
        category = path.name.removesuffix("_score.json").split("_", 2)[2]
        yield Graded(f"bfcl_{category}", [[1.0]] * right + [[0.0]] * (total - right), "BFCL", failed)


def _bfcl_totals(job: Job) -> Mapping[str, float]:
    with (job.folder / "score" / "data_overall.csv").open(encoding="utf-8", newline="") as file:
        [row] = csv.DictReader(file)
    asked = {column: name for column, name in _TOTALS.items() if name in job.sets}
    return {f"bfcl_{name}": float(row[column].rstrip("%")) / 100 for column, name in asked.items()}


# ----------------------------------------------------------------------------------------------------------- evalplus
def _evalplus_commands(job: Job) -> list[list[str]]:
    trainer = job.config.trainer
    served = ["--model", job.server.name, "--backend", "openai", "--base_url", job.url, "--root", str(job.folder)]
    drawn = ["--n_samples", str(trainer.eval_rollouts), "--temperature", str(trainer.eval_temperature)]
    drawn = ["--greedy"] if trainer.eval_rollouts == 1 else drawn
    return [["evalplus.evaluate", "--dataset", name, *served, *drawn, *job.arguments] for name in job.sets]


def _evalplus_grades(job: Job) -> Iterator[Graded]:
    """Two sets each: right by the original tests, and (`_plus`) by evalplus's further ones, too."""
    for name in job.sets:
        [path] = (job.folder / name).glob("*_eval_results.json")
        by_question = json.loads(path.read_text(encoding="utf-8"))["eval"].values()
        passed = [
            [(row["base_status"] == "pass", row["plus_status"] == "pass") for row in rows] for rows in by_question
        ]
        yield Graded(name, [[float(base) for base, _ in rows] for rows in passed], "base tests")
        yield Graded(f"{name}_plus", [[float(base and plus) for base, plus in rows] for rows in passed], "all tests")


HARNESSES: Mapping[str, Harness] = {
    "lm_eval": Harness("lm_eval", "lm-eval", ("mmlu_pro",), _lm_eval_commands, _lm_eval_grades),
    "bfcl": Harness(
        "bfcl-eval",
        "bfcl",
        ("non_live", "live", "multi_turn"),
        _bfcl_commands,
        _bfcl_grades,
        _choose_bfcl,
        key="REMOTE_OPENAI_API_KEY",
        variables=lambda job: {"BFCL_PROJECT_ROOT": str(job.folder), "REMOTE_OPENAI_BASE_URL": job.url},
        totals=_bfcl_totals,
    ),
    "evalplus": Harness("evalplus", "evalplus.evaluate", ("humaneval", "mbpp"), _evalplus_commands, _evalplus_grades),
}
