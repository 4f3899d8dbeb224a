"""A teacher for on-policy distillation: how much more probable than the policy it finds each token that the policy drew.

Agarwal et al. 2023, "On-Policy Distillation of Language Models", https://arxiv.org/abs/2306.13649. The reverse KL's
sample per token as reward: Lu et al. 2025, "On-Policy Distillation", https://thinkingmachines.ai/blog/on-policy-distillation
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

from megatron_rl.config.schema import ServerConfig
from megatron_rl.data.sample import SampleMapping, TokenMapping
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards.kinds import ANY, InlineReward, Reward, Score
from megatron_rl.rewards.registry import register_reward
from megatron_rl.rewards.remote import AnswerRules, Budget, Nonsense, RemoteReward, Reply
from megatron_rl.rewards.server_or_folder import Device, check_device, check_way, place
from megatron_rl.runtime.http import EndpointError, Unanswered

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

_LOADING = threading.Lock()
_COMPARED = 64  # tokens, over the whole vocabulary, that a server's tokenizer must read as the policy's does
_ROUNDING = 1e-3  # a log-prob may be that far above 0
_POSITIONS = 1024  # whose distributions over the vocabulary are in memory at a time


@dataclass(frozen=True)
class TeacherRules:
    """As `AnswerRules`, without a neutral score: where the teacher does not answer, tokens have no reward of it."""

    unanswered: Literal["drop", "stop"] = "drop"
    step_seconds: Annotated[float, Field(ge=0.1)] = 600.0
    max_requests_per_run: Budget = None
    max_tokens_per_run: Budget = None


@register_reward("teacher", ServerConfig, TeacherRules)
def teacher(
    server: ServerConfig,
    rules: TeacherRules,
    urls: str | list[str] | None = None,
    model: str | None = None,
    path: str | None = None,
    batch_tokens: Annotated[int, Field(ge=1)] = 8192,
    device: Device = "auto",
) -> Reward:
    """log p(teacher) - log p(policy) of each drawn token: minus the reverse KL's sample.

    The policy's log-probs are the engine's, under the distribution that it samples from; the teacher's are at temperature 1.
    It is given the tokens themselves, so it must have the policy's vocabulary; the run checks that before it starts.

    Args:
        server, rules: `urls`: as for the judge.
        urls: base URL of vLLM's server, with `/v1`, or several of equal servers. Needs `model`.
        model: the name under which the servers have it.
        path: instead of `urls`, a Hugging Face folder, loaded by every rank when it scores its first rollouts.
        batch_tokens: `path`: tokens in one forward pass, padding included; a longer rollout has one of its own.
        device: `path`: `auto` (the rank's GPU, where there is one), `cpu`, `cuda`.
    """
    check_way(urls, path, model, (server, rules), {"batch_tokens": batch_tokens != 8192, "device": device != "auto"})
    if path is not None:
        return LocalTeacher(path, batch_tokens, device)
    if urls is None or not model:
        raise ValueError("model is missing: the name under which the server has the teacher")
    return TeacherServer(urls, server, AnswerRules(**vars(rules)), model)


class TeacherServer(RemoteReward):
    """A teacher behind vLLM's `/v1/completions`, which gives the log-probs of a prompt of token ids."""

    remembers = False  # no rollout comes twice, and an answer is as long as its rollout

    def __init__(self, urls: str | Sequence[str], server: ServerConfig, rules: AnswerRules, model: str) -> None:
        super().__init__(urls, server, rules, "/completions", self._render, self._of_response, _has_log_probs, ANY)
        self.per_token, self.check_tokenizer = True, self._check_tokenizer
        self.remarks = lambda completion, sample: ()
        self._model = model

    def _body(self, ids: Sequence[int]) -> dict[str, object]:
        return {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}

    def _render(self, completion: str, sample: SampleMapping) -> dict[str, object]:
        return self._body(cast(TokenMapping, sample)["token_ids"].tolist())

    def _of_response(self, reply: Reply, asked: Mapping[str, Any]) -> tuple[Score, str]:
        return [log_prob for log_prob, _ in _read(reply, asked["prompt"])], ""

    async def _score(self, completion: str, sample: SampleMapping) -> Score:
        log_probs = await super()._score(completion, sample)
        return None if log_probs is None else _difference(cast("list[float]", log_probs), cast(TokenMapping, sample))

    def _check_tokenizer(self, tokenizer: Tokenizer) -> None:
        known = sorted(tokenizer.get_vocab().values())
        ids = known[:: max(1, len(known) // _COMPARED)]
        try:
            reply = self.ask(self._body(ids))
            entries = _read(reply, ids)
        except (Unanswered, EndpointError, Nonsense) as error:
            raise ValueError(
                f"the teacher does not score a prompt of token ids of the policy's vocabulary: {error}; start it with "
                f"`vllm serve`, of a model with the policy's tokenizer, under the name {self._model!r}"
            ) from error
        for token, (_, theirs) in zip(ids[1:], entries, strict=True):
            ours = tokenizer.decode([token])
            if ours != theirs and "\N{REPLACEMENT CHARACTER}" not in f"{ours}{theirs}":
                raise _other_vocabulary(token, ours, theirs)


def _has_log_probs(reply: Reply) -> bool:
    with contextlib.suppress(LookupError, TypeError):
        return isinstance(reply["choices"][0]["prompt_logprobs"], list)
    return False


def _read(reply: Reply, ids: Sequence[int]) -> list[tuple[float, object]]:
    """Log-prob of each token but the first, and how the server reads it.

    Raises:
        Nonsense: they are of other tokens, or no log-probs, as under vLLM's `--logprobs-mode raw_logits`.
    """
    entries = reply["choices"][0]["prompt_logprobs"][1:]
    try:
        return [
            (_checked(entry[str(token)]["logprob"]), entry[str(token)].get("decoded_token"))
            for token, entry in zip(ids[1:], entries, strict=True)
        ]
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise Nonsense(
            f"not the log-probs of the {len(ids)} tokens of the prompt ({error}): {str(entries)[:300]}"
        ) from None


def _checked(log_prob: object) -> float:
    if isinstance(log_prob, bool) or not isinstance(log_prob, int | float):
        raise TypeError(f"{log_prob!r:.80} in the place of a log-prob")
    if not -math.inf < log_prob <= _ROUNDING:
        raise ValueError(f"{log_prob!r:.80} is the logarithm of no probability")
    return float(log_prob)


def _other_vocabulary(token: int, ours: object, theirs: object) -> ValueError:
    return ValueError(
        f"the teacher has another vocabulary than the policy: token {token} is {theirs!r} there and {ours!r} here; distil "
        "from a model of the policy's family, which has its tokenizer"
    )


def _difference(log_probs: Sequence[float] | np.ndarray, sample: TokenMapping) -> list[float]:
    """Rewards of the drawn tokens, from the teacher's log-probs of all tokens but the first."""
    import numpy as np

    teachers = np.asarray(log_probs, dtype=np.float64)[sample["loss_mask"][1:]]
    difference: list[float] = (teachers - sample["logprobs"]).tolist()
    return difference


class LocalTeacher(InlineReward):
    """A causal language model in this process. It scores all rollouts together, after generation."""

    batched = True

    def __init__(self, path: str, batch_tokens: int, device: Device) -> None:
        super().__init__(
            lambda completion, sample: next(self.scores([completion], [sample])),
            per_token=True,
            check_tokenizer=self._check_tokenizer,
        )
        self.path, self.batch_tokens, self.device = path, batch_tokens, device
        self._model: PreTrainedModel | None = None

    def _check_tokenizer(self, tokenizer: Tokenizer) -> None:
        from transformers import AutoConfig, AutoTokenizer

        check_device(self.device)
        theirs = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False).get_vocab()
        ours = tokenizer.get_vocab()
        by_id = {token: text for text, token in theirs.items()}
        for text, token in ours.items():
            if theirs.get(text) != token:
                raise _other_vocabulary(token, text, by_id.get(token))
        # A model that reads images has its decoder's sizes in a section of their own.
        rows = AutoConfig.from_pretrained(self.path, trust_remote_code=False).get_text_config().vocab_size
        if rows <= max(ours.values()):
            raise ValueError(
                f"{self.path}: the teacher has {rows} rows of tokens, and the policy's go up to {max(ours.values())}"
            )

    def scores(self, completions: Sequence[str], samples: Sequence[SampleMapping]) -> Iterator[Score]:
        """Per rollout its tokens' rewards, in order. Batches have similar lengths, the longest first."""
        rollouts = cast("Sequence[TokenMapping]", samples)
        scores: list[Score] = [None] * len(rollouts)
        order = sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i]["token_ids"]))
        while order:
            width = len(rollouts[order[0]]["token_ids"])
            batch = order[: max(1, self.batch_tokens // width)]
            order = order[len(batch) :]
            found = self._log_probs([rollouts[i]["token_ids"] for i in batch], width)
            for i, log_probs in zip(batch, found, strict=True):
                scores[i] = _difference(log_probs, rollouts[i])
        return iter(scores)

    def _log_probs(self, sequences: Sequence[np.ndarray], width: int) -> list[np.ndarray]:
        """Log-probs of each sequence's tokens but the first, float32."""
        import torch

        model = self._load()
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)
        mask = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)], mask[row, : len(ids)] = torch.from_numpy(ids), 1
        tokens, mask = tokens.to(model.device), mask.to(model.device)
        with torch.inference_mode():
            logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].flatten(0, 1)
            rows = zip(logits.split(_POSITIONS), tokens[:, 1:].flatten().split(_POSITIONS), strict=True)
            flat = torch.cat([_log_prob(part, targets) for part, targets in rows])
        log_probs = flat.view(len(sequences), -1).cpu().numpy()
        return [row[: len(ids) - 1] for row, ids in zip(log_probs, sequences, strict=True)]

    def _load(self) -> PreTrainedModel:
        with _LOADING:
            if self._model is None:
                from transformers import AutoModelForCausalLM

                model = AutoModelForCausalLM.from_pretrained(self.path, dtype="auto", trust_remote_code=False)
                self._model = model.eval().to(place(self.device))
        return self._model


def _log_prob(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
