"""TRL's GRPOConfig, as YAML for `trl grpo --config` or as `key=value`."""

from __future__ import annotations

from megatron_rl.migrate import common
from megatron_rl.migrate.draft import Draft, finite

_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def convert(draft: Draft) -> None:
    common.put_model(draft, draft.take("model_name_or_path", "model"))
    draft.put("run_dir", draft.take("output_dir"))
    draft.same()
    files = common.put_data(draft, "train", draft.take("dataset_name", "train_dataset"), {}, chat=True)
    if files and (split := draft.take("dataset_train_split")) is not None:
        draft.put("tasks.train.data.split", split)
    group = draft.get("rollout.group_size") or 8
    draft.put("rollout.group_size", group)
    _batch(draft, group)
    prompt, response = draft.count("max_prompt_length") or 512, draft.count("max_completion_length") or 256
    common.put_lengths(draft, prompt, response, None)
    preset = {"none": "dr_grpo", "False": "dr_grpo"}.get(str(draft.take("scale_rewards")), "grpo")
    draft.put("algorithm.preset", preset)
    draft.put("algorithm.aggregation", _AGGREGATIONS.get(str(draft.take("loss_type") or "dapo")))
    common.put_kl(draft, draft.number("beta"), None)
    if draft.take("importance_sampling_level") == "sequence":
        draft.put("algorithm.ratio", "sequence")
    if draft.take("mask_truncated_completions"):
        draft.put("algorithm.truncated", "mask")
    if draft.take("gradient_checkpointing"):
        draft.put("actor.recompute", "full")
    schedule = str(draft.take("lr_scheduler_type") or "linear")
    draft.put("actor.optimizer.schedule", schedule if schedule in ("linear", "cosine", "constant") else None)
    trackers = draft.take("report_to")
    if "wandb" in (trackers if isinstance(trackers, list) else [trackers]):
        draft.put("logging.wandb", "huggingface")
    common.put_saving(draft, draft.number("save_steps"), draft.number("eval_steps"))
    names, weights = draft.take("reward_funcs"), draft.take("reward_weights")
    for number, name in enumerate(names if isinstance(names, list) else []):
        key = f"rewards.reward_{number + 1}"
        draft.put(f"{key}.reward", f"my_rewards.py:{str(name).rpartition('.')[2]}")
        if isinstance(weights, list) and number < len(weights):
            draft.put(f"{key}.weight", finite(weights[number]))
    if names:
        draft.remark(
            "rewards",
            "a factory in a file of your own, which returns score(completion, sample): docs/rewards/your-own.md",
        )


def _batch(draft: Draft, group: int) -> None:
    rollouts = draft.number("generation_batch_size")
    device, accumulated = (
        draft.number("per_device_train_batch_size") or 8,
        draft.number("gradient_accumulation_steps") or 1,
    )
    split = draft.number("steps_per_generation")
    per_update = device * accumulated
    if rollouts is None:
        rollouts = device * (split or accumulated)
        draft.remark("trainer", "prompts_per_step: of one process there; multiply it by the number of processes")
    prompts = max(1, round(rollouts / group))
    common.put_batch(draft, prompts, per_update / group if split or draft.flat.get("generation_batch_size") else None)
    common.put_steps(draft, draft.count("max_steps"), draft.number("num_train_epochs"))
