"""A reward model on the actor's model: one number per sequence, from the last token's hidden state."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.config.schema import Config
from megatron_rl.models import model_of, read_hf_config
from megatron_rl.models.classifier import classifier_config, is_classifier
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.weights.files import WeightSource
from megatron_rl.weights.load_hf import WithHead


class RewardActor(Actor):
    """Holds this rank's shard of a reward model. A policy's folder gets a new head; a reward model's is continued.

    `log_probs` and the losses of `update` get scores in the place of log-probs: float32 [sequences].
    """

    def __init__(self, config: Config, grid: ProcessGrid, folder: str | Path, weights: WeightSource) -> None:
        hf_config = config.model.completed(read_hf_config(folder))
        model = model_of(hf_config)
        if not is_classifier(model.family):
            weights = WithHead(weights, model, config.seed)
            hf_config = classifier_config(model.family, hf_config)
        super().__init__(config, grid, folder, weights, hf_config)

    def score(
        self, micro: MicroBatch, hidden: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [1, tokens (/ TP with sequence parallelism), hidden] -> float32 [sequences], and None.

        Every tensor-parallel rank computes the same: its gradient is whole, and is not summed over them.
        """
        hidden = hidden[0]
        if self.config.parallel.sequence:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        last = hidden.index_select(0, micro.predictors).float()
        scores = F.linear(last, self.chunks[-1].output_layer.weight.float())[:, 0]
        return micro.whole(scores, self.parallel.cp), None
