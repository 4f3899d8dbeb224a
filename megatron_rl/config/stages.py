"""How many of the model's layers each pipeline stage holds."""

from __future__ import annotations


def stage_layers(layers: int, pipeline: int, virtual_pipeline: int = 1) -> list[int]:
    """Layers on each of `pipeline` stages, a multiple of `virtual_pipeline` on every one.

    Where they do not divide evenly, the inner stages hold the rounded-up mean, and the first and the last, which also hold
    the embedding and the output layer, share the rest: 94 layers over 8 stages are 11, six times 12, 11. Where that leaves
    one of them without a layer, the inner stages hold one less: 5 over 4 are 2, 1, 1, 1.

    Raises:
        ValueError: the first stage would hold more than the mean: Megatron-Core gives all inner stages the same number. The
            message names no key.
    """
    rows, odd = divmod(layers, virtual_pipeline)
    if odd:
        raise ValueError(f"{layers} layers do not divide over {virtual_pipeline} model chunks per stage")
    if rows % pipeline == 0:
        return [layers // pipeline] * pipeline
    fullest = middle = -(-rows // pipeline)
    rest = rows - middle * (pipeline - 2)
    if rest < 2:
        middle -= 1
        rest = rows - middle * (pipeline - 2)
    if middle < 1 or -(-rest // 2) > fullest:
        chunks = f" of {virtual_pipeline} chunks each" if virtual_pipeline > 1 else ""
        few = rows < pipeline
        why = f"{rows} for {pipeline}" if few else "all but the first and the last hold the same number"
        raise ValueError(f"{layers} layers cannot be spread over {pipeline} stages{chunks} ({why})")
    spread = [-(-rest // 2), *[middle] * (pipeline - 2), rest // 2]
    return [count * virtual_pipeline for count in spread]
