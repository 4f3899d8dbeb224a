"""Looks for packages that are not installed. A laptop or a login node may have this package alone, which checks recipes,
plans and reads run folders; what runs a recipe needs torch and the rest of the stack."""

from __future__ import annotations

import importlib.util

from megatron_rl.base.messages import ConfigError

# What `make setup` and `make setup-gpu` bring, by the names of their modules.
_STACK = (
    *("torch", "megatron", "vllm", "transformers", "datasets", "pyarrow", "aiohttp", "math_verify", "reasoning_gym"),
    *("tensorboard", "mpmath", "matplotlib", "PIL", "jinja2", "tokenizers", "transformer_engine"),
)


def require_torch(command: str) -> None:
    """Raises ConfigError where this Python has no torch, before ranks are started that could only say so."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(_no("torch", f"`{command}`"))


def explanation(error: ModuleNotFoundError) -> str | None:
    """A line for the user where an import failed that the whole stack would have; None where something else is wrong."""
    name = (error.name or "").partition(".")[0]
    if name not in _STACK or importlib.util.find_spec(name) is not None:
        return None
    return _no(name, "this")


def _no(package: str, what: str) -> str:
    return (
        f"no {package} here: {what} needs the whole stack, which `make setup` brings (on a GPU node `make setup-gpu`), in "
        "the folder of the source; call .venv/bin/megatron-rl there, or activate its .venv"
    )
