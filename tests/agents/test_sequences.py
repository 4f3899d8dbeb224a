"""Rollouts of several sequences: where they part, what is drawn and given in each, their limits and seeds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.agents.ledger import Ledger, LedgerError, TooManySequences
from megatron_rl.agents.rendering import Renderer
from megatron_rl.agents.replies import read_reply
from megatron_rl.config.schema import TaskConfig
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Message, Sample
from megatron_rl.evaluation import response_log
from megatron_rl.evaluation.samples import conversation_of
from megatron_rl.rollout.sampling import rollout_seed
from megatron_rl.tasks.tokenizing import encode, template_params
from tests.agents import talking
from tests.agents.conversing import PROPERTIES, TOOLS, renderer_of, tokenizer_of
from tests.agents.talks import Talks

END = 0  # <|im_end|>
USER: Message = {"role": "user", "content": "Look."}
AGAIN: Message = {"role": "user", "content": "And now?"}
OTHER: Message = {"role": "system", "content": "Be brief."}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Told:
    """A ledger, and all that was drawn in it."""

    def __init__(self, sequences: int = 9) -> None:
        self.renderer = renderer_of("qwen2.5")
        self.sample = Sample("task/0", "task", [USER], self.renderer.first([USER], None))
        self.ledger = Ledger(self.renderer, self.sample, sequences, of_experts=talking.OF_EXPERTS)
        self.drawn: list[int] = []
        self.places: list[tuple[int, ...]] = []
        self.asked: list[list[int]] = []

    def ask(self, messages: list[Message], answer: str, tools: Any = None) -> list[int]:
        """What was drawn."""
        self.asked.append(self.ledger.request(messages, tools))
        self.places.append(self.ledger.place)
        ids = [10_000 + 2 * len(self.places), 10_001 + 2 * len(self.places), END]  # no text's
        experts = talking.routed([*self.asked[-1], *ids])[self.ledger.routed :]
        self.ledger.record(ids, [-float(i) for i in ids], 7, "stop", said(answer), experts)
        self.drawn += ids
        return ids

    @property
    def rollout(self) -> Rollout:
        """Each sequence has the experts that the engine chose for it, but for the last token's, which nothing reads."""
        experts, segments = self.ledger.experts, self.ledger.segments
        rollout = Rollout("task/0", 0, segments, "stop", experts, conversations=self.ledger.conversations)
        ends = np.cumsum(rollout.sequence_lengths)[:-1]
        assert experts is not None
        for tokens, chosen in zip(np.split(rollout.tokens, ends), np.split(experts, ends), strict=True):
            np.testing.assert_array_equal(chosen[:-1], talking.routed(tokens.tolist())[:-1])
        return rollout

    @property
    def sequences(self) -> list[list[int]]:
        rollout = self.rollout
        return [part.tolist() for part in np.split(rollout.tokens, np.cumsum(rollout.sequence_lengths)[:-1])]


def test_a_second_answer_parts_where_it_was_asked_and_what_is_shared_is_drawn_once() -> None:
    told = Told()
    first = told.ask([USER], "Yes.")
    second = told.ask([USER, said("Yes."), AGAIN], "No.")
    third = told.ask([USER, said("Yes."), AGAIN], "On.")  # asked again
    other = told.ask([USER], "Off.")
    prompt, asked = told.sample.prompt_ids, told.asked[1]
    assert told.asked[2] == asked
    assert told.asked[3] == prompt
    assert told.sequences == [[*asked, *second], [*asked, *third], [*prompt, *other]]
    rollout = told.rollout
    assert rollout.response_ids.tolist() == [*first, *second, *third, *other]
    assert rollout.logprobs.tolist() == [-float(i) for i in told.drawn]
    assert told.places == [(0, 0), (0, 0, 0), (0, 0, 1), (0, 1)]
    begins = [segment for segment in rollout.segments if segment.begins_sequence]
    assert [segment.ids.tolist() for segment in begins] == [asked, prompt]
    assert told.ledger.messages == [USER, said("Off.")]


