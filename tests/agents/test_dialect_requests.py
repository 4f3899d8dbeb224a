"""What a request in a dialect may ask for: what is refused and how, what is let by, and what comes with an answer."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from megatron_rl.agents.replies import read_reply
from tests.agents.conversing import TOOLS
from tests.agents.held import CALLS, CLAUDES, FUNCTION, USER, Held, code_of

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("v1/chat/completions", {"messages": [USER], "seed": 3}, "unsupported_parameter", "`seed` is not supported"),
    ("v1/chat/completions", {"messages": [USER], "n": True}, "unsupported_parameter", "`n` = True"),
    ("v1/chat/completions", {"messages": [USER], "stream": 1}, "invalid_parameter", "`stream` is 1"),
    ("v1/chat/completions", {"messages": [USER], "top_logprobs": 3}, "unsupported_parameter", "`top_logprobs` = 3"),
    ("v1/chat/completions", {"messages": [USER], "tools": [3]}, "invalid_parameter", "`tools` must be a list"),
    ("v1/responses", {"input": "Look.", "temperature": 0.2}, "unsupported_parameter", "the recipe draws with 1"),
    ("v1/responses", {"input": "Look.", "reasoning": {"effort": "low"}}, "unsupported_parameter", "chat_params"),
    ("v1/responses", {"input": "Look.", "background": True}, "unsupported_parameter", "`background`"),
    ("v1/responses", {"input": "Look.", "tool_choice": "required"}, "unsupported_parameter", "forced"),
    ("v1/responses", {"input": "Look.", "tools": [{"type": "web_search"}]}, "unsupported_parameter", "'web_search'"),
    ("v1/responses", {"input": "Look.", "include": ["x"]}, "unsupported_parameter", "`include` = ['x']"),
    ("v1/responses", {"input": "Look.", "max_output_tokens": 0}, "invalid_parameter", "`max_output_tokens` is 0"),
    ("v1/responses", {"input": "Look.", "previous_response_id": "r"}, "previous_response_not_found", "no response 'r'"),
    ("v1/responses", {"input": [{"type": "item_reference", "id": "i"}]}, "invalid_messages", "'item_reference'"),
    (
        "v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "invalid_messages",
        "input_image",
    ),
    ("v1/responses", {"input": [{"role": "robot", "content": ""}]}, "invalid_messages", "input[0].role is 'robot'"),
    ("v1/responses", {"input": 3}, "invalid_parameter", "`input` must be a list"),
    ("v1/responses", {"input": "Look?"}, "forked", "messages[0]"),
    ("v1/messages", {"messages": [USER], "top_k": 3}, "unsupported_parameter", "`top_k`"),
    ("v1/messages", {"messages": [USER], "stop_sequences": ["x"]}, "unsupported_parameter", "`stop_sequences`"),
    ("v1/messages", {"messages": [USER], "thinking": {"type": "disabled"}}, "unsupported_parameter", "chat_params"),
    ("v1/messages", {"messages": [USER], "tool_choice": {"type": "any"}}, "unsupported_parameter", "forced"),
    (
        "v1/messages",
        {"messages": [USER], "tools": [{"type": "bash_20250124"}]},
        "unsupported_parameter",
        "bash_20250124",
    ),
    ("v1/messages", {"messages": [{"role": "tool", "content": ""}]}, "invalid_messages", "messages[0].role is 'tool'"),
    ("v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "invalid_messages", "'image'"),
    ("v1/messages", {"messages": "Look."}, "invalid_parameter", "`messages` must be a list"),
    ("v1/messages", {"messages": [USER], "system": "Be brief."}, "forked", "messages[0]"),
    ("inference/v1/generate", {"token_ids": []}, "invalid_messages", "`token_ids` must be"),
    ("inference/v1/generate", {"token_ids": [True]}, "invalid_messages", "`token_ids` must be"),
    ("inference/v1/generate", {"token_ids": [7]}, "forked", "token_ids[0] is 7, and was"),
    ("inference/v1/generate", {"token_ids": [1], "stream": True}, "unsupported_parameter", "`stream` = True"),
    (
        "inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"seed": 1}},
        "unsupported_parameter",
        "the recipe's",
    ),
    (
        "inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"logprobs": 5}},
        "unsupported_parameter",
        "logprobs",
    ),
    ("v1/reward", {"reward": "good"}, "invalid_reward", "no number"),
    ("v1/reward", {"reward": {"*": 1.0}}, "invalid_reward", "no number"),
]


def test_what_has_no_counterpart_is_refused_by_name_and_draws_nothing() -> None:
    async def ask() -> None:
        held = Held(tools=None)
        for path, body, code, words in REFUSED:
            status, said, text = code_of(await held.post(path, body))
            assert (status, said) == (400, code), (path, body, text)
            assert words in text, (path, body, text)
        for path in ("v1/chat/completions", "v1/responses", "v1/messages", "inference/v1/generate", "v1/reward"):
            answer = await held.http().post(f"http://engine/sessions/1/{path}", json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert held.requests == []
        with pytest.raises(anthropic.BadRequestError, match="forked: the first request is not the sample's prompt"):
            await held.anthropic().messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "?"}])
        stranger = held.anthropic().with_options(api_key="k")
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "Look."}])

    asyncio.run(ask())


ODD = (True, 5, float("nan"), float("inf"), "x", "\ud800", [5], ["x"], {}, {"a": 1}, [[[]]], 10**400)
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": [{"type": "text", "text": "Hm"}], "tool_calls": [CALL]}
WHOLE: list[tuple[str, dict[str, Any]]] = [
    (
        "v1/chat/completions",
        {"messages": [USER, CALLED, {"role": "tool", "tool_call_id": "1", "content": "ok"}], "tools": [FUNCTION]},
    ),
    (
        "v1/chat/completions",
        {"messages": [USER], "tools": TOOLS, "stream": True, "stream_options": {}, "logprobs": False},
    ),
    (
        "v1/responses",
        {
            "input": [
                {"role": "user", "content": "Look."},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
                {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "ok"},
            ],
            "instructions": "Be brief.",
        },
    ),
    ("v1/responses", {"input": "Look.", "tools": [FUNCTION], "include": [], "metadata": {"a": "b"}, "stream": True}),
    (
        "v1/messages",
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}]},
            ],
            "system": [{"type": "text", "text": "Be brief."}],
            "thinking": {"type": "adaptive"},
            "tool_choice": {"type": "auto"},
        },
    ),
    ("v1/messages/count_tokens", {"messages": [USER], "tools": [CLAUDES]}),
    ("inference/v1/generate", {"token_ids": [], "sampling_params": {"logprobs": 1}, "request_id": "r"}),
    ("v1/reward", {"reward": {"a": 1.0, "b": [1.0]}}),
]


def altered(value: Any) -> Iterator[Any]:
    """Yields the value with an odd one in each of its places."""
    yield from ODD
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for odd in altered(value[key]):
            copied = copy.copy(value)
            copied[key] = odd
            yield copied


def test_no_value_in_a_request_is_a_fault_of_the_server() -> None:
    async def ask() -> None:
        held = Held("Yes.")
        for path, body in WHOLE:
            whole = {**body, "token_ids": held.session.opening.sample.prompt_ids} if "token_ids" in body else body
            for odd in ({**whole, key: value} for key in body for value in altered(body[key])):
                headers = {"authorization": f"Bearer {held.session.api_key}"}
                address = f"http://engine/sessions/1/{path}"  # the client raises what the app does
                answer = await held.http().post(address, content=json.dumps(odd), headers=headers)
                assert answer.status_code in (200, 400), (odd, answer.text)
                if answer.status_code == 200 and "count_tokens" not in path:
                    held = Held("Yes.")

    asyncio.run(ask())


def test_what_says_nothing_of_the_answer_is_let_by() -> None:
    async def ask() -> None:
        held = Held("Yes.", system=True, temperature=0.5)
        answer = await held.openai().responses.create(
            model="gpt",
            instructions="Be brief.",
            input="Look.",
            tools=[FUNCTION],
            parallel_tool_calls=True,
            store=False,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="k",
            temperature=0.5,
            top_p=1,
            truncation="disabled",
            max_output_tokens=7,
            text={"format": {"type": "text"}},
        )
        assert (answer.output_text, answer.status, held.requests[0].sampling.max_tokens) == ("Yes.", "completed", 7)
        held = Held("Yes.", system=True)
        asked: Any = {
            "messages": [{"role": "user", "content": "Look."}],
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": [CLAUDES],
            "thinking": {"type": "adaptive"},
        }
        client = held.anthropic()
        counted = await client.messages.count_tokens(model="m", **asked)
        said = await client.messages.create(
            model="m", max_tokens=7, metadata={"user_id": "u"}, extra_body={"temperature": 1.0}, **asked
        )
        assert counted.input_tokens == said.usage.input_tokens == len(held.requests[0].tokens)
        assert said.usage.output_tokens == len(held.session.ledger.segments[-1].ids)
        assert held.requests[0].sampling.max_tokens == 7

    asyncio.run(ask())


def test_no_calls_are_read_where_none_are_wanted() -> None:
    async def ask() -> None:
        for path, body in (
            ("v1/responses", {"input": "Look.", "tools": [FUNCTION], "tool_choice": "none"}),
            ("v1/messages", {"messages": [USER], "tools": [CLAUDES], "tool_choice": {"type": "none"}}),
        ):
            answer = (await Held(CALLS).post(path, body)).json()
            parts = answer.get("output") or [answer]
            assert [part["type"] for part in parts] == ["message"]
            assert parts[0]["content"][0]["text"] == CALLS

    asyncio.run(ask())


def test_a_chat_comes_with_its_tokens_where_they_are_asked_for() -> None:
    """As vLLM gives them, and as NeMo-Gym's model server takes them."""

    async def ask() -> None:
        for stream in (False, True):
            held = Held("Yes.", tools=None)
            wanted: Any = {"logprobs": True, "top_logprobs": 0, "stream": stream}
            extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
            came: Any = await held.openai().chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "Look."}],
                **wanted,
                extra_body=extra,
            )
            ids = held.session.ledger.segments[-1].ids.tolist()
            logprobs = [-0.5 - i for i in range(len(ids))]
            chunks = [chunk async for chunk in came] if stream else [came]
            choice: Any = chunks[-1].choices[0]
            assert chunks[0].prompt_token_ids == list(held.requests[0].tokens)
            assert choice.token_ids == ids
            assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{i}" for i in ids]
            assert [entry.logprob for entry in choice.logprobs.content] == logprobs
            if not stream:
                message = choice.message.to_dict()
                assert message["prompt_token_ids"] == list(held.requests[0].tokens)
                assert (message["generation_token_ids"], message["generation_log_probs"]) == (ids, logprobs)
        plain = await Held("Yes.", tools=None).post("v1/chat/completions", {"messages": [USER]})
        assert "token_ids" not in plain.text

    asyncio.run(ask())


