from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import Config, ConfigError, Machine, check, check_machine, load_recipe
from megatron_rl.config.machine import count_gpus
from megatron_rl.config.presets import PRESETS

CPU = Machine()


def problems(config: Config, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(config, **{"machine": CPU, **kwargs})
    return str(caught.value).splitlines()


def test_a_good_recipe_passes_and_is_not_changed(recipe) -> None:
    config = recipe("actor.parallel.tensor=2")
    checked = check(config, machine=CPU)
    assert checked.launch.processes == 2
    assert config.launch.processes is None
    assert check(checked, machine=CPU) == checked


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.steps=0"], "`trainer.steps` must be at least 1; it is 0"),
        (["tasks.train.sums.size=0"], "`tasks.train.sums.size` must be at least 1; it is 0"),
        (["tasks.train.sums.weight=0"], "`tasks.train.sums.weight` must be greater than 0; it is 0"),
        (["model.create.init_std=0"], "`model.create.init_std` must be greater than 0; it is 0"),
        (["rollout.temperature=0"], "`rollout.temperature` must be at least 0.01; it is 0"),
        (["rollout.temperature=0.005"], "`rollout.temperature` must be at least 0.01; it is 0.005"),
        (["rollout.memory_fraction=1.5"], "`rollout.memory_fraction` must be at most 1; it is 1.5"),
        (["launch.timeout_minutes=.inf"], "`launch.timeout_minutes` must be at most 1,000,000; it is inf"),
        (["rollout.temperature=.nan"], "`rollout.temperature` must be at most 2; it is nan"),
        (["model.dtype=fp32"], "must be one of float32, bfloat16; it is 'fp32'; did you mean 'float32'?"),
        (["rollout.too_long=dorp"], "did you mean 'drop'?"),
        (["actor.optimizer.schedule=cos"], "`actor.optimizer.schedule` must be one of constant, linear, cosine"),
        (["sft.optimizer.schedule=cos"], "`sft.optimizer.schedule`"),
        (["actor.fp8.recipe=int8"], "`actor.fp8.recipe` must be one of delayed, tensorwise, blockwise, mxfp8"),
        (["actor.optimizer.betas=[0.9]"], "`actor.optimizer.betas` must be a list of 2 values; it is [0.9]"),
        (["actor.optimizer.min_lr=1"], "`actor.optimizer.min_lr` (1.0) must not exceed"),
        (["launch.processes=3", "actor.parallel.tensor=2"], "a number that fits is 4"),
        (["launch.processes=3", "rollout.tensor_parallel=2"], "(3) must be a multiple of `rollout.tensor_parallel`"),
        (["launch.processes=2", "actor.parallel.expert=4"], "`actor.parallel.expert` (4) must divide the 2 ranks "),
        (["actor.parallel.expert=2"], "the model has no experts; set it to 1"),
        (["tasks.train.sums.columns.images=x"], "`tasks.train.sums.columns.images`: the model reads text only; remove it"),
        (["actor.freeze_vision_tower=true"], "tower` is for models that read images, and this one does not; set it to"),
        (["actor.freeze_vision_tower=true", "actor.lora.rank=4"], "no effect with `actor.lora`, which trains adapters only"),
        (["model.min_pixels=9"], "`model.min_pixels` is for models that read images, and this one does not; remove it"),
        (["actor.parallel.expert_tensor=2"], "`actor.parallel.expert_tensor` is 2, but the model has no experts; set it"),
        (["actor.moe.routing_replay=rollout"], "=rollout` is for experts, and the model has none; set it to none"),
        (["actor.moe.dispatcher=deepep"], "raise `actor.parallel.expert`, or set dispatcher=alltoall"),
        (["actor.recompute=selective", "actor.recompute_modules=[]"], "needs `actor.recompute_modules`, which is empty"),
        (["actor.recompute=selective", "actor.recompute_modules=[moe]"], "it has core_attn, layernorm, mlp"),
        (["actor.recompute_modules=[attention]"], "`actor.recompute_modules[0]` must be one of layernorm, core_attn, mlp, "),
        (["actor.fp8={recipe: delayed}"], "to 0; set actor.fp8.format=hybrid"),
        (["actor.fp8={recipe: delayed, bf16_ends: 1}"], "cannot go with recipe=delayed"),
        (
            ["actor.fp8={recipe: delayed, format: hybrid}", "actor.recompute=selective", "actor.recompute_modules=[moe_act]"],
            "`actor.recompute_modules` has moe_act, for which",
        ),
        (
            ["actor.fp8.recipe=delayed", "actor.recompute=selective", "actor.recompute_modules=[layernorm]"],
            "`actor.recompute_modules` has layernorm, for which",
        ),
        (["actor.fp8.bf16_ends=3"], "(3) must be at most 2, the model's 2 layers over 1 pipeline stages"),
        (["actor.optimizer={moments: bfloat16, distributed: false}"], "needs actor.optimizer.distributed=true and model."),
        (["actor.optimizer={device: cpu, distributed: false}"], "needs actor.optimizer.distributed=true; set it"),
        (["actor.optimizer={device: cpu, moments: bfloat16}"], "is for an optimizer on the GPU; set it to float32"),
        (["actor.optimizer.device=cpu", "actor.fp8.param_gather=true"], "set actor.fp8.param_gather=false, or device=gpu"),
        (["actor.optimizer.distributed=false", "sft.steps=1"], "`sft.optimizer.distributed` is true, and gradients are "),
        (["actor.overlap=true", "logging.gradient_variance_every=1"], "set it to 0, or `actor.overlap` to null or false"),
        (["actor.parallel.virtual_pipeline=2"], "needs `actor.parallel.pipeline` > 1, which is 1"),
        (["actor.parallel.sequence=true"], "needs `actor.parallel.tensor` > 1, which is 1"),
        (["launch.processes=3", "actor.parallel.context=2"], "tensor x pipeline x context (1 x 1 x 2 = 2); a number"),
        (["actor.parallel.pipeline=3"], "the model's 2 layers cannot be spread over 3 stages (2 for 3); lower `actor.par"),
        (["actor.parallel.tensor=4"], "key/value heads (2) must be a multiple of `actor.parallel.tensor` (4)"),
        (["rollout.expert_parallel=true"], "the model has no experts"),
        (["rollout.fp8_skip=[model.layers.0.*]"], "does nothing while `rollout.fp8` is none"),
        (["rollout.fp8=blockwise"], "self_attn.k_proj has 64 rows, and blocks have 128; name it in"),
        (["rollout.fp8=blockwise", "rollout.fp8_skip=[lm_head]"], "'lm_head', which matches no matrix that would be in FP8"),
        (["rollout.fp8=blockwise", "rollout.fp8_skip=['*']"], "leaves no matrix in FP8"),
        (["rollout.fp8=blockwise", "rollout.fp8_skip=['*.v_proj']"], "names model.layers.0.self_attn.v_proj alone"),
        (["rollout.tensor_parallel=3"], "attention heads (4) must be a multiple of `rollout.tensor_parallel`"),
        (["trainer.minibatches=7"], "must be a multiple of `trainer.minibatches` (7)"),
        (["launch.processes=4", "trainer.prompts_per_step=1", "rollout.group_size=2"], "for 4 data-parallel ranks"),
        (["sft.batch_size=1", "sft.steps=1", "launch.processes=2"], "`sft.batch_size` (1) must be at least the 2"),
        (["actor.tokens_per_microbatch=79"], "32 + rollout.max_tokens 48 = 80"),
        (["rollout.max_tokens=1000"], "exceeds the model's 512 positions"),
        (["trainer.eval_rollouts=4"], "set a temperature, or eval_rollouts=1"),
        (["trainer.eval_temperature=1"], "one rollout per prompt is decoded greedily"),
        (["trainer.eval_rollouts=4", "trainer.eval_temperature=0.005"], "vLLM would draw at 0.01, the least"),
        (["algorithm.preset=shrinkage", "rollout.group_size=1"],
         "shrinkage needs at least 2 rollouts per prompt; `rollout.group_size` is 1"),
        (["algorithm.estimator.name=bloo", "trainer.prompts_per_step=1"], "bloo needs at least 2 prompts per step"),
        (["algorithm.preset=awpo"], "awpo needs the reward column 'judge'; `rewards` has correct"),
        (["algorithm.preset=awpo", "rewards={correct: null, judge: {reward: judge}}"], "besides judge"),
        (["algorithm.estimator.name=gpro"], "algorithm.estimator: unknown advantage estimator 'gpro'; did you mean 'grpo'?"),
        (["algorithm.surrogate.name=clipp"], "algorithm.surrogate: unknown surrogate 'clipp'; did you mean 'clip'?"),
        (["algorithm.surrogate.params.eps_hi=1"], "did you mean 'eps_high'?"),
        (["algorithm.aggregation=token"], "did you mean 'token-mean'?"),
        (["algorithm.resample_rounds=2"], "algorithm.drop_zero_variance_groups=true"),
        (
            ["algorithm.zero_variance_rewards=[a]", "algorithm.drop_zero_variance_groups=true"],
            "rewards computed here are correct",
        ),
        (["algorithm.zero_variance_rewards=[correct]"], "no effect while `algorithm.drop_zero_variance_groups` is false"),
        (["algorithm.kl.reward_coef=0.1", "rewards.kl.reward=math"], "`algorithm.kl` adds a column of this name"),
        (["rewards.std.reward=math"], "`rewards.std`: the metric `reward/std` is of all rewards' weighted sum; rename"),
        (["algorithm.plugins=[nowhere.py]"], "algorithm.plugins: no file"),
        (["rewards.correct=null"], "`rewards` is empty"),
        (["trainer.eval_reward=judge"], "`trainer.eval_reward` names 'judge'"),
        (["rewards.correct.tasks=[smus]"], "names the unknown task 'smus'; did you mean 'sums'?"),
        (["rewards.correct.tasks=[]"], "would never be computed"),
        (["rewards.correct.weight=.inf"], "`rewards.correct.weight` must be a finite number"),
        (["rewards.correct.condition={column: x, at_least: .inf}"], "at_least` must be a finite number; it is inf"),
        (["tasks.train.sums=null"], "`tasks.train` is empty"),
        (["tasks.train.a/b.source=jsonl"], "the name 'a/b' in `tasks.train` must be letters (a to z), digits, `_` and `-`"),
        (["tasks.train.sums.chat=true"], "model.create.chat_template"),
        (["sft.steps=5"], "no task has demonstrations to learn from; set `tasks.train.sums.demonstrations`"),
        (["model.create=null"], "set `model.path` to a Hugging Face folder, or `model.create`"),
        (["model.create.kv_heads=3"], "`model.create.heads` (4) must be a multiple of `model.create.kv_heads` (3)"),
        (["model.create.vocab_size=8"], "must hold 21 characters, 0 words and 2 special tokens: make it at least 23"),
        (["model.create.characters=aab"], "repeats 'a'"),
        (["model.path=nowhere"], "`model.path`: nowhere does not exist"),
        (["run_dir=recipe.yaml/run"], "recipe.yaml is a file; choose another folder"),
        (["logging.wandb=project"], "needs the package wandb"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_the_remedy(recipe, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(recipe(*overrides), machine=CPU)
    assert any(message in problem for problem in str(caught.value).splitlines())


def test_a_choice_is_checked_where_the_recipe_did_not_come_from_a_file_too(recipe) -> None:
    config = recipe()
    config.model.dtype = "float16"
    config.sft.optimizer.betas = [0.9, 1.5]
    assert problems(config) == [
        "`model.dtype` must be one of float32, bfloat16; it is 'float16'; did you mean 'bfloat16'?",
        "`sft.optimizer.betas[1]` must be less than 1; it is 1.5",
    ]


def test_all_problems_are_named_at_once(recipe) -> None:
    assert len(problems(recipe("trainer.minibatches=7", "actor.parallel.sequence=true", "rewards.correct=null"))) == 3


def test_judge_that_only_runs_where_it_is_needed(recipe) -> None:
    judge = ["rewards.judge={reward: judge, when_needed: true}"]
    check(recipe("algorithm.preset=awpo", *judge), machine=CPU)
    lone = recipe("algorithm.preset=awpo", *judge, "rewards.correct.when_needed=true")
    assert any("besides judge" in problem for problem in problems(lone))


def test_commands_need_different_things(recipe) -> None:
    assert any("`sft.steps` is 0" in problem for problem in problems(recipe(), command="sft"))
    check(recipe("tasks.train={sums: null}", "rewards.correct.tasks=[held_out]"), command="evaluate", machine=CPU)
    assert any(
        "`tasks.eval` is empty" in p for p in problems(recipe("tasks.eval={held_out: null}"), command="evaluate")
    )


# ------------------------------------------------------------------------------------------------------------- layout
def test_of_the_stages_without_rollouts_a_command_is_held_to_its_own(recipe) -> None:
    shared = recipe("reward_model={steps: 5, batch_size: 1, optimizer: {distributed: false}}", "launch.processes=2")
    for command in ("train", "evaluate"):
        check(shared, command=command, machine=CPU)
    found = problems(shared, command="reward-model")
    assert any(line.startswith("`reward_model.batch_size` (1) must be at least the 2") for line in found)
    assert any(line.startswith("`reward_model.optimizer.distributed` is false") for line in found)


@pytest.mark.parametrize(
    ("overrides", "processes"),
    [
        ([], 1),
        (["actor.parallel.tensor=2", "rollout.tensor_parallel=2"], 2),
        (["actor.parallel.tensor=2", "actor.parallel.pipeline=2"], 4),
        (["rollout.tensor_parallel=4", "actor.parallel.pipeline=2"], 4),
        (["launch.processes=4"], 4),
    ],
)
def test_processes_on_a_cpu_are_the_fewest_that_fit(recipe, overrides: list[str], processes: int) -> None:
    assert check(recipe(*overrides), machine=CPU).launch.processes == processes


def test_on_gpus_one_process_each(recipe) -> None:
    assert check(recipe("actor.parallel.tensor=2"), machine=Machine(gpus=8)).launch.processes == 8
    assert any(
        "(3) must be a multiple" in p for p in problems(recipe("actor.parallel.tensor=2"), machine=Machine(gpus=3))
    )


def test_parameters_in_fp8_need_buffers_that_hold_them(recipe) -> None:
    check(recipe("actor.fp8={param_gather: true}"), machine=CPU)
    check(recipe("actor.fp8={recipe: mxfp8}"), machine=CPU)
    [mxfp8] = problems(recipe("actor.fp8={recipe: mxfp8, param_gather: true}"))
    assert "set param_gather to false" in mxfp8
    [plain] = problems(recipe("actor.fp8={param_gather: true}", "actor.optimizer.distributed=false"))
    assert "`actor.fp8.param_gather` needs `actor.optimizer.distributed`" in plain


def test_another_launchers_world_is_taken_as_it_is(recipe) -> None:
    outer = Machine(world_size=4, local_world_size=2)
    assert check(recipe("actor.parallel.tensor=2"), machine=outer).launch.processes is None
    check(recipe("launch.processes=2"), machine=outer)
    assert any("started 2 processes" in problem for problem in problems(recipe("launch.processes=4"), machine=outer))
    assert any("the number of processes (4)" in p for p in problems(recipe("rollout.tensor_parallel=3"), machine=outer))


@pytest.mark.parametrize(
    ("overrides", "machine", "message"),
    [
        (["launch.processes=4"], Machine(gpus=2), "4 processes need a GPU each and this machine offers 2"),
        (
            ["launch.processes=null"],
            Machine(gpus=1, world_size=2, local_world_size=2),
            "the launcher started 2 processes on this machine, and this one sees 1 GPUs: each must see those of all",
        ),
        (["actor.fp8={}"], CPU, "set actor.fp8=null"),
        (["actor.offload=true"], CPU, "set actor.offload=false"),
        (["actor.optimizer.device=cpu"], CPU, "`actor.optimizer.device=cpu` keeps the optimizer off a GPU"),
        (["sft.optimizer.device=cpu"], CPU, "`sft.optimizer.device=cpu` keeps the optimizer off a GPU"),
        (
            ["actor.recompute=selective", "actor.recompute_modules=[mlp, layernorm]"],
            CPU,
            "has layernorm, which needs Tra",
        ),
        (["model.create.head_dim=16"], CPU, r"model.create.head_dim` \(16\) is none of the sizes .*: 32, 64,"),
    ],
)
def test_what_this_machine_lacks(recipe, overrides: list[str], machine: Machine, message: str) -> None:
    checked = check(recipe(*overrides), machine=machine)  # fine in itself: it may be meant for another machine
    with pytest.raises(ConfigError, match=message):
        check_machine(checked, machine)


def test_float32_over_context_parallel_ranks_needs_plain_layers(recipe, tmp_path: Path, monkeypatch: Any) -> None:
    machine = Machine(gpus=2)
    overrides = ["actor.parallel.context=2", "model.dtype=float32"]
    check_machine(check(recipe(*overrides), machine=machine), machine)
    (tmp_path / "transformer_engine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"`actor.parallel.context` is 2, .* set model.dtype=bfloat16, or"):
        check_machine(check(recipe(*overrides), machine=machine), machine)
    check_machine(check(recipe("actor.parallel.context=2", "model.dtype=bfloat16"), machine=machine), machine)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 2), ("", 0), ("0", 1), ("0,1,2", 2), ("1,-1,0", 1), ("-1", 0), ("GPU-ab,GPU-cd", 2)],
)
def test_gpus_are_counted_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus(tmp_path) == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_folder_that_cannot_be_written(recipe, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert any("no permission to write" in problem for problem in problems(recipe("run_dir=closed/run")))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_quick_start_takes_every_preset_by_one_override(preset: str) -> None:
    path = Path(__file__).parents[2] / "recipes/cpu/quickstart.yaml"
    assert check(load_recipe(path, [f"algorithm.preset={preset}"]), machine=CPU).algorithm.preset == preset


def test_recipes_shipped_with_the_project_pass() -> None:
    recipes = sorted(Path(__file__).parents[2].glob("recipes/cpu/*.yaml"))
    assert recipes
    for path in recipes:
        config = load_recipe(path)
        check(config, machine=CPU, command="reward-model" if config.reward_model.wanted else "train")
