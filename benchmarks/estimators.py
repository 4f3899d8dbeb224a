"""How long estimators and the loss take, and against the papers' listings and the grouping of released trainers.

`python -m benchmarks.estimators`; one core, a minute. The comparisons are written here
from the formulas; they are what the papers' listings and released trainers do, with their loops.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.others import told
from megatron_rl.actor.head import VocabShard, log_probs_from_hidden
from megatron_rl.algorithms import (
    Denominators,
    RewardTable,
    list_advantage_estimators,
    list_surrogates,
    make_advantage_estimator,
    make_algorithm,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from reproduced.page import markdown_table

PROMPTS, ROLLOUTS, REWARDS = 4096, 16, 4
SIZES = (2**14, 2**16, 2**18, 2**20)  # rollouts
TOKENS = 2**16
SHAPES = ((128, 64), (128, 512), (128, 2048))  # hidden size, vocabulary; the first is the quick start's


def seconds(function: Callable[[], object], least: float = 0.2, most: int = 30) -> float:
    """CPU time of a call: the least of several, over calls of at least `least` seconds together.

    CPU time, because other processes may be running; the least, because they also take the caches.
    """
    function()
    times: list[float] = []
    while sum(times) < least and len(times) < most:
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return min(times)


def make_table(prompts: int) -> RewardTable:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(prompts, ROLLOUTS, REWARDS, generator=generator, dtype=torch.float64)
    return RewardTable(
        values,
        ("a", "b", "c", "judge"),
        lengths=torch.randint(1, 4096, (prompts, ROLLOUTS), generator=generator),
        greedy=torch.rand(prompts, REWARDS, generator=generator, dtype=torch.float64),
    )


# ---------------------------------------------------------------------------------------------------- what we compare with
def shrinkage_by_prompt(rewards: Tensor) -> Tensor:
    """The shrinkage paper's Listing 1: a loop over prompts, each looking at all others; [n, m] -> [n, m]."""
    n, m = rewards.shape
    mean, variance = rewards.mean(1), rewards.var(1) / m
    batch, weight = [], []
    for i in range(n):
        others = torch.cat([mean[:i], mean[i + 1 :]])
        v, s = torch.cat([variance[:i], variance[i + 1 :]]).mean(), others.var(correction=0)
        batch.append(others.mean())
        weight.append((n - 1) / n * v / (v + s))
    share = torch.stack(weight)[:, None]
    own = (rewards.sum(1, keepdim=True) - rewards) / (m - 1)
    return rewards - (1 - share) * own - share * torch.stack(batch)[:, None]


def by_prompt_id(rewards: Tensor, ids: Sequence[int], of_group: Callable[[Tensor], Tensor]) -> Tensor:
    """Groups collected in a dictionary by prompt id, one small tensor operation per group; [rollouts] -> [rollouts]."""
    members: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(ids):
        members[prompt].append(index)
    result = torch.empty_like(rewards)
    for indices in members.values():
        result[indices] = of_group(rewards[indices])
    return result


def z_score(group: Tensor) -> Tensor:
    return (group - group.mean()) / (group.std() + 1e-6)


def leave_one_out(group: Tensor) -> Tensor:
    return (group - group.mean()) * len(group) / (len(group) - 1)


def compared(table: RewardTable) -> dict[str, tuple[Callable[[], Tensor], str]]:
    """Estimator -> its counterpart, and what that is."""
    n, m, k = table.values.shape
    summed = table.values.sum(2)
    ids = [i for i in range(n) for _ in range(m)]

    def gdpo() -> Tensor:
        parts = [by_prompt_id(table.values[:, :, j].flatten(), ids, z_score) for j in range(k)]
        total = torch.stack(parts).sum(0)
        return ((total - total.mean()) / (total.std() + 1e-8)).view(n, m)

    return {
        "shrinkage": (lambda: shrinkage_by_prompt(summed), "Listing 1, a loop over prompts"),
        "grpo": (lambda: by_prompt_id(summed.flatten(), ids, z_score).view(n, m), "groups in a dictionary"),
        "rloo": (lambda: by_prompt_id(summed.flatten(), ids, leave_one_out).view(n, m), "groups in a dictionary"),
        "gdpo": (gdpo, "groups in a dictionary, per reward"),
    }


