"""A Bradley-Terry reward model: a sequence classifier with one output, behind vLLM's HTTP server or loaded here."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatron_rl.base.messages import errors_named
from megatron_rl.config.keys import Finite
from megatron_rl.config.schema import ServerConfig
from megatron_rl.data.sample import Message, Prompt
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.models import read_hf_config
from megatron_rl.models.classifier import num_labels
from megatron_rl.rewards.judge import as_text
from megatron_rl.rewards.kinds import ANY, UNIT, Bounds, InlineReward, Reward, SampleMapping, Score
from megatron_rl.rewards.registry import register_reward
from megatron_rl.rewards.remote import AnswerRules, Nonsense, RemoteReward, Reply
from megatron_rl.rewards.server_or_folder import Device, check_device, check_way, place

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedModel

_LOADING = threading.Lock()


@dataclass(frozen=True)
class ModelRules(AnswerRules):
    """As `AnswerRules`; `neutral` is on the scale of the score."""

    neutral: Finite = 0.0


@register_reward("reward_model", ServerConfig, ModelRules)
def reward_model(
    server: ServerConfig,
    rules: ModelRules,
    urls: str | list[str] | None = None,
    model: str | None = None,
    path: str | None = None,
    squash: Literal["none", "sigmoid"] = "none",
    batch_size: Annotated[int, Field(ge=1)] = 16,
    max_tokens: Annotated[int, Field(ge=1)] | None = None,
    device: Device = "auto",
) -> Reward:
    """The model's one output for the conversation of prompt and response: any real number, or in (0, 1) with `sigmoid`.

    A prompt of chat messages becomes a chat with the response as the assistant's, in the reward model's own template; a
    prompt of text is followed by the response.

    Args:
        server, rules: `urls`: as for the judge.
        urls: base URL, or several of equal servers, without `/v1`: vLLM's `/classify` is below it. Needs `model`.
        model: the name under which the servers have it.
        path: instead of `urls`, a Hugging Face folder, loaded by every rank when it scores its first rollout.
        squash: `none`, or `sigmoid` of the output.
        batch_size: `path`: rollouts in one forward pass.
        max_tokens: longer conversations lose their beginning; null: the limit of the model, or of its server.
        device: `path`: `auto` (the rank's GPU, where there is one), `cpu`, `cuda`.
    """
    squashed, bounds = (_sigmoid, UNIT) if squash == "sigmoid" else (float, ANY)
    check_way(urls, path, model, (server, rules), {"batch_size": batch_size != 16, "device": device != "auto"})
    if path is not None:
        if (outputs := num_labels(read_hf_config(path))) != 1:
            raise ValueError(f"path: {path}: a classifier with {outputs} outputs; a reward model has one")
        return LocalModel(path, squashed, bounds, batch_size, max_tokens, device)
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
            return {**body, "input": conversation(prompt, completion)}
        return {**body, "messages": conversation(prompt, completion), "add_generation_prompt": False}

    def read(reply: Reply, asked: Mapping[str, object]) -> tuple[float, str]:
        try:
            [value] = reply["data"][0]["probs"]
            if isinstance(value, bool) or not isinstance(value, int | float):  # a text, or the keys of a mapping
                raise TypeError
            score = squashed(float(value))
        except (LookupError, TypeError, ValueError, OverflowError):
            raise Nonsense(f"not the one output of a reward model: {str(reply)[:300]}") from None
        if not math.isfinite(score):
            raise Nonsense(f"the output is {value}")
        return score, ""

    def is_reply(reply: Reply) -> bool:
        return isinstance(reply.get("data"), list) and bool(reply["data"])

    return RemoteReward(urls, server, rules, "/classify", render, read, is_reply, bounds)


def conversation(prompt: Prompt, response: str) -> Prompt:
    """The text that is scored: the chat that ends with the response, or of a prompt of text that text and the response."""
    return prompt + response if isinstance(prompt, str) else [*prompt, Message(role="assistant", content=response)]


def conversation_ids(tokenizer: Tokenizer, whole: Prompt) -> list[int]:
    """Tokens of a conversation; of a chat in the tokenizer's template, or where it has none under the roles' names."""
    if isinstance(whole, str) or tokenizer.chat_template is None:
        return list(tokenizer(as_text(whole))["input_ids"])
    return list(tokenizer.apply_chat_template(whole, tokenize=True, return_dict=True)["input_ids"])


def _encode[T, R](path: str, encode: Callable[[T], R], text: T) -> R:
    # tokenizers raises bare Exceptions.
    with errors_named(f"{path}: the reward model's tokenizer cannot encode {text!r:.80}", Exception):
        return encode(text)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


class LocalModel(InlineReward):
    """A sequence classifier in this process. It scores all rollouts together, after generation.

    Raises:
        ValueError: its tokenizer does not know a text, or it is no decoder with a `score` layer.
    """

    batched = True

    def __init__(
        self,
        path: str,
        squash: Callable[[float], float],
        bounds: Bounds,
        batch_size: int,
        max_tokens: int | None,
        device: Device,
    ) -> None:
        super().__init__(
            lambda completion, sample: next(self.scores([completion], [sample])),
            bounds=bounds,
            check_tokenizer=lambda _: check_device(device),
            check_sample=self._check_prompt,
        )
        self.path, self.squash, self.batch_size = path, squash, batch_size
        self.max_tokens, self.device = max_tokens, device
        self._loaded: tuple[PreTrainedModel, Tokenizer] | None = None
        self._vocabulary: tuple[Fast | None, int] | None = None  # the tokenizer's, and the model's number of tokens

    def _check_prompt(self, sample: SampleMapping) -> None:
        """ValueError where the tokenizer in the folder does not know the prompt, or gives it tokens that the model has not:
        it is another model's. Needs no torch."""
        if self._vocabulary is None:
            from tokenizers import Tokenizer as Fast

            file = Path(self.path) / "tokenizer.json"
            rows = read_hf_config(self.path).get("vocab_size")
            self._vocabulary = Fast.from_file(str(file)) if file.is_file() else None, int(str(rows))
        tokenizer, rows = self._vocabulary
        text = as_text(sample.get("prompt", ""))
        if tokenizer is not None and max(_encode(self.path, tokenizer.encode, text).ids, default=0) >= rows:
            raise ValueError(
                f"{self.path}: its tokenizer has tokens for {text!r:.80} that its model has not ({rows} rows)"
            )

    def scores(self, completions: Sequence[str], samples: Sequence[SampleMapping]) -> Iterator[Score]:
        """One score per completion, in order. Batches have similar lengths, the longest first."""
        import torch

        model, tokenizer = self._load()
        limit = self.max_tokens or model.config.max_position_embeddings
        ids = [
            _encode(
                self.path, partial(conversation_ids, tokenizer), conversation(sample.get("prompt", ""), completion)
            )[-limit:]
            or [tokenizer.eos_token_id]
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

    def _load(self) -> tuple[PreTrainedModel, Tokenizer]:
        with _LOADING:
            if self._loaded is None:
                from transformers import AutoModelForSequenceClassification, AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
                model = AutoModelForSequenceClassification.from_pretrained(
                    self.path, dtype="auto", trust_remote_code=False
                )
                if not hasattr(model, "score"):
                    raise ValueError(f"{self.path}: a {type(model).__name__} is no decoder with a `score` layer")
                if model.config.pad_token_id is None:
                    model.config.pad_token_id = tokenizer.pad_token_id or 0  # masked out all the same
                model.eval().to(place(self.device))
                self._loaded = model, tokenizer
        return self._loaded
