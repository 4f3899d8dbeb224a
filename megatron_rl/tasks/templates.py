"""The text around a prompt: `str.format` fields, and one conversion of our own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter

from megatron_rl.base.messages import unknown_name

COMPACT = "compact"
_WIDEST = 10_000  # characters of one field, if its text is shorter


class _Template(Formatter):
    def format_field(self, value: object, format_spec: str) -> str:
        if format_spec == COMPACT:
            return "".join(str(value).split())
        return str(super().format_field(value, format_spec))


def fill(template: str, fields: Mapping[str, object]) -> str:
    """Fill `{field}`s of a template; `{field:compact}` drops all white space from the field's text.

    Braces in the fields' own text are left alone; a literal brace in the template is doubled, `{{`.

    Raises:
        ValueError: a field that does not exist, or a template that `str.format` would not take.
    """
    try:
        return _Template().vformat(template, (), fields)
    except KeyError as error:
        problem = unknown_name("field", error.args[0], fields)
        raise ValueError(f"the template {template!r} asks for what this sample lacks: {problem}") from None
    except (IndexError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the template {template!r} cannot be filled in: {error}") from None


def check_template(template: str) -> list[str]:
    """Names of a template's fields. ValueError where its braces are not balanced, or a field has no name."""
    if not template.strip():
        raise ValueError("the template is empty, so every prompt would be; write {prompt}, or leave the key out")
    try:
        fields = [(name, spec or "") for _, name, spec, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"{template!r}: {error}; write a literal brace twice, {{{{ or }}}}") from None
    names = [name for name, _ in fields]
    for name, spec in fields:
        if "{" in spec or any(int(number) > _WIDEST for number in re.findall("[0-9]{1,9}", spec)):
            raise ValueError(
                f"{template!r}: the format {spec!r} of {name!r} may have widths up to {_WIDEST}, as numbers"
            )
    if any(name == "" or name[0].isdigit() for name in names):
        raise ValueError(f"{template!r}: every field needs a name, for example {{prompt}}")
    return [name.split(".")[0].split("[")[0] for name in names]