# ------------------------------------------------------------------------------------------------------------ measurements
def estimators() -> list[list[object]]:
    table = make_table(PROMPTS)
    others = compared(table)
    rows = []
    for name in list_advantage_estimators():
        estimator = make_advantage_estimator(name)
        own = seconds(partial(estimator, table))
        row: list[object] = [name, f"{own * 1e3:.1f}"]
        if name in others:
            other, what = others[name]
            difference = float((other() - estimator(table).advantages).abs().max())
            if difference > 1e-4:
                raise RuntimeError(f"{name} and its counterpart ({what}) differ by {difference}")
            spent = seconds(other, most=3)
            row += [what, f"{spent * 1e3:.0f}", f"{spent / own:.0f}"]
        else:
            row += ["", "", ""]
        rows.append(row)
    whole = make_algorithm("gdpo")
    rows.append(
        [
            "gdpo, whole step with its metrics",
            f"{seconds(lambda: whole.compute_advantages(table)) * 1e3:.1f}",
            "",
            "",
            "",
        ]
    )
    return rows


def scaling() -> list[list[object]]:
    rows = []
    for name in list_advantage_estimators():
        estimator = make_advantage_estimator(name)
        row: list[object] = [name]
        for size in SIZES:
            row.append(f"{seconds(partial(estimator, make_table(size // ROLLOUTS))) / size * 1e9:.0f}")
        rows.append(row)
    return rows


def loss() -> list[list[object]]:
    """The time that the policy loss adds to forward and backward of plain log-probs, per surrogate."""
    generator = torch.Generator().manual_seed(0)
    rollouts = 128
    sequence_ids = torch.arange(rollouts).repeat_interleave(TOKENS // rollouts)
    advantages = torch.randn(rollouts, generator=generator)[sequence_ids]
    mask = torch.ones(TOKENS, dtype=torch.bool)
    shift = 0.3 * torch.randn(TOKENS, generator=generator)
    own: dict[str, float] = {}
    for name in list_surrogates():
        algorithm = make_algorithm({"surrogate": {"name": name}})
        log_probs = torch.randn(TOKENS, generator=generator, requires_grad=True)
        old = log_probs.detach() + shift

        def step(algorithm=algorithm, log_probs=log_probs, old=old) -> None:  # type: ignore[no-untyped-def]
            value, _ = algorithm.policy_loss(
                log_probs,
                old,
                old,
                None,
                None,
                advantages,
                mask,
                sequence_ids=sequence_ids,
                denominators=Denominators(TOKENS, rollouts),
            )
            value.backward()

        own[name] = seconds(step)
    rows: list[list[object]] = []
    for hidden_size, vocabulary in SHAPES:
        hidden = torch.randn(TOKENS, hidden_size, generator=generator, requires_grad=True)
        weight = torch.randn(vocabulary, hidden_size, generator=generator, requires_grad=True)
        targets = torch.randint(vocabulary, (TOKENS,), generator=generator)
        shard = VocabShard(start=0, vocab_size=vocabulary, group=None)

        def plain(hidden=hidden, weight=weight, targets=targets, shard=shard) -> None:  # type: ignore[no-untyped-def]
            log_probs, _ = log_probs_from_hidden(hidden, weight, targets, shard, 1.0, 2048, False)
            (-advantages * log_probs).sum().backward()

        base = seconds(plain, most=3)
        shares = [f"{own[name] / base:.1%}" for name in own]
        rows.append([f"hidden {hidden_size}, vocabulary {vocabulary}", f"{base * 1e3:.0f}", *shares])
    rows.append(["the loss alone, ms", "", *(f"{value * 1e3:.1f}" for value in own.values())])
    return rows


def machine() -> str:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return f"{cpu}, one core, torch {torch.__version__.partition('+')[0]}"


def page() -> str:
    blocks = [
        f"{datetime.date.today()}; {machine()}. CPU time, the least of several calls.",
        f"**Estimators**, {PROMPTS} prompts x {ROLLOUTS} rollouts x {REWARDS} rewards, float64. The counterparts are "
        "written from the papers' listings and from how released trainers group rollouts; the advantages agree.",
        markdown_table(("estimator", "ms", "compared with", "its ms", "times"), estimators()),
        f"**Growth**: nanoseconds per rollout ({ROLLOUTS} per prompt, {REWARDS} rewards), for steps of so many rollouts.",
        markdown_table(("estimator", *(f"{size:,}" for size in SIZES)), scaling()),
        f"**Loss**: forward and backward of the log-probs of {TOKENS:,} tokens from the last hidden states, in ms (the "
        "model itself not included), and what the policy loss with all its metrics adds. The "
        "first line is the quick start's head.",
        markdown_table(("", "log-probs, ms", *list_surrogates()), loss()),
    ]
    return "\n\n".join(blocks) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the head's tensor-parallel group
    print(page())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    with told():
        sys.exit(main())
