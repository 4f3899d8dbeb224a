"""Seconds of our estimators and of verl's on the same rewards; runs in the environment of `make bench-peers`, prints JSON.

python -m benchmarks.peers.verl_estimators

4,096 prompts of 16 rollouts, 4 rewards, responses of one token (verl spreads over tokens, so longer ones cost it more).
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

from benchmarks.estimators import PROMPTS, REWARDS, ROLLOUTS, make_table, seconds
from megatron_rl.algorithms import make_advantage_estimator

Outcome = Callable[..., tuple[Tensor, Tensor]]
OTHERS: dict[str, dict[str, Outcome]] = {
    "grpo": {
        "loops": core_algos.compute_grpo_outcome_advantage,
        "vectorised": core_algos.compute_grpo_vectorized_outcome_advantage,
    },
    "rloo": {
        "loops": core_algos.compute_rloo_outcome_advantage,
        "vectorised": core_algos.compute_rloo_vectorized_outcome_advantage,
    },
    "gdpo": {"loops": core_algos.compute_gdpo_outcome_advantage},
}


def main() -> None:
    table = make_table(PROMPTS)
    ids = np.repeat(np.arange(PROMPTS), ROLLOUTS).astype(str).astype(object)
    mask = torch.ones(PROMPTS * ROLLOUTS, 1)
    rewards = table.values.sum(2).reshape(-1, 1).float()
    columns = {f"r{k}": table.values[:, :, k].flatten().numpy() for k in range(REWARDS)}
    of_gdpo = {  # verl places a reward at a response's last token
        "config": {"gdpo_reward_keys": list(columns)},
        "non_tensor_batch": columns,
        "batch": {"prompts": torch.ones(len(mask), 1), "attention_mask": torch.ones(len(mask), 2, dtype=torch.int64)},
    }
    result: dict[str, dict[str, float]] = {}
    for name, others in OTHERS.items():
        estimator = make_advantage_estimator(name)
        result[name] = {"ours": seconds(lambda estimator=estimator: estimator(table))}  # type: ignore[misc]
        for kind, other in others.items():
            options = of_gdpo if name == "gdpo" else {}

            def run(other: Outcome = other, options: dict[str, object] = options) -> Tensor:
                return other(rewards, mask, ids, **options)[0]

            difference = float((run().view(PROMPTS, ROLLOUTS) - estimator(table).advantages).abs().max())
            if difference > 1e-3:
                raise RuntimeError(f"verl's {name} ({kind}) and ours differ by {difference}")
            result[name][kind] = seconds(run, most=3)
    print(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
