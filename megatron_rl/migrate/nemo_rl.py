"""NeMo-RL's configurations of GRPO (`examples/run_grpo*.py`)."""

from __future__ import annotations

from megatron_rl.migrate import common
from megatron_rl.migrate.draft import Draft

_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32"}


def convert(draft: Draft) -> None:
    common.put_model(draft, draft.take("policy.model_name"))
    folder = draft.take("checkpointing.checkpoint_dir")
    draft.take("logger.log_dir")
    draft.put("run_dir", folder)
    draft.put("model.dtype", _DTYPES.get(str(draft.take("policy.precision"))))
    _drop_unused_backend(draft)
    draft.same()
    _data(draft)
    _batch(draft)
    _algorithm(draft)
    _actor(draft)
    enabled = draft.take("checkpointing.enabled")
    every = draft.number("checkpointing.save_period")
    common.put_saving(draft, 0 if enabled is False else every, draft.number("grpo.val_period"))
    most = draft.count("grpo.max_val_samples")
    draft.put("trainer.eval_max_prompts", most if most and most > 0 else None)
    project = draft.take("logger.wandb.project")
    if draft.take("logger.wandb_enabled"):
        draft.put("logging.wandb", project or "nemo-rl")


def _drop_unused_backend(draft: Draft) -> None:
    """Drops the section of the backend that is off."""
    is_megatron = bool(draft.take("policy.megatron_cfg.enabled"))
    draft.take("policy.dtensor_cfg.enabled")
    unused: tuple[str, ...] = ("policy.megatron_cfg.",)
    if is_megatron:
        unused = ("policy.dtensor_cfg.", "policy.optimizer.", "policy.scheduler")
    for name in [name for name in draft.flat if name.startswith(unused)]:
        del draft.flat[name]


def _data(draft: Draft) -> None:
    columns = {
        "prompt": str(draft.take("data.input_key", "data.train.input_key") or "input"),
        "answer": str(draft.take("data.output_key", "data.train.output_key") or "output"),
    }
    train = draft.take("data.train.data_path", "data.train_data_path")
    if train is None and (name := draft.take("data.dataset_name")) is not None:
        draft.remark(
            "tasks",
            f"data.dataset_name={name} is one of NeMo-RL's own readers; docs/data.md says how data are read here",
        )
    common.put_data(draft, "train", train, columns, chat=True)
    common.put_data(draft, "eval", draft.take("data.validation.data_path", "data.val_data_path"), columns, chat=True)
    if (file := draft.take("data.prompt_file", "data.default.prompt_file")) is not None:
        draft.remark(
            "tasks",
            f"data.prompt_file={file}: its text goes into a task's `prompt`, with {{prompt}} in the place of {{}}",
        )


