"""A server of the Model Context Protocol without the package: JSON-RPC on lines. Its tools fail in every way.

Its argument says how it fails, if at all: `silent`, `dead`, `garbage`, `flood`, `line`, from the first message on; `chatty`:
it prints what is no message beside its answers. It imports the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time

TOOLS = ("add", "count", "complain", "hang", "die", "flood", "missing")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def main(how: str) -> None:
    counted = 0
    for line in sys.stdin:
        if how == "silent":
            time.sleep(600)
        if how == "dead":
            sys.exit(3)
        if how == "garbage":
            print("Welcome! <html>")
            break
        if how in ("flood", "line"):
            while True:
                os.write(
                    1, b"x" * 65536 if how == "line" else b'{"jsonrpc": "2.0", "method": "notifications/x"}\n' * 999
                )
        if how == "chatty":
            print("got a message", flush=True)
        asked = json.loads(line)
        method, params = asked["method"], asked.get("params", {})
        if "id" not in asked:
            continue
        answer: dict[str, object] = {"jsonrpc": "2.0", "id": asked["id"]}
        if method == "initialize":
            about = {"name": "small", "version": "1"}
            version = params["protocolVersion"]
            answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        elif method == "tools/list":
            first = "cursor" not in params
            names = TOOLS[:4] if first else TOOLS[4:]
            listed = [{"name": name, "description": f"to {name}", "inputSchema": SCHEMA} for name in names]
            answer["result"] = {"tools": listed, **({"nextCursor": "more"} if first else {})}
        elif method == "tools/call" and params["name"] != "missing":
            name = params["name"]
            counted += 1
            if name == "hang":
                time.sleep(600)
            if name == "die":
                os._exit(1)
            text = {"add": str(params["arguments"].get("a", 0) + 1), "count": str(counted)}.get(name, "no paint left")
            text = "x" * 10**7 if name == "flood" else text
            content = [{"type": "text", "text": text}, {"type": "text", "text": "."}]
            answer["result"] = {"content": content, "isError": name == "complain"}
        else:
            answer["error"] = {"code": -32601, "message": f"unknown {method}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
