"""Writes a reference rationale for every row of a data set, with any model behind an OpenAI chat API.

python tools/write_rationales.py --data train.jsonl --out train_rationales.jsonl --url http://localhost:8000/v1 --model NAME

The output has the input's rows, in order, with the column `rationale` added, which the reward `judge` compares with. It
appears when it is complete. Until then answers are in OUT.partial: a command that was stopped, or ran out of budget, is
started again and asks only for what is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.base.typed_params import check_types
from megatron_rl.config.schema import ServerConfig, TaskConfig
from megatron_rl.rewards.judge import check_body, has_message, messages, reply_text
from megatron_rl.rewards.remote import Nonsense
from megatron_rl.runtime.calls import event_loop
from megatron_rl.runtime.http import Endpoint, EndpointError, Unanswered
from megatron_rl.tasks.row_mapping import column, gold_calls
from megatron_rl.tasks.rows import jsonl_rows, parquet_rows

TEMPLATE = """\
You write the reasoning of an expert assistant that uses tools. You are given a request and the tool calls that \
are the right next step. Write what the expert thinks before making exactly these calls: what the user wants, \
what is known already and what is missing, which tool serves which part and why, where each parameter's value \
comes from, what depends on what, and when to stop. Where the right step is to call no tool, reason why, and \
what to answer.

Write in the first person and the present tense, in at most 150 words, as one plain text without headings. Reach \
the calls by reasoning: do not mention that they were given. Do not write the calls themselves.
[user]
<request>
{prompt}
</request>

<right_tool_calls>
{tool_calls}
</right_tool_calls>

Write the reasoning."""
DEFAULT_BODY = {"temperature": 0.0, "max_tokens": 1024}


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the output is complete. 1: some rows have no rationale yet. 2: the command cannot work as given."""
    args = _arguments(arguments)
    try:
        rows = list(_rows(args.data, args.limit))
        template = args.template.read_text(encoding="utf-8") if args.template else TEMPLATE
        body = check_body(json.loads(args.body) if args.body else None, DEFAULT_BODY)
        requests = [{"model": args.model, "messages": _messages(template, row, args), **body} for row in rows]
        if args.dry_run:
            for message in requests[0]["messages"] if requests else ():
                print(f"--- {message['role']} ---\n{message['content']}\n")
            print(f"{len(rows)} rows. Nothing was asked.")
            return 0
        if not args.url or not args.model:
            raise ValueError("--url and --model are missing")
        return _write(args, rows, requests)
    except (ValueError, OSError, EndpointError) as error:
        print(f"write_rationales: {error}", file=sys.stderr)
        return 2


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="JSON Lines or Parquet: a file, folder or pattern")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines")
    parser.add_argument(
        "--url", action="append", help="base URL such as http://localhost:8000/v1; several times for several servers"
    )
    parser.add_argument("--model", help="the model's name at the servers")
    parser.add_argument("--api-key-env", metavar="NAME", help="NAME of the environment variable with the key")
    parser.add_argument("--prompt-column", default="prompt", help="text or chat messages (default: prompt)")
    parser.add_argument("--calls-column", default="tool_calls", help="gold calls (default: tool_calls)")
    parser.add_argument("--column", default="rationale", help="the column to add (default: rationale)")
    parser.add_argument("--template", type=Path, help="a prompt in place of ours; as for the reward `judge`")
    parser.add_argument(
        "--body", metavar="JSON", help=f"further keys of the request (default: {json.dumps(DEFAULT_BODY)})"
    )
    parser.add_argument("--limit", type=int, help="only the first so many rows")
    parser.add_argument("--max-requests", type=int, help="stop after so many requests, retries included")
    parser.add_argument("--max-tokens", type=int, help="stop after so many tokens, as the servers report them")
    parser.add_argument("--max-in-flight", type=int, default=64, help="requests at a time (default: 64)")
    parser.add_argument("--request-seconds", type=float, default=120.0, help="longest time of a request (default: 120)")
    parser.add_argument("--retries", type=int, default=4, help="further requests after a failed one (default: 4)")
    parser.add_argument("--keep-missing", action="store_true", help="write the output though rows lack a rationale")
    parser.add_argument("--dry-run", action="store_true", help="show the first prompt, ask nothing")
    return parser.parse_args(arguments)


