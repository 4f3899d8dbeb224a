"""Public datasets -> JSON Lines for `source: jsonl`.

    python tools/prepare_data.py toolace --input Team-ACE/ToolACE --output data/toolace.jsonl
    python tools/prepare_data.py dapo_math --input dapo-math-17k.parquet --output data/dapo.jsonl

The input is a file (.jsonl, .json, .parquet), a pattern of such files, a dataset's folder or its name on the hub. What does
not become a row is counted by reason and printed; docs/data.md says what the formats are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from public_data import BENCHMARKS, FORMATS, STYLES, SYSTEM, Converter, Dropped, Options

from megatron_rl.base.messages import errors_named
from megatron_rl.config.schema import TaskConfig
from megatron_rl.tasks.rows import Row, files_of, huggingface_rows, jsonl_rows, parquet_rows


@dataclass
class Counts:
    read: int = 0
    written: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        options = Options(args.style, _system(args.system), args.seed, args.ability, args.baseline, args.category)
        config = TaskConfig(source="huggingface", path=args.input, subset=args.subset, split=args.split)
        keep = args.keep_duplicates or args.format in BENCHMARKS
        counts = convert(_rows(config), FORMATS[args.format](options), Path(args.output), keep)
    except (OSError, ValueError) as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    print(f"{counts.read} rows read, {counts.written} written to {args.output}")
    for reason, number in counts.dropped.most_common():
        print(f"  {number} dropped: {reason}")
    if not counts.written:
        print(f"prepare_data: nothing was written; is {args.input} in the format {args.format}?", file=sys.stderr)
    return 0 if counts.written else 1


def convert(rows: Iterator[Row], converter: Converter, output: Path, keep_duplicates: bool = False) -> Counts:
    """Write what the converter makes of the rows; the file appears under its name when it is whole."""
    counts = Counts()
    seen: set[bytes] = set()
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    try:
        with partial.open("wb") as file:
            for row in rows:
                counts.read += 1
                for made in converter(row):
                    if isinstance(made, Dropped):
                        counts.dropped[made.reason] += 1
                        continue
                    try:
                        line = json.dumps(made, ensure_ascii=False).encode()
                    except UnicodeEncodeError:  # half of a pair of surrogates, as JSON can write it
                        counts.dropped["text that is no Unicode"] += 1
                        continue
                    known = json.dumps([made["prompt"], made.get("answer"), made.get("tool_calls")], sort_keys=True)
                    key = hashlib.blake2b(known.encode(), digest_size=16).digest()  # tests of code can be megabytes
                    if key in seen and not keep_duplicates:
                        counts.dropped["the same prompt and answer as a row before"] += 1
                        continue
                    seen.add(key)
                    file.write(line + b"\n")
                    counts.written += 1
        if counts.written:
            os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return counts


def _rows(config: TaskConfig) -> Iterator[Row]:
    assert config.path is not None
    if config.path.endswith(".json"):
        for file in files_of(config.path, ".json"):
            with errors_named(f"{file} is not JSON", ValueError, RecursionError):
                rows = json.loads(file.read_bytes())
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ValueError(f"{file} must hold a list of objects")
            yield from rows
        return
    readers = {".jsonl": jsonl_rows, ".parquet": parquet_rows}
    read = readers.get(Path(config.path).suffix, huggingface_rows)
    for _, row in read(config):
        yield row


def _system(path: str | None) -> str:
    if path is None:
        return SYSTEM
    text = Path(path).read_text("utf-8")
    if "{tools}" not in text:
        raise ValueError(f"{path} must have {{tools}} where the tools are to be listed")
    return text.replace("{", "{{").replace("}", "}}").replace("{{tools}}", "{tools}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--input", required=True, help="file, pattern, dataset folder, or name on the hub")
    parser.add_argument("--output", required=True, help="the JSON Lines file to write")
    parser.add_argument("--split", default="train", help="of a dataset; train")
    parser.add_argument("--subset", help="of a dataset: its configuration")
    parser.add_argument("--style", choices=STYLES, default="toolrl", help="toolace, xlam, hammer, stepwise: the prompt")
    parser.add_argument("--system", metavar="FILE", help="a system message of your own, with {tools} in it")
    parser.add_argument("--seed", type=int, default=0, help="hammer: of the random names; 0")
    parser.add_argument(
        "--ability", choices=("math", "code"), default="math", help="eurus: which of its two halves; math"
    )
    parser.add_argument("--baseline", metavar="FILE", help="arena_hard: the baseline model's answers")
    parser.add_argument("--category", help="arena_hard: only questions of this one, e.g. creative_writing")
    parser.add_argument(
        "--keep-duplicates",
        action="store_true",
        help="keep rows that have the same prompt and answer; api_bank, a benchmark, always does",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
