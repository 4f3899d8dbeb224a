"""What a conversation takes as its continuation, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron_rl.agents.ledger import Forked, Ledger, LedgerError, OtherPrompt
from megatron_rl.data.sample import Message, Sample
from tests.agents.conversing import renderer_of

USER: Message = {"role": "user", "content": "Look."}
YES: Message = {"role": "assistant", "content": "Yes."}
AGAIN: Message = {"role": "user", "content": "And now?"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"what": "lamp"}'}}
CALLS: Message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "content": "off", "tool_call_id": "call00000"}
END = 0  # <|im_end|>


def ledger(prompt: str | list[Message] = "Look.", answer: Message | None = YES, finish_reason: str = "stop") -> Ledger:
    """A ledger with one recorded turn; without `answer` with none."""
    renderer = renderer_of("qwen2.5")
    messages = [USER] if isinstance(prompt, str) else prompt
    made = Ledger(renderer, Sample("task/0", "task", prompt, renderer.first(messages, None)))
    if answer is not None:
        made.request(messages, None)
        made.record([40, 41, END], [-1.0, -2.0, -3.0], 7, finish_reason, answer)
    return made


def test_a_prompt_of_text_is_the_users_message() -> None:
    assert ledger("Look.", None).request([USER], None) == ledger([USER], None).request([USER], [])


def test_a_recorded_turn_is_a_segment_with_its_log_probs_and_version() -> None:
    made = ledger()
    made.request([USER, YES, AGAIN], None)
    assert len(made.segments) == 2  # a request that has no answer is no part of the rollout
    made.record([42], None, 8, "length", YES)
    _, turn, appended, last = made.segments
    assert (turn.ids.tolist(), turn.version) == ([40, 41, END], 7)
    assert turn.logprobs is not None
    assert turn.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert appended.logprobs is None
    assert last.logprobs is not None
    assert np.isnan(last.logprobs).all()
    assert made.turns == 2
    assert [message["role"] for message in made.messages] == ["user", "assistant", "user", "assistant"]


def test_the_same_request_again_is_the_same_while_it_has_no_answer() -> None:
    made = ledger()
    first = made.request([USER, YES, AGAIN], None)
    assert made.request([dict(reversed(USER.items())), YES, AGAIN], None) == first
    with pytest.raises(Forked, match="while another had no answer"):
        made.request([USER, YES, AGAIN, AGAIN], None)
    made.record([42, END], [-1.0, -1.0], 7, "stop", YES)
    with pytest.raises(Forked, match=r"it has 3 messages, and there are 4"):
        made.request([USER, YES, AGAIN], None)


def test_what_the_model_may_still_draw_counts_what_was_appended_and_what_waits() -> None:
    made = ledger()
    assert made.room(100) == 97
    prompt = len(made.segments[0].ids)
    asked = len(made.request([USER, YES, AGAIN], None))
    assert made.room(100) == 100 - (asked - prompt)
    assert made.room(5) == 0


def test_messages_are_kept_as_recorded_whatever_the_client_sends_back() -> None:
    made = ledger(answer={**YES, "reasoning_content": "Hm."})
    made.request([USER, {**YES, "content": "Yes.\n", "refusal": None}, AGAIN], None)
    made.record([42, END], [-1.0, -1.0], 7, "stop", YES)
    assert made.messages[1] == {**YES, "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda m: [{**USER, "content": "Stop."}, *m[1:]], r"messages\[0\]: its content is 'Stop.', and was 'Look.'"),
        (lambda m: [m[0], {**CALLS, "content": "No."}, *m[2:]], r"messages\[1\]: its content"),
        (lambda m: [m[0], {**CALLS, "tool_calls": []}, *m[2:]], r"messages\[1\]: what it calls is \[\]"),
        (lambda m: [m[0], RESULT, *m[2:]], r"messages\[1\]: its role is 'tool', and was 'assistant'"),
        (lambda m: m[:2], "no message behind the model's last turn"),
        (lambda m: m[:1], "it has 1 messages, and there are 2"),
        (lambda m: [m[0], AGAIN, *m[1:]], r"messages\[1\]: its role is 'user'"),
        (lambda m: [*m, YES, AGAIN], r"messages\[3\] is the assistant's, and the model did not write it"),
    ],
)
def test_a_request_that_is_no_continuation_is_refused_by_its_message(
    change: Callable[[list[Message]], list[Message]], error: str
) -> None:
    made = ledger(answer=CALLS)
    whole = [USER, CALLS, RESULT]
    with pytest.raises(Forked, match=error):
        made.request(change(whole), None)
    assert made.request(whole, None)  # a refusal changes nothing


def test_another_result_of_a_call_is_a_fork() -> None:
    made = ledger(answer=CALLS)
    made.request([USER, CALLS, RESULT], None)
    made.record([42, END], [-1.0, -1.0], 7, "stop", YES)
    for changed in ({**RESULT, "content": "on"}, {**RESULT, "tool_call_id": "call00001"}):
        with pytest.raises(Forked, match=r"messages\[2\]: its"):
            made.request([USER, CALLS, changed, YES, AGAIN], None)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ([AGAIN], r"messages\[0\]: its content is 'And now\?', and was 'Look.'"),
        ([{"role": "system", "content": "Be brief."}, USER], r"messages\[0\]: its role is 'system', and was 'user'"),
        ([USER, AGAIN], "has 2 messages, and the sample's prompt 1"),
        ([], "it has 0 messages, and there are 1"),
    ],
)
def test_a_first_request_that_is_not_the_prompt_is_refused(sent: list[Message], error: str) -> None:
    with pytest.raises(OtherPrompt, match=error):
        ledger(answer=None).request(sent, None)


def test_other_tools_later_are_refused() -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "look"}}
    with pytest.raises(Forked, match="the tools are not those of the first request"):
        ledger().request([USER, YES, AGAIN], [tool])


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"content": "x"}, r"messages\[2\] is .* needs a role"),
        ({"role": "user", "content": 3}, r"messages\[2\].content is 3, and must be a text"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, r"messages\[2\] has a tool call"),
        ({"role": "user", "content": "\ud800"}, "the tokenizer cannot encode"),
        ({"role": "user", "content": "\ud800<|im_end|>"}, "the tokenizer cannot encode"),
    ],
)
def test_a_malformed_message_is_named(message: Message, error: str) -> None:
    with pytest.raises(LedgerError, match=error):
        ledger().request([USER, YES, message], None)


def test_an_answer_needs_a_request_and_a_log_prob_for_each_token() -> None:
    made = ledger()
    with pytest.raises(ValueError, match="no request to record an answer to"):
        made.record([42], [-1.0], 7, "stop", YES)
    made.request([USER, YES, AGAIN], None)
    with pytest.raises(ValueError, match="2 tokens were drawn, and 1 have a log-prob"):
        made.record([42, END], [-1.0], 7, "stop", YES)
