"""The ways in which conversations of several turns are known to be trained wrongly, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.agents.ledger import Forked, LedgerError, OtherPrompt
from megatron_rl.agents.rendering import Renderer
from megatron_rl.agents.replies import read_reply, turn_text
from megatron_rl.config.schema import TaskConfig
from megatron_rl.data.sample import Message
from megatron_rl.tasks.tokenizing import tokenize
from tests.agents.conversing import TOOLS, Conversation, Turn, answer, begin, renderer_of
from tests.agents.families import FAMILIES, tokenizer_of

USER: Message = {"role": "user", "content": "Look."}
AGAIN: Message = {"role": "user", "content": "And now?"}
END = "<|im_end|>"


def ids_of(name: str, text: str) -> list[int]:
    return tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]


def begun(name: str, tools: list[dict[str, Any]] | None = None, **params: object) -> Conversation:
    """A conversation whose first request is made."""
    conversation = begin(FAMILIES[name], [USER], tools, **params)
    conversation.requests.append(conversation.ledger.request([USER], tools))
    return conversation


def drawn(conversation: Conversation, ids: list[int], cut: bool = False) -> Message:
    """Records a turn of these tokens; the message that a client is answered."""
    reason = "length" if cut else "stop"
    reply = read_reply(
        turn_text(conversation.tokenizer, ids, reason), reason, conversation.family.parser, len(conversation.turns)
    )
    answer(conversation, Turn(ids, [-1.0] * len(ids), reason, False, reply.message))
    return reply.message


def after(conversation: Conversation, *new: Message, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """The tokens that new messages append."""
    conversation.messages += new
    before = sum(len(segment.ids) for segment in conversation.ledger.segments)
    return conversation.ledger.request(conversation.messages, tools)[before:]


def after_turn(name: str, text: str, *new: Message, cut: bool = False, **params: object) -> str:
    """The text appended behind a turn's."""
    conversation = begun(name, **params)
    drawn(conversation, ids_of(name, text), cut)
    return conversation.tokenizer.decode(after(conversation, *new))


def test_1_tokens_that_encoding_would_not_give_back_stay_as_they_were_drawn() -> None:
    conversation = begun("qwen2.5")
    whole = ids_of("qwen2.5", "lamp")
    apart = [i for letter in "lamp" for i in ids_of("qwen2.5", letter)]
    assert whole != apart
    drawn(conversation, [*apart, *ids_of("qwen2.5", END)])
    after(conversation, AGAIN)
    assert conversation.ledger.segments[1].ids.tolist() == [*apart, *ids_of("qwen2.5", END)]


def test_2_thinking_that_the_template_strips_from_earlier_turns_stays() -> None:
    conversation = begun("qwen3")
    written = ids_of("qwen3", f"<think>\nHm.\n</think>\n\nYes.{END}")
    message = drawn(conversation, written)
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    request = conversation.ledger.request([USER, message, AGAIN], None)
    assert request[len(conversation.sample.prompt_ids) :][: len(written)] == written
    assert "thinking of earlier turns is left out" in str(renderer_of("qwen3").rewrites())


def test_3_the_newline_behind_the_end_token_is_written_though_it_was_not_drawn() -> None:
    assert after_turn("qwen2.5", f"Yes.{END}", AGAIN).startswith("\n<|im_start|>user\nAnd now?")


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "mistral", "deepseek"])
def test_4_a_turn_has_one_end_token_whether_it_was_drawn_or_cut(name: str) -> None:
    end = FAMILIES[name].stops[0]
    assert not after_turn(name, f"Yes.{end}", AGAIN).startswith(end)
    assert after_turn(name, "Yes.", AGAIN, cut=True).startswith(end)


def test_4_another_stop_token_ends_a_turn_in_the_place_of_the_templates() -> None:
    assert after_turn("qwen2.5", "Yes.<|endoftext|>", AGAIN).startswith("\n<|im_start|>user")
    assert after_turn("gpt-oss", "<|channel|>final<|message|>Yes.<|return|>", AGAIN).startswith("<|start|>user")
    assert after_turn("gpt-oss", "<|channel|>final<|message|>Yes.", AGAIN, cut=True).startswith("<|end|><|start|>user")


