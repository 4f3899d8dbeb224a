"""Where engine and actor differ (`megatron-rl selftest --mismatch`): operation by operation, over a few sequences.

The actor computes what the engine has computed, each of its operations from what the engine's took. So an operation's own
difference is seen, without what those before it have added up. What it brings to the log-probs is how much these change where
the actor computes by itself, and adds that difference to what the operation gives in every layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from megatron_rl.rollout import vllm_engine
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.selftest.bench import SHAPE, Bench, Figures, Surprise, sequences
from megatron_rl.trainer.run import Run, build_run

NORM, ATTENTION, ROUTER, MLP, HEAD = "norm", "attention", "router", "mlp", "head"


def dense(bench: Bench) -> Figures:
    return _compared(bench, experts=0)


def experts(bench: Bench) -> Figures:
    return _compared(bench, experts=16)


def exact(bench: Bench) -> Figures:
    """Fails with the name of the first operation whose outputs differ for the same input; with `rollout.exact` none may."""
    return _exactly(bench, experts=0)


def exact_experts(bench: Bench) -> Figures:
    return _exactly(bench, experts=16)


def _exactly(bench: Bench, experts: int) -> Figures:
    run, operations = _started(bench, experts, "rollout.exact=true")
    # The engine's layer of experts computes its router without calling the module.
    operations = [operation for operation in operations if operation.kind != ROUTER]
    figures: Figures = {"operations": float(len(operations))}
    for tokens in sequences(SHAPE.vocab_size):
        passed, of_engine = _by_engine(run, tokens.tolist(), operations)
        alone = _by_actor(run, tokens.tolist())
        with _as_engine(operations, passed, {operation.kind: [] for operation in operations}) as differences:
            _by_actor(run, tokens.tolist())
        different = [name for name, difference in differences.items() if difference.any()]
        if different or not np.array_equal(alone, of_engine):
            raise Surprise(
                f"log-probs differ by up to {np.abs(alone - of_engine).max():.2g}; of {len(operations)} operations the first "
                f"that gives something else is {different[0] if different else 'the output layer'}"
            )
        figures["log-probs differ by"] = _apart(alone, of_engine)
    run.close()
    return figures


@dataclass(frozen=True)
class Operation:
    """Pairs an operation's modules in vLLM's model and in the actor's."""

    kind: str
    engine: str  # name in the model
    actor: nn.Module


@dataclass
class Passed:
    """Holds what the engine's operations took and gave in a pass, [tokens, ...], by their modules' names."""

    took: dict[str, Tensor] = field(default_factory=dict)
    gave: dict[str, Tensor] = field(default_factory=dict)


def _compared(bench: Bench, experts: int) -> Figures:
    """Returns the mean difference of log-probs; then, what brings most first, how far each operation is from the engine's, as
    a share of its size, and the difference of log-probs that it brings; and what none of them explains."""
    run, operations = _started(bench, experts)
    kinds = list(dict.fromkeys(operation.kind for operation in operations))
    errors, brought = {kind: list[float]() for kind in kinds}, {kind: list[float]() for kind in (*kinds, HEAD)}
    apart, left = list[float](), list[float]()
    for tokens in sequences(SHAPE.vocab_size):
        passed, of_engine = _by_engine(run, tokens.tolist(), operations)
        alone = _by_actor(run, tokens.tolist())
        apart.append(_apart(alone, of_engine))
        with _as_engine(operations, passed, errors) as differences:  # all but the output layer
            brought[HEAD].append(_apart(_by_actor(run, tokens.tolist()), of_engine))
        for kind in kinds:
            with _added([operation for operation in operations if operation.kind == kind], differences):
                brought[kind].append(_apart(_by_actor(run, tokens.tolist()), alone))
        with _added(operations, differences):
            left.append(_apart(_by_actor(run, tokens.tolist()), of_engine))
    run.close()
    figures: Figures = {"log-probs differ by": float(np.mean(apart))}
    for kind in sorted(brought, key=lambda kind: -float(np.mean(brought[kind]))):
        share = f"{np.mean(errors[kind]):.1e} of its size, " if kind in errors else ""
        figures[kind] = f"{share}brings {np.mean(brought[kind]):.1e}"
    return figures | {"left where all are added": float(np.mean(left))}


def _started(bench: Bench, experts: int, *overrides: str) -> tuple[Run, list[Operation]]:
    given = ("model.dtype=bfloat16", "rollout.max_tokens=256", *overrides)
    config = bench.recipe(bench.model(SHAPE, experts), "run", *given)
    run = build_run(config, bench.grid, Path(config.run_dir))
    run.learner.start()
    with _eager():
        run.start_engine()
    return run, _operations(run.learner.actor.chunks[0], experts > 0)


