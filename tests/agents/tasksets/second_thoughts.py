"""A taskset of verifiers: the policy answers, its environment asks once more, and counts letters."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Data(vf.TaskData):
    letter: str


class SecondThoughts(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def with_letter(self, trace: vf.Trace) -> float:
        return float(self.data.letter in (trace.last_reply or ""))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class AsksAgain(vf.SingleAgentEnv):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            if not (await interaction.turn()).terminated:
                await interaction.turn("are you sure?")


class Letters(vf.Taskset[SecondThoughts, vf.TasksetConfig]):
    def load(self) -> Iterator[SecondThoughts]:
        for letter in "aeiou":
            yield SecondThoughts(Data(prompt=f"with {letter}?", system_prompt="you spell.", letter=letter))


__all__ = ["AsksAgain", "Letters"]