def test_4_where_the_next_role_ends_a_turn_it_is_not_written_twice() -> None:
    assert after_turn("glm4", "Yes.<|user|>", AGAIN).startswith("\nAnd now?")
    assert after_turn("glm4", "Yes.<|endoftext|>", AGAIN).startswith("<|user|>\nAnd now?")
    assert after_turn("glm4", "Yes.", AGAIN, cut=True).startswith("<|user|>\nAnd now?")


def test_4_a_last_token_that_was_cut_off_is_no_end_though_the_template_writes_it_there() -> None:
    assert after_turn("plain", "Yes.\n", AGAIN, cut=True) == "\n[user]And now?\n[assistant]"
    assert after_turn("plain", "Yes.<eos>", AGAIN) == "\n[user]And now?\n[assistant]"


def test_5_a_turn_that_begins_with_a_newline_is_not_joined_with_the_templates() -> None:
    conversation = begun("qwen2.5")
    newline, joined = ids_of("qwen2.5", "\n"), ids_of("qwen2.5", "\n\n")
    assert len(newline) == len(joined) == 1
    drawn(conversation, [*newline, *ids_of("qwen2.5", f"Yes.{END}")])
    request = conversation.ledger.request([USER, *conversation.messages[1:], AGAIN], None)
    prompt = len(conversation.sample.prompt_ids)
    assert request[prompt - 1 : prompt + 1] == newline * 2


