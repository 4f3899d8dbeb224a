"""The fixed rubric behind an OpenAI chat API, to try the reward `judge` without a model: `python tools/rubric_server.py`.

It reads the built-in prompt of the reward `judge` and replies `{"score": X}` with the grade that the reward `rubric` gives.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING, Any

from megatron_rl.rewards.rubric import grade
from megatron_rl.rewards.tool_parsers import json_lines

if TYPE_CHECKING:
    from aiohttp import web

_SECTION = re.compile(r"<(correct_tool_calls|reference_rationale|candidate_[0-9a-f]{8})>\n(.*?)\n</\1>", re.DOTALL)


def grade_prompt(prompt: str) -> float:
    """The grade of the candidate in a prompt made from the built-in template. ValueError for any other prompt."""
    sections = {name.partition("_")[0]: text for name, text in _SECTION.findall(prompt)}
    if sections.keys() != {"correct", "reference", "candidate"}:
        raise ValueError("this server reads the built-in prompt of the reward `judge` only")
    lines = json_lines(sections["correct"])
    gold = [json.loads(line) for line in lines] if lines[0].startswith("{") else []
    rationale = "" if sections["reference"] == "(none)" else sections["reference"]
    return grade(sections["candidate"], gold, rationale)


def application(name: str) -> web.Application:
    """The server: `POST /v1/chat/completions` and `GET /v1/models` of one model."""
    from aiohttp import web

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"}]})

    async def chat(request: web.Request) -> web.Response:
        try:
            body: Any = await request.json()
        except (ValueError, RecursionError, LookupError) as error:  # LookupError: a charset that there is not
            return _error(web, 400, f"the body is no JSON: {error}")
        if not isinstance(body, dict):
            return _error(web, 400, "the body is no JSON object")
        if body.get("model") != name:
            return _error(web, 404, f"there is no model {body.get('model')!r}, only {name!r}")
        try:
            content = json.dumps({"score": grade_prompt(body["messages"][-1]["content"])})
        except (ValueError, LookupError, TypeError) as error:
            return _error(web, 400, str(error))
        message = {"role": "assistant", "content": content}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"object": "chat.completion", "model": name, "choices": [choice], "usage": usage})

    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
    return app


def _error(web: Any, status: int, text: str) -> Any:
    return web.json_response({"error": {"message": text, "code": status}}, status=status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--name", default="rubric", help="the model's name in requests")
    args = parser.parse_args()
    from aiohttp import web

    web.run_app(application(args.name), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
