"""6 x 6 mazes, made and scored as the shrinkage baseline's paper describes them (appendix D.4.2).

    python recipes/shrinkage/maze.py data/maze      # writes train.jsonl and test.jsonl

The border is wall, so 4 x 4 cells are left; the shortest path has 4 to 8 steps. A row has the prompt, and the maze as its
answer: every path of open cells from S to E is right, whether it is the shortest or not.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SIZE = 6
MOVES = {"L": (0, -1), "R": (0, 1), "U": (-1, 0), "D": (1, 0)}
PROMPT = """You need to solve the following maze. * denotes a wall that you cannot walk through, . denotes a cell that \
you can walk through. S denotes the start, E denotes the destination. There are four moves: Left (L), Right (R), \
Up (U), Down (D). Write the final path in <answer> </answer>.

## Maze
{maze}
"""
_ANSWER = re.compile(r"<answer>\s*([LRUD]+)\s*</answer>")


def find(maze: list[str], letter: str) -> tuple[int, int]:
    return next((y, x) for y, row in enumerate(maze) for x, cell in enumerate(row) if cell == letter)


def shortest(maze: list[str]) -> int | None:
    """Steps of the shortest path from S to E; None where there is no path."""
    start, goal = find(maze, "S"), find(maze, "E")
    steps = {start: 0}
    queue = deque([start])
    while queue:
        y, x = queue.popleft()
        if (y, x) == goal:
            return steps[goal]
        for dy, dx in MOVES.values():
            cell = (y + dy, x + dx)
            if cell not in steps and maze[cell[0]][cell[1]] != "*":
                steps[cell] = steps[y, x] + 1
                queue.append(cell)
    return None


def solves(maze: list[str], path: str) -> bool:
    """Whether the path leads from S to E over open cells, and ends there."""
    y, x = find(maze, "S")
    for letter in path:
        dy, dx = MOVES[letter]
        y, x = y + dy, x + dx
        if maze[y][x] == "*":
            return False
    return maze[y][x] == "E"


def make_maze(rng: random.Random) -> list[str]:
    """A maze with a shortest path of 4 to 8 steps; walls, start and end are drawn until there is one."""
    while True:
        cells = [(y, x) for y in range(1, SIZE - 1) for x in range(1, SIZE - 1)]
        start, goal = rng.sample(cells, 2)
        walls = {cell for cell in cells if rng.random() < 0.35}
        letters = {**dict.fromkeys(walls, "*"), start: "S", goal: "E"}
        maze = [
            "".join(letters.get((y, x), "." if 0 < y < SIZE - 1 and 0 < x < SIZE - 1 else "*") for x in range(SIZE))
            for y in range(SIZE)
        ]
        steps = shortest(maze)
        if steps is not None and 4 <= steps <= 8:
            return maze


def maze_path() -> Callable[[str, Mapping[str, Any]], float]:
    """The reward: 1 where the last <answer> is a path through the maze in the sample's `answer`, else 0."""

    def score(completion: str, sample: Mapping[str, Any]) -> float:
        answers = _ANSWER.findall(completion)
        return float(bool(answers) and solves(str(sample["answer"]).split("\n"), answers[-1]))

    return score


def main(folder: Path, sizes: Mapping[str, int], seed: int = 1) -> None:
    """Writes `<split>.jsonl` for every split; no maze is in two of them."""
    rng, seen = random.Random(seed), set()
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in sizes.items():
        rows: list[str] = []
        while len(rows) < size:
            maze = "\n".join(make_maze(rng))
            if maze not in seen:
                seen.add(maze)
                rows.append(json.dumps({"prompt": PROMPT.format(maze=maze), "answer": maze}))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"test": 200, "train": 20_000})
