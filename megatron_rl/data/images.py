"""Images of prompts: opened, resized as the model's own processor does, placed among the tokens. No torch, and numpy late."""

from __future__ import annotations

import functools
import hashlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from megatron_rl.base.messages import errors_named
from megatron_rl.base.plugins import require_regular

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as PILImage
    from torch import Tensor

    from megatron_rl.models.family import Vision

Source: TypeAlias = "Path | bytes"  # an image file, or what is in one
MARK = "<image>"  # where an image stands in a prompt's text
# Those that PIL reads itself; it hands others to programs, such as PostScript to Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MOST_PIXELS = 1 << 26  # 67 million; decoded whole, such an image takes up to 0.8 GB
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")  # of 8 bits or fewer per channel
_KEPT = 16  # prompts whose pixels stay in memory


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt, and where they stand in it. Equal for equal files in equal places."""

    reader: ImageReader
    sources: tuple[Source, ...]
    grid: tuple[tuple[int, int, int], ...]  # frames, rows and columns of patches of each image
    first: tuple[int, ...]  # place of each image's first token in the prompt
    length: int  # of the prompt, in tokens

    @property
    def grids(self) -> np.ndarray:
        """int64 [images, 3]."""
        import numpy as np

        return np.array(self.grid, dtype=np.int64)

    @property
    def counts(self) -> list[int]:
        """Tokens of each image."""
        return self.reader.tokens(self.grid)

    @property
    def slots(self) -> np.ndarray:
        """int64 [image tokens]: their places in the prompt."""
        import numpy as np

        return np.concatenate([at + np.arange(count) for at, count in zip(self.first, self.counts, strict=True)])

    def positions(self, length: int) -> np.ndarray:
        """int64 [3, length]: time, height and width of every token of a sequence that begins with the prompt.

        Text goes on in all three; an image's tokens have its rows and columns for height and width, and what follows begins
        after the largest of them (Qwen2.5-VL report, 2.1.2).
        """
        import numpy as np

        merge, indices, at, now = self.reader.vision.merge, list[np.ndarray](), 0, 0
        for first, (frames, rows, columns) in zip(self.first, self.grid, strict=True):
            indices.append(np.tile(np.arange(now, now + first - at), (3, 1)))
            now += first - at
            shape = frames, rows // merge, columns // merge
            indices.append(np.indices(shape).reshape(3, -1) + now)
            at, now = first + int(np.prod(shape)), now + max(shape)
        return np.concatenate([*indices, np.tile(np.arange(now, now + length - at), (3, 1))], axis=1)

    def collapsed(self, tokens: Sequence[int]) -> list[int]:
        """A sequence that begins with the prompt, with one token for each image: what vLLM takes."""
        short, at = list[int](), 0
        for first, count in zip(self.first, self.counts, strict=True):
            short += tokens[at : first + 1]
            at = first + count
        return [*short, *tokens[at:]]

    def pictures(self) -> list[PILImage]:
        """The images, in RGB."""
        return [open_image(source) for source in self.sources]

    def pixels(self) -> np.ndarray:
        """float32 [patches, numbers of a patch], all images', as the tower takes them; not to be changed."""
        return _pixels(self.reader, self.sources)


class Pictures(Protocol):
    """The images of one prompt, ready for a vision tower: `PromptImages`, or numbers of the right shape."""

    @property
    def grids(self) -> np.ndarray: ...

    def pixels(self) -> np.ndarray: ...


@dataclass(frozen=True)
class PackedImages:
    """The images of packed sequences."""

    prompts: Sequence[Pictures]  # each once, in whatever number of sequences it stands
    slots: Tensor  # int64 [image tokens of all sequences]: their places among the tokens
    sources: Tensor  # int64, as many: which of the prompts' image tokens, one prompt after the other, stands there


