"""A Bradley-Terry reward model: a sequence classifier with one output, behind vLLM's HTTP server or loaded here."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from megatron_rl.config.keys import Finite
from megatron_rl.config.schema import ServerConfig
from megatron_rl.parameters import Range
from megatron_rl.rewards.judge_prompt import as_text
from megatron_rl.rewards.kinds import InlineReward, Reward, SampleMapping, Score
from megatron_rl.rewards.registry import register_reward
from megatron_rl.rewards.remote import Nonsense, Policy, RemoteReward, Reply
from megatron_rl.sample import Message
from megatron_rl.tokenizer import Tokenizer

_LOADING = threading.Lock()


@dataclass(frozen=True)
class ModelPolicy(Policy):
    """As `Policy`; `neutral` is on the scale of the score."""

    neutral: Finite = 0.0


@register_reward("reward_model", ServerConfig, ModelPolicy)
def reward_model(
    server: ServerConfig,
    policy: ModelPolicy,
    urls: str | list[str] | None = None,
    model: str | None = None,
    path: str | None = None,
    squash: Literal["none", "sigmoid"] = "none",
    batch_size: Annotated[int, Range(low=1)] = 16,
    max_tokens: Annotated[int, Range(low=1)] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Reward:
    """The model's one output for the conversation of prompt and response: any real number, or in (0, 1) with `sigmoid`.

    A prompt of chat messages becomes a chat with the response as the assistant's, in the reward model's own template; a
    prompt of text is followed by the response.

    Args:
        server, policy: `urls`: as for the judge.
        urls: base URL, or several of equal servers, without `/v1`: vLLM's `/classify` is below it. Needs `model`.
        model: the name under which the servers have it.
        path: instead of `urls`, a Hugging Face folder, loaded by every rank when it scores its first rollout.
        squash: `none`, or `sigmoid` of the output.
        batch_size: `path`: rollouts in one forward pass.
        max_tokens: longer conversations lose their beginning; null: the limit of the model, or of its server.
        device: `path`: `auto` (the rank's GPU, where there is one), `cpu`, `cuda`.
    """
    squashed = _sigmoid if squash == "sigmoid" else float
    if (urls is None) == (path is None):
        raise ValueError("give either urls (of a server) or path (of a model folder)")
    if path is not None:
        if not (Path(path) / "config.json").exists():
            raise ValueError(f"path: {path} is not a Hugging Face folder: it has no config.json")
        return LocalModel(path, squashed, batch_size, max_tokens, device)
    if urls is None or not model:
        raise ValueError("model is missing: the name under which the server has the reward model")

    def render(completion: str, sample: SampleMapping) -> dict[str, object]:
        prompt = sample.get("prompt", "")
        # -1: the model's own limit. The beginning is cut, as `LocalModel` does.
        body = {
            "model": model,
            "use_activation": False,
            "truncate_prompt_tokens": max_tokens or -1,
            "truncation_side": "left",
        }
        if isinstance(prompt, str):
            return {**body, "input": prompt + completion}
        return {**body, "messages": _chat(prompt, completion), "add_generation_prompt": False}

    def read(reply: Reply) -> tuple[float, str]:
        try:
            [value] = reply["data"][0]["probs"]
            score = squashed(float(value))
        except (LookupError, TypeError, ValueError, OverflowError):
            raise Nonsense(f"not the one output of a reward model: {str(reply)[:300]}") from None
        if not math.isfinite(score):
            raise Nonsense(f"the output is {value}")
        return score, ""

    def is_reply(reply: Reply) -> bool:
        return isinstance(reply.get("data"), list) and bool(reply["data"])

    return RemoteReward(urls, server, policy, "/classify", render, read, is_reply)


def _chat(prompt: list[Message], completion: str) -> list[Message]:
    return [*prompt, {"role": "assistant", "content": completion}]


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


class LocalModel(InlineReward):
    """A sequence classifier in this process. It scores all rollouts together, after generation.

    Raises:
        ValueError: at the first call, where the folder's model has not exactly one output.
    """

    batched = True

    def __init__(
        self, path: str, squash: Callable[[float], float], batch_size: int, max_tokens: int | None, device: str
    ) -> None:
        super().__init__(lambda completion, sample: next(self.scores([completion], [sample])))
        self.path, self.squash, self.batch_size = path, squash, batch_size
        self.max_tokens, self.device = max_tokens, device
        self._loaded: tuple[Any, Tokenizer] | None = None

    def scores(self, completions: Sequence[str], samples: Sequence[SampleMapping]) -> Iterator[Score]:
        """One score per completion, in order. Batches have similar lengths, the longest first."""
        import torch

        model, tokenizer = self._load()
        limit = self.max_tokens or model.config.max_position_embeddings
        ids = [
            self._tokens(tokenizer, completion, sample)[-limit:]
            for completion, sample in zip(completions, samples, strict=True)
        ]
        scores = [0.0] * len(ids)
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            width = len(ids[batch[0]])
            tokens = torch.full((len(batch), width), model.config.pad_token_id, dtype=torch.long)
            mask = torch.zeros(len(batch), width, dtype=torch.long)
            for row, i in enumerate(batch):
                tokens[row, : len(ids[i])] = torch.tensor(ids[i], dtype=torch.long)
                mask[row, : len(ids[i])] = 1
            with torch.inference_mode():
                hidden = model.base_model(tokens.to(model.device), attention_mask=mask.to(model.device))[0]
                last = hidden[torch.arange(len(batch)), mask.sum(1) - 1]  # of each row's last own token
                logits = model.score(last).float().cpu()
            for row, i in enumerate(batch):
                scores[i] = self.squash(float(logits[row, 0]))
        return iter(scores)

    def _tokens(self, tokenizer: Tokenizer, completion: str, sample: SampleMapping) -> list[int]:
        prompt = sample.get("prompt", "")
        if isinstance(prompt, str):
            ids = tokenizer(prompt + completion)["input_ids"]
        elif tokenizer.chat_template is None:
            ids = tokenizer(as_text(_chat(prompt, completion)))["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(_chat(prompt, completion), tokenize=True, return_dict=True)["input_ids"]
        return list(ids) or [tokenizer.eos_token_id]

    def _load(self) -> tuple[Any, Tokenizer]:
        with _LOADING:
            if self._loaded is None:
                import torch
                from transformers import AutoModelForSequenceClassification, AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(self.path)
                model = AutoModelForSequenceClassification.from_pretrained(self.path, dtype="auto")
                if model.config.num_labels != 1 or not hasattr(model, "score"):
                    outputs = f"{model.config.num_labels} outputs of a {type(model).__name__}"
                    raise ValueError(
                        f"{self.path}: {outputs}; a reward model has one, of a decoder with a `score` layer"
                    )
                if model.config.pad_token_id is None:
                    model.config.pad_token_id = tokenizer.pad_token_id or 0  # masked out all the same
                on_gpu = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
                model.eval().to(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")
                self._loaded = model, tokenizer
        return self._loaded
