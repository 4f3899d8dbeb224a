"""The dialects that agents speak, with the official clients: what they replay is what was recorded, and streams are whole."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState

from megatron_rl.agents import endpoint
from megatron_rl.agents.replies import read_reply
from megatron_rl.agents.session import Opening, Patience, Session
from megatron_rl.config.schema import AgentConfig
from megatron_rl.data.sample import Message, Sample
from megatron_rl.rollout.engine import Completion, Request
from megatron_rl.rollout.sampling import Sampling
from tests.agents import dialects, talking
from tests.agents.conversing import TOOLS, renderer_of
from tests.agents.families import FAMILIES, tokenizer_of

THOUGHT = "<think>\nHm.\n</think>\n\n"
CALLS = (
    FAMILIES["qwen3"].call("look", {"what": "lamp", "n": 1})
    + "\n"
    + FAMILIES["qwen3"].call("look", {"what": "é\ud83d"})
)


class Held:
    """A session whose turns are written here, behind the endpoint."""

    def __init__(
        self, *turns: str, tools: Any = TOOLS, system: bool = False, agent: Any = None, **sampling: Any
    ) -> None:
        tokenizer, renderer = tokenizer_of("qwen3"), renderer_of("qwen3")
        self.tokenizer, self._turns = tokenizer, list(turns)
        prompt: list[Message] = [{"role": "system", "content": "Be brief."}] if system else []
        prompt.append({"role": "user", "content": "Look."})
        sample = Sample(
            "t/0", "t", prompt, renderer.first(prompt, tools), metadata={"tools": tools} if tools else {}, agent="t"
        )
        drawn = Sampling(**{"temperature": 1.0, "top_p": 1.0, "max_tokens": 4000, **sampling})
        opening = Opening(
            sample, 0, drawn, 3, 1, "tasks.train.t", AgentConfig("a", parser="hermes", **(agent or {})), 2
        )
        self.requests: list[Request] = []
        self.hold, self._held = False, list[Completion]()  # turns are answered at `release`
        self.session = Session("1", opening, renderer, tokenizer, Patience(100.0), self._ask)
        self.app = endpoint.make_app({"1": self.session}.get)

    def _ask(self, request: Request) -> None:
        self.requests.append(request)
        text = self._turns.pop(0)
        end = [] if text.endswith("...") else [self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], *end]
        reason: Any = "stop" if end else "length"
        logprobs = [-0.5 - i for i in range(len(ids))]
        done = Completion(request, ids, logprobs, reason, 2, np.zeros(0, dtype=np.float32))
        if self.hold:
            self._held.append(done)
        else:
            asyncio.get_running_loop().call_soon(self.session.answer, done)

    def release(self) -> None:
        for done in self._held:
            self.session.answer(done)

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app))

    def openai(self) -> openai.AsyncOpenAI:
        address, key = "http://engine/sessions/1/v1", self.session.api_key
        return openai.AsyncOpenAI(base_url=address, api_key=key, http_client=self.http(), max_retries=0)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        address, key = "http://engine/sessions/1", self.session.api_key
        return anthropic.AsyncAnthropic(base_url=address, api_key=key, http_client=self.http(), max_retries=0)

    async def post(self, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        headers = {"authorization": f"Bearer {self.session.api_key}"}
        return await self.http().post(f"http://engine/sessions/1/{path}", json=body, headers=headers)


FUNCTION = {"type": "function", "strict": False, "description": None, **TOOLS[0]["function"]}
CLAUDES: Any = {
    "name": "look",
    "description": TOOLS[0]["function"]["description"],
    "input_schema": TOOLS[0]["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}


async def streamed_response(client: openai.AsyncOpenAI, **asked: Any) -> Any:
    """A response, which is what the client's own accumulator puts together. It leaves thinking out."""
    state: Any = ResponseStreamState(input_tools=asked["tools"], text_format=openai.omit)
    async for event in await client.responses.create(model="policy", stream=True, **asked):
        state.handle_event(event)
        last: Any = event
    put_together, said = (
        [
            {key: value for key, value in item.to_dict().items() if key not in ("status", "parsed", "parsed_arguments")}
            for item in response.output
            if item.type != "reasoning"
        ]
        for response in (state._ResponseStreamState__current_snapshot, last.response)
    )
    assert put_together == said
    return last.response


async def by_responses(held: Held, stream: bool) -> list[Any]:
    """Thinks and calls, is answered, says something, is asked on, and is cut; every item is sent back as it came."""
    said: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Look."}]}]
    texts, client = [], held.openai()
    for more in (["a", "b"], [], []):
        if stream:
            answer = await streamed_response(client, input=said, tools=[FUNCTION])
        else:
            answer = await client.responses.create(model="policy", input=said, tools=[FUNCTION], tool_choice="auto")
        said += [item.to_dict() for item in answer.output]
        texts.append([(item.type, answer.status) for item in answer.output])
        calls = [item for item in answer.output if item.type == "function_call"]
        said += [
            {"type": "function_call_output", "call_id": call.call_id, "output": text}
            for call, text in zip(calls, more, strict=True)
        ]
        said += [] if calls else [{"role": "user", "content": "And now?"}]
    return texts