class ImageReader:
    """Reads images for one model.

    Args:
        folder: Hugging Face's, with preprocessor_config.json.
        max_pixels, min_pixels: images are resized to have at most and at least so many; None: as the folder says.

    Raises:
        ValueError: the folder says nothing of images.
    """

    def __init__(
        self, folder: str | Path, vision: Vision, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        self.vision = vision
        if not (Path(folder) / "preprocessor_config.json").is_file():
            raise ValueError(f"{folder} has no preprocessor_config.json, which says how images become pixels")
        self.processor = image_processor(folder, vision, min_pixels, max_pixels)

    def place(self, ids: Sequence[int], sources: Sequence[Source]) -> tuple[list[int], PromptImages]:
        """Token ids in which each image's one token is repeated as often as the tower has outputs, and where these are.

        Raises:
            ValueError: the prompt has another number of image tokens, or an image cannot be read.
        """
        token = self.vision.image_token
        if (found := list(ids).count(token)) != len(sources):
            raise misplaced(len(sources), found)
        grids = tuple(self.grid(source) for source in sources)
        counts, placed, first = iter(self.tokens(grids)), list[int](), list[int]()
        for one in ids:
            if one == token:
                first.append(len(placed))
            placed += [token] * next(counts) if one == token else [one]
        return placed, PromptImages(self, tuple(sources), grids, tuple(first), len(placed))

    def grid(self, source: Source) -> tuple[int, int, int]:
        """Frames (1), rows and columns of patches of an image. Raises ValueError: as `open_image`, or it is too narrow."""
        smart_resize = import_module(self.vision.processor[0]).smart_resize
        image = open_image(source)
        with errors_named(f"{_name(source)} of {image.width} x {image.height} pixels"):
            size, factor = self.processor.size, self.processor.patch_size * self.vision.merge
            height, width = smart_resize(image.height, image.width, factor, size["shortest_edge"], size["longest_edge"])
        return 1, height // self.processor.patch_size, width // self.processor.patch_size

    def tokens(self, grids: Sequence[tuple[int, int, int]]) -> list[int]:
        """How many tokens images with these grids are."""
        return [frames * rows * columns // self.vision.merge**2 for frames, rows, columns in grids]


@functools.lru_cache(_KEPT)  # no part of a reader, which other ranks are sent
def _pixels(reader: ImageReader, sources: tuple[Source, ...]) -> np.ndarray:
    found = reader.processor([open_image(source) for source in sources], return_tensors="np")["pixel_values"]
    import numpy as np

    return np.asarray(found, dtype=np.float32)


def open_image(source: Source) -> PILImage:
    """An image in RGB, transparent parts white.

    Raises:
        ValueError: it is missing, no regular file, broken, too large, of a format that is not among `FORMATS`, or of a mode
            whose colours are not 8 bits; names it.
    """
    from PIL import Image as PIL

    image = _decoded(source)
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = PIL.alpha_composite(PIL.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _decoded(source: Source) -> PILImage:
    from PIL import Image as PIL
    from PIL import ImageOps

    warnings.simplefilter("ignore", PIL.DecompressionBombWarning)  # too large is an error here
    try:
        if isinstance(source, Path):
            require_regular(source)
        image: PILImage = PIL.open(source if isinstance(source, Path) else io.BytesIO(source), formats=FORMATS)
        if image.mode in _MODES and image.width * image.height <= MOST_PIXELS:
            image.load()
            return ImageOps.exif_transpose(image)
    except FileNotFoundError:
        raise ValueError(f"{_name(source)} does not exist") from None
    except PIL.DecompressionBombError as error:
        raise ValueError(f"{_name(source)} is too large: {error}") from None
    except Exception as error:  # PIL's readers raise whatever they come across in a broken file
        raise ValueError(f"{_name(source)} cannot be read as an image ({', '.join(FORMATS)}): {error}") from None
    if image.mode not in _MODES:
        raise ValueError(
            f"{_name(source)} has mode {image.mode}, which is no picture of 8-bit colours; convert it to RGB"
        )
    raise ValueError(
        f"{_name(source)} is too large: {image.width} x {image.height} pixels are more than {MOST_PIXELS:,}; scale it down"
    )


def misplaced(images: int, places: int) -> ValueError:
    return ValueError(f"it has {images} images, and its text a place for {places} (write {MARK} for each)")


def fingerprint(sources: Sequence[Source]) -> str:
    """Fingerprint of the files' contents. Raises ValueError: one cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        with errors_named(_name(source), OSError):
            if isinstance(source, Path):
                require_regular(source)
            content = source if isinstance(source, bytes) else source.read_bytes()
        digest.update(hashlib.blake2b(content).digest())
    return digest.hexdigest()


def image_processor(
    folder: str | Path, vision: Vision, min_pixels: int | None = None, max_pixels: int | None = None
) -> Any:
    """The processor that the family names, with the folder's settings."""
    module, name = vision.processor
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    processor: Any = getattr(import_module(module), name).from_pretrained(
        str(folder), **{name: value for name, value in limits.items() if value is not None}
    )
    return processor


def _name(source: Source) -> str:
    return f"image {source}" if isinstance(source, Path) else f"an image of {len(source):,} bytes"
