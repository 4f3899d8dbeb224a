"""`logging.gradient_variance_every`: refused where it could not measure."""

from __future__ import annotations

import pytest

from megatron_rl.config import ConfigError, Machine, check

CPU = Machine()
ON = "logging.gradient_variance_every=1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.prompts_per_step=4"], r"at most 2560 tokens fits one; lower `actor.tokens_per_microbatch` \(8192\)"),
        (
            ["trainer.prompts_per_step=4", "launch.processes=2", "actor.parallel.pipeline=2"],
            r"at most 2560 tokens fits one; lower",
        ),
        (
            [
                "trainer.prompts_per_step=16",
                "launch.processes=4",
                "actor.parallel.tensor=2",
                "actor.parallel.sequence=true",
            ],
            r"tokens fits 2 that are one part of the gradient; lower",
        ),
    ],
)
def test_refused(recipe, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(recipe(ON, *overrides), machine=CPU)
    check(recipe("logging.gradient_variance_every=0", *overrides), machine=CPU)


def test_accepted(recipe) -> None:
    check(recipe(ON), machine=CPU)
    check(recipe(ON, "trainer.prompts_per_step=4", "launch.processes=2"), machine=CPU)
    check(recipe(ON, "trainer.prompts_per_step=4", "actor.tokens_per_microbatch=512"), machine=CPU)
