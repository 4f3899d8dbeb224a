"""An agent of two turns, for evaluations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


def twice(question: str = "1+2=") -> Callable[[Any, Any], Awaitable[float]]:
    """Asks something else after the first answer; the reward is the length of the second."""

    async def run(model: Any, task: Any) -> float:
        messages = list(task["prompt"])
        first = await model.chat.completions.create(model="policy", messages=messages)
        messages += [first.choices[0].message.to_dict(), {"role": "user", "content": question}]
        second = await model.chat.completions.create(model="policy", messages=messages)
        return float(len(second.choices[0].message.content))

    return run
