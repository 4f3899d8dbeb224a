"""Mutated recipes and overrides through `--check`: it answers with one message, soon, and never with a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import random
import string
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from megatron_rl import cli
from megatron_rl.base.typed_params import fields, unwrap
from megatron_rl.config import load_recipe
from megatron_rl.config.keys import entry_type
from megatron_rl.config.schema import Config
from tests.fuzz.loop import deadline, run

ROOT = Path(__file__).parents[2]
SECONDS = 20.0  # of one check, on a busy machine
PARAMS = (
    *("tasks.train.sums.params", "tasks.train.sums.demonstration_params", "tasks.train.sums.chat_params"),
    *("tasks.train.file.columns.metadata", "rewards.correct.params", "rewards.format.params", "rewards.judge.params"),
    *("algorithm.estimator.params", "algorithm.surrogate.params", "watchdog.phases"),
)
NAMES = {"tasks.train": "sums", "tasks.eval": "held_out", "rewards": "correct"}


@dataclass(frozen=True)
class Case:
    """One call of the command."""

    recipe: bytes
    overrides: tuple[str, ...] = ()
    name: str = "recipe.yaml"


def base_tree(folder: Path) -> dict[str, Any]:
    """A recipe with every kind of source and reward that needs no network; its files are made in `folder`."""
    (folder / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "metadata": {"level": 3}}\n' * 9)
    (folder / "judged.py").write_text("def factory(share: float = 1.0):\n    return lambda completion, sample: share\n")
    (folder / "base.yaml").write_text("trainer: {steps: 3}\n")
    if not (folder / "pipe").exists():
        os.mkfifo(folder / "pipe")
    return {
        "base": "base.yaml",
        "run_dir": "runs/fuzz",
        "model": {"create": {"layers": 2}, "dtype": "float32"},
        "tasks": {
            "train": {
                "sums": {
                    "source": "reasoning_gym",
                    "name": "chain_sum",
                    "size": 10,
                    "params": {"min_terms": 2, "max_terms": 3},
                    "prompt": "{expression:compact}=",
                    "demonstrations": "chain_sum_steps",
                    "demonstration_params": {"share": 0.5},
                },
                "file": {"source": "jsonl", "path": "data.jsonl", "prompt": "{level}: {prompt}"},
                "tools": {"source": "tool_world", "size": 5},
            },
            "eval": {
                "held_out": {"source": "reasoning_gym", "name": "maze", "size": 5, "seed": 2},
                "part": {"source": "split", "of": "file", "hold_out": 0.5},
            },
        },
        "rewards": {
            "correct": {
                "reward": "puzzle",
                "params": {"after": "#", "partial": False},
                "tasks": ["sums", "held_out"],
            },
            "format": {"reward": "format", "params": {"pattern": "[^#]*#-?[0-9]+"}, "weight": 0.1},
            "judge": {"reward": "judged.py:factory", "params": {"share": 0.5}, "when_needed": True},
            "short": {"reward": "length", "params": {"limit": 100}, "condition": {"column": "correct"}},
        },
        "rollout": {"group_size": 4, "max_prompt_tokens": 12, "max_tokens": 24},
        "sft": {"steps": 3},
        "trainer": {"steps": 4, "prompts_per_step": 8},
    }


@cache
def keys() -> tuple[str, ...]:
    """Every key of the schema, with names of the recipe above."""
    return tuple(_keys(Config, ""))


def _keys(hint: Any, key: str) -> Iterator[str]:
    hint = unwrap(hint)[0]
    if key:
        yield key
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
        for name, inner in fields(hint).items():
            yield from _keys(inner, f"{key}.{name}" if key else name)
    elif (entry := entry_type(hint)) is not None and key in NAMES:
        yield from _keys(entry, f"{key}.{NAMES[key]}")


NUMBERS = [
    *("0", "1", "-1", "2", "3", "-0.0", "0.5", "1e-300", "1e300", ".nan", ".inf", "-.inf", "4294967296"),
    *("1" + "0" * 23, "9" * 5000, "0x" + "f" * 5000, "0o7", "1_000", "1e", "٣", "0b1", "1:30", "-9223372036854775809"),
    *("1e400", "65536"),
]
TEXTS = [
    *("''", "abc", "null", "~", "true", "no", "[]", "{}", "[1]", "{a: 1}", "[[[[1]]]]", "[null]", "{1: 2}"),
    *("{null: 1}", "a" * 300, "a/" * 3000, "x\\0y", '"\\0"', '"a\\nb"', "é" * 200, '"\\ud800"', "\udc80", "\x85"),
    *('"\\u2028"', '"\\t"', "${seed}", "${nope}", "${a", "$", "${run_dir}${run_dir}", "${oc.env:HOME}", "\\${seed}"),
    *("{prompt}", "{nope}", "{", "{prompt:>99999999999}", "{prompt!r:.9}", "{prompt.__class__}", "{prompt[0]}", "{0}"),
    *("{}", "{level:d}", "{level:{x}}", "/dev/zero", "/dev/null", "/dev/stdin", "pipe", ".", "/", "..", "data.jsonl"),
    *("base.yaml", "nope.jsonl", "*.jsonl", "~", "~nobody/x", "/proc/self/mem", "file:///etc/passwd", "http://["),
    *("2026-99-99", "2026-01-01", "!!python/name:os.system", "&a [*a]", "*a", "<<: 1", "|", "- a", "a: b: c", "%", "@"),
    *("`", "judged.py:factory", "nope.py:f", "os:system", "a.py:", "column:answer", "column:", "column:nope"),
    *("tool_world", "math", "judge", "reward_model", "code_pass_rate", "length", "(", "[", "(a+)+$", "\\", "grpo"),
    *("awpo", "none", "eval/held_out/avg@1", "[sums]", "[nope]", "{column: format}"),
]


def make_case(number: int, folder: Path) -> Case:
    """The case of this number; the same every time."""
    drawn = random.Random(f"recipes {number}")
    kinds: list[Callable[[random.Random, Path], Case]] = [
        *[_by_override] * 6,
        *[_by_tree] * 4,
        *[_by_bytes] * 3,
        *[_by_yaml] * 2,
        _by_file,
    ]
    return drawn.choice(kinds)(drawn, folder)


def _value(drawn: random.Random) -> str:
    pool = drawn.choice((NUMBERS, TEXTS))
    value = drawn.choice(pool)
    if drawn.random() < 0.1:
        value = "".join(drawn.choices(string.printable, k=drawn.randrange(1, 30)))
    if drawn.random() < 0.05:
        value = f"{'[' * (depth := drawn.choice((3, 60, 400, 3000)))}{value}{']' * depth}"
    return value


def _key(drawn: random.Random) -> str:
    if drawn.random() < 0.25:
        inside = drawn.choice(
            ("share", "min_terms", "seed", "path", "after", "pattern", "limit", "eps", "start", "a.b", "x")
        )
        return f"{drawn.choice(PARAMS)}.{inside}"
    key = drawn.choice(keys())
    if drawn.random() < 0.05:
        key += drawn.choice((".x", "..", ".", " ", ".a" * 3000, "\0", "=", "[0]"))
    return key


def _by_override(drawn: random.Random, folder: Path) -> Case:
    text = yaml.safe_dump(base_tree(folder), sort_keys=False).encode()
    overrides = tuple(f"{_key(drawn)}={_value(drawn)}" for _ in range(drawn.choice((1, 1, 1, 2, 5))))
    return Case(text, overrides)


def _by_tree(drawn: random.Random, folder: Path) -> Case:
    """Values of another kind at some place of the tree."""
    tree = base_tree(folder)
    odd = [
        None,
        True,
        0,
        -1,
        10**23,
        -(2**63),
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "a\0b",
        "a\nb",
        [],
        {},
        [1],
        {"a": 1},
    ]
    odd += [
        {"a": {"b": [None, {}]}},
        ["x"] * 5,
        "pipe",
        "/dev/zero",
        {f"k{i}": i for i in range(300)},
        "\u2028",
        {"": 1},
    ]
    for _ in range(drawn.choice((1, 1, 2, 4))):
        node: Any = tree
        while isinstance(node, dict) and node:
            name = drawn.choice(list(node))
            if not isinstance(node[name], dict) or not node[name] or drawn.random() < 0.3:
                node[name] = drawn.choice(odd)
                break
            node = node[name]
    return Case(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode())


def _by_bytes(drawn: random.Random, folder: Path) -> Case:
    data = bytearray(yaml.safe_dump(base_tree(folder), sort_keys=False).encode())
    for _ in range(drawn.choice((1, 1, 3, 30))):
        at = drawn.randrange(len(data))
        action = drawn.randrange(4)
        if action == 0:
            data[at] = drawn.randrange(256)
        elif action == 1:
            del data[at : at + drawn.randrange(1, 20)]
        elif action == 2:
            data[at:at] = bytes(drawn.choices(b"\t :-[]{}#&*!|>'\"%@`\0\xff\n,?", k=drawn.randrange(1, 4)))
        else:
            end = at + drawn.randrange(1, 60)
            data[at:at] = data[at:end]
    return Case(bytes(data))


def _by_yaml(drawn: random.Random, folder: Path) -> Case:
    """Things that YAML has and recipes do not need."""
    depth = drawn.choice((10, 200, 900, 5000))
    odd = [
        "a: &a [*a]",
        "run_dir: !!python/object/apply:os.system ['touch ran']",
        "run_dir: a\nrun_dir: b",
        "\n".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9) if i else '1'}]" for i in range(30)),
        "rewards: " + "{a: " * depth + "1" + "}" * depth,
        "rewards: {x: {reward: puzzle, params: {a: " + "[" * depth + "]" * depth + "}}}",
        "- 1",
        "",
        "null",
        "1",
        "--- \n---\n",
        "base: "
        + drawn.choice(("recipe.yaml", "[recipe.yaml]", '"a\\0b"', "pipe", "/dev/zero", ".", "[[]]", "a" * 5000)),
        "run_dir: 2026-99-99",
        "seed: " + drawn.choice(NUMBERS),
        "? [a, b]\n: c",
        "? {a: b}\n: c",
        "<<: {seed: 1}",
        "<<: [1]",
        "\ufeffseed: 1",
        "seed: 1".encode("utf-16").decode("latin-1"),
        "seed: !!int x",
        "seed: !!float 1",
        "seed: !!binary a",
        "seed: !!timestamp x",
        "tasks: {train: {a: {source: jsonl, path: " + drawn.choice(("pipe", "/dev/zero", ".", "''", '"\\0"')) + "}}}",
    ]
    rest = yaml.safe_dump(base_tree(folder), sort_keys=False) if drawn.random() < 0.5 else "run_dir: a\n"
    text = drawn.choice(odd)
    return Case((text if drawn.random() < 0.4 else f"{rest}\n{text}").encode("utf-8", "surrogatepass"))


def _by_file(drawn: random.Random, folder: Path) -> Case:
    """Recipes that are no files, and chains of bases."""
    base_tree(folder)
    name = drawn.choice(("pipe", "/dev/zero", "/dev/null", ".", "", "nope", "a" * 300, "a\0b", "chain_0.yaml"))
    if name == "chain_0.yaml":
        length = drawn.choice((5, 1200))
        for i in range(length):
            (folder / f"chain_{i}.yaml").write_text(f"base: chain_{i + 1}.yaml\n")
        (folder / f"chain_{length}.yaml").write_text("run_dir: a\n")
    return Case(b"", (), name)


def check_case(case: Case, folder: Path) -> tuple[int, str]:
    """Runs the command in this process, in `folder`; returns the exit code and what it said on stderr.

    Raises:
        AssertionError: another exit code than 0 and 2, no message, a traceback, or a resolved recipe that is another one
            when it is read again.
        Exception: what the command itself raises.
    """
    if case.recipe:
        (folder / case.name).write_bytes(case.recipe)
    out, err = io.StringIO(), io.StringIO()
    arguments = ["train", case.name, "--check", *case.overrides]
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ),
        deadline(SECONDS),
    ):
        try:
            code = cli.main(arguments)
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
    said = err.getvalue()
    assert code in (0, 2), f"exit code {code}"
    assert code == 0 or said.strip(), "refused without a word"
    assert "Traceback" not in said
    assert len(said) < 20_000, f"{len(said)} characters of message"
    assert not (folder / "ran").exists(), "something was run"
    if code == 0:
        said.encode()
        resolved = folder / "resolved.yaml"
        resolved.write_text(out.getvalue(), encoding="utf-8")
        with contextlib.chdir(folder):
            load_recipe(resolved)
    return code, said


def try_case(number: int) -> int:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return check_case(make_case(number, Path(folder)), Path(folder))[0]


if __name__ == "__main__":
    run(try_case, "recipes")
