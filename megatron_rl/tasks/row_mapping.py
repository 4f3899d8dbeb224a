"""From a row of a file or dataset to an item: which column is what."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from megatron_rl.base.messages import errors_named
from megatron_rl.config.schema import ColumnsConfig, TaskConfig
from megatron_rl.data.images import Source
from megatron_rl.data.sample import Call, Prompt
from megatron_rl.rewards.tool_parsers import OPEN, as_call, load_json, parse_tool_calls
from megatron_rl.tasks.rows import Row, Rows, prune


@dataclass(slots=True)
class Item:
    prompt: Prompt  # text, or chat messages
    answer: object = None
    tool_calls: list[Call] | None = None
    needs_response: bool | None = None
    tools: list[dict[str, object]] | None = None  # JSON schemas for the chat template
    metadata: dict[str, object] = field(default_factory=dict)
    images: tuple[Source, ...] = ()


_MISSING = object()
RESPONSE = "<response>"


def column(row: Row, path: str, default: object = None) -> object:
    """The value in a column: the one of exactly that name, or `a.b`, the key `b` of the object in column `a`."""
    if path in row:
        return row[path]
    head, dot, rest = path.partition(".")
    inside = row.get(head)
    return column(inside, rest, default) if dot and isinstance(inside, dict) else default


def has_column(row: Row, path: str) -> bool:
    return column(row, path, _MISSING) is not _MISSING


def column_names(row: Row) -> list[str]:
    """Names that `column` understands, nested ones included."""
    names = []
    for key, value in row.items():
        names.append(key)
        if isinstance(value, dict):
            names += [f"{key}.{name}" for name in column_names(value)]
    return names


def file_items(rows: Callable[[TaskConfig], Rows], arrow: bool) -> Callable[[TaskConfig], Iterator[Item]]:
    """The source that reads such rows. `arrow`: nulls in a row's objects mean that the key is absent."""

    def items(config: TaskConfig) -> Iterator[Item]:
        for where, row in islice(rows(config), config.size):
            with errors_named(where):
                yield to_item(row, config.columns, arrow, folder_of(config))

    return items


def folder_of(config: TaskConfig) -> Path:
    """The folder that paths of images in a task's data are relative to."""
    place = Path(config.path or ".").expanduser()
    return place if place.is_dir() else place.parent


def to_item(row: Row, columns: ColumnsConfig, arrow: bool = False, folder: Path = Path()) -> Item:
    """One row's item. Metadata: every column that has no other meaning, the keys of `metadata`, and `columns.metadata`.

    Raises:
        ValueError: no prompt, or a column that does not hold what it should.
    """
    prompt = _prompt(row, columns, arrow)
    calls_column = column(row, columns.tool_calls)
    calls = gold_calls(calls_column, columns.tool_calls)
    if arrow and _filled_in(calls_column):
        raise ValueError(
            f"{columns.tool_calls!r} has null parameters: Arrow gives every call the parameters of all calls; store the "
            "gold calls as JSON text"
        )
    needs_response = _optional_bool(row, columns.needs_response)
    if needs_response is None and isinstance(calls_column, str) and not _is_json(calls_column):
        needs_response = RESPONSE in calls_column
    tools = _tools(column(row, columns.tools), columns.tools, arrow)
    used = {columns.prompt, columns.answer, columns.tool_calls, columns.needs_response, columns.tools, columns.system}
    used.add(columns.images)
    metadata = {key: value for key, value in row.items() if key not in used and key != "metadata"}
    extra = row.get("metadata") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"the column 'metadata' must be an object, not {type(extra).__name__}")
    metadata |= extra
    for name, path in columns.metadata.items():
        if not has_column(row, path):
            raise ValueError(f"columns.metadata.{name}: no column {path!r} (it has {', '.join(column_names(row))})")
        metadata[name] = column(row, path)
    return Item(
        prompt=prompt,
        answer=column(row, columns.answer),
        tool_calls=calls,
        needs_response=needs_response,
        tools=tools,
        metadata=metadata,
        images=_images(row, columns.images, folder) if columns.images is not None else (),
    )


