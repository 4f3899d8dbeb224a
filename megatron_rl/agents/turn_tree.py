"""The turns of a rollout's conversations as a tree, and a request that is to be a turn of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_rl.data.rollout import Segment
from megatron_rl.data.sample import Message
from megatron_rl.tasks.tokenizing import Tools


@dataclass
class TurnNode:
    """A root, which has no turn yet, or a turn of the model with what was said between its parent and it.

    Attributes:
        given: int64 [tokens] before the turn, behind the parent's; a root's: all that its first turns are given.
        drawn: None: a root.
        messages: those of `given`, and the turn's.
        place: numbers of the root and of the answers down to here, each counted among those to the same turn.
        ended: the drawn token that ended the turn; None: it was cut, or nothing was drawn.
        experts: of `given` and `drawn`, as of `Rollout.experts`; None: unknown, as a root's before its first answer.
    """

    parent: TurnNode | None
    given: np.ndarray
    messages: list[Message]
    tools: Tools
    place: tuple[int, ...]
    drawn: Segment | None = None
    ended: int | None = None
    is_cut: bool = False
    experts: np.ndarray | None = None
    answers: list[TurnNode] = field(default_factory=list)

    @property
    def path(self) -> list[TurnNode]:
        """The nodes from the root to here."""
        path, node = [self], self.parent
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @property
    def history(self) -> list[Message]:
        return [message for node in self.path for message in node.messages]

    @property
    def ids(self) -> list[int]:
        return [i for node in self.path for part in node.parts for i in part.ids.tolist()]

    @property
    def parts(self) -> list[Segment]:
        return [Segment(self.given), *([] if self.drawn is None else [self.drawn])]

    @property
    def size(self) -> int:
        """Tokens up to here."""
        return sum(len(part.ids) for node in self.path for part in node.parts)

    @property
    def routed(self) -> int:
        """Tokens up to here whose experts are known: all but the last drawn one, of which nothing was computed; a root's all,
        once it has an answer."""
        return 0 if self.experts is None else self.size - (self.drawn is not None)

    @property
    def known_experts(self) -> np.ndarray:
        """Returns `experts`. ValueError: the engine returned none."""
        if self.experts is None:
            raise ValueError(f"the engine has returned no experts with the turn at {self.place}")
        return self.experts

    def take_experts(self, experts: np.ndarray) -> None:
        """Takes the experts of the tokens behind the parent's `routed` ones, up to the last drawn here. Called before this
        node is among the parent's answers.

        Raises:
            ValueError: they are of more or fewer tokens.
        """
        parent = self.parent
        assert parent is not None  # a root is no turn
        lacked = parent.size - parent.routed
        if len(experts) != self.size - parent.routed:
            raise ValueError(f"{len(experts)} tokens have experts, and {self.size - parent.routed} lack them")
        self.experts = experts[lacked:]
        if parent.experts is None:
            parent.experts = experts[:lacked]
        elif lacked and not parent.answers:
            parent.experts = np.concatenate([parent.experts[:-1], experts[:lacked]])


@dataclass
class TurnRequest:
    """A request to the model that has no answer yet.

    Attributes:
        parent: the node that its answer comes behind.
        given: token ids behind the parent's.
        is_root: `parent` is a new root, which the tree gets with the answer.
    """

    parent: TurnNode
    given: list[int]
    messages: list[Message]  # behind the parent's
    is_root: bool
