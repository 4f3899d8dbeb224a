"""What ranks with Transformer Engine compute in the tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_rl.runtime import device
from tests.checkpoint import ranks
from tests.checkpoint.ranks import Layout
from tests.models import layouts as models


def layer_norm_linear() -> None:
    """Transformer Engine's fused module against torch's functions: output and gradients."""
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for normalization in ("RMSNorm", "LayerNorm"):
            with device.megatron():
                module = te.LayerNormLinear(32, 48, normalization=normalization, params_dtype=dtype, device="cpu")
                x = torch.randn(10, 32, dtype=dtype, requires_grad=True)
                out = module(x)
                torch.autograd.backward(out.float().square().sum())
            own = {name: parameter.detach().clone().requires_grad_() for name, parameter in module.named_parameters()}
            same, gamma = x.detach().clone().requires_grad_(), own["layer_norm_weight"]
            if normalization == "RMSNorm":
                normed = F.rms_norm(same, (32,), gamma, 1e-5)
            else:
                normed = F.layer_norm(same, (32,), gamma, own["layer_norm_bias"], 1e-5)
            want = F.linear(normed, own["weight"], own["bias"])
            want.float().square().sum().backward()
            close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-1}
            torch.testing.assert_close(out, want, **close)
            torch.testing.assert_close(x.grad, same.grad, **close)
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(parameter.grad, own[name].grad, **close)


def fused_adam() -> None:
    """Transformer Engine's Adam against torch's, over steps of a changing rate, with weight decay."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    values, options = torch.randn(40, generator=torch.Generator().manual_seed(0)), {"betas": (0.9, 0.95), "eps": 1e-6}
    own, want = values.clone().requires_grad_(), values.clone().requires_grad_()
    with device.megatron():
        fused = FusedAdam([own], lr=0.0, weight_decay=0.1, **options)
    plain = torch.optim.AdamW([want], lr=0.0, weight_decay=0.1, **options)
    for step in range(1, 6):
        for parameter, optimizer in ((own, fused), (want, plain)):
            optimizer.param_groups[0]["lr"] = 0.1 * step
            parameter.grad = values * step
            with device.megatron():
                optimizer.step()
    torch.testing.assert_close(own, want, rtol=1e-5, atol=1e-6)


def permutation() -> None:
    """Tokens to their experts and back by the fused functions that the dispatcher calls, against a loop; with gradients."""
    from transformer_engine.pytorch import moe_permute_with_probs, moe_sort_chunks_by_index, moe_unpermute

    torch.manual_seed(0)
    tokens, experts = 7, 4
    routed = torch.rand(tokens, experts) < 0.5
    probs = torch.rand(tokens, experts) * routed
    x = torch.randn(tokens, 16, requires_grad=True)
    weights = probs.clone().requires_grad_()
    places = [(token, expert) for expert in range(experts) for token in range(tokens) if routed[token, expert]]
    with device.megatron():
        rows, permuted_probs, order = moe_permute_with_probs(x, probs, routed, num_out_tokens=len(places))
        back = moe_unpermute(rows, order, merging_probs=weights, restore_shape=x.shape)
        torch.autograd.backward((back * torch.arange(16)).sum())
        chunks = moe_sort_chunks_by_index(rows.detach(), torch.tensor([2, 1, len(places) - 3]), torch.tensor([2, 0, 1]))
    assert torch.equal(rows, torch.stack([x[token] for token, _ in places]))
    assert torch.equal(permuted_probs, torch.stack([probs[place] for place in places]))
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))
    torch.testing.assert_close(x.grad, torch.arange(16) * probs.sum(1, keepdim=True))
    torch.testing.assert_close(weights.grad, (x.detach() * torch.arange(16)).sum(1, keepdim=True) * routed)
    assert torch.equal(chunks, torch.cat([rows[3:], rows[:2], rows[2:3]]))


