"""The dialects that agents speak, with the official clients: what they replay is what was recorded, and streams are whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState

from tests.agents import dialects, talking
from tests.agents.conversing import TOOLS
from tests.agents.held import CALLS, CLAUDES, FUNCTION, THOUGHT, Held


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
