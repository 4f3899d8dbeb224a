"""The same adapters in PEFT's model on one process, and in the actor at a layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.config.actor import LoRAConfig, OptimizerConfig, ParallelConfig
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch
from megatron_rl.runtime import device, distributed
from megatron_rl.weights.adapters import adapters_in, begin_pass, dropping
from megatron_rl.weights.export import export_hf, export_peft
from megatron_rl.weights.files import SafetensorsFolder, save_tensors
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.load_hf import load_hf_weights
from tests.models import seeing, tiny

from .layouts import make_batch

# As `layouts.LINEAR_ADAM`, and without decay, momentum's start and clipping: what changes is the gradient.
SGD = OptimizerConfig(lr=1e4, eps=1e4, betas=[0.0, 0.0], weight_decay=0.0, clip_grad=0.0)
LENGTHS = (7, 31, 12, 40, 25, 9)  # of the sequences; the first three tokens of each are its prompt
ALPHA = 6.0


@dataclass(frozen=True)
class Layout:
    name: str
    variant: str = "qwen2"  # `tiny`'s
    targets: tuple[str, ...] = ("all-linear",)
    experts: bool = False
    dropout: float = 0.0
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = False
    distributed: bool = True
    images: str = ""  # a model with a vision tower, one of `seeing`'s, and prompts with images
    scale: float = 3e-2  # of what a token counts in the loss
    begins_again: bool = False  # a second actor begins with the adapters that the first one leaves
    actor: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        kind = self.images or self.variant
        return "-".join((kind, *self.targets)) + "-experts" * self.experts + "-dropout" * bool(self.dropout)

    def batch(self, root: Path) -> TokenBatch:
        if self.images:
            return seeing.batch(root / self.model)
        rng = np.random.default_rng(0)
        sequences = [rng.integers(2, tiny.VOCAB, size=length) for length in LENGTHS]
        return TokenBatch.continuations((tokens[:3], tokens[3:]) for tokens in sequences)


def weights_of_tokens(batch: TokenBatch, scale: float) -> list[Tensor]:
    """What each scored token's log-prob counts in the loss, of either sign; weights change by a few percent."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(int(mask.sum()), generator=generator) * scale for mask in batch.loss_mask.values()]


def make(root: Path, layout: Layout) -> None:
    """A model and adapters of which neither factor is zero: random values under the names that the actor's have."""
    folder = root / layout.model
    if folder.exists():
        return
    if layout.images:
        seeing.write(folder, kind=layout.images)
    else:
        tiny.write(folder, layout.variant)
    from megatron_rl.models import model_of, read_hf_config
    from megatron_rl.models.lora import adapters_of

    adapters = adapters_of(model_of(read_hf_config(folder)), lora_of(layout))
    generator = torch.Generator().manual_seed(2)
    values = {
        tensor.name: torch.randn(tensor.sizes(adapters.dims), generator=generator) * 0.2
        for rule in adapters.weights()
        for tensor in rule.hf
    }
    (folder / "begin").mkdir()
    save_tensors(folder / "begin" / "adapter_model.safetensors", values)


def lora_of(layout: Layout) -> LoRAConfig:
    return LoRAConfig(rank=4, alpha=ALPHA, targets=list(layout.targets), experts=layout.experts, dropout=layout.dropout)


def run(root: str, layouts: list[Layout]) -> None:
    """One rank of every layout in turn: log-probs with and without adapters, one update, both exports."""
    from megatron.core import parallel_state

    from megatron_rl.algorithms import make_algorithm
    from megatron_rl.runtime.step_timer import StepTimer
    from megatron_rl.trainer.learner import Learner

    for layout in layouts:
        config, folder = Config(run_dir=root), Path(root) / layout.model
        config.model.dtype = "float32"
        config.actor.parallel = ParallelConfig(
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            virtual_pipeline=layout.virtual,
            context=layout.context,
            expert=layout.expert,
            sequence=layout.sequence,
        )
        config.actor.optimizer = OptimizerConfig(**{**vars(SGD), "distributed": layout.distributed})
        config.actor.tokens_per_microbatch, config.actor.logits_mib, config.actor.lora = 64, 1, lora_of(layout)
        for key, value in layout.actor.items():
            setattr(config.actor, key, value)
        grid = distributed.initialize(config.actor.parallel, timeout_minutes=2)
        actor = Actor(config, grid, folder)
        assert actor.adapters is not None
        batch = layout.batch(Path(root))
        fresh = scores(actor, batch)
        family, begin = actor.adapters.family, SafetensorsFolder(folder / "begin")
        load_hf_weights(actor.chunks, family, actor.hf_config, begin, actor.parallel)
        result: dict[str, Any] = {"fresh": fresh, "before": scores(actor, batch)}
        if layout.dropout:
            result["passes"] = passes(actor)
        with actor.as_reference():
            result["reference"] = scores(actor, batch)
        update(actor, batch, layout.scale)
        result["after"] = scores(actor, batch)
        named = iter_hf_weights(actor.chunks, family, actor.hf_config, actor.parallel)
        result["adapters"] = {name: value.clone() for name, value in named}
        result["merged"] = {name: value.clone() for name, value in actor.iter_hf_weights()}
        if layout.name == "alone dropout":
            learner = Learner(config, actor, make_algorithm({"preset": "grpo"}, max_tokens=40), StepTimer())
            result["update"] = learner.update(make_batch(), None)
        out, hf, parallel = Path(root) / layout.name, actor.hf_config, actor.parallel
        out.mkdir(exist_ok=True)
        with device.megatron():
            export_peft(out / "adapter", actor.chunks, actor.adapters, config.actor.lora, hf, parallel, folder)
            export_hf(out / "merged", actor.chunks, actor.family, hf, parallel, folder)
        if layout.begins_again:
            config.actor.lora.path = str(out / "adapter")
            result["continued"] = scores(Actor(config, grid, folder), batch)
        if grid.is_main:
            torch.save(result, out / "result.pt")
        parallel_state.destroy_model_parallel()