def _rows(data: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    parquet = data.suffix == ".parquet" or (data.is_dir() and any(data.glob("*.parquet")))
    read = parquet_rows if parquet else jsonl_rows
    for number, (_, row) in enumerate(read(TaskConfig(source="parquet" if parquet else "jsonl", path=str(data)))):
        if number == limit:
            return
        yield row


def _messages(template: str, row: Mapping[str, Any], args: argparse.Namespace) -> list[dict[str, str]]:
    prompt: Any = column(dict(row), args.prompt_column)
    if prompt is None:
        raise ValueError(f"a row has no column {args.prompt_column!r}; it has {', '.join(row)}: see --prompt-column")
    calls = gold_calls(column(dict(row), args.calls_column), args.calls_column) or []
    return messages(template, "", {"prompt": prompt, "tool_calls": calls}, "")


def _key(request: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=16).hexdigest()


def _write(args: argparse.Namespace, rows: list[dict[str, Any]], requests: list[dict[str, Any]]) -> int:
    config = ServerConfig(args.max_in_flight, args.request_seconds, args.retries, api_key_env=args.api_key_env)
    check_types(ServerConfig, vars(config))
    partial = args.out.with_name(args.out.name + ".partial")
    keys = [_key(request) for request in requests]
    found = _read_partial(partial)
    missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in found}
    print(f"{len(rows)} rows, {sum(key in found for key in keys)} have a rationale, {len(missing)} prompts to ask")
    reasons = asyncio.run_coroutine_threadsafe(_ask(args, config, missing, found, partial), event_loop()).result()
    left = sum(key not in found for key in keys)
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:5]:
        print(f"{count} without: {reason}", file=sys.stderr)
    if left and not args.keep_missing:
        print(f"{left} rows have no rationale: start again to ask for them, or take --keep-missing", file=sys.stderr)
        return 1
    temporary = args.out.with_name(args.out.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for key, row in zip(keys, rows, strict=True):
            more = {args.column: found[key]} if key in found else {}
            file.write(json.dumps({**row, **more}, ensure_ascii=False, default=str) + "\n")
    os.replace(temporary, args.out)
    if not left:
        partial.unlink(missing_ok=True)
    print(f"wrote {args.out}")
    return 1 if left else 0


def _read_partial(partial: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    if partial.exists():
        for line in partial.read_text(encoding="utf-8").split("\n"):
            try:
                row = json.loads(line)
            except ValueError:  # a line that a killed process left unfinished
                continue
            found[row["key"]] = row["rationale"]
    return found


def _rationale(reply: Mapping[str, Any]) -> str:
    """What a reply says after its thinking. Nonsense where that is nothing, or was cut off."""
    said = reply_text(reply)
    if reply["choices"][0].get("finish_reason") == "length":
        raise Nonsense("the reply was cut off: give more max_tokens by --body")
    text = said.rpartition("</think>")[2].strip()
    if not text:
        raise Nonsense("an empty reply")
    return text.encode(errors="replace").decode()  # JSON can hold half a surrogate, a file of text cannot


async def _ask(
    args: argparse.Namespace,
    config: ServerConfig,
    missing: Mapping[str, dict[str, Any]],
    found: dict[str, str],
    partial: Path,
) -> dict[str, int]:
    """Asks for all that is missing; answers go to `found` and to the file. Why others have none, with counts."""
    reasons: dict[str, int] = {}
    queue = iter(missing.items())
    partial.parent.mkdir(parents=True, exist_ok=True)

    def spend() -> None:
        traffic = endpoint.traffic
        if args.max_requests is not None and traffic.requests >= args.max_requests:
            raise Unanswered("--max-requests is used up", "budget")
        if args.max_tokens is not None and traffic.prompt_tokens + traffic.completion_tokens >= args.max_tokens:
            raise Unanswered("--max-tokens is used up", "budget")

    endpoint = Endpoint(args.url, config, spend, has_message)
    began = shown = time.monotonic()
    with partial.open("a", encoding="utf-8") as file:
        file.write("\n")  # ends a line that a killed process left unfinished

        async def worker() -> None:
            nonlocal shown
            for key, request in queue:
                try:
                    text = _rationale(await endpoint.post("/chat/completions", request))
                except (Unanswered, Nonsense) as error:
                    reason = str(error)[:200]
                    reasons[reason] = reasons.get(reason, 0) + 1
                    continue
                found[key] = text
                file.write(json.dumps({"key": key, "rationale": text}) + "\n")
                file.flush()
                if time.monotonic() - shown > 10:
                    shown = time.monotonic()
                    done = sum(key in found for key in missing)
                    print(f"{done} of {len(missing)}, {done / (shown - began):.1f} per second", flush=True)

        try:
            await asyncio.gather(*(worker() for _ in range(config.max_in_flight)))
        finally:
            await endpoint.close()
    traffic = endpoint.traffic
    print(
        f"{traffic.requests} requests, {traffic.retries} of them retries; "
        f"{traffic.prompt_tokens} tokens read, {traffic.completion_tokens} written"
    )
    return reasons


if __name__ == "__main__":
    sys.exit(main())
