"""vLLM: drafts that change no token. Written for 0.32.

A draft guesses the next tokens of a response, and one pass of the model computes the logits behind all of them. vLLM's own
check of drafts takes other random numbers than decoding does, and on a CPU it draws from a wrong distribution. Here each
position is drawn as if it were decoded by itself, with the same random number, and a drafted token stands where it is what
was drawn. So the tokens are those of an engine without drafts; and of a guess without probabilities no check accepts more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler

from megatron_rl.seams import check_parameters
from megatron_rl.seams.vllm_decoding import give_back

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

FORWARD = "self metadata draft_probs logits sampling_metadata"
_NONE = -1  # vLLM's mark of a position without a token


class Guesser(Protocol):
    """Who guesses (`rollout.drafts.Drafts`)."""

    def guess(self, request: str, drawn: Sequence[int], together: int) -> list[int]: ...

    def verified(self, drafted: int, accepted: int) -> None: ...


class Proposer:
    """vLLM asks it for drafts, by the name of this class. It has none until `use`."""

    def __init__(self, config: VllmConfig) -> None:
        self.longest = config.model_config.max_model_len
        self.runner: Any = None
        self.drafts: Guesser | None = None

    def use(self, runner: Any, drafts: Guesser) -> None:
        """From here on the model runner, whose proposer this is, gets these drafts and draws what it would without."""
        check_parameters(RejectionSampler.forward, FORWARD)
        self.runner, self.drafts = runner, drafts
        runner.rejection_sampler = functools.partial(draw, runner.sampler, drafts)

    def load_model(self, model: object) -> None:
        """vLLM's CPU runner asks every proposer; this one has no model."""

    def propose(
        self, drawn: list[list[int]], lengths: np.ndarray, tokens: np.ndarray, slot_mappings: object = None
    ) -> list[list[int]]:
        """Returns the drafts of each row of the batch. `drawn`: what the pass drew; `lengths`: tokens of each row with it."""
        if self.drafts is None:
            return [[] for _ in drawn]
        proposed = []
        for row, new in enumerate(drawn):
            request, room = self.runner.input_batch.req_ids[row].partition("-")[0], self.longest - 1 - int(lengths[row])
            # A row whose prompt is read in parts has drawn nothing yet.
            proposed.append(self.drafts.guess(request, new, len(drawn))[: max(0, room)] if new else [])
        return proposed


def draw(
    sampler: Sampler,
    drafts: Guesser,
    metadata: SpecDecodeMetadata,
    draft_probs: None,
    logits: Tensor,
    sampling_metadata: SamplingMetadata,
) -> SamplerOutput:
    """Draws each position as if it were decoded by itself. `logits`: [positions, vocabulary], of each request its drafted
    tokens' and the next one's."""
    rows = np.array(metadata.num_draft_tokens) + 1
    drawn = sampler(logits=logits, sampling_metadata=_of_positions(sampling_metadata, rows))
    tokens, used = _accepted(drawn.sampled_token_ids.flatten(), metadata.draft_token_ids, rows)
    for request, generator in sampling_metadata.generators.items():
        give_back(generator, int(rows[request]), int(used[request]))
    drafts.verified(int(rows.sum()) - len(rows), int(used.sum()) - len(rows))
    return SamplerOutput(tokens, _spread(drawn.logprobs_tensors, rows))


def _of_positions(sampling: SamplingMetadata, rows: np.ndarray) -> SamplingMetadata:
    """Repeats what each request has for each of its positions. `rows` [requests]: positions of each."""
    repeats, first = torch.from_numpy(rows), np.cumsum(rows) - rows

    def each(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat_interleave(repeats.to(values.device))

    return replace(
        sampling,
        temperature=each(sampling.temperature),
        top_p=each(sampling.top_p),
        top_k=each(sampling.top_k),
        generators={
            int(row): generator
            for request, generator in sampling.generators.items()
            for row in range(first[request], first[request] + rows[request])
        },
    )


def _accepted(drawn: Tensor, drafted: Tensor, rows: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Returns each request's drafted tokens that were drawn, and the token after: [requests, most positions], `_NONE` where
    there is none; and how many these are. `drawn` [positions], `drafted` [positions - requests]."""
    count, width = len(rows), int(rows.max())
    there = np.arange(width) < rows[:, None]
    guessed = np.arange(width) < rows[:, None] - 1
    tokens, guesses = np.full((count, width), _NONE), np.full((count, width), _NONE)
    tokens[there], guesses[guessed] = drawn.cpu().numpy(), drafted.cpu().numpy()
    used = (guessed & (tokens == guesses)).cumprod(1).sum(1) + 1
    tokens[np.arange(width) >= used[:, None]] = _NONE
    return torch.from_numpy(tokens.astype(np.int32)).to(drawn.device), used


def _spread(logprobs: LogprobsTensors | None, rows: np.ndarray) -> LogprobsTensors | None:
    """Log-probs of positions, [positions, ...], as vLLM expects them: [requests * most positions, ...]."""
    if logprobs is None:
        return None
    first, width = np.cumsum(rows) - rows, int(rows.max())
    index = torch.from_numpy((first[:, None] + np.minimum(np.arange(width), rows[:, None] - 1)).flatten())
    index = index.to(logprobs.logprobs.device)
    return LogprobsTensors(*(values[index] for values in logprobs[:3]))