def _operations(chunk: nn.Module, has_experts: bool) -> list[Operation]:
    """Lists a decoder's operations. Where Transformer Engine computes a norm within the next product there is none for it."""
    decoder = cast(Any, chunk).decoder  # of Megatron-Core's GPTModel, which has no types
    operations = []
    for number, layer in enumerate(decoder.layers):
        name = f"model.layers.{number}"
        for norm, of_engine in (
            (layer.input_layernorm, "input_layernorm"),
            (layer.pre_mlp_layernorm, "post_attention_layernorm"),
        ):
            if any(True for _ in norm.parameters()):
                operations.append(Operation(NORM, f"{name}.{of_engine}", norm))
        operations.append(Operation(ATTENTION, f"{name}.self_attn", layer.self_attention))
        if has_experts:
            operations.append(Operation(ROUTER, f"{name}.mlp.gate", layer.mlp.router))
        operations.append(Operation(MLP, f"{name}.mlp", layer.mlp))
    return [*operations, Operation(NORM, "model.norm", decoder.final_layernorm)]


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """vLLM compiles nothing while entered: in what is compiled no module is called by itself."""
    options = vllm_engine.llm_options
    vllm_engine.llm_options = lambda *arguments: options(*arguments) | {"enforce_eager": True}
    try:
        yield
    finally:
        vllm_engine.llm_options = options


def _by_engine(run: Run, tokens: list[int], operations: Sequence[Operation]) -> tuple[Passed, np.ndarray]:
    """Returns what passed through the engine's operations for a sequence, and its log-probs, float32 [tokens - 1]."""
    engine, passed, hooks = run.sampler.engine, Passed(), list[Any]()
    assert isinstance(engine, VllmEngine)

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken = [value for value in (*args, *kwargs.values()) if _is_hidden(value)]
            passed.took.setdefault(name, taken[0].clone())

        return hook

    def after(name: str, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if name in passed.gave:
                return  # of the token that it draws behind the sequence
            passed.gave[name] = (output[0] if isinstance(output, tuple) else output).clone()
            if kind == NORM and isinstance(output, tuple):  # it has added the layer's output to the stream first
                passed.took[name] = output[1].clone()

        return hook

    def attach(model: nn.Module) -> None:
        modules = dict(model.named_modules())
        if missing := next((operation.engine for operation in operations if operation.engine not in modules), None):
            raise Surprise(f"vLLM's model has no module {missing}")
        for operation in operations:
            hooks.append(
                modules[operation.engine].register_forward_pre_hook(before(operation.engine), with_kwargs=True)
            )
            hooks.append(
                modules[operation.engine].register_forward_hook(
                    after(operation.engine, operation.kind), with_kwargs=True
                )
            )

    engine.llm.apply_model(attach)
    [scores] = engine.score([tokens])
    for hook in hooks:
        hook.remove()
    if silent := next((operation.engine for operation in operations if operation.engine not in passed.gave), None):
        raise Surprise(f"vLLM has not called its module {silent}")
    return passed, scores


def _is_hidden(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2


def _by_actor(run: Run, tokens: list[int]) -> np.ndarray:
    [scores] = run.learner.score([tokens]).log_probs
    return scores


def _apart(scores: np.ndarray, others: np.ndarray) -> float:
    return float(np.abs(scores - others).mean())


@contextlib.contextmanager
def _as_engine(
    operations: Sequence[Operation], passed: Passed, errors: dict[str, list[float]]
) -> Iterator[dict[str, Tensor]]:
    """While entered, the actor's operations take what the engine's took, and give what they gave. Yields what these gave less
    what the actor's would have given, float32 by operation, there after a pass. `errors`: gets its share of it, by kind."""
    differences = dict[str, Tensor]()

    def taken(operation: Operation, result: Tensor) -> Tensor:
        return _with(result, passed.took[operation.engine])

    def changed_output(operation: Operation, result: Tensor) -> Tensor:
        gave = passed.gave[operation.engine].float()
        differences[operation.engine] = gave - result.reshape(-1, result.shape[-1])[: len(gave)].float()
        errors[operation.kind].append(float(differences[operation.engine].norm() / gave.norm()))
        return _with(result, gave)

    with contextlib.ExitStack() as stack:
        for operation in operations:
            stack.enter_context(_changed(operation, taken, changed_output))
        yield differences


@contextlib.contextmanager
def _added(operations: Sequence[Operation], differences: dict[str, Tensor]) -> Iterator[None]:
    """While entered, these operations of the actor's give so much more."""

    def changed_output(operation: Operation, result: Tensor) -> Tensor:
        more = differences[operation.engine]
        return _with(result, result.reshape(-1, result.shape[-1])[: len(more)].float() + more)

    with contextlib.ExitStack() as stack:
        for operation in operations:
            stack.enter_context(_changed(operation, lambda operation, result: result, changed_output))
        yield


@contextlib.contextmanager
def _changed(
    operation: Operation, takes: Callable[[Operation, Tensor], Tensor], gives: Callable[[Operation, Tensor], Tensor]
) -> Iterator[None]:
    """While entered, an operation of the actor's takes and gives something else. A router gives the logits by which experts
    are chosen."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (takes(operation, args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": takes(operation, kwargs["hidden_states"])}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return (gives(operation, output[0]), *output[1:]) if isinstance(output, tuple) else gives(operation, output)

    router: Any = operation.actor
    with contextlib.ExitStack() as stack:
        if operation.kind == ROUTER:
            gating = router.gating
            router.gating = lambda hidden, *more: gives(operation, gating(takes(operation, hidden), *more))
            stack.callback(delattr, router, "gating")
        else:
            stack.callback(operation.actor.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(operation.actor.register_forward_hook(after, with_kwargs=True).remove)
        yield


def _with(whole: Tensor, rows: Tensor) -> Tensor:
    """[tokens, 1, ...] with these in the first tokens' place."""
    changed = whole.detach().clone()
    changed.reshape(-1, whole.shape[-1])[: len(rows)] = rows.to(whole)
    return changed
