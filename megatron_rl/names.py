"""Help with misspelled names in recipes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """A sentence for a name nobody knows: the nearest known one, or all of them where none is near.

    Args:
        what: what the name should have been, for example ``reward``.
        name: the name as the user wrote it.
        known: the names that exist.
    """
    names = sorted(known)
    nearest = difflib.get_close_matches(str(name), names, n=1)
    if nearest:
        return f"unknown {what} {name!r}; did you mean {nearest[0]!r}?"
    return f"unknown {what} {name!r}; there is {', '.join(names) or 'none'}"
