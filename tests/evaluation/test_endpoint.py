"""The endpoint as an engine, against a server that answers by a rule and misbehaves on purpose.

The real server is in tests/e2e.
"""

from __future__ import annotations

import errno
import socket
import struct
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.schema import AgentConfig, Config, EndpointConfig, TaskConfig, TasksConfig
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


def test_an_evaluation_goes_on_with_the_same_agents_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files are named by path or by module, anywhere in the parameters, and YAML has values that JSON has not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("of_a_module.py", "shop.py", "template.jinja"):
        (tmp_path / name).write_text("1\n")
    params: dict[str, Any] = {"shops": [{"at": f"{tmp_path}/shop.py:Shop"}], "prices": {1: 0.5}, "word": "none.py:x"}
    agent = AgentConfig("of_a_module:agent", params)
    task = TaskConfig(source="jsonl", chat=True, chat_template=str(tmp_path / "template.jinja"), agent=agent)
    config = Config(run_dir="", tasks=TasksConfig(eval={"t": task}))
    kept.begin(tmp_path / "responses", kept.origin(config, {}))
    assert kept.differences(tmp_path / "responses", kept.origin(config, {})) == []
    for name in ("of_a_module.py", "shop.py", "template.jinja"):
        (tmp_path / name).write_text("2\n")
        assert kept.differences(tmp_path / "responses", kept.origin(config, {})) == ["agents"]
        (tmp_path / name).write_text("1\n")


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
