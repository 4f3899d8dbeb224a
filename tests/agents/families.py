"""Chat templates that behave as the published ones do, written here in few words, and byte-level tokenizers for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from megatron_rl.rewards.tool_parsers import ParserName

_TOOLS = "{{ '\\n'.join(tools | map('tojson')) }}"
_GO_ON = "{% if add_generation_prompt %}<|im_start|>assistant\n"

# Tool replies that follow one another are one message of the user's.
_CHATML_REPLY = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_CHATML_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
QWEN2_5 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.{% if tools %}{{ '\n' }}"
    + _TOOLS
    + "{% endif %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}" + _CHATML_REPLY + "{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == 'system' and tools %}{{ '\n' }}" + _TOOLS + "{% endif %}"
    "" + _CHATML_CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + _GO_ON + "{% endif %}"
)
# Thinking is kept behind the last message of the user's only, where the last turn has a think block, be it empty.
QWEN3 = (
    "{% set ns = namespace(last=messages | length - 1, open=true) %}{% for m in messages[::-1] %}"
    "{% if ns.open and m.role == 'user' %}{% set ns.last = messages | length - 1 - loop.index0 %}"
    "{% set ns.open = false %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}" + _CHATML_REPLY + "{% elif m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ content }}" + _CHATML_CALLS + "<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    ""
    + _GO_ON
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Calls are tags, and of their values only objects and lists are JSON. Contents are trimmed, the template opens the thinking.
_QWEN3_5_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\n\n' if loop.first and m.content else '' if loop.first else '\n' }}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
QWEN3_5 = (
    QWEN3.replace(_CHATML_CALLS, _QWEN3_5_CALLS)
    .replace("{{ m.content }}", "{{ m.content | trim }}")
    .replace("</think>\n\n{% endif %}{% endif %}", "</think>\n\n{% else %}<think>\n{% endif %}{% endif %}")
)
# Contents are trimmed, results are JSON, and a turn has one call.
LLAMA3_1 = (
    "{{ bos_token }}{% set date = date_string or strftime_now('%d %b %Y') %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday: {{ date }}\n{% if tools %}" + _TOOLS + "{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The tools stand before the user's last message, calls need ids of nine characters, and nothing begins the model's turn.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role in ('user', 'system') %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]" + _TOOLS + "[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    '{{ raise_exception("ids have nine characters") }}{% endif %}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, '
    '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
# A turn ends with <|return|> where it is the last, with <|call|> where it calls; results have the call's name.
GPT_OSS = (
    "<|start|>system<|message|>{{ strftime_now('%Y-%m-%d') }}<|end|>{% set ns = namespace(name=none) %}"
    "{% for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}"
    "{% set f = m.tool_calls[0].function %}{% set ns.name = f.name %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% set last = loop.last and not add_generation_prompt %}{% if last and m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if last else '<|end|>' }}"
    "{% elif m.role == 'tool' %}{% if ns.name is none %}{{ raise_exception('nothing was called') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Nothing ends a turn but the first token of the next message; arguments must be a mapping.
GLM4 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n" + _TOOLS + "{% endif %}{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '\n' }}<think>{% if loop.index0 > ns.last %}{{ m.reasoning_content | trim }}{% endif %}</think>"
    "{% if content | trim %}{{ '\n' }}{{ content | trim }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ '\n' }}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}{{ '\n' }}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Roles are tokens that are not called special, arguments are joined to text, and the template opens the thinking. Only the
# first calls and the first results of a conversation have what begins such; where a turn calls again, what was behind the
# results before it is left out.
DEEPSEEK = (
    "{{ bos_token }}{% set ns = namespace(tool=false, called=false, replied=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if not ns.replied %}<｜tool▁outputs▁begin｜>{% endif %}{% set ns.replied = true %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}{% elif 'tool_calls' in m %}{% for c in m.tool_calls %}"
    "{% if ns.called %}{{ '\n' }}{% else %}<｜Assistant｜>{{ m.content }}<｜tool▁calls▁begin｜>{% endif %}"
    "{% set ns.called = true %}<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name }}\n"
    "```json\n{{ '' + c.function.arguments + '' }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{{ eos_token }}"
    "{% else %}{{ '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}{{ m.content.split('</think>')[-1] }}"
    "{{ eos_token }}{% endif %}{% set ns.tool = m.role == 'tool' %}{% endfor %}"
    "{% if ns.tool %}<｜tool▁outputs▁end｜>{% elif add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
# No token ends a turn in the text, as in the models that tests make.
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt else '' }}"
)


@dataclass(frozen=True)
class Family:
    """A template, its tokens, and how its model writes."""

    name: str
    template: str
    special: tuple[str, ...]  # the first ends a sequence
    added: tuple[str, ...] = ()  # tokens of their own that are not special
    stops: tuple[str, ...] = ()  # by which a turn may end; the first is what the template ends a turn with
    parser: ParserName | None = None  # None: our parsers do not read its calls
    begins: str = ""  # what the model writes first in a turn
    lists_tools_once: bool = True  # or not at all
    metaspace: bool = False  # the tokenizer puts a space before a text
    folder: str = ""  # of a published tokenizer; empty: it is made here

    def call(self, name: str, arguments: dict[str, object]) -> str:
        """What a model of Qwen's or Llama's writes to call a tool."""
        if self.parser == "llama":
            return json.dumps({"name": name, "parameters": arguments})
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


_CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|image_pad|>")
_CHATML_STOPS = ("<|im_end|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>")
_QWEN3_TAGS = (*_TAGS, "<think>", "</think>", "<tool_response>", "</tool_response>")
_LLAMA = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
_MISTRAL = (
    *("</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
_GPT_OSS = ("<|return|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|call|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_TAGS = (*_TAGS, "<think>", "</think>")
_DEEPSEEK_ENDS = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>")
_DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        *("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep"),
        *("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
    )
)

FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2.5", QWEN2_5, _CHATML, _TAGS, _CHATML_STOPS, "hermes"),
        Family("qwen3", QWEN3, _CHATML, _QWEN3_TAGS, _CHATML_STOPS, "hermes"),
        Family("qwen3.5", QWEN3_5, _CHATML, _QWEN3_TAGS, _CHATML_STOPS, "qwen3_5"),
        Family("llama3.1", LLAMA3_1, _LLAMA, (), ("<|eot_id|>", "<|eom_id|>"), "llama"),
        Family("mistral", MISTRAL, _MISTRAL, (), ("</s>",), "mistral", lists_tools_once=False, metaspace=True),
        Family("gpt-oss", GPT_OSS, _GPT_OSS, (), ("<|return|>",), "gpt_oss", begins="<|channel|>final<|message|>"),
        Family("glm4", GLM4, _GLM, _GLM_TAGS, ("<|user|>", "<|endoftext|>"), "glm4", begins="\n<think></think>\n"),
        Family(
            "deepseek", DEEPSEEK, _DEEPSEEK_ENDS, ("<think>", "</think>", *_DEEPSEEK), _DEEPSEEK_ENDS[:1], "deepseek"
        ),
        Family("plain", PLAIN, ("<eos>",), (), ("<eos>",), "hermes"),
    )
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the family's tokens with some hundred merges, among them of spaces, newlines and brackets."""
    family = FAMILIES[name]
    if family.folder:
        published = PreTrainedTokenizerFast.from_pretrained(family.folder)
        published.add_tokens([AddedToken(token, normalized=False) for token in family.added])
        published.chat_template = family.template
        return published
    fast = Tokenizer(BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if family.metaspace:
        fast = Tokenizer(BPE(byte_fallback=True))
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        fast.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(i) for i in range(32, 127)] + ["\n", "▁"]
    corpus = [
        "Look the lamp up.\n\n\nassistant\nuser\n",
        '{"name": "look", "arguments": {"what": "lamp"}}\n',
        "|><|im_end|>\n\n",
    ]
    trainer = BpeTrainer(
        vocab_size=len(alphabet) + len(family.special) + 120,
        special_tokens=list(family.special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    fast.train_from_iterator(corpus * 20, trainer)
    fast.add_tokens([AddedToken(token, normalized=False) for token in family.added])
    named = {"eos_token": family.special[0]}
    if "bos_token" in family.template:
        named["bos_token"] = family.special[1]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, **named)
    tokenizer.chat_template = family.template
    return tokenizer