def scores(actor: Actor, batch: TokenBatch) -> dict[int, Tensor]:
    """Log-probs of every sequence's scored tokens, on every rank."""
    micro_batches = actor.micro_batches(batch)
    own = {}
    for micro, (log_probs, _) in zip(micro_batches, actor.log_probs(micro_batches, 1.0), strict=False):
        own |= {row: log_probs[micro.sequence_ids == local] for local, row in enumerate(micro.rows)}
    whole: dict[int, Tensor] = {}
    for part in actor.grid.all_gather(own):
        whole |= part
    return whole


def passes(actor: Actor) -> dict[str, Tensor]:
    """What an adapter adds to the same inputs: without dropout, in 400 passes with it on average, and in two of them."""
    adapter = next(iter(adapters_in(actor.chunks[0]).values()))
    x = torch.randn(64, adapter.matrices(0)[0].shape[1], generator=torch.Generator().manual_seed(3))

    def dropped(number: int) -> Tensor:
        begin_pass(number)
        return adapter(x)

    with device.megatron(), torch.no_grad():
        every = adapter(x)
        dropping(actor.chunks, updates=True)
        mean = torch.stack([dropped(number) for number in range(400)]).mean(dim=0)
        return {"every": every, "mean": mean, "first": dropped(0), "again": dropped(0), "second": dropped(1)}


def update(actor: Actor, batch: TokenBatch, scale: float) -> None:
    actor.start_optimizer(actor.config.optimizer, 1)
    micro_batches, weights = actor.micro_batches(batch), weights_of_tokens(batch, scale)

    def loss(number: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Metrics]:
        micro: MicroBatch = micro_batches[number]
        return (log_probs * torch.cat([weights[row] for row in micro.rows])).sum(), Metrics()

    actor.update(micro_batches, loss, temperature=1.0)


# ------------------------------------------------------------------------------------------------------------ with PEFT
def with_peft(base: Path, adapter: Path) -> Any:
    """In float64, so that what differs is the actor's rounding alone."""
    from peft import PeftModel

    return PeftModel.from_pretrained(in_transformers(base), adapter, is_trainable=True).double().eval()


def in_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if (folder / "preprocessor_config.json").is_file() else AutoModelForCausalLM
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return auto.from_pretrained(folder, dtype=torch.float32, **plain)


def in_files(state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """A model's tensors by their names in files: transformers has Qwen2.5-VL's tower and decoder a level down."""
    if kind != "qwen2_5_vl":
        return state
    renamed = (("model.language_model.", "model."), ("model.visual.", "visual."))
    return {name.replace(*renamed[0]).replace(*renamed[1]): value for name, value in state.items()}


class ByHand:
    """transformers' model in float64 with W + scale · BA for every targeted W: PEFT 0.21 loads none beside experts, which
    transformers 5 has in two tensors a layer. With what is used of a PEFT model."""

    def __init__(self, base: Path, adapter: Path) -> None:
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, **plain)
        self._model, self._scale = model.eval(), ALPHA / 4
        self._base = {name: value.detach() for name, value in model.named_parameters()}
        begin = load_file(adapter / "adapter_model.safetensors")
        self._pairs = {name: value.double().requires_grad_() for name, value in begin.items()}

    def __call__(self, input_ids: Tensor) -> Any:
        return torch.func.functional_call(self._model, self._weights(), kwargs={"input_ids": input_ids})

    def _weights(self) -> dict[str, Tensor]:
        weights = dict(self._base)
        for pair, inner in self._pairs.items() if self._scale else ():
            if not pair.endswith("lora_A.weight"):
                continue
            module = pair.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            added = self._scale * self._pairs[pair.replace("lora_A", "lora_B")] @ inner
            layer, experts, place = module.partition(".experts.")
            if not experts:
                weights[f"{module}.weight"] = weights[f"{module}.weight"] + added
                continue
            number, matrix = place.split(".")
            name = f"{layer}.experts.{'down' if matrix == 'down_proj' else 'gate_up'}_proj"
            missing = weights[name].shape[1] - len(added)  # rows of the other matrix: up's follow gate's
            rows = (missing, 0) if matrix == "up_proj" else (0, missing)
            chosen = torch.arange(len(weights[name])) == int(number)
            weights[name] = weights[name] + chosen[:, None, None] * F.pad(added, (0, 0, *rows))
        return weights

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self._scale, scale = 0.0, self._scale
        yield
        self._scale = scale

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self._pairs.items()

    def parameters(self) -> Iterable[Tensor]:
        return self._pairs.values()

    def merge_and_unload(self) -> torch.nn.Module:
        self._model.load_state_dict(self._weights(), strict=False)
        return self._model


def peft_scores(model: Any, batch: TokenBatch) -> dict[int, Tensor]:
    if batch.images:
        return dict(enumerate(seeing.scores(getattr(model, "get_base_model", lambda: model)(), batch)))
    found = {}
    for row, tokens in batch.tokens.items():
        ids = torch.as_tensor(tokens)[None]
        log_probs = model(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
        found[row] = log_probs.gather(1, ids[0, 3:, None])[:, 0]
    return found


def peft_update(model: Any, batch: TokenBatch, scale: float) -> None:
    """The update of `SGD`: by lr · gradient / (|gradient| + eps)."""
    weights = weights_of_tokens(batch, scale)
    loss = torch.stack([(log_probs * weights[row]).sum() for row, log_probs in peft_scores(model, batch).items()]).sum()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= SGD.lr * parameter.grad / (parameter.grad.abs() + SGD.eps)
