"""vLLM's route that takes and gives tokens (`/inference/v1/generate`), as the clients of vLLM and of `renderers` speak it."""

from __future__ import annotations

from typing import Any

from megatron_rl.agents.dialects.asking import (
    MODEL,
    AcceptedParameters,
    Asked,
    Body,
    Dialect,
    flag,
    limit_of,
    mapping,
    openai_refusal,
    usage_of,
)
from megatron_rl.agents.session import PolicyTurn, RefusedTurn
from megatron_rl.rollout.sampling import Sampling

_PARAMETERS = AcceptedParameters(
    read=frozenset({"token_ids", "sampling_params", "return_token_ids"}),
    ignored=frozenset({"request_id", "model", "cache_salt", "priority", "token_offsets"}),
    fixed={"stream": (False,), "output_mode": ("tokens",), "stream_options": ({},)},
    remedies={"stream": "a turn's tokens come in one reply"},
)
_SAMPLING = AcceptedParameters(
    read=frozenset({"temperature", "top_p", "max_tokens"}),
    # Three of texts, of which there are none here. Clients of `renderers` always name their family's stop tokens; a turn ends
    # where the recipe's turns end.
    ignored=frozenset({"skip_special_tokens", "spaces_between_special_tokens", "detokenize", "stop_token_ids"}),
    fixed={
        "n": (1,),
        "logprobs": (0, 1),
        "top_k": (-1, 0),
        "min_p": (0,),
        "min_tokens": (0,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "ignore_eos": (False,),
        "stop": ([], ""),
    },
    remedies={"seed": "a turn's seed is the recipe's"},
)


def read(body: Body, sampling: Sampling) -> Asked:
    """Reads a request, see `Dialect.read`."""
    _PARAMETERS.check(body, sampling)
    flag(body, "return_token_ids")
    tokens, sampling_params = body.get("token_ids"), mapping(body, "sampling_params")
    if not (isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)):
        raise RefusedTurn("`token_ids` must be a list of integers", "invalid_messages")
    _SAMPLING.check(sampling_params, sampling, "sampling_params.")
    return Asked(reads_calls=False, max_tokens=limit_of(sampling_params, "max_tokens"), tokens=tokens)


def reply(body: Body, turn: PolicyTurn, name: str) -> dict[str, Any]:
    """Writes the answer, see `Dialect.reply`."""
    prompt, drawn = usage_of(turn)
    logprobs = None
    if mapping(body, "sampling_params").get("logprobs") is not None and turn.logprobs is not None:
        # `token` is what earlier versions of vLLM wrote, and `renderers` reads.
        content: list[dict[str, object]] = [
            {"token_id": token, "token": f"token_id:{token}", "logprob": value, "rank": None, "top_logprobs": []}
            for token, value in zip(turn.ids, turn.logprobs, strict=True)
        ]
        logprobs = {"content": content}
    choice = {"index": 0, "finish_reason": turn.finish_reason, "stop_reason": None, "token_ids": turn.ids}
    return {
        "request_id": body.get("request_id") or name,
        "created": 0,
        "model": MODEL,
        "choices": [{**choice, "logprobs": logprobs}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn},
        "prompt_logprobs": None,
        "prompt_token_ids": turn.prompt_ids if body.get("return_token_ids") else None,
    }


DIALECT = Dialect(read, reply, None, openai_refusal)
