"""The endpoint as an engine, and evaluations with it, against a server that answers by a rule and misbehaves on purpose.

The real server is in tests/e2e.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rewards import chat_server
from transformers import AutoTokenizer

from megatron_rl.cli import main
from megatron_rl.config import load_recipe
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.schema import EndpointConfig
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation import response_log as kept
from megatron_rl.rollout.dispatch import Dispatcher
from megatron_rl.rollout.endpoint_engine import EndpointEngine, Server, find_server
from megatron_rl.rollout.engine import EngineError, Failure
from megatron_rl.rollout.episode import single_turn
from megatron_rl.rollout.generate import generate
from megatron_rl.rollout.sampling import Sampling, rollout_seed
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.runtime.http import EndpointError
from megatron_rl.tasks.sources import items_of
from megatron_rl.tasks.tool_house import ToolHouse
from megatron_rl.weights.create import create_model

from .server import Rule, answer, serving

SAMPLES = [Sample(f"sums/{i}", "sums", f"{i}+1=", [i, 1, 2]) for i in range(4)]
DRAWN = Sampling(1.0, 0.9, 16)
ONCE = EndpointConfig(retries=0, request_seconds=5)


def echo(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
    return answer(request, [request["prompt"][0], 7])


@contextmanager
def engine_of(url: str, config: EndpointConfig = ONCE) -> Iterator[EndpointEngine]:
    engine = EndpointEngine(Server((url,), "tiny", room=64), config)
    try:
        yield engine
    finally:
        engine.shutdown()


def ask(
    rule: Rule,
    config: EndpointConfig = ONCE,
    count: int = 2,
    sampling: Sampling = DRAWN,
    on_finished: Callable[[Rollout], None] = lambda rollout: None,
) -> Any:
    failed: list[Failure] = []
    with serving(rule) as server, engine_of(server.url, config) as engine:
        dispatcher = Dispatcher(ALONE, engine.room)
        turns = single_turn(sampling, 5, -1)
        drawn = generate(engine, dispatcher, SAMPLES, count, turns, on_finished, failed.append)
        return server, ([drawn.held[row] for row in sorted(drawn.held)], failed)


def test_each_request_has_the_tokens_and_the_seed_of_its_rollout() -> None:
    server, (rollouts, failed) = ask(echo)
    assert not failed
    assert [(r.sample_id, r.index, r.response_ids.tolist()) for r in rollouts] == [
        (sample.id, index, [sample.prompt_ids[0], 7]) for sample in SAMPLES for index in range(2)
    ]
    sent = {(tuple(request["prompt"]), request["seed"]) for request in server.requests}
    assert sent == {(tuple(s.prompt_ids), rollout_seed(5, -1, s.id, i)) for s in SAMPLES for i in range(2)}
    for request in server.requests:  # nothing is left to the model's generation_config.json
        assert (request["temperature"], request["top_p"], request["max_tokens"]) == (1.0, 0.9, 16)
        assert (request["top_k"], request["min_p"], request["repetition_penalty"]) == (0, 0.0, 1.0)


def test_greedy_requests_have_no_seed() -> None:
    server, _ = ask(echo, sampling=Sampling(0.0, 1.0, 16), count=1)
    assert not any("seed" in request for request in server.requests)


def test_a_server_that_fails_for_a_while_is_asked_again() -> None:
    def flaky(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        return echo(request, attempt) if attempt > 2 else (503, {"error": "starting"})

    _, (rollouts, failed) = ask(flaky, EndpointConfig(retries=3))
    assert len(rollouts) == 8
    assert not failed


def broken_for_one(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
    return (500, {"error": "no"}) if request["prompt"][0] == 2 else echo(request, attempt)


def test_what_stays_unanswered_is_named_and_nothing_else_is_lost() -> None:
    _, (rollouts, failed) = ask(broken_for_one)
    assert {rollout.sample_id for rollout in rollouts} == {"sums/0", "sums/1", "sums/3"}
    assert sorted(failure.request.name for failure in failed) == [("sums/2", 0), ("sums/2", 1)]
    assert "HTTP 500" in failed[0].reason


def test_an_aborted_response_is_no_response() -> None:
    _, (rollouts, failed) = ask(lambda request, _: answer(request, [1], finish_reason="abort"))
    assert (len(rollouts), len(failed)) == (0, 8)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"token_ids": None}, "does not return token ids"),
        *(({"token_ids": [token]}, "no whole numbers") for token in (1.5, "5", True, -1, 2**31)),
        ({"token_ids": [1] * 17}, "17 tokens to a request of at most 16"),
        *(({"prompt_token_ids": ids}, "changed the prompt") for ids in ([9, 9], None)),
    ],
)
def test_a_server_that_does_not_keep_to_tokens_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ask(lambda request, _: answer(request, [1], **changes))


def test_a_server_that_refuses_access_ends_the_evaluation() -> None:
    with pytest.raises(EndpointError, match="401"):
        ask(lambda request, _: (401, {"error": "no key"}))


def test_a_full_disk_is_said_as_it_is() -> None:
    def keep(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        ask(echo, on_finished=keep)


def test_the_tokens_of_a_sequence_are_scored() -> None:
    def score(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        assert (request["prompt_logprobs"], request["max_tokens"]) == (0, 1)
        entries = [None, *({str(token): {"logprob": -token / 8}} for token in request["prompt"][1:])]
        return answer(request, [1], prompt_logprobs=entries)

    with serving(score) as server, engine_of(server.url) as engine:
        scores = engine.score([[1, 2, 3], [4, 8]])
        assert [row.tolist() for row in scores] == [[-0.25, -0.375], [-1.0]]
        assert engine.max_scored == 63
    for entries in (None, [], [None, None], [None, {"3": {"logprob": -1}}]):
        with (
            serving(lambda request, _, entries=entries: answer(request, [1], prompt_logprobs=entries)) as server,
            engine_of(server.url) as engine,
            pytest.raises(ValueError, match="log-probs of a prompt"),
        ):
            engine.score([[1, 2]])


def test_a_servers_weights_are_its_own() -> None:
    with engine_of("http://127.0.0.1:9/v1") as engine:
        for ask_for in (lambda: engine.load([], 1), engine.sleep, lambda: engine.wake("cache")):
            with pytest.raises(EngineError, match="serves 'tiny' with weights of its own"):
                ask_for()


def test_the_server_is_looked_at_before_it_is_asked() -> None:
    with serving(echo, "a", "b", room=100) as server:
        assert find_server([server.url], "b", ONCE, 100).name == "b"
        for name, longest, match in ((None, 10, "'a', 'b'"), ("c", 10, "not 'c'"), ("a", 101, "max-model-len 100")):
            with pytest.raises(ValueError, match=match):
                find_server([server.url], name, ONCE, longest)
    with pytest.raises(ValueError, match="OpenAI-compatible"):
        find_server([server.url], "a", ONCE, 10)


# ------------------------------------------------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    create_model(folder, CreateModelConfig(), seed=0)
    (folder / "model.safetensors").unlink()  # an endpoint has the weights
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(1, 5)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "run_dir": str(tmp_path / "run"),
        "tasks": {"eval": {"sums": {"source": "jsonl", "path": str(tmp_path / "sums.jsonl")}}},
        "rewards": {"correct": {"reward": "format", "params": {"pattern": "[24]"}}},
        "rollout": {"max_prompt_tokens": 16, "max_tokens": 8},
        "evaluation": {"endpoint": {"retries": 0}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


ONE_MAY_FAIL = "evaluation.endpoint.max_failed_share=0.25"


def double(model: Path) -> Rule:
    """Says the sum, as text in the model's tokens; fails for 3."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def rule(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        first = int(tokenizer.decode(request["prompt"])[0])
        return (
            (500, {})
            if first == 3
            else answer(request, tokenizer(str(2 * first), add_special_tokens=False)["input_ids"])
        )

    return rule


