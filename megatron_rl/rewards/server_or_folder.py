"""The two ways to a model that scores: asked at a server, or loaded from a folder by the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Device = Literal["auto", "cpu", "cuda"]


def check_way(
    urls: str | list[str] | None,
    path: str | None,
    model: str | None,
    settings: tuple[Any, ...],
    of_folder: Mapping[str, bool],
) -> None:
    """ValueError unless a recipe gives one way to the model, and nothing that only goes with the other.

    Args:
        model: the name under which the server has it.
        settings: instances of dataclasses whose fields go with a server.
        of_folder: the parameters that go with a folder, and whether each is another than its default.
    """
    if (urls is None) == (path is None):
        raise ValueError("give either urls (of a server) or path (of a model folder)")
    of_server = {"model": model is not None}
    of_server |= {field.name: getattr(one, field.name) != field.default for one in settings for field in fields(one)}
    way, others = ("path", of_server) if urls is None else ("urls", of_folder)
    for name, changed in others.items():
        if changed:
            raise ValueError(f"{name} does nothing beside {way}: leave it out")
    if path is not None and not (Path(path) / "config.json").exists():
        raise ValueError(f"path: {path} is not a Hugging Face folder: it has no config.json")


def check_device(device: Device) -> None:
    """ValueError where this machine has no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device = 'cuda', and this machine has no GPU")


def place(device: Device) -> torch.device:
    """The device that a parameter names; `auto`: the rank's GPU, where there is one."""
    import torch

    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
