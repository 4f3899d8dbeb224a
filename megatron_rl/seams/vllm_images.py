"""vLLM's Qwen2.5-VL and Qwen3-VL for images without videos, so without torchvision. Written for 0.32, with transformers 5.19.

vLLM's model file imports one function from the image processor that needs torchvision, and its processor wants one for
videos, which needs it too. transformers has the same function, and the processor of images, on PIL; so actor and engine, on
a CPU and on a GPU, read the same pixels. vLLM inspects a model's class in another process, where none of this would hold,
unless the class was registered in this one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from megatron_rl.seams import check_parameters

_QWEN = "transformers.models.qwen2_vl.image_processing_"
# The processor of transformers for each architecture.
PROCESSORS = {
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLProcessor",
    "Qwen3VLForConditionalGeneration": "Qwen3VLProcessor",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLProcessor",
}
# Of vLLM's classes of what they ask about the model's processor.
OVERRIDDEN = {
    "get_hf_processor": "self kwargs",
    "get_supported_mm_limits": "self",
    "get_supported_mm_processor_kwargs": "self",
    "get_mm_max_tokens_per_item": "self seq_len mm_counts",
}
# Of `get_dummy_mm_data` of the class that fills memory as an engine starts.
DUMMIES = "self seq_len mm_counts mm_options"
SMART_RESIZE = "height width factor min_pixels max_pixels"  # what vLLM imports from either image processor


def register_images_only(architecture: str, image_processor: Any) -> None:
    """vLLM's model of this architecture reads images by `image_processor`, and takes no videos; before an engine starts."""
    import transformers
    from vllm import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    with no_torchvision():
        from vllm.model_executor.models.qwen2_vl import Qwen2VLProcessingInfo

        model = _model(architecture)
    info, dummies = model._processor_factory.info, model._processor_factory.dummy_inputs
    check_parameters(dummies.get_dummy_mm_data, DUMMIES)
    for name, parameters in OVERRIDDEN.items():
        check_parameters(getattr(info, name), parameters)

    class ImagesOnly(getattr(transformers, PROCESSORS[architecture])):  # type: ignore[misc]
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)

    class Info(info):  # type: ignore[misc, valid-type]
        made: ImagesOnly | None = None

        def get_hf_processor(self, **_: object) -> ImagesOnly:
            if self.made is None:
                self.made = ImagesOnly(image_processor, self.ctx.get_tokenizer())
            return self.made

        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None}

        def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
            # Qwen3-VL's adds to the options of the processor of videos.
            options: dict[str, set[str]] = Qwen2VLProcessingInfo.get_supported_mm_processor_kwargs(self)
            return options

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> dict[str, int]:
            return {"image": self.get_max_image_tokens()}

    class Dummies(dummies):  # type: ignore[misc, valid-type]
        def get_dummy_mm_data(self, seq_len: int, mm_counts: Any, mm_options: Any) -> dict[str, Any]:
            width, height = self.info.get_image_size_with_most_features()
            count, options = mm_counts.get("image", 0), mm_options.get("image")
            return {"image": self._get_dummy_images(width=width, height=height, num_images=count, overrides=options)}

    class _Model(model):  # type: ignore[misc, valid-type]
        pass

    processor = model._processor_factory.processor
    register = MULTIMODAL_REGISTRY.register_processor(processor, info=Info, dummy_inputs=Dummies)
    ModelRegistry.register_model(architecture, register(_Model))


def _model(architecture: str) -> Any:
    """Returns vLLM's own class of an architecture, whatever was registered in its place."""
    from vllm.model_executor.models.registry import _VLLM_MODELS

    module, name = _VLLM_MODELS[architecture]
    return getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)


# Models of text whose file in vLLM also holds one that reads images.
_TEXT_ONLY = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def register_text_only(architecture: str) -> None:
    """Makes vLLM find a model of text whose file wants torchvision, where there is none; before an engine starts."""
    if architecture not in _TEXT_ONLY or importlib.util.find_spec("torchvision") is not None:
        return
    from vllm import ModelRegistry

    with no_torchvision():
        ModelRegistry.register_model(architecture, _model(architecture))


@contextlib.contextmanager
def no_torchvision() -> Iterator[None]:
    """While entered, what imports the image processor on torchvision gets the one on PIL, where there is no torchvision."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    name, on_pil = f"{_QWEN}qwen2_vl", importlib.import_module(f"{_QWEN}pil_qwen2_vl")
    check_parameters(on_pil.smart_resize, SMART_RESIZE)
    before: ModuleType | None = sys.modules.get(name)
    sys.modules[name] = on_pil
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