def router() -> None:
    """The fused choice of experts against softmax and topk, with gradients."""
    from transformer_engine.pytorch.router import fused_topk_with_score_function

    for before in (True, False):
        logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        same = logits.detach().clone().requires_grad_()
        with device.megatron():
            probs, chosen = fused_topk_with_score_function(logits, 3, before, None, None, None, "softmax", None)
            torch.autograd.backward((probs * torch.arange(8)).sum())
        best = same.topk(3, dim=1).indices
        scores = same.softmax(1).gather(1, best) if before else same.gather(1, best).softmax(1)
        want = torch.zeros(6, 8).scatter(1, best, scores)
        (want * torch.arange(8)).sum().backward()
        assert torch.equal(chosen, want > 0)
        torch.testing.assert_close(probs, want)
        torch.testing.assert_close(logits.grad, same.grad)


def load_and_export(root: str, layouts: list[models.Layout]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    models.check(rank, world, f"{root}/rendezvous-{world}", root, layouts)


def save_before_the_first_update(root: str, layouts: list[Layout]) -> None:
    """Of every layout: a checkpoint at step 0, updates, another optimizer, back to step 0; from there as `save_trained`."""
    for layout in layouts:
        actor, folder = ranks.make_actor(Path(root), layout), Path(root) / "again" / layout.name
        saver = ranks.save(actor, folder, 0)
        ranks.learn(actor, 5, groups=2)
        actor.start_optimizer(actor.optimizer_config, ranks.UPDATES)
        ranks.learn(actor, 6, groups=2)
        ranks.load(actor, folder / "step_0", 0)
        ranks.learn(actor, 0, groups=2)
        ranks.learn(actor, 1, groups=2)
        ranks.save(actor, folder, 2, saver)
        assert [outcome.error for outcome in saver.outcomes()] == [None, None]
        ranks.close()


def selftest(folder: Path) -> None:
    """The steps of `megatron-rl selftest` that compare Transformer Engine's layers with torch's and with the plain ones."""
    from megatron_rl.selftest import without_engine
    from megatron_rl.selftest.bench import Bench

    figures = without_engine.actor(Bench(folder))
    with device.megatron():
        figures |= without_engine.attention(Bench(folder))
    assert len(figures) == 10


def learn_offloaded(root: str, layouts: list[Layout]) -> None:
    """Four updates as `save_trained` makes them, with the optimizer's state on the host before and between."""
    for layout in layouts:
        actor, folder = ranks.make_actor(Path(root), layout), Path(root) / "offloaded" / layout.name
        actor.config.offload = actor.config.offload_weights = True
        for seed in (0, 1):
            actor.offload()
            actor.offload_weights()
            assert not any(tensor.untyped_storage().nbytes() for tensor in actor.optimizer_state() if seed)
            actor.onload()
            ranks.learn(actor, seed, groups=2)
            ranks.check_gradients_are_not_copied(actor)
        ranks.save(actor, folder, 2)
        ranks.close()


def kept_activations() -> None:
    """What `plan --exact` has layers keep from the forward to the backward pass, on tensors without content, against what
    Transformer Engine's own modules keep."""
    import warnings

    from megatron_rl.config import load_recipe
    from megatron_rl.planning import exact
    from tests.planning.planned_models import MOE, QWEN2_TIED, QWEN3, RECIPES

    warnings.filterwarnings("ignore")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    experts = {**MOE, **sizes, "moe_intermediate_size": 128}
    for model, overrides in (
        ({**QWEN3, **sizes}, ("actor.recompute=none",)),
        ({**QWEN2_TIED, **sizes}, ("actor.recompute=selective",)),
        (experts, ("actor.recompute=none",)),
        (experts, ("actor.recompute=selective", "actor.recompute_modules=[moe]")),
    ):
        given = ("model.dtype=bfloat16", "actor.tokens_per_microbatch=1024", "actor.parallel.tensor=1", *overrides)
        config = load_recipe(RECIPES / "cpu" / "quickstart.yaml", given)
        _, own, _ = exact._measure_rank(config, model, 0, 1, False, torch.device("cpu"))
        with device.plain_layers():
            _, counted, _ = exact._measure_rank(config, model, 0, 1, True, exact.META)
        ratio = counted[0].kept / own[0].kept
        assert 0.98 < ratio < 1.02, f"{overrides}: {ratio}"
