"""vLLM's Qwen2.5-VL for images without videos, so without torchvision. Written for 0.32, with transformers 5.19.

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

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
_QWEN = "transformers.models.qwen2_vl.image_processing_"
# Of vLLM's class of what it asks about the model's processor.
OVERRIDDEN = {"get_hf_processor": "self kwargs", "get_supported_mm_limits": "self"}
SMART_RESIZE = "height width factor min_pixels max_pixels"  # what vLLM imports from either image processor


def register_images_only(image_processor: Any) -> None:
    """vLLM's model of this architecture reads images by `image_processor`, and takes no videos; before an engine starts."""
    from transformers import Qwen2_5_VLProcessor
    from transformers.processing_utils import ProcessorMixin
    from vllm import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    with no_torchvision():
        from vllm.model_executor.models import qwen2_5_vl as model

    for name, parameters in OVERRIDDEN.items():
        check_parameters(getattr(model.Qwen2_5_VLProcessingInfo, name), parameters)

    class ImagesOnly(Qwen2_5_VLProcessor):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)

    class Info(model.Qwen2_5_VLProcessingInfo):
        made: ImagesOnly | None = None

        def get_hf_processor(self, **_: object) -> ImagesOnly:
            if self.made is None:
                self.made = ImagesOnly(image_processor, self.ctx.get_tokenizer())
            return self.made

        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None}

    class _Model(model.Qwen2_5_VLForConditionalGeneration):
        pass

    register = MULTIMODAL_REGISTRY.register_processor(
        model.Qwen2_5_VLMultiModalProcessor, info=Info, dummy_inputs=model.Qwen2_5_VLDummyInputsBuilder
    )
    ModelRegistry.register_model(ARCHITECTURE, register(_Model))


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
