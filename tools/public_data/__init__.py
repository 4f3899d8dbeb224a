"""Public datasets -> rows for the `jsonl` source. A converter turns one row into rows, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from megatron_rl.tasks.rows import Row
from public_data.dialogue import STYLES, SYSTEM, Dropped
from public_data.feedback import arena_hard_rows, baseline_answers, preference_rows, prompt_rows
from public_data.maths import dapo_rows, deepscaler_rows, eurus_rows, gsm8k_rows
from public_data.tools import (
    api_bank_rows,
    read_messages,
    read_toolace,
    read_xlam,
    tool_rows,
    toolrl_rows,
)

Converter = Callable[[Row], Iterable[Row | Dropped]]


@dataclass(frozen=True)
class Options:
    style: str = "toolrl"  # tools: toolrl | chat, how the prompt shows tools and history
    system: str = SYSTEM  # tools, toolrl style: the system message, with the field {tools}
    mask_seed: int = 0  # hammer: of the random names
    ability: str = "math"  # eurus: math | code
    baseline: str | None = None  # arena_hard: file of the baseline's answers
    category: str | None = None  # arena_hard: only questions of this one


FORMATS: dict[str, Callable[[Options], Converter]] = {
    "toolace": lambda o: partial(tool_rows, read=read_toolace, style=o.style, system=o.system),
    "xlam": lambda o: partial(tool_rows, read=read_xlam, style=o.style, system=o.system),
    "hammer": lambda o: partial(tool_rows, read=read_xlam, style=o.style, system=o.system, mask_seed=o.mask_seed),
    "stepwise": lambda o: partial(tool_rows, read=read_messages, style=o.style, system=o.system),
    "toolrl": lambda o: toolrl_rows,
    "api_bank": lambda o: api_bank_rows,
    "gsm8k": lambda o: gsm8k_rows,
    "dapo_math": lambda o: dapo_rows,
    "deepscaler": lambda o: deepscaler_rows,
    "prompts": lambda o: prompt_rows,
    "preferences": lambda o: preference_rows,
    "arena_hard": lambda o: partial(arena_hard_rows, answers=baseline_answers(o.baseline), category=o.category),
    "eurus": lambda o: partial(eurus_rows, ability=o.ability),
}

# Benchmarks: every row is a test case, even where another row has the same prompt and answer.
BENCHMARKS = frozenset({"api_bank", "arena_hard"})

__all__ = ["BENCHMARKS", "FORMATS", "STYLES", "SYSTEM", "Converter", "Dropped", "Options"]
