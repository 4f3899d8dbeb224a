"""The two calls of Gymnasium's interface, and a process that makes them for another.

As a script it is run by an interpreter of the user's, which may have none of this package's libraries: it imports the
standard library only. Requests come on its standard input and go answered to its standard output, a line of JSON each:
`{"do": "make", "name": "file.py:factory", "params": {...}}`, `{"do": "reset", "seed": 7}`,
`{"do": "step", "action": "left"}`, `{"do": "close"}`; `{"error": ...}` answers what raised. What the environment itself
prints is dropped.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import threading
from typing import Any, NamedTuple


class Step(NamedTuple):
    """An environment's word on an action. `ended`: terminated or truncated."""

    observation: str
    reward: float
    ended: bool


def begun(environment: Any, seed: int) -> str:
    """The first observation, as text. TypeError where `reset` returns something else than Gymnasium's."""
    returned = environment.reset(seed=seed)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"reset returned {returned!r:.80}, must be (observation, info)")
    return str(returned[0])


def stepped(environment: Any, action: str) -> Step:
    """The environment's word on an action. TypeError where `step` returns something else than Gymnasium's."""
    returned = environment.step(action)
    if not isinstance(returned, tuple) or len(returned) != 5:
        raise TypeError(f"step returned {returned!r:.80}, must be (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, _ = returned
    return Step(str(observation), float(reward), bool(terminated or truncated))


def _load(name: str) -> Any:
    module_name, _, attribute = name.rpartition(":")
    if not module_name.endswith(".py"):
        return getattr(importlib.import_module(module_name), attribute)
    spec = importlib.util.spec_from_file_location("environment", module_name)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["environment"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, attribute)


def _end_with(requests: int) -> None:
    """Ends this process, whatever it is at, once nobody can ask any more. (PR_SET_PDEATHSIG would when a thread ends.)"""
    hang_up = select.poll()
    hang_up.register(requests, 0)
    hang_up.poll()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    threading.Thread(target=_end_with, args=(requests.fileno(),), daemon=True).start()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(__file__)]  # with modules of this package
    environment: Any = None
    factories: dict[str, Any] = {}
    for line in requests:
        request = json.loads(line)
        answer: dict[str, object] = {}
        try:
            if request["do"] == "make":
                name = request["name"]
                factories[name] = factories.get(name) or _load(name)
                environment = factories[name](**request["params"])
            elif request["do"] == "reset":
                answer["observation"] = begun(environment, request["seed"])
            elif request["do"] == "step":
                answer = stepped(environment, request["action"])._asdict()
            else:
                with contextlib.suppress(AttributeError):  # it need not have one
                    environment.close()
        except Exception as error:  # a user's code: whatever it raises
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
