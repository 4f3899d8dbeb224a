"""Checks of evaluations by rewards that compare, and by harnesses."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.schema import Config


def runs_harness(config: Config, command: str) -> bool:
    """Whether another project's package asks and grades, so that there are no tasks and rewards of ours."""
    return command == "evaluate" and config.evaluation.harness.name is not None


def check_evaluation(config: Config) -> Iterator[str]:
    """Checks the options of `evaluation` against each other and the rewards."""
    pair, style = config.evaluation.pairwise, config.evaluation.style
    if pair is not None and sorted(_position(config, name) for name in pair) != ["A", "B"]:
        yield f"`evaluation.pairwise` must name two `pairwise` rewards, with position A and with B; it is {pair}"
    if style is not None and (pair is None or style not in config.rewards or config.rewards[style].reward != "style"):
        yield f"`evaluation.style` is {style!r}; it must name a reward `style`, beside `evaluation.pairwise`"
    yield from _check_harness(config)


def _position(config: Config, name: str) -> str:
    """Where the response of a `pairwise` reward stands; empty for any other name."""
    reward = config.rewards.get(name)
    return str(reward.params.get("position", "")) if reward is not None and reward.reward == "pairwise" else ""


def _check_harness(config: Config) -> Iterator[str]:
    section = config.evaluation.harness
    if section.name is None:
        return
    if section.name == "bfcl" and section.handler is None:
        yield "`evaluation.harness.handler` names none of BFCL's models; `.venv-eval/bfcl/bin/bfcl models` lists them"
    if section.name != "bfcl" and section.handler is not None:
        yield f"`evaluation.harness.handler` is bfcl's, and the harness is {section.name}; set it to null"
    if section.sets == []:
        yield "`evaluation.harness.sets` is an empty list; null means the usual ones"
    if section.name == "evalplus" and (strange := set(section.sets or ()) - {"humaneval", "mbpp"}):
        yield f"`evaluation.harness.sets` has {', '.join(sorted(strange))}; evalplus has humaneval and mbpp"
    if section.name == "evalplus" and section.limit is not None:
        yield f"`evaluation.harness.limit` is {section.limit}, and evalplus asks all of its questions; set it to null"
    if section.name != "evalplus" and config.trainer.eval_rollouts != 1:
        yield (
            f"`trainer.eval_rollouts` is {config.trainer.eval_rollouts}, and {section.name} asks each question once; set it "
            "to 1, and eval_temperature to 0"
        )
