"""verl's configurations (`verl.trainer.main_ppo`): composed YAML, or the overrides of a launch script on verl's defaults."""

from __future__ import annotations

from megatron_rl.migrate import common
from megatron_rl.migrate.draft import Draft

_ARR = "actor_rollout_ref"
# What verl does where a launch script says nothing, and a recipe here would do something else.
_DEFAULTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_ARR}.actor.ppo_mini_batch_size": 256,
    f"{_ARR}.actor.clip_ratio_c": 3.0,
    f"{_ARR}.actor.loss_agg_mode": "token-mean",
    f"{_ARR}.actor.optim.weight_decay": 0.01,
    f"{_ARR}.actor.optim.betas": [0.9, 0.999],
    f"{_ARR}.rollout.n": 1,
    "trainer.total_epochs": 30,
    "algorithm.adv_estimator": "gae",
}
_ESTIMATORS = {  # to a preset, whose estimator is the same
    "grpo": "grpo",
    "rloo": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}


def convert(draft: Draft) -> None:
    missing = {key: value for key, value in _DEFAULTS.items() if draft.flat.get(key) is None}
    if missing:
        draft.flat |= missing
        said = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in missing.items())
        draft.remark("", f"by verl's defaults, since it says nothing else: {said}")
    common.put_model(draft, draft.take(f"{_ARR}.model.path"))
    if (name := draft.take("trainer.experiment_name")) is not None:
        draft.put("run_dir", f"runs/{name}")
    draft.take("trainer.default_local_dir")
    draft.same()
    _data(draft)
    _batch(draft)
    _algorithm(draft)
    _actor(draft)
    _evaluation(draft)


def _data(draft: Draft) -> None:
    columns = {"prompt": str(draft.take("data.prompt_key") or "prompt"), "answer": "reward_model.ground_truth"}
    if columns["prompt"] == "prompt":
        columns.pop("prompt")
    common.put_data(draft, "train", draft.take("data.train_files"), columns, chat=True)
    common.put_data(draft, "eval", draft.take("data.val_files"), columns, chat=True)
    draft.remark("tasks", "chat: verl's data hold chat messages, to which the tokenizer's template is applied")
    if draft.take("data.filter_overlong_prompts"):
        draft.put("rollout.too_long", "drop")
    path, name = draft.take("custom_reward_function.path"), draft.take("custom_reward_function.name")
    if path is not None:
        draft.put("rewards.own.reward", f"{path}:{name or 'compute_score'}")
        draft.remark(
            "rewards",
            "own: verl calls compute_score(data_source, solution_str, ground_truth, extra_info); here the name is a factory, "
            "which returns score(completion, sample): docs/rewards/your-own.md",
        )
    if (manager := draft.take("reward_model.reward_manager")) not in (None, "naive"):
        draft.remark("rewards", f"reward_model.reward_manager={manager} there; rewards here are named one by one")


def _batch(draft: Draft) -> None:
    prompts = draft.count("data.train_batch_size") or 1
    common.put_batch(draft, prompts, draft.number(f"{_ARR}.actor.ppo_mini_batch_size"))
    common.put_steps(draft, draft.count("trainer.total_training_steps"), draft.number("trainer.total_epochs"))
    common.put_lengths(
        draft,
        draft.count("data.max_prompt_length") or 512,
        draft.count("data.max_response_length") or 512,
        draft.count(f"{_ARR}.actor.ppo_max_token_len_per_gpu"),
    )
    common.put_saving(draft, draft.number("trainer.save_freq"), draft.number("trainer.test_freq"))


def _algorithm(draft: Draft) -> None:
    estimator = str(draft.take("algorithm.adv_estimator"))
    preset = _ESTIMATORS.get(estimator)
    if preset is None:
        draft.remark(
            "algorithm", f"algorithm.adv_estimator={estimator} has no counterpart (there is no critic); grpo stands in"
        )
    if preset == "grpo" and draft.take("algorithm.norm_adv_by_std_in_grpo") is False:
        preset = "dr_grpo"
    draft.put("algorithm.preset", preset or "grpo")
    draft.put("algorithm.aggregation", draft.take(f"{_ARR}.actor.loss_agg_mode"))
    if (clip := draft.number(f"{_ARR}.actor.clip_ratio")) is not None:
        for key in ("eps_low", "eps_high"):
            if draft.get(f"algorithm.surrogate.params.{key}") is None:
                draft.put(f"algorithm.surrogate.params.{key}", clip)
    if draft.take(f"{_ARR}.actor.policy_loss.loss_mode") == "gspo":
        draft.put("algorithm.ratio", "sequence")
    kind = draft.take(f"{_ARR}.actor.kl_loss_type")
    coef = draft.number(f"{_ARR}.actor.kl_loss_coef")
    if draft.take(f"{_ARR}.actor.use_kl_loss"):
        common.put_kl(draft, 0.001 if coef is None else coef, _KL.get(str(kind or "low_var_kl")))
    reward_coef = draft.number("algorithm.kl_ctrl.kl_coef")
    if draft.take("algorithm.use_kl_in_reward"):
        draft.put("algorithm.kl.reward_coef", 0.001 if reward_coef is None else reward_coef)
    rounds = draft.count("algorithm.filter_groups.max_num_gen_batches")
    if draft.take("algorithm.filter_groups.enable"):
        draft.put("algorithm.drop_zero_variance_groups", True)
        draft.put("algorithm.resample_rounds", rounds if rounds and rounds > 0 else 10)
    weight = draft.take("algorithm.rollout_correction.rollout_is")
    cap = draft.number("algorithm.rollout_correction.rollout_is_threshold")
    if weight in ("token", "sequence"):
        draft.put("algorithm.correction.weight", weight)
        draft.put("algorithm.correction.cap", cap)


def _actor(draft: Draft) -> None:
    schedule = draft.take(
        *(f"{_ARR}.actor.optim.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style"))
    )
    draft.put("actor.optimizer.schedule", _SCHEDULES.get(str(schedule)))
    betas = draft.take(f"{_ARR}.actor.optim.betas")
    draft.put("actor.optimizer.betas", list(betas) if isinstance(betas, list) else None)
    if draft.take(f"{_ARR}.actor.megatron.sequence_parallel") is not False:  # by default it is on there
        draft.put("actor.parallel.sequence", True)
    if draft.take(f"{_ARR}.model.enable_gradient_checkpointing"):
        draft.put("actor.recompute", "full")
    engines = ("megatron", "fsdp_config")
    state = [
        draft.take(f"{_ARR}.actor.{engine}.{what}_offload") for engine in engines for what in ("optimizer", "grad")
    ]
    weights = [draft.take(f"{_ARR}.actor.{engine}.param_offload") for engine in engines]
    if any(state) or any(weights):
        draft.put("actor.offload", True)
    if any(weights):
        draft.put("actor.offload_weights", True)
    loggers = draft.take("trainer.logger")
    project = draft.take("trainer.project_name")
    if "wandb" in (loggers if isinstance(loggers, list) else [loggers]):
        draft.put("logging.wandb", project or "verl")


def _evaluation(draft: Draft) -> None:
    values = f"{_ARR}.rollout.val_kwargs"
    rollouts, sampled = draft.count(f"{values}.n"), draft.take(f"{values}.do_sample")
    temperature, top_p = draft.number(f"{values}.temperature"), draft.number(f"{values}.top_p")
    draft.put("trainer.eval_rollouts", rollouts)
    if sampled is not False and temperature:
        draft.put("trainer.eval_temperature", temperature)
        draft.put("trainer.eval_top_p", top_p)
