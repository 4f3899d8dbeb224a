"""Words for messages about recipes: the nearest name, and values as a recipe writes them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

LARGEST = 2**63 - 1  # what a 64-bit number holds; also far above all that is counted here
_SHOWN = 80  # characters of a value that a message shows


class ConfigError(ValueError):
    """A recipe, or a command, that cannot run. The message is for the person who wrote it: source, key, value, remedy."""

    code = 2  # the command's exit code: `runtime.exit_codes.BAD_INPUT`


@contextmanager
def errors_named(
    where: str, *caught: type[Exception], as_error: Callable[[str], Exception] = ValueError
) -> Iterator[None]:
    """An error of the body is raised again as `as_error`, behind what it is about: `where: what the error says`.

    Args:
        where: a key, a file or an option; empty: what the error says, alone.
        caught: which errors; none named: ValueError.
    """
    errors = caught or (ValueError,)
    try:
        yield
    except errors as error:
        text = str(getattr(error, "strerror", None) or error)
        raise as_error(f"{where}: {text}" if where else text) from error


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, swapped letters being the likeliest mistake; None where none reaches `cutoff`."""
    text = str(name)

    def likeness(candidate: str) -> tuple[bool, float, str]:
        ratio = difflib.SequenceMatcher(None, candidate, text).ratio()
        return sorted(candidate) == sorted(text), ratio, candidate

    best = max(map(likeness, known), default=(False, 0.0, ""))
    return best[2] if best[2] and best[1] >= cutoff else None


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.5) -> str:
    """`; did you mean 'x'?`, or nothing where no known name is near."""
    best = nearest(name, known, cutoff)
    return "" if best is None else f"; did you mean {best!r}?"


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """A sentence for an unknown name of `what`, a reward say: the nearest known one, or all of them where none is near."""
    names = sorted(known)
    hint = did_you_mean(name, names, 0.6) or f"; there is {', '.join(names) or 'none'}"
    return f"unknown {what} {name!r}{hint}"


def show(value: object) -> str:
    """A value as a recipe would write it, cut to a readable length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {value.bit_length()} bits"
    return shorten(repr(value))


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `1,024 processes`."""
    plural = noun if number == 1 else f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{number:,} {plural}"


def shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def leaves(section: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of all that a mapping of mappings holds; an empty one is a value."""
    if not isinstance(section, Mapping) or not section:
        yield prefix, section
        return
    for key, value in section.items():
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
