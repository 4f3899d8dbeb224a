"""Private and patched parts of other libraries, one module per library: what is used of them, why, and the version read.

A release may change these without notice. So every patch names the signature that it was written for and refuses another, and
`tests/seams` checks all of them against what is installed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def replaced(owner: object, name: str, new: Callable[..., object], parameters: str) -> Iterator[None]:
    """While entered, `owner.name` is `new`. Raises RuntimeError: as `check_parameters`."""
    original: Callable[..., object] = getattr(owner, name)
    check_parameters(original, parameters)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, original)


def check_parameters(function: Callable[..., object], parameters: str) -> None:
    """Refuses a private or patched function whose signature is not the one this package was written for.
    `parameters`: their names, separated by blanks.

    Raises:
        RuntimeError: they are others.
    """
    found = " ".join(inspect.signature(function).parameters)
    if found != parameters:
        raise RuntimeError(
            f"{function.__module__}.{function.__qualname__} takes ({found}), and megatron_rl/seams was written for "
            f"({parameters}): install the versions of requirements/"
        )