def test_a_conversation_goes_on_from_the_turn_that_has_most_of_it() -> None:
    told = Told()
    told.ask([USER], "Yes.")
    no = told.ask([USER], "No.")
    told.ask([USER, said("Yes."), AGAIN], "On.")
    follow_up = told.ask([USER, said("No."), AGAIN], "Off.")
    assert len(told.sequences) == 2
    assert told.sequences[1] == [*told.asked[3], *follow_up]
    assert told.asked[3][: len(told.sample.prompt_ids) + 3] == [*told.sample.prompt_ids, *no]
    assert told.places[2:] == [(0, 0, 0), (0, 1, 0)]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([OTHER, USER], None),  # another agent's
        ([OTHER, {"role": "user", "content": "So far: Yes.<|im_end|>"}], None),  # a summary, which quotes a turn
        ([USER, said("Yes."), AGAIN], TOOLS),  # the same with tools
        ([USER, said("Perhaps."), AGAIN], None),  # what the model did not write
    ],
)
def test_other_messages_begin_a_sequence_in_which_only_the_answer_is_drawn(messages: list[Message], tools: Any) -> None:
    told = Told()
    told.ask([USER], "Yes.")
    answer = told.ask(messages, "No.", tools)
    renderer, rollout = told.renderer, told.rollout
    assert told.asked[1] == renderer.whole(messages, tools)
    assert rollout.loss_mask[rollout.sequence_lengths[0] :].tolist() == [False] * len(told.asked[1]) + [True] * 3
    assert told.sequences[1] == [*told.asked[1], *answer]
    assert told.places == [(0, 0), (1, 0)]
    closes = sum(i == END for i in told.asked[1])
    assert closes == sum(message["role"] != "tool" for message in messages) + (0 if messages[0] == OTHER else 1)
    further = told.ask([*messages, said("No."), AGAIN], "On.", tools)
    assert len(told.sequences) == 2
    assert told.sequences[1] == [*told.asked[2], *further]


def test_whole_messages_are_rendered_as_prompts_are() -> None:
    for name in ("qwen2.5", "qwen3", "plain"):
        renderer = renderer_of(name)
        for messages in ([USER], [OTHER, USER], [USER, said("Yes."), AGAIN]):
            assert renderer.whole(messages, None) == renderer.first(messages, None)


def test_experts_of_tokens_that_have_some_are_refused() -> None:
    told = Told()
    told.ask([USER], "Yes.")
    asked = told.ledger.request([USER, said("Yes."), AGAIN], None)
    with pytest.raises(ValueError, match=r"^\d+ tokens have experts, and \d+ lack them$"):
        told.ledger.record([END], [0.0], 7, "stop", said(""), talking.routed([*asked, END]))


def test_limits_count_all_sequences_with_copies_of_what_they_share() -> None:
    told = Told(sequences=2)
    told.ask([USER], "Yes.")
    prompt = len(told.sample.prompt_ids)
    assert told.ledger.room(100) == 97
    told.ledger.request([USER], None)
    assert told.ledger.room(100) == 97 - prompt  # the second sequence begins with a copy
    told.ask([USER], "No.")
    assert told.ledger.room(100) == 94 - prompt
    rollout = told.rollout
    assert rollout.num_tokens - len(rollout.prompt_ids) == 100 - told.ledger.room(100)
    with pytest.raises(TooManySequences, match="has had its 2 sequences"):
        told.ledger.request([OTHER, USER], None)
    told.ask([USER, said("Yes."), AGAIN], "On.")  # a refusal changes nothing
    with pytest.raises(LedgerError, match="no message behind the model's last turn"):
        told.ledger.request([USER, said("Yes.")], None)
    assert told.ledger.turns == 3


