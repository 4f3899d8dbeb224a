"""What a run recorded of a step, as arrays, and its policy's log-probs once more by transformers in float64."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

Expected = float | tuple[float, float] | None  # a value; or two that it must lie between; None: this step has none


class Policy:
    """A model's log-probs and entropies by transformers, in float64."""

    def __init__(self, folder: Path, temperature: float = 1.0) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch, self.temperature = torch, temperature
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self._of_text = {self.tokenizer.decode([i]): i for i in range(self.model.config.vocab_size)}

    def ids(self, pieces: Sequence[str]) -> list[int]:
        return [self._of_text[piece] for piece in pieces]

    def score(self, prompt: str, pieces: Sequence[str]) -> tuple[Any, Any]:
        """Log-probs of the response's tokens, and entropies, with gradients."""
        given = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response = self.ids(pieces)
        ids = self.torch.tensor([[*given, *response]])
        logits = self.model(ids).logits[0, len(given) - 1 : -1] / self.temperature
        every = logits.log_softmax(-1)
        chosen = every.gather(1, ids[0, len(given) :, None])[:, 0]
        return chosen, -(every.exp() * every).sum(-1)


@dataclass
class Step:
    """What a run recorded of a step. n prompts, m rollouts each; tokens of the rollouts that were trained on, in order."""

    run_dir: Path
    row: Mapping[str, float]
    before: Mapping[str, float] | None  # the row before it, where it continues that one's algorithm
    recipe: Mapping[str, Any]  # resolved, with the step's section `algorithm`
    policy: Policy | None = None  # with the weights before the step's first update
    reference: Policy | None = None

    @property
    def number(self) -> int:
        return int(self.row["step"])

    @cached_property
    def file(self) -> Mapping[str, np.ndarray]:
        with np.load(self.run_dir / "rollouts" / f"step_{self.number}.npz") as found:
            return dict(found)

    @cached_property
    def tokens(self) -> Mapping[str, np.ndarray]:
        """Arrays of tokens in float64, and `row`: each token's rollout, prompt × m + number."""
        parts = []
        for path in sorted((self.run_dir / "rollouts" / f"step_{self.number}.tokens").glob("*.npz")):
            with np.load(path) as found:
                names = ("log_probs", "old_log_probs", "rollout_log_probs", "gradient_weights")
                parts.append(
                    {name: found[name].astype(np.float64) for name in names}
                    | {"row": np.repeat(found["rows"], found["lengths"])}
                )
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "samples" / f"step_{self.number}.jsonl").open()]

    @cached_property
    def algorithm(self) -> Mapping[str, Any]:
        return self.recipe["algorithm"]

    @property
    def rewards(self) -> np.ndarray:
        return self.file["rewards"]

    @property
    def lengths(self) -> np.ndarray:
        return self.file["lengths"]

    @cached_property
    def advantage(self) -> np.ndarray:
        """Of each token, as the loss had it."""
        return self.file["advantages"].reshape(-1)[self.tokens["row"]].astype(np.float32).astype(np.float64)

    @cached_property
    def mismatch(self) -> np.ndarray:
        """Trainer minus engine, of each token; a difference of float32 numbers, rounded as float32 rounds it."""
        t = self.tokens
        return (t["old_log_probs"].astype(np.float32) - t["rollout_log_probs"].astype(np.float32)).astype(np.float64)

    def by_rollout(self, values: np.ndarray, where: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Values of each rollout's tokens; those without any left out."""
        for row in dict.fromkeys(self.tokens["row"].tolist()):
            own = self.tokens["row"] == row
            own = own if where is None else own & where
            if own.any():
                yield values[own]

    @cached_property
    def live(self) -> np.ndarray:
        """Tokens that the correction's filters leave."""
        left = np.ones(len(self.mismatch), dtype=bool)
        for one in self.algorithm["correction"]["filters"]:
            d = self.mismatch
            if one["by"] == "ratio":
                assert one["level"] == "token"
                value = np.exp(d)
            else:
                value = {"k1": -d, "k2": d**2 / 2, "k3": np.expm1(d) - d}[one["by"]]
                if one["level"] != "token":
                    reduce = np.mean if one["level"] == "geometric" else np.sum
                    of = {row: reduce(value[self.tokens["row"] == row]) for row in set(self.tokens["row"].tolist())}
                    value = np.array([of[row] for row in self.tokens["row"].tolist()])
            low, high = one.get("low"), one.get("high")
            left &= (low is None or value >= np.float32(low)) & (high is None or value <= np.float32(high))
        return left

    @cached_property
    def log_ratio(self) -> np.ndarray:
        """Of the tokens that are left, as the gradient weight sees it."""
        plain = self.tokens["log_probs"] - self.tokens["old_log_probs"]
        if self.algorithm["ratio"] == "token":
            return plain[self.live]
        assert self.algorithm["ratio"] == "sequence"
        of = {
            r: plain[(self.tokens["row"] == r) & self.live].mean() for r in set(self.tokens["row"][self.live].tolist())
        }
        return np.array([of[row] for row in self.tokens["row"][self.live].tolist()])

    @property
    def bounds(self) -> tuple[float, float]:
        """Of the trust region."""
        if len(self.file["clip_range"]):
            return tuple(self.file["clip_range"].tolist())
        params = self.algorithm["surrogate"].get("params", {})
        return params.get("eps_low", 0.2), params.get("eps_high", 0.2)

    @cached_property
    def region(self) -> np.ndarray:
        low, high = self.bounds
        a, d = self.advantage[self.live], self.log_ratio
        found = np.full(len(a), "M ")
        found[(d < math.log1p(-low)) & (a < 0)] = "LN"
        found[(d > math.log1p(high)) & (a > 0)] = "HP"
        found[(d < math.log1p(-low)) & (a > 0)] = "LP"
        found[(d > math.log1p(high)) & (a < 0)] = "HN"
        return np.char.strip(found)

    @cached_property
    def weight(self) -> np.ndarray:
        """F of every token that is left, by the papers' equations."""
        low, high = self.bounds
        w, region, section = np.exp(self.log_ratio), self.region, self.algorithm["surrogate"]
        if section["name"] == "clip":
            return np.where((region == "LN") | (region == "HP"), 0.0, w)
        if section["name"] == "cispo":
            return np.clip(w, 1 - low, 1 + high)
        assert section["name"] == "dgpo", section["name"]
        n, m = section["params"]["n"], section["params"]["m"]
        right = (1 + high) ** (1 / m) * w ** (1 - 1 / m)
        return np.where(region == "LN", w ** (n + 1) / (1 - low) ** n, np.where(region == "HP", right, w))

    @cached_property
    def importance(self) -> np.ndarray | None:
        """The correction's weights of the tokens that are left."""
        kind, cap = self.algorithm["correction"]["weight"], self.algorithm["correction"]["cap"]
        if kind == "none":
            return None
        assert kind == "token"
        return np.minimum(np.exp(self.mismatch[self.live]), cap)

    def policy_of(self, which: str) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs of every token by `policy` or `reference`, in the order of the samples; and entropies."""
        import torch

        model = getattr(self, which)
        with torch.no_grad():
            scored = [model.score(one["prompt"], one["pieces"]) for one in self.samples]
        return tuple(np.concatenate([part[i].numpy() for part in scored]) for i in (0, 1))

    @cached_property
    def sampled(self) -> np.ndarray:
        """Place of each of `tokens` among those of the samples, which are in the order of their rows."""
        lengths = np.array([one["tokens"] for one in self.samples])
        starts = np.cumsum(lengths) - lengths
        row = self.tokens["row"]
        within = np.concatenate([np.arange(count) for _, count in _runs(row)]) if len(row) else row
        return starts[row] + within


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    return [(key, len(list(own))) for key, own in itertools.groupby(values.tolist())]
