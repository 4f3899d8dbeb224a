"""Where prompts come from: generated puzzles and files, as `Sample`s in a deterministic order. Imports no torch."""

from megatron_rl.tasks.checks import check_tasks
from megatron_rl.tasks.loading import LoadedTasks, filter_by_length, load_task, load_tasks
from megatron_rl.tasks.order import PromptOrder

__all__ = ["LoadedTasks", "PromptOrder", "check_tasks", "filter_by_length", "load_task", "load_tasks"]
