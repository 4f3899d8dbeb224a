"""Where prompts come from: your data and generators, as `Sample`s in a deterministic order. Imports no torch."""

from megatron_rl.tasks.loading import Prompts, filter_by_length, load_task, load_tasks, tasks_to_evaluate
from megatron_rl.tasks.order import MixedOrder, Order, PromptOrder, make_order
from megatron_rl.tasks.rows import asks_hub
from megatron_rl.tasks.task_checks import check_tasks, first_items

__all__ = [
    "MixedOrder",
    "Order",
    "PromptOrder",
    "Prompts",
    "asks_hub",
    "check_tasks",
    "filter_by_length",
    "first_items",
    "load_task",
    "load_tasks",
    "make_order",
    "tasks_to_evaluate",
]