def test_failed_requests_are_shown_and_fail_the_command(
    model: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(double(model)) as server:
        arguments = ["evaluate", str(recipe), "--model", str(model), "--endpoint", server.url]
        assert main(arguments) == 1
        shown = capsys.readouterr()
        assert "1 requests (25.0%) stayed unanswered" in shown.err
        assert "failed" in shown.out
        assert main([*arguments, ONE_MAY_FAIL]) == 0
    content = json.loads((recipe.parent / "run" / "evaluation.json").read_text())
    assert content["failed_requests"] == 1
    assert content["metrics"]["eval/sums/avg@1"]["value"] == pytest.approx(2 / 3), "8 is wrong; the lost one is not"
    assert content["model"]["served_name"] == "tiny"
    records = (recipe.parent / "run" / "samples" / "sums.jsonl").read_text().splitlines()
    assert [json.loads(line)["response"] for line in records] == ["2", "4", "8"]
    assert (recipe.parent / "run" / "previous_1" / "evaluation.json").exists(), "an earlier evaluation is kept"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--endpoint", "http://127.0.0.1:9/v1"], "--model DIR"),
        (["--served-name", "tiny"], "without --endpoint"),
        (["--model", "nowhere"], "does not exist"),
        (["--model", "."], "neither a Hugging Face folder"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(
    arguments: list[str], match: str, recipe: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(recipe.parent)
    extra = [] if "--model" in arguments else ["model.create={}"]
    assert main(["evaluate", str(recipe), *arguments, *extra]) == 2
    assert match in capsys.readouterr().err
    assert not (recipe.parent / "run").exists()


def test_data_without_what_the_reward_needs_is_refused_before_anybody_is_asked(
    model: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(double(model)) as server:
        arguments = ["evaluate", str(recipe), "--model", str(model), "--endpoint", server.url]
        assert main([*arguments, "rewards.correct.reward=puzzle", "rewards.correct.params={}"]) == 2
        assert not server.requests
    assert (
        "sums.jsonl, line 1: the reward 'correct' cannot score it: the puzzle reward needs" in capsys.readouterr().err
    )


def test_a_training_runs_folder_is_not_touched(model: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recipe.parent / "run"
    (run / "checkpoints").mkdir(parents=True)
    with serving(double(model)) as server:
        arguments = ["evaluate", str(recipe), "--model", str(model), "--endpoint", server.url]
        assert main([*arguments, f"run_dir={run}"]) == 2
        assert "holds a training run" in capsys.readouterr().err
        main(arguments)
    assert {path.name for path in run.iterdir()} == {"checkpoints", "evaluation"}
    assert (run / "evaluation" / "endpoint" / "evaluation.json").exists()


def test_a_judge_is_asked_once_also_by_the_next_evaluation(model: Path, recipe: Path) -> None:
    def grade(number: int, body: dict[str, Any]) -> str:
        return f"score:{(0.25, 1.0, 0.5)[number]}"

    def last_row() -> dict[str, float]:
        return dict(json.loads((recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()[-1]))

    with serving(double(model)) as server, chat_server.serving(grade) as judge:
        arguments = ["evaluate", str(recipe), "--model", str(model), "--endpoint", server.url, ONE_MAY_FAIL]
        arguments += ["rewards.judge.reward=judge"]
        arguments += ["rewards.judge.params.model=m", f"rewards.judge.params.urls={judge.url}"]
        assert main(arguments) == 0
        first = last_row()
        assert (first["judge/scored"], first["judge/cache_hits"], len(judge.requests)) == (3, 0, 3)
        samples = recipe.parent / "run" / "samples" / "sums.jsonl"
        grades = [json.loads(line)["rewards"]["judge"] for line in samples.read_text().splitlines()]
        assert sorted(grades) == [0.25, 0.5, 1.0]

        assert main(arguments) == 0
        again = last_row()
        assert (again["judge/scored"], again["judge/cache_hits"], len(judge.requests)) == (3, 3, 3)
        assert [json.loads(line)["rewards"]["judge"] for line in samples.read_text().splitlines()] == grades


def test_an_evaluation_that_was_killed_asks_only_for_what_is_missing(
    model: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, release = recipe.parent / "run", threading.Event()
    tokenizer = AutoTokenizer.from_pretrained(model)

    def by_seed(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        return answer(request, tokenizer(str(request["seed"] % 1000), add_special_tokens=False)["input_ids"])

    def some(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        if tokenizer.decode(request["prompt"])[0] in "34":
            release.wait(60)
        return by_seed(request, attempt)

    def command(url: str, *more: str) -> list[str]:
        sampled = ["trainer.eval_rollouts=3", "trainer.eval_temperature=1.0"]
        return ["evaluate", str(recipe), "--model", str(model), "--endpoint", url, *sampled, *more]

    def responses() -> list[str]:
        return (run / "samples" / "sums.jsonl").read_text().splitlines()

    with serving(by_seed) as server:
        assert main(command(server.url)) == 0
        expected = responses()
        assert len(expected) == len(server.requests) == 12
        assert not (run / "responses").exists()

    with serving(some) as server:
        process = subprocess.Popen([sys.executable, "-m", "megatron_rl", *command(server.url)])
        left = run / "responses" / "engine0.jsonl"
        deadline = time.monotonic() + 120
        while not left.exists() or left.read_text().count("\n") < 6:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
        release.set()
    assert not (run / "evaluation.json").exists()
    lines = left.read_text().splitlines()
    left.write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])  # as a kill in the middle of a write leaves it
    saved, origin = left.read_text(), (left.parent / "origin.json").read_text()

    def again(*more: str) -> int:
        with serving(by_seed) as server:
            assert main(command(server.url, *more)) == 0
            return len(server.requests)

    assert again() == 7
    assert "continuing an interrupted evaluation: 5 responses" in capsys.readouterr().out
    assert responses() == expected
    assert not (run / "responses").exists()

    def leave() -> None:
        left.parent.mkdir()
        left.write_text(saved)
        (left.parent / "origin.json").write_text(origin)

    leave()
    data = recipe.parent / "sums.jsonl"
    data.write_text(data.read_text().replace("1+1=", "7+7="))
    assert again() == 12 - 5 + "".join(lines[:5]).count("sums/0")  # another prompt under a known name

    for change in ("trainer.eval_temperature=0.5", "seed=8", "rollout.max_tokens=7"):
        leave()
        assert again(change) == 12
        key = change.partition("=")[0]
        assert f"an interrupted evaluation is not continued, because of another {key}" in capsys.readouterr().out


HOUSE = Path(__file__).parents[2] / "recipes" / "cpu" / "tool_house.yaml"


def knows_the_house(folder: Path, fails: Callable[[str], bool]) -> Rule:
    """Converses as the demonstrations do: what was said before decides the turn. `fails`: what has no answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = load_recipe(HOUSE)
    said: dict[str, str] = {}
    for item in items_of(replace(config.tasks.eval["house_test"], size=3)):
        house = ToolHouse()
        house.reset({"metadata": item.metadata, "tools": item.tools})
        text = f"{item.prompt}\n>"
        for call in item.tool_calls or []:
            body = json.dumps({"name": call["name"], "arguments": call["parameters"]})
            said[text] = f"<tool_call>\n{body}\n</tool_call>"
            text += f"{said[text]}<eos>\n={house.call(call['name'], call['parameters'])}\n>"
        said[text] = str(item.answer)

    def rule(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        text = tokenizer.decode(request["prompt"])
        if fails(text):
            return 500, {}
        drawn = tokenizer(said[text], add_special_tokens=False)["input_ids"]
        return answer(request, [*drawn, tokenizer.eos_token_id])

    return rule


def test_conversations_with_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole tasks succeed; one that the server leaves is lost, and only it is held again by the same command."""
    created = load_recipe(HOUSE).model.create
    assert created is not None
    create_model(tmp_path / "model", created, seed=0)
    given = ["tasks.eval.house_test.size=3", f"run_dir={tmp_path / 'run'}", "evaluation.endpoint.retries=0"]
    given += ["trainer.eval_rollouts=2", "model.create=null"]

    def evaluated(fails: Callable[[str], bool]) -> tuple[int, int]:
        with serving(knows_the_house(tmp_path / "model", fails)) as server:
            arguments = ["evaluate", str(HOUSE), "--model", str(tmp_path / "model"), "--endpoint", server.url, *given]
            return main(arguments), len(server.requests)

    def left() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        rows = (tmp_path / "run" / "samples" / "house_test.jsonl").read_text().splitlines()
        return json.loads((tmp_path / "run" / "evaluation.json").read_text()), [json.loads(row) for row in rows]

    code, asked = evaluated(lambda text: False)
    content, whole = left()
    assert (code, content["metrics"]["eval/house_test/avg@2"]["value"]) == (0, 1.0)
    assert content["metrics"]["eval/house_test/pass@2"]["value"] == 1.0
    assert asked == sum(len(record["turn_tokens"]) for record in whole)
    assert all(record["rewards"] == {"success": 1.0, "steps": 1.0} for record in whole)

    turns = {record["sample"]: len(record["turn_tokens"]) for record in whole}
    lost, begins = whole[0]["sample"], f"{whole[0]['prompt']}\n>"
    fails = 2 * 2 * 2  # two rollouts, two attempts each, a turn and one without an answer
    assert evaluated(lambda text: text.startswith(begins) and text != begins) == (1, asked - 2 * turns[lost] + fails)
    content, rest = left()
    assert (content["failed_requests"], rest[2:]) == (2, whole[2:])
    assert [record.get("failed_by") for record in rest] == ["infrastructure"] * 2 + [None] * 4
    assert all(value is None for record in rest[:2] for value in record["rewards"].values())
    shown = capsys.readouterr()
    assert "2 conversations were lost" in shown.out
    assert "HTTP 500" in shown.out
    assert "2 requests (33.3%) stayed unanswered" in shown.err

    assert evaluated(lambda text: False) == (0, 2 * turns[lost])
    assert "continuing an interrupted evaluation: 4 responses" in capsys.readouterr().out
    content, again = left()
    assert (content["failed_requests"], again) == (0, whole)


def test_what_is_kept_after_a_torn_line_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "engine0.jsonl"
    path.write_text('{"sample": "sums/1", "roll')
    _, (rollouts, _) = ask(echo)
    keeper = kept.Keeper(path)
    for rollout in rollouts:
        keeper(rollout)
    keeper.close()
    found = kept.read(tmp_path, SAMPLES[1:])
    assert {key: rollout.response_ids.tolist() for key, rollout in found.items()} == {
        (sample.id, index): [sample.prompt_ids[0], 7] for sample in SAMPLES[1:] for index in range(2)
    }


# Runs the command line where neither Megatron-Core nor vLLM can be imported.
WITHOUT_ENGINE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "vllm", "transformer_engine"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from megatron_rl.cli import main
from megatron_rl.config import load_recipe
sys.exit(main(sys.argv[1:]))
"""


def test_a_machine_without_megatron_and_vllm_can_ask_a_server(model: Path, recipe: Path) -> None:
    with serving(double(model)) as server:
        arguments = ["evaluate", str(recipe), "--model", str(model), "--endpoint", server.url, ONE_MAY_FAIL]
        command = [sys.executable, "-c", WITHOUT_ENGINE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (recipe.parent / "run" / "evaluation.json").exists()


def test_a_client_that_hangs_up_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """Of the server of these tests, whose clients give up on purpose; a mistake of the rule's still has one."""
    with serving(lambda request, attempt: {}["no such answer"]) as server:
        port = server.http.server_address[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not closed
            client.send(b"POST")
        with pytest.raises(ConnectionError):
            urllib.request.urlopen(f"{server.url}/completions", data=b"{}", timeout=5)
    said = capfd.readouterr().err
    assert "KeyError: 'no such answer'" in said
    assert "ConnectionResetError" not in said
