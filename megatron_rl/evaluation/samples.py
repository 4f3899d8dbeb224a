"""`samples/`: rollouts as text, one per line: of a step, with their prompts' images beside them, or of an evaluation."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.data.images import PromptImages, fingerprint, open_image
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Message, Sample
from megatron_rl.runtime import disk
from megatron_rl.tasks.tokenizing import as_chat

_PICTURE = 384  # pixels of an image's longer side, at most


def write_samples(
    path: Path,
    samples: Sequence[Sample],
    rollouts: Sequence[Rollout],
    extra: Sequence[Mapping[str, object]],
    with_images: bool = True,
) -> None:
    """One line per rollout, with its prompt, gold answer and rewards (null: no value). `extra`: further keys of each."""
    by_id = {sample.id: sample for sample in samples}
    path.parent.mkdir(exist_ok=True)
    images = {
        sample.id: _write_images(path.parent / "images", sample.images)
        for sample in (by_id[name] for name in dict.fromkeys(rollout.sample_id for rollout in rollouts))
        if sample.images is not None and with_images
    }
    with disk.text_file(path) as file:
        for rollout, more in zip(rollouts, extra, strict=True):
            sample = by_id[rollout.sample_id]
            record = {
                "sample": sample.id,
                "rollout": rollout.index,
                "prompt": sample.prompt,
                **({"images": images[sample.id]} if sample.id in images else {}),
                "response": rollout.text,
                **conversation_of(sample, rollout),
                "answer": sample.answer,
                "rewards": {name: None if math.isnan(value) else value for name, value in rollout.rewards.items()},
                **more,
                "finish_reason": rollout.finish_reason,
                "tokens": len(rollout.response_ids),
            }
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")


def conversation_of(sample: Sample, rollout: Rollout) -> dict[str, object]:
    """`conversation`, the messages after the prompt, `turn_tokens`, of the assistant's among them, `turn_rewards` by column,
    and who broke it off: `failed_by`; nothing of a response.

    Of several sequences those of each, behind a message of the role `sequence`; of tokens that were not sampled in it, 0.
    """
    turns = [segment for segment in rollout.segments if segment.logprobs is not None]
    if not rollout.is_conversation:
        return {}
    facts: dict[str, object] = {} if rollout.failed_by is None else {"failed_by": rollout.failed_by}
    if rollout.turn_rewards:
        facts["turn_rewards"] = dict(rollout.turn_rewards)
    begin = len(as_chat(sample.prompt))
    if not rollout.conversations:
        return {"conversation": rollout.messages[begin:], "turn_tokens": [len(turn.ids) for turn in turns], **facts}
    shown, tokens = list[Message](), list[int]()
    for number, (messages, lengths) in enumerate(rollout.spoken, start=1):
        begin = begin if number == 1 else 0
        if number > 1:
            shown.append({"role": "sequence", "content": str(number)})
        shown += messages[begin:]
        own = [i for i in range(begin, len(messages)) if messages[i]["role"] == "assistant"]
        tokens += [lengths.get(i, 0) for i in own]
    return {"conversation": shown, "turn_tokens": tokens, **facts}


def write_responses(
    path: Path, samples: Sequence[Sample], rollouts: Sequence[Rollout], right_if: tuple[str, float]
) -> None:
    """`samples/<task>.jsonl` of an evaluation, with the verdicts; null: no value."""
    name, least = right_if
    calls = {sample.id: {"answer": sample.tool_calls} if sample.answer is None else {} for sample in samples}
    verdicts = (None if math.isnan(rollout.rewards[name]) else rollout.rewards[name] >= least for rollout in rollouts)
    extra = [{**calls[rollout.sample_id], "right": right} for rollout, right in zip(rollouts, verdicts, strict=True)]
    write_samples(path, samples, rollouts, extra, with_images=False)


def _write_images(folder: Path, images: PromptImages) -> list[str]:
    """The images, reduced to `_PICTURE`, in files named by what is in the originals. Returns their names."""
    folder.mkdir(exist_ok=True)
    names = [f"{fingerprint([source])}.webp" for source in images.sources]
    missing = {name: source for name, source in zip(names, images.sources, strict=True) if not (folder / name).exists()}
    for name, source in missing.items():
        picture, temporary = open_image(source), folder / f".{name}"
        picture.thumbnail((_PICTURE, _PICTURE))
        picture.save(temporary, "WEBP")
        os.replace(temporary, folder / name)
    return names