def _images(row: Row, name: str, folder: Path) -> tuple[Source, ...]:
    if not has_column(row, name):
        raise ValueError(f"columns.images: no column {name!r} (it has {', '.join(column_names(row))})")
    value = column(row, name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_image(value, name, folder) for value in values)


def _image(value: object, name: str, folder: Path) -> Source:
    """A path, a file's bytes, an object with either (Hugging Face's form), or PIL's image, which becomes a PNG."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return folder / value
    if hasattr(value, "save"):
        file = io.BytesIO()
        value.save(file, "PNG")
        return file.getvalue()
    raise ValueError(f"{name!r} must hold paths or bytes of images, not {value!r:.80}")


def _prompt(row: Row, columns: ColumnsConfig, arrow: bool) -> Prompt:
    key = columns.prompt
    if not has_column(row, key):
        raise ValueError(f"no column {key!r} (it has {', '.join(row)}); set columns.prompt to the prompt's column")
    prompt = column(row, key)
    system = None
    if columns.system is not None:
        system = column(row, columns.system)
        if not isinstance(system, str):
            raise ValueError(f"columns.system: {columns.system!r} must hold text, not {system!r:.80}")
    if isinstance(prompt, str):
        if system is None:
            return prompt
        return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) and "role" in turn for turn in prompt):
        if system is not None:
            raise ValueError(f"columns.system: {key!r} holds chat messages; put the system message among them")
        return list(prune(prompt)) if arrow else prompt
    raise ValueError(f"{key!r} must be text or a list of chat messages with a role, not {prompt!r:.80}")


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] in ("[", "{")


def _from_json(text: str, name: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name!r} is not JSON ({error}): {text!r:.80}") from None


def gold_calls(value: object, name: str) -> list[Call] | None:
    """Gold calls from what a column holds: null, a list of calls, that list as JSON, or a response with ToolRL's tags.

    A call is an object with a `name` and `parameters` (or `arguments`); OpenAI's `function` around both is read too, and
    parameters as JSON text.

    Raises:
        ValueError: anything else, or calls that cannot be read.
    """
    if value is None:
        return None
    if isinstance(value, str):
        if not _is_json(value):
            if OPEN not in value:
                if RESPONSE in value:
                    return []
                raise ValueError(f"{name!r} must be calls as JSON, or a response with ToolRL's tags, not {value!r:.80}")
            calls = parse_tool_calls(value)
            if calls is None:
                raise ValueError(f"{name!r}: the calls in {value!r:.80} cannot be read")
            return calls
        value = _from_json(value, name)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise ValueError(f"{name!r} must be a list, not {type(value).__name__}")
    calls = []
    for item in value:
        call = _gold_call(item)
        if call is None:
            raise ValueError(f'a gold call must be {{"name": text, "parameters": object}}, not {item!r:.80}')
        calls.append(call)
    return calls


def _filled_in(calls: object) -> bool:
    """Whether calls that are objects have null parameters, which Arrow adds. In JSON text a null belongs to the data."""
    for call in [calls] if isinstance(calls, dict) else calls if isinstance(calls, list) else []:
        inner = call["function"] if isinstance(call.get("function"), dict) else call
        for parameters in (inner.get("parameters"), inner.get("arguments")):
            if isinstance(parameters, dict) and None in parameters.values():
                return True
    return False


def _gold_call(value: object) -> Call | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if isinstance(value, dict) and isinstance(value.get("arguments"), str):
        value = {"name": value.get("name"), "parameters": load_json(value["arguments"])}
    return as_call(value, ("parameters", "arguments"))


def _tools(value: object, name: str, arrow: bool) -> list[dict[str, object]] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = _from_json(value, name)
    if not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise ValueError(f"{name!r} must be a list of JSON schemas, not {value!r:.80}")
    return list(prune(value)) if arrow else value


def _optional_bool(row: Row, key: str) -> bool | None:
    value = column(row, key)
    if value is None or isinstance(value, bool):
        return value
    raise ValueError(f"{key!r} must be true or false, not {value!r}")