async def by_messages(held: Held, stream: bool) -> list[Any]:
    said: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Look."}]}]
    texts, client = [], held.anthropic()
    for more in (["a", "b"], [], []):
        asked: Any = {"model": "policy", "max_tokens": 900, "messages": said, "tools": [CLAUDES]}
        if stream:
            async with client.messages.stream(**asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**asked, tool_choice={"type": "auto"})
        said.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
        texts.append([(block.type, answer.stop_reason) for block in answer.content])
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": text}]}
            for call, text in zip(calls, more, strict=True)
        ]
        said.append({"role": "user", "content": results or "And now?"})
    return texts


async def by_chat(held: Held, stream: bool) -> list[Any]:
    said: list[Any] = [{"role": "user", "content": "Look."}]
    texts, client = [], held.openai()
    for more in (["a", "b"], [], []):
        asked: Any = {"model": "policy", "messages": said, "tools": TOOLS}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                async for _ in events:
                    pass
                answer: Any = events.current_completion_snapshot  # `get_final_completion` refuses what was cut
        else:
            answer = await client.chat.completions.create(**asked)
        message = answer.choices[0].message
        sent = {key: value for key, value in message.to_dict().items() if key != "parsed"}
        for call in sent.get("tool_calls") or ():
            call["function"].pop("parsed_arguments", None)
        said.append(sent)
        texts.append([answer.choices[0].finish_reason])
        said += [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in zip(message.tool_calls or (), more, strict=True)
        ]
        said += [] if message.tool_calls else [{"role": "user", "content": "And now?"}]
    return texts


TURNS = (f"{THOUGHT}I look.\n{CALLS}", "It is on.", "And so on ...")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("speak", [by_responses, by_messages])
def test_a_conversation_with_calls_is_the_same_in_every_dialect(speak: Any, stream: bool) -> None:
    ours, held = Held(*TURNS), Held(*TURNS)
    assert asyncio.run(by_chat(ours, stream)) == [["tool_calls"], ["stop"], ["length"]]
    kinds = asyncio.run(speak(held, stream))
    assert [list(request.tokens) for request in held.requests] == [list(request.tokens) for request in ours.requests]
    assert held.session.ledger.messages == ours.session.ledger.messages
    if speak is by_responses:
        first = [("reasoning", "completed"), ("message", "completed"), *[("function_call", "completed")] * 2]
        assert kinds == [first, [("message", "completed")], [("message", "incomplete")]]
    else:
        first = [("thinking", "tool_use"), ("text", "tool_use"), *[("tool_use", "tool_use")] * 2]
        assert kinds == [first, [("text", "end_turn")], [("text", "max_tokens")]]


SPOKEN = ["chat_streamed", "responses", "responses_streamed", "messages", "messages_streamed", "mixed"]


class TestTalks:
    """Conversations over the engine of arithmetic."""

    @pytest.fixture(scope="class")
    def words(self, tmp_path_factory: pytest.TempPathFactory) -> Any:
        return talking.tokenizer(tmp_path_factory.mktemp("words"))

    def talk(self, folder: Path, words: Any, agent: str, of: Any = talking, **keys: Any) -> Any:
        config = talking.recipe(f"{of.__name__}:{agent}", **keys)
        prompts = talking.samples(folder, config, words, ["what is 1+1?"])
        with talking.hosted(config, words) as conversations:
            rollouts = talking.conversed(conversations, prompts, 1)
            assert not conversations.take_lost()
        return rollouts

    @pytest.mark.parametrize("dialect", SPOKEN)
    def test_the_same_is_trained_on_in_every_dialect(self, tmp_path: Path, words: Any, dialect: str) -> None:
        told = self.talk(tmp_path, words, "speaking", dialects, params={"dialect": dialect})
        assert talking.bits(told) == talking.bits(self.talk(tmp_path, words, "patient"))

    def test_a_reply_stands_for_what_was_said_up_to_it(self, tmp_path: Path, words: Any) -> None:
        told = self.talk(tmp_path, words, "remembering", dialects)
        assert talking.bits(told) == talking.bits(self.talk(tmp_path, words, "patient"))

    def test_tokens_go_in_and_come_out(self, tmp_path: Path, words: Any) -> None:
        told, ours = self.talk(tmp_path, words, "by_tokens", dialects), self.talk(tmp_path, words, "patient")
        for theirs, our in zip(talking.bits(told), talking.bits(ours), strict=True):
            assert (*theirs[:3], *theirs[4:]) == (*our[:3], *our[4:])
            assert [message["content"] for message in theirs[3] if message["role"] == "assistant"] == [
                message["content"] for message in our[3] if message["role"] == "assistant"
            ]


# ------------------------------------------------------------------------------------------- what is refused, and how
USER = {"role": "user", "content": "Look."}
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
    ("v1/responses", {"input": "Look.", "include": ["x"]}, "unsupported_parameter", "`include` = 'x'"),
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


def code_of(answer: httpx2.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


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
