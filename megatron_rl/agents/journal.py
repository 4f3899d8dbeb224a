"""What was said in a step's conversations so far, on disk, so that a run that is killed asks nobody twice.

`<run_dir>/journal/step_<n>/engine_<e>` is written by the engine's first rank and read by all engines' when the step is begun
again. Its lines are added to only, each with a checksum: a kill leaves whole ones and at most one that is left out. They are
written without fsync: what a killed process has written stays; a machine that goes down may lose some, which are asked again.

The first line says what the others depend on (`origin`): the weights' bits, the step, the keys of the recipe. Where that is
not this step's, the file is dropped, by name. A turn is found by the request's tokens, seed and limits, so that it is what
the engine would draw; a tool's reply by what was asked; a whole conversation by its prompt. With routing replay a token's
experts are there twice, with its turn and with the whole conversation: 1 KB a token of Qwen3-30B-A3B.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import shutil
import zlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import numpy as np

from megatron_rl.agents.failures import InfrastructureFailed
from megatron_rl.agents.registry import agent_tasks, sources_of
from megatron_rl.config.schema import Config
from megatron_rl.data.exact_json import from_json, to_json
from megatron_rl.data.rollout import Rollout
from megatron_rl.rollout.engine import Completion, Request
from megatron_rl.runtime import provenance
from megatron_rl.tasks.tokenizing import template_params

if TYPE_CHECKING:
    from megatron_rl.agents.session import Opening

T = TypeVar("T")
FOLDER = "journal"  # in the run folder
Line = dict[str, Any]


def origin(config: Config, step: int, version: int, weights: str) -> dict[str, object]:
    """Everything that a step's conversations depend on apart from their prompts and the world, in JSON's values. `weights`:
    tells the bits of the engine's weights from others."""
    rollout = config.rollout
    known: dict[str, object] = {"the step": step, "the optimizer steps": version, "the weights": weights}
    known |= {"seed": config.seed, "model.dtype": config.model.dtype, "versions of packages": provenance.versions()}
    known |= {f"rollout.{name}": getattr(rollout, name) for name in ("temperature", "max_tokens", "fp8", "fp8_skip")}
    known |= {f"rollout.{name}": getattr(rollout, name) for name in ("tensor_parallel", "expert_parallel")}
    known["actor.moe.routing_replay"] = config.actor.moe.routing_replay
    for key, task in agent_tasks(config).items():
        if key.startswith("tasks.train."):
            assert task.agent is not None
            known |= {f"{key}.agent": asdict(task.agent), f"{key}.chat_params": template_params(task)}
            known |= {f"the file of {name}": digest for name, digest in sources_of(task.agent).items()}
    return cast(dict[str, object], json.loads(json.dumps(known, default=str)))


def drop(run_dir: Path, step: int) -> None:
    """Removes the journals of all steps up to this one: a checkpoint has what came of them."""
    folder = run_dir / FOLDER
    for path in folder.glob("step_*"):
        if (number := path.name.removeprefix("step_")).isdigit() and int(number) <= step:
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not empty, or not there
        folder.rmdir()


@dataclass
class Resumed:
    """Counts of what was made of the journals of a step that was begun before.

    Attributes:
        whole: conversations that had ended, and were not held again.
        continued: others of which something was recorded.
        otherwise: those of them that did not ask again for all that was recorded.
        dropped: why files were not used.
    """

    whole: int = 0
    continued: int = 0
    otherwise: int = 0
    dropped: list[str] = field(default_factory=list)

    def __add__(self, other: Resumed) -> Resumed:
        counts = (self.whole + other.whole, self.continued + other.continued, self.otherwise + other.otherwise)
        return Resumed(*counts, list(dict.fromkeys([*self.dropped, *other.dropped])))

    def __str__(self) -> str:
        parts = [f"{self.whole} had ended, {self.continued} go on"] if self.whole or self.continued else []
        if self.otherwise:
            parts.append(f"{self.otherwise} of them otherwise than recorded, since their agent asked something else")
        return "; ".join([", ".join(parts), *self.dropped] if parts else self.dropped)


@dataclass
class _Found:
    """The lines that journals have of one conversation."""

    turns: dict[str, Line] = field(default_factory=dict)
    replies: dict[tuple[int, str, int], object] = field(default_factory=dict)  # by attempt, question and its number
    rollout: object = None


class StepJournal:
    """The journals of one step: reads those that there are, and writes this engine's.

    Args:
        folder: of the step.
    """

    def __init__(self, folder: Path, engine: int, origin: Mapping[str, object]) -> None:
        self.folder, self._origin = folder, dict(origin)
        self._found: dict[str, _Found] = defaultdict(_Found)
        self._resumed, self._failed = Resumed(), False
        folder.mkdir(parents=True, exist_ok=True)
        path, own = folder / f"engine_{engine}", False
        for each in sorted(folder.glob("engine_*")):
            is_of_this_step = self._read(each)
            own = own or (is_of_this_step and each == path)
        self._file: BinaryIO = path.open("ab" if own else "wb", buffering=0)
        if own:
            self._file.write(b"\n")  # behind a killed process's last line
        else:
            self.write({"origin": self._origin})

    def of(self, opening: Opening) -> ConversationJournal:
        """The part of one conversation."""
        key = _key_of(opening)
        found = self._found.pop(key, _Found())
        self._resumed.whole += found.rollout is not None
        self._resumed.continued += found.rollout is None and bool(found.turns)
        return ConversationJournal(self, key, found)

    def count_otherwise(self) -> None:
        self._resumed.otherwise += 1

    def take_resumed(self) -> Resumed:
        """Counts of what became of what was recorded, since the last call."""
        resumed, self._resumed = self._resumed, Resumed()
        return resumed

    def write(self, line: Line) -> None:
        """Adds a line. A disk that takes no more ends the journal, not the run."""
        text = json.dumps(line, separators=(",", ":")).encode()
        try:
            if not self._failed:
                self._file.write(b"%08x %s\n" % (zlib.crc32(text), text))
        except OSError as error:
            self._failed = True
            self._resumed.dropped.append(f"{self._file.name} is not written any further: {error}")

    def close(self) -> None:
        self._file.close()

    def _read(self, path: Path) -> bool:
        """Whether the file is of this step; takes what is in it then."""
        if not path.stat().st_size:  # another engine has just begun it
            return False
        lines = _lines(path)
        first = next(lines, {}).get("origin")
        if first != self._origin:
            then = first or {}
            differing = sorted(key for key in {*then, *self._origin} if then.get(key) != self._origin.get(key))
            changed = ", ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
            why = f"{changed} had another value" if then else "its first line is damaged"
            self._resumed.dropped.append(f"{path.parent.name}/{path.name} is not used: {why}")
            return False
        for line in lines:
            conversation = self._found[line["of"]]
            if "turn" in line:
                conversation.turns[line["turn"]] = line
            elif "asked" in line:
                conversation.replies[line["attempt"], line["asked"], line["number"]] = line["reply"]
            else:
                conversation.rollout = line["rollout"]
        return True