@pytest.mark.parametrize("seed", range(20))
def test_of_random_trees_every_drawn_token_is_trained_on_once_behind_what_it_was_drawn_behind(seed: int) -> None:
    rng, told = random.Random(seed), Told(sequences=100)
    had: list[tuple[list[Message], list[int]]] = [([USER], [])]  # and what was drawn in it
    behind: dict[tuple[int, ...], list[int]] = {}
    for turn in range(rng.randint(1, 12)):
        messages, before = had[0] if turn == 0 else rng.choice(had)
        if turn and rng.random() < 0.2:
            messages = [OTHER, {"role": "user", "content": f"word {rng.randint(0, 2)}"}]
            before = []
            had.append((messages, before))
        drawn = told.ask(messages, f"answer {turn}")
        behind[tuple(drawn)] = told.asked[-1]
        further: list[Message] = [said(f"answer {turn}"), {"role": "user", "content": f"and {rng.randint(0, 1)}?"}]
        had.append(([*messages, *further], [*before, *drawn]))
        assert [i for i in told.asked[-1] if i in told.drawn and i != END] == [i for i in before if i != END]
    rollout, found = told.rollout, dict[tuple[int, ...], list[int]]()
    ends = np.cumsum(rollout.sequence_lengths)[:-1]
    for tokens, mask in zip(np.split(rollout.tokens, ends), np.split(rollout.loss_mask, ends), strict=True):
        assert not mask[0]
        (places,) = np.nonzero(mask)
        for group in np.split(places, len(places) // 3):
            found[tuple(tokens[group].tolist())] = tokens[: group[0]].tolist()
    assert found == behind
    assert sorted(rollout.response_ids.tolist()) == sorted(told.drawn)
    assert 1000 - told.ledger.room(1000) == rollout.num_tokens - len(rollout.prompt_ids)
    assert len(set(told.places)) == len(told.places)
    for messages, own in rollout.spoken:
        assert all(messages[i]["role"] == "assistant" for i in own)
    assert sum(tokens for _, own in rollout.spoken for tokens in own.values()) == rollout.length


# -------------------------------------------------------------------------------------------------------- conversations
@pytest.fixture
def talks(tmp_path: Path, words: Any) -> Talks:
    return Talks(tmp_path, words)


def test_what_parts_is_a_function_of_seeds_and_not_of_latencies(talks: Talks) -> None:
    engine = talking.Arithmetic()
    rollouts = talks("parting", engine=engine, sequences=4, max_turns=9, tokens=400)
    assert not talks.lost
    for rollout in rollouts.held.values():
        assert len(rollout.sequence_lengths) == 4
        assert len(rollout.conversations) == 4
        assert rollout.messages == rollout.conversations[-1]
        seeds = [request.seed for request in engine.submitted if request.name == (rollout.sample_id, rollout.index)]
        name = rollout.sample_id, rollout.index
        places = [(), (), (0, 0, 1), (0, 1), (1, 0), (1, 0, 0)]
        wanted = [
            rollout_seed(7, 5, *name, *([turn] if not place else [0, place])) for turn, place in enumerate(places)
        ]
        assert seeds == wanted
        sample = next(sample for sample in rollouts.samples if sample.id == rollout.sample_id)
        shown: Any = conversation_of(sample, rollout)
        assert [one["content"] for one in shown["conversation"] if one["role"] == "sequence"] == ["2", "3", "4"]
        assert sum(shown["turn_tokens"]) == rollout.length
        assert sum(tokens > 0 for tokens in shown["turn_tokens"]) == 6
    (folder := talks.folder / "kept").mkdir()
    keeper = response_log.Keeper(folder / "kept.jsonl")  # an evaluation that goes on has all of it
    for rollout in rollouts.held.values():
        keeper(rollout)
    keeper.close()
    kept = response_log.read(folder, rollouts.samples)
    for rollout in rollouts.held.values():
        again = kept[rollout.sample_id, rollout.index]
        assert again.spoken == rollout.spoken
        assert again.tokens.tolist() == rollout.tokens.tolist()
    for latency in (1, 2):
        slow = talks("parting", sequences=4, max_turns=9, tokens=400, params={"latency": latency})
        assert talking.bits(slow) == talking.bits(rollouts)
    plain = {(row, i): rollout.segments[i] for row, rollout in talks("patient").held.items() for i in (1, 3)}
    parted = {(row, i): rollout.segments[i] for row, rollout in rollouts.held.items() for i in (1,)}
    assert all(np.array_equal(plain[key].ids, parted[key].ids) for key in parted)


def test_what_the_recipe_does_not_allow_breaks_off_by_name(talks: Talks) -> None:
    for sequences, code in ((1, "forked"), (3, "sequence_limit")):
        talking.SAID.clear()
        rollouts = talks("parting", sequences=sequences, max_turns=9, tokens=400, model_failed=-1.0, stop_after=99)
        assert all(text.startswith(code) for text in talking.SAID)
        assert talking.SAID
        if code == "sequence_limit":  # as any limit: the turns before are trained on
            assert {rollout.failed_by for rollout in rollouts.held.values()} == {"model"}
            assert all(len(rollout.sequence_lengths) == 3 for rollout in rollouts.held.values())


def test_rewards_per_token_read_one_sequence(tmp_path: Path) -> None:
    from megatron_rl.preflight.recipe import _check_sequences

    config = talking.recipe("patient", sequences=2)
    reward: Any = type("PerToken", (), {"per_token": True})
    config.rewards = {"teacher": type("Section", (), {"tasks": None})}  # type: ignore[dict-item]
    with pytest.raises(
        ValueError, match=r"tasks.train.t.agent.sequences is 2, and rewards.teacher gives a number to each"
    ):
        _check_sequences(config, {"teacher": reward})
    config.tasks.train["t"].agent.sequences = 1  # type: ignore[union-attr]
    _check_sequences(config, {"teacher": reward})


CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "lamp"}}\n</tool_call>'