def _batch(draft: Draft) -> None:
    prompts, group = draft.count("grpo.num_prompts_per_step") or 32, draft.get("rollout.group_size") or 1
    rollouts = draft.number("policy.train_global_batch_size")
    common.put_batch(draft, prompts, rollouts / group if rollouts else None)
    epochs, steps = draft.number("grpo.max_num_epochs"), draft.count("grpo.max_num_steps")
    per_epoch = None if draft.prompts is None else draft.prompts // prompts
    if epochs is not None and steps is not None and (per_epoch is None or steps > epochs * per_epoch):
        draft.remark("trainer", f"steps: at most {steps} and at most {epochs:g} epochs there, whichever ends first")
        if per_epoch is not None or steps >= 100_000:  # a number that stands for "no limit"
            steps = None
    common.put_steps(draft, steps, epochs)
    total = draft.count("policy.max_total_sequence_length") or 512
    prompt, response = draft.count("data.max_input_seq_length"), draft.count("policy.generation.max_new_tokens")
    if prompt is None or prompt >= total:
        prompt = max(1, total // 4)
        draft.remark(
            "rollout", f"max_prompt_tokens: {total} tokens in all there, here for prompt and response each: a guess"
        )
    tokens = draft.count("policy.sequence_packing.train_mb_tokens", "policy.dynamic_batching.train_mb_tokens")
    common.put_lengths(draft, prompt, response if response and response < total else total - prompt, tokens)


def _algorithm(draft: Draft) -> None:
    preset = {"grpo": "grpo", "reinforce_plus_plus": "reinforce_pp_baseline", "gdpo": "gdpo"}
    name = draft.take("grpo.adv_estimator.name") or "grpo"
    own_baseline = draft.take("grpo.use_leave_one_out_baseline", "grpo.adv_estimator.use_leave_one_out_baseline")
    normalized = draft.take("grpo.normalize_rewards", "grpo.adv_estimator.normalize_rewards")
    if str(name) not in preset:
        draft.remark("algorithm", f"grpo.adv_estimator.name={name} has no counterpart; grpo stands in")
    chosen = preset.get(str(name), "grpo")
    if chosen == "grpo" and normalized is False:
        chosen = "rloo" if own_baseline else "dr_grpo"
    elif chosen == "grpo" and own_baseline:
        draft.remark(
            "algorithm", "grpo.use_leave_one_out_baseline with normalize_rewards: the baseline here is the group's mean"
        )
    draft.put("algorithm.preset", chosen)
    by_token = draft.take("loss_fn.token_level_loss")
    draft.put("algorithm.aggregation", "seq-mean-token-mean" if by_token is False else "token-mean")
    if draft.take("loss_fn.sequence_level_importance_ratios"):
        draft.put("algorithm.ratio", "sequence")
    kind = draft.take("loss_fn.reference_policy_kl_type")
    common.put_kl(
        draft, draft.number("loss_fn.reference_policy_kl_penalty"), kind if kind in ("k1", "k2", "k3") else None
    )
    cap = draft.number("loss_fn.truncated_importance_sampling_ratio")
    if draft.take("loss_fn.use_importance_sampling_correction"):
        draft.put("algorithm.correction.weight", "token")
        draft.put("algorithm.correction.cap", cap if cap is not None else 1e6, "" if cap else "not truncated there")
    if draft.take("grpo.overlong_filtering"):
        draft.put("algorithm.truncated", "mask")
    rounds = draft.count("grpo.dynamic_sampling_max_gen_batches")
    if draft.take("grpo.use_dynamic_sampling"):
        draft.put("algorithm.drop_zero_variance_groups", True)
        draft.put("algorithm.resample_rounds", rounds or 10)
    if draft.take("grpo.async_grpo.enabled"):
        draft.remark("trainer", "grpo.async_grpo: see launch.generators, with which generation is one step ahead")


def _actor(draft: Draft) -> None:
    for backend in ("megatron_cfg", "dtensor_cfg"):
        if draft.take(f"policy.{backend}.activation_checkpointing"):
            draft.put("actor.recompute", "full")
        if draft.take(f"policy.{backend}.sequence_parallel"):
            draft.put("actor.parallel.sequence", True)
    optimizer, scheduler = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
    betas = draft.take("policy.optimizer.kwargs.betas")
    if betas is None:
        pair = [draft.number(f"{optimizer}.adam_beta{number}") for number in (1, 2)]
        betas = pair if None not in pair else None
    draft.put("actor.optimizer.betas", betas)
    draft.put("actor.optimizer.eps", draft.number("policy.optimizer.kwargs.eps", f"{optimizer}.adam_eps"))
    draft.put("actor.optimizer.warmup_steps", draft.count(f"{scheduler}.lr_warmup_iters"))
    style, least = draft.take(f"{scheduler}.lr_decay_style"), draft.number(f"{optimizer}.min_lr")
    if style in ("cosine", "linear"):
        draft.put("actor.optimizer.schedule", style)
        draft.put("actor.optimizer.min_lr", least)