class ConversationJournal:
    """The record of one conversation, and what it was in an earlier start of the run. Without a `journal` nothing is.

    Attributes:
        rollout: of a conversation that had ended.
    """

    def __init__(self, journal: StepJournal | None = None, key: str = "", found: _Found | None = None) -> None:
        self._journal, self._key, self._found = journal, key, found or _Found()
        self.rollout: Rollout | None = from_json(self._found.rollout)
        self._attempt = max((attempt for attempt, *_ in self._found.replies), default=0)
        self._asked_again, self._written = set[str](), set(self._found.turns)
        self._replied = Counter[str]()  # in this attempt

    def turn(self, request: Request) -> Completion | None:
        """The engine's answer to this request, where it was recorded."""
        if not self._found.turns:
            return None
        key = _key_of_turn(request)
        line = self._found.turns.get(key)
        if line is None:
            return None
        self._asked_again.add(key)
        logprobs = None if line["logprobs"] is None else _unpacked(line["logprobs"], "<f8")
        nothing = np.zeros(0, dtype=np.float32)
        ids, reason, version = _unpacked(line["ids"], "<i4"), line["finish_reason"], line["version"]
        return Completion(request, ids, logprobs, reason, version, nothing, from_json(line.get("experts")))

    def keep_turn(self, completion: Completion) -> bool:
        """Records a turn, and returns whether it was not recorded yet."""
        if self._journal is None or (key := _key_of_turn(completion.request)) in self._written:
            return False
        self._written.add(key)
        logprobs = None if completion.logprobs is None else _packed(completion.logprobs, "<f8")
        line = {"of": self._key, "turn": key, "ids": _packed(completion.ids, "<i4"), "logprobs": logprobs}
        if completion.experts is not None:
            line["experts"] = to_json(completion.experts)
        self._journal.write({**line, "finish_reason": completion.finish_reason, "version": completion.version})
        return True

    async def reply(self, asked: object, call: Callable[[], Awaitable[T]], again: bool) -> T:
        """Returns a reply, recorded or made now, see `AgentTask.recorded`."""
        key = _digest(to_json(asked))
        number = self._replied[key]
        self._replied[key] += 1
        reply_key = self._attempt, key, number
        if reply_key not in self._found.replies:
            made = await call()
            if self._journal is not None:
                names = dict(zip(("attempt", "asked", "number"), reply_key, strict=True))
                self._journal.write({"of": self._key, **names, "reply": to_json(made)})
            return made
        if again:
            try:
                await call()
            except InfrastructureFailed:
                raise  # the environment did not come to where it was
            except Exception:
                pass  # what a tool raises now is not what it said then
        return cast(T, from_json(self._found.replies[reply_key]))

    def begin_again(self) -> None:
        """The infrastructure failed: the next attempt asks for other replies."""
        self._attempt += 1
        self._replied.clear()

    def keep_end(self, rollout: Rollout) -> None:
        """One that the infrastructure lost is held again in the next start: that has no memory of failures."""
        if self._journal is not None and rollout.failed_by != "infrastructure":
            self._journal.write({"of": self._key, "rollout": to_json(rollout)})
            if self._found.turns.keys() - self._asked_again:
                self._journal.count_otherwise()


def _key_of_turn(request: Request) -> str:
    return _digest([list(request.tokens), asdict(request.sampling), request.seed])


def _lines(path: Path) -> Iterator[Line]:
    """A journal's lines, without those that a kill or the disk has damaged."""
    for written in path.read_bytes().split(b"\n"):
        checksum, _, text = written.partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            yield json.loads(text)


def _key_of(opening: Opening) -> str:
    """Tells the conversation from others: also from one about a prompt that has changed."""
    sample = opening.sample
    try:
        about = json.dumps(to_json(sample.as_mapping()), sort_keys=True)
    except TypeError:  # metadata may be anything
        about = repr(sample.as_mapping())
    whose = [sample.id, opening.index, opening.seed, opening.step, asdict(opening.sampling)]
    return _digest([*whose, list(sample.prompt_ids), about])


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=12).hexdigest()


def _packed(numbers: Any, dtype: str) -> str:
    return base64.b64encode(np.asarray(numbers, dtype=dtype).tobytes()).decode()


def _unpacked(text: str, dtype: str) -> list[Any]:
    return cast(list[Any], np.frombuffer(base64.b64decode(text), dtype=dtype).tolist())