def test_6_several_results_are_one_message_of_the_users() -> None:
    conversation = begun("qwen3")
    family = FAMILIES["qwen3"]
    calls = family.call("look", {"what": "lamp"}) + "\n" + family.call("look", {"what": "door"})
    message: Any = drawn(conversation, ids_of("qwen3", calls + END))
    results = [
        {"role": "tool", "content": f"r{i}", "tool_call_id": c["id"]} for i, c in enumerate(message["tool_calls"])
    ]
    assert conversation.tokenizer.decode(after(conversation, *results)) == (
        "\n<|im_start|>user\n<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_6_results_of_several_calls_follow_where_the_template_refuses_to_write_several() -> None:
    conversation = begun("llama3.1")
    call = FAMILIES["llama3.1"].call("look", {})
    message: Any = drawn(conversation, ids_of("llama3.1", f"{call}; {call}<|eot_id|>"))
    results = [{"role": "tool", "content": "r", "tool_call_id": call["id"]} for call in message["tool_calls"]]
    assert conversation.tokenizer.decode(after(conversation, *results)).count("ipython") == 2


def test_7_an_empty_think_block_is_written_by_the_prompt_only() -> None:
    text = after_turn("qwen3", f"Yes.{END}", AGAIN, enable_thinking=False)
    assert text.count("<think>") == 1
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert after_turn("qwen3", f"Yes.{END}", AGAIN).count("<think>") == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_8_special_tokens_in_what_tools_and_users_say_are_text(name: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    said = " ".join([*family.special, *family.added, "\ue0000\ue001", "WORD0X1END"]).replace("\ue0000\ue001 ", "")
    conversation, plain = begun(name), begun(name)
    for each in (conversation, plain):
        drawn(each, ids_of(name, f"Yes.{family.stops[0]}"))
    ids, without = (
        after(conversation, {"role": "user", "content": said}),
        after(plain, {"role": "user", "content": "x"}),
    )
    added = tokenizer.added_tokens_decoder
    assert [i for i in ids if i in added] == [i for i in without if i in added]
    if not family.metaspace:
        assert said in tokenizer.decode(ids)


def test_8_what_is_text_is_encoded_as_the_tokenizer_encodes_text() -> None:
    tokenizer, said = tokenizer_of("qwen2.5"), f"the {END}\n(<|im_start|>)"
    conversation = begun("qwen2.5")
    drawn(conversation, ids_of("qwen2.5", f"Yes.{END}"))
    ids = after(conversation, {"role": "user", "content": said})
    start, end = ids_of("qwen2.5", "<|im_start|>")[0], ids_of("qwen2.5", END)[0]
    text = tokenizer(f"user\n{said}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    tokenizer("", split_special_tokens=False)
    assert ids[ids.index(start) + 1 : ids.index(end)] == text


def test_9_the_day_does_not_change_a_conversation_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("llama3.1")
    days = iter(range(100))
    moving = Renderer(tokenizer, {"strftime_now": lambda _: f"day {next(days)}"})
    assert moving.first([USER], None) != moving.first([USER], None)
    conversation = begin(FAMILIES["llama3.1"], [USER])
    conversation.ledger._renderer = moving
    assert conversation.ledger.request([USER], None) == conversation.sample.prompt_ids
    drawn(conversation, ids_of("llama3.1", "Yes.<|eot_id|>"))
    assert "day" not in tokenizer.decode(after(conversation, AGAIN))
    assert "date of the day" in str(renderer_of("llama3.1").rewrites())


def test_10_arguments_that_a_client_writes_anew_are_the_same() -> None:
    conversation = begun("qwen2.5")
    message: Any = drawn(conversation, ids_of("qwen2.5", FAMILIES["qwen2.5"].call("look", {"a": 1, "b": [2]}) + END))
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == '{"a": 1, "b": [2]}'
    result: Message = {"role": "tool", "content": "r", "tool_call_id": call["id"]}
    sent = {"role": "assistant", "tool_calls": [{**call, "function": {"name": "look", "arguments": '{"b":[2],"a":1}'}}]}
    tokens = conversation.ledger.request([USER, sent, result], None)
    assert conversation.ledger.request([USER, message, result], None) == tokens
    sent["tool_calls"][0]["function"]["arguments"] = '{"b":[2],"a":2}'
    with pytest.raises(Forked, match="what it calls is"):
        conversation.ledger.request([USER, sent, result], None)


def test_10_no_arguments_are_an_empty_object() -> None:
    conversation = begun("glm4")
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    ids = ids_of("glm4", "<tool_call>look\n</tool_call><|observation|>")
    answer(conversation, Turn(ids, [-1.0] * len(ids), "stop", True, message))
    bare = {**message, "tool_calls": [{**call, "function": {"name": "look", "arguments": ""}}]}
    result: Message = {"role": "tool", "content": "r", "tool_call_id": "call00000"}
    tokens = conversation.ledger.request([USER, bare, result], None)
    assert conversation.tokenizer.decode(tokens).endswith(
        "</tool_call><|observation|>\n<tool_response>\nr\n</tool_response><|assistant|>"
    )


def test_10_arguments_are_text_where_the_template_joins_them_to_text() -> None:
    conversation = begun("deepseek")
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    ids = ids_of("deepseek", "</think><｜end▁of▁sentence｜>")
    message: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer(conversation, Turn(ids, [-1.0] * len(ids), "stop", False, message))
    result: Message = {"role": "tool", "content": "r", "tool_call_id": "call00000"}
    assert conversation.tokenizer.decode(after(conversation, result)) == (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>r<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )
    drawn(conversation, ids)  # and the template goes on to read the call
    assert conversation.tokenizer.decode(after(conversation, AGAIN)) == "<｜User｜>And now?<｜Assistant｜><think>\n"


def test_10_calls_behind_results_go_on_with_what_the_model_saw() -> None:
    """The template leaves it out once there are such calls, which is said."""
    conversation, result = begun("deepseek"), "<｜tool▁outputs▁end｜>"
    assert f"{result!r}, behind a tool's reply, is left out" in str(conversation.renderer.rewrites())
    for number in range(2):
        call = {"id": f"call{number:05d}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        message: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
        ids = ids_of("deepseek", f"</think>{number}<｜end▁of▁sentence｜>")
        answer(conversation, Turn(ids, [-1.0] * len(ids), "stop", False, message))
        appended = after(conversation, {"role": "tool", "content": "r", "tool_call_id": call["id"]})
    text = conversation.tokenizer.decode([*conversation.rollout.tokens, *appended])
    assert f"r<｜tool▁output▁end｜>{result}</think>1<｜end▁of▁sentence｜><｜tool▁output▁begin｜>" in text
    assert text.count(result) == 2


def test_11_reasoning_that_a_client_leaves_out_is_no_difference() -> None:
    conversation = begun("qwen3")
    message = drawn(conversation, ids_of("qwen3", f"<think>\nHm.\n</think>\n\nYes.{END}"))
    tokens = conversation.ledger.request([USER, message, AGAIN], None)
    assert conversation.ledger.request([USER, {"role": "assistant", "content": " Yes."}, AGAIN], None) == tokens


@pytest.mark.parametrize("name", ["llama3.1", "mistral", "deepseek"])
def test_12_the_beginning_of_the_sequence_is_there_once(name: str) -> None:
    conversation = begun(name)
    drawn(conversation, ids_of(name, f"Yes.{FAMILIES[name].stops[0]}"))
    after(conversation, AGAIN)
    tokens = conversation.ledger.request(conversation.messages, None)
    assert tokens.count(conversation.tokenizer.bos_token_id) == 1


def test_13_special_tokens_that_were_drawn_are_in_the_text_and_in_what_is_trained() -> None:
    conversation = begun("llama3.1")
    ids = ids_of("llama3.1", '<|python_tag|>{"name": "look", "parameters": {}}<|eom_id|>')
    message: Any = drawn(conversation, ids)
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert conversation.ledger.segments[1].ids.tolist() == ids


def test_14_the_order_of_a_tools_keys_does_not_matter() -> None:
    conversation = begun("qwen3", TOOLS)
    other = [{"function": {**TOOLS[0]["function"], "strict": None}, "type": "function"}]
    assert conversation.ledger.request([USER], other) == conversation.sample.prompt_ids
    with pytest.raises(OtherPrompt, match=r"tools none, and the sample look"):
        begin(FAMILIES["qwen3"], [USER], TOOLS).ledger.request([USER], None)


def test_15_images_behind_the_prompt_are_refused_by_name() -> None:
    conversation = begun("qwen2.5")
    message = drawn(conversation, ids_of("qwen2.5", f"Yes.{END}"))
    picture: Message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:a.png"}}]}
    with pytest.raises(LedgerError, match=r"messages\[2\] has more than text"):
        conversation.ledger.request([USER, message, picture], None)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_request_is_what_the_task_tokenised(name: str) -> None:
    config = TaskConfig("file", chat=True, chat_params={"date_string": "1 Jan"})
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, USER]
    (ids,) = tokenize([(messages, TOOLS)], config, tokenizer_of(name))
    assert renderer_of(name).first(messages, TOOLS) == ids


def test_tools_that_the_template_moves_stay_where_they_were_and_are_written_again() -> None:
    conversation = begun("mistral", TOOLS)
    drawn(conversation, ids_of("mistral", "Yes.</s>"))
    text = conversation.tokenizer.decode(after(conversation, AGAIN, tools=TOOLS))
    assert text.startswith("[AVAILABLE_TOOLS]")
    assert renderer_of("mistral").rewrites() == "the tools are written in another place once others follow"


def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_behind_a_turn() -> None:
    tokenizer, template = tokenizer_of("mistral"), tokenizer_of("mistral").chat_template
    try:
        tokenizer.chat_template = FAMILIES["plain"].template
        renderer = Renderer(tokenizer, {})
        ids = renderer.following([USER, {"role": "assistant", "content": "Yes."}, AGAIN], 2, None, None)
    finally:
        tokenizer.chat_template = template
    assert tokenizer.convert_ids_to_tokens(ids)[0].startswith("\n")


def test_a_template_that_leaves_the_turn_out_is_refused() -> None:
    tokenizer, template = tokenizer_of("plain"), tokenizer_of("plain").chat_template
    try:
        tokenizer.chat_template = "{{ messages[0].content }}"
        with pytest.raises(ValueError, match="leaves out the model's turn"):
            Renderer(tokenizer, {}).following([USER, {"role": "assistant", "content": "Yes."}, AGAIN], 2, None, None)
    finally:
        tokenizer.chat_template = template


def test_templates_that_write_turns_alike_are_said_nothing_about() -> None:
    assert renderer_of("qwen2.5").rewrites() is None
    assert renderer_of("plain").rewrites() is None
