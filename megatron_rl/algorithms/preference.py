"""The loss of reward models: Bradley and Terry 1952, as in Ouyang et al. 2022, equation 1."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor, centering: float) -> Tensor:
    """Per pair, float [pairs]: -log sigmoid(chosen - rejected - margin) + centering (chosen + rejected)^2.

    Args:
        chosen, rejected: scores, float [pairs].
        margin: how much better the chosen response is, float [pairs]; 0 where nothing is known (Touvron et al. 2023,
            Llama 2, equation 2).
        centering: keeps scores near 0, which the first term does not (Eisenstein et al. 2023).
    """
    return -F.logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()