def test_tokens_that_do_not_go_on_with_the_sequence_are_refused() -> None:
    async def ask() -> None:
        held = Held("Yes.", "No.", tools=None)
        prompt = list(held.session.opening.sample.prompt_ids)
        sent = {"token_ids": prompt, "sampling_params": {"logprobs": 0, "max_tokens": 9}}
        answer = (await held.post("inference/v1/generate", sent)).json()
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert (answer["prompt_token_ids"], answer["usage"]["prompt_tokens"]) == (None, len(prompt))
        recorded = [*prompt, *choice["token_ids"]]
        for tokens, words in (
            (prompt, "there are"),
            (recorded, "no token behind"),
            ([*recorded[:-1], 5, 6], f"token_ids[{len(recorded) - 1}] is 5, and was"),
            ([*recorded, 10**6], "token_ids has 1000000"),
            ([*recorded, -1], "token_ids has -1"),
        ):
            status, code, text = code_of(await held.post("inference/v1/generate", {"token_ids": tokens}))
            assert (status, code) == (400, "forked"), text
            assert words in text
        await held.post("inference/v1/generate", {"token_ids": [*recorded, 5, 6]})
        segments = held.session.ledger.segments
        assert [segment.logprobs is not None for segment in segments] == [False, True, False, True]
        assert [segment.ids.tolist() for segment in segments[:3]] == [prompt, choice["token_ids"], [5, 6]]

    asyncio.run(ask())


def test_a_number_that_json_has_not_is_no_call() -> None:
    for number in ("NaN", "Infinity", "1e999", "[-Infinity]"):
        text = f'<tool_call>\n{{"name": "look", "arguments": {{"n": {number}}}}}\n</tool_call>'
        assert read_reply(text, "stop", "hermes", 0).unread
    assert not read_reply(text.replace("-Infinity", "-1e9"), "stop", "hermes", 0).unread


def test_a_reward_is_posted_once() -> None:
    async def post() -> None:
        held = Held(tools=None)
        waiting = asyncio.create_task(held.session.given())
        for _ in range(2):  # a client that had no answer posts it again
            answer = await held.post("v1/reward", {"reward": {"done": 1, "style": None}})
            assert answer.status_code == 200
        assert str(await waiting) == "{'done': 1.0, 'style': nan}"
        assert code_of(await held.post("v1/reward", {"reward": 0.5}))[:2] == (400, "reward_given")
        held.session.close()
        assert code_of(await held.post("v1/reward", {"reward": 0.5}))[:2] == (410, "session_closed")

    asyncio.run(post())