@pytest.mark.parametrize("renders", [False, True])
def test_a_history_that_the_template_rewrites_is_kept_or_begins_a_sequence(renders: bool) -> None:
    """Qwen3's template keeps the thinking of a chain of calls, and leaves it out once the user speaks again."""
    renderer = renderer_of("qwen3")
    sample = Sample("task/0", "task", [USER], renderer.first([USER], TOOLS), metadata={"tools": TOOLS})
    ledger, messages, drawn = Ledger(renderer, sample, 3, renders), [USER], list[list[int]]()
    for turn, (text, answer) in enumerate(
        [(CALL, {"role": "tool", "content": "It is lit."}), ("It is.", AGAIN), ("Off.", None)]
    ):
        asked = ledger.request(messages, TOOLS)
        ids = [*encode([f"<think>\nHm {turn}.\n</think>\n\n{text}"], renderer.tokenizer)[0], END]
        message = read_reply(renderer.tokenizer.decode(ids[:-1]), "stop", "hermes", turn, tools=TOOLS).message
        ledger.record(ids, [-1.0] * len(ids), 0, "stop", message)
        drawn.append(ids)
        given, messages = messages, [*messages, message, *([answer] if answer else [])]
    rollout = Rollout("task/0", 0, ledger.segments, "stop", conversations=ledger.conversations)
    assert rollout.response_ids.tolist() == [i for ids in drawn for i in ids]
    assert len(rollout.sequence_lengths) == 1 + renders
    seen = renderer.tokenizer.decode(asked)
    assert ("Hm 0." in seen, "Hm 1." in seen, "It is lit." in seen) == (not renders, not renders, True)
    if renders:
        assert asked == renderer.whole(given, TOOLS)
        assert rollout.sequence_lengths[1] == len(asked) + len(drawn[-1])


def test_conversations_in_toolrls_form_are_asked_about_as_its_data_has_them() -> None:
    """The layout of rows of its data, of which `recipes/_data/toolrl.jinja` writes 299 of 300 character by character."""
    task = TaskConfig("jsonl", chat=True, chat_template="recipes/_data/toolrl.jinja")
    renderer = Renderer(tokenizer_of("qwen2.5"), template_params(task))
    sample = Sample("task/0", "task", [USER], renderer.first([USER], TOOLS), metadata={"tools": TOOLS})
    ledger, messages, asked = Ledger(renderer, sample, 3, True), [USER], list[str]()
    calls = "\n".join(f'{{"name": "look", "parameters": {{"what": "{what}"}}}}' for what in ("lamp", "é"))
    turns = [
        f"<think> I look. </think>\n<tool_call>\n{calls}\n</tool_call>",
        "<think> Lit. </think>\n<response> It is. </response>",
        "<response> Yes. </response>",
    ]
    replies = [[{"role": "tool", "content": text} for text in ('{"lit": true}', "It's dark.")], [AGAIN], []]
    for number, (text, following) in enumerate(zip(turns, replies, strict=True)):
        asked.append(renderer.tokenizer.decode(ledger.request(messages, TOOLS)))
        ids = [*encode([text], renderer.tokenizer)[0], END]
        message = read_reply(text, "stop", "toolrl", number, tools=TOOLS).message
        ledger.record(ids, None, 0, "stop", message)
        messages = [*messages, message, *following]
    first, user = "<|im_start|>user\n**Dialogue Records History**\n", "<user> Look. </user>"
    system, records = asked[0].split(first)
    assert records == f"{user}<|im_end|>\n<|im_start|>assistant\n"
    written = Path("recipes/_data/toolrl_system.txt").read_text()  # with which the rows of single steps are made
    listed = f"1. Name: look\nDescription: Looks.\nParameters: {json.dumps(PROPERTIES)}"
    assert system == f"<|im_start|>system\n{written.replace('{tools}', listed)}<|im_end|>\n"
    escaped = turns[0].replace("é", "\\u00e9")
    observed = '<obs> [{"name": "look", "results": {"lit": true}}, {"name": "look", "results": "It\'s dark."}] </obs>'
    once = f"{system}{first}{user}\n\n{escaped}\n{observed}"
    assert asked[1] == f"{once}<|im_end|>\n<|im_start|>assistant\n"
    assert asked[2] == f"{once}\n\n{turns[1]}\n\n<user> And now? </user><|im_end|>\n<|im_start|>assistant\n"
    rollout = Rollout("task/0", 0, ledger.segments, "stop", conversations=ledger.conversations)
    assert len(rollout.sequence_lengths) == 3
    assert "".join(str(message["role"])[0] for message in ledger.messages) == "uattaua"


def test_rendered_histories_need_sequences() -> None:
    from megatron_rl.preflight.recipe import _check_sequences

    config = talking.recipe("patient", history="rendered")
    with pytest.raises(ValueError, match=r"history` is rendered, .*sequences is 1; set it to .*max_turns \(4\)"):
        _check_sequences(config, {})
    config.tasks.train["t"].agent.sequences = 4  # type: ignore[union-attr]
    _check_sequences(config, {})
