"""Where images stand in a prompt: as text for the tokenizer, then among its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.base.messages import errors_named
from megatron_rl.data.images import MARK, ImageReader, PromptImages, Source, misplaced, open_image
from megatron_rl.data.sample import Message, Prompt


def mark_images(prompt: Prompt, images: Sequence[Source], reader: ImageReader | None) -> Prompt:
    """The prompt with the model's own text for an image at each `<image>`; without one, images come first.

    Content that is a list of parts (`{"type": "image"}`) is left to the chat template.

    Raises:
        ValueError: the model, or the way in which it is asked, takes text only.
    """
    if not images:
        return prompt
    if reader is None:
        raise ValueError(
            "it has images, which only a model with a vision tower reads, sampled by the run's own engine; remove "
            "columns.images, or set model.path to such a model"
        )
    image_text = reader.vision.image_text
    if isinstance(prompt, str):
        return prompt.replace(MARK, image_text) if MARK in prompt else image_text * len(images) + prompt
    contents = [message.get("content") for message in prompt]
    if any(isinstance(content, list) for content in contents):
        return prompt
    if any(isinstance(content, str) and MARK in content for content in contents):
        return [_replaced(message, image_text) for message in prompt]
    user = next((i for i, message in enumerate(prompt) if message.get("role") == "user"), len(prompt) - 1)
    first = {**prompt[user], "content": image_text * len(images) + str(prompt[user].get("content") or "")}
    return [*prompt[:user], first, *prompt[user + 1 :]]


def _replaced(message: Message, own: str) -> Message:
    content = message.get("content")
    return {**message, "content": content.replace(MARK, own)} if isinstance(content, str) else message


def check_images(prompt: Prompt, images: Sequence[Source]) -> None:
    """ValueError: an image cannot be read, or the text has marks for another number of them."""
    for source in images:
        open_image(source)
    contents = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    marks = sum(content.count(MARK) for content in contents if isinstance(content, str))
    if marks not in (0, len(images)):
        raise misplaced(len(images), marks)


def place_images(
    name: str, ids: list[int], images: Sequence[Source], reader: ImageReader | None
) -> tuple[list[int], PromptImages | None]:
    """Places images as `ImageReader.place` says; `name` is the sample's, for errors."""
    if not images or reader is None:
        return ids, None
    with errors_named(name):
        return reader.place(ids, images)
