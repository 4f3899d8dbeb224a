"""What the supervised steps learn from."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch.distributed as dist
from transformers import AutoTokenizer

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.actor.update_result import UpdateResult
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.config.model import CreateModelConfig, ModelConfig
from megatron_rl.config.schema import AgentConfig, Config, TaskConfig, TasksConfig
from megatron_rl.data.batch import TokenBatch
from megatron_rl.data.sample import Sample
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.tasks.loading import check_demonstrations
from megatron_rl.trainer.run import build_run
from megatron_rl.trainer.sft import Example, _batch, _step, demonstration_ids
from megatron_rl.weights.create import create_model


def test_a_token_that_the_model_has_no_row_for_is_named(tmp_path: Path) -> None:
    """Added to the tokenizer, and not to the model; whose padded embedding may even have a row of zeros for it."""
    create_model(tmp_path / "model", CreateModelConfig(layers=1), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    vocab_size = len(tokenizer)
    sample = Sample("sums/3", "sums", "1+1=", tokenizer.encode("1+1="), demonstration="2=")
    [(ids, learned)] = demonstration_ids([sample], tokenizer, Config(run_dir="unused"), vocab_size)
    assert ids[-1] == tokenizer.eos_token_id
    assert learned.all()
    tokenizer.add_tokens(["2="])
    message = rf"sums/3 has token '2=', number {len(tokenizer) - 1}, .* resize its embedding"
    with pytest.raises(ValueError, match=message):
        demonstration_ids([sample], tokenizer, Config(run_dir="unused"), vocab_size)


def test_a_demonstration_that_is_too_long_is_found_before_the_model_is_built(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    create_model(tmp_path / "model", CreateModelConfig(layers=1), seed=0)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "d": "2"}\n{"prompt": "1+2=", "d": "1+1+1=3"}\n')
    config = Config(run_dir=str(tmp_path), model=ModelConfig(path=str(tmp_path / "model")))
    task = TaskConfig(source="jsonl", path=str(tmp_path / "sums.jsonl"), demonstrations="column:d")
    config.tasks.train = {"sums": task}
    config.rollout.max_tokens = 7
    # One rank without Megatron's process groups: building the model would fail otherwise.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    with pytest.raises(ValueError, match=r"demonstration of sums/1 has 8 tokens, more than rollout\.max_tokens = 7"):
        build_run(config, ALONE, tmp_path, "sft")
    config.sft.steps = 1
    with pytest.raises(ValueError, match="demonstration of sums/1"):
        build_run(config, ALONE, tmp_path, "train")


def test_a_demonstration_that_just_fits_is_taken(tmp_path: Path) -> None:
    create_model(tmp_path / "model", CreateModelConfig(layers=1), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    sample = Sample("sums/0", "sums", "1+2=", tokenizer.encode("1+2="), demonstration="1+1+1=3")
    check_demonstrations([sample], tokenizer, 8)
    with pytest.raises(ValueError, match="has 8 tokens"):
        check_demonstrations([sample], tokenizer, 7)


def test_a_demonstrated_conversation_is_learned_from_the_policys_turns(tmp_path: Path) -> None:
    """Its tokens follow the prompt's in the batch, and those of the reply are not scored."""
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}#{% endfor %}="
    )
    create_model(tmp_path / "model", CreateModelConfig(layers=1, chat_template=template), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    said = [("assistant", "2"), ("user", "+3"), ("assistant", "5")]
    config = Config(run_dir="unused", tasks=TasksConfig(train={"sums": TaskConfig(source="jsonl", chat=True)}))
    demonstration = [dict[str, object](role=role, content=content) for role, content in said]
    sample = Sample("sums/0", "sums", "1+1", tokenizer.encode("1+1#="), demonstration=demonstration)
    [target] = demonstration_ids([sample], tokenizer, config, len(tokenizer))
    batch = _batch([Example(sample.prompt_ids, *target, None)])
    assert tokenizer.decode(batch.tokens[0]) == "1+1#=2<eos>#+3#=5<eos>"
    assert tokenizer.decode(batch.tokens[0][batch.loss_mask[0]]) == "2<eos>5<eos>"
    sample.demonstration = demonstration[:2]
    with pytest.raises(ValueError, match=r"demonstration of sums/0: .* ends with a message of the assistant"):
        demonstration_ids([sample], tokenizer, config, len(tokenizer))
    config.tasks.train["sums"].agent = AgentConfig("tools", history="rendered", sequences=2)
    with pytest.raises(ValueError, match=r"demonstration of sums/0: it is one sequence, .* `agent.history` to kept"):
        demonstration_ids([sample], tokenizer, config, len(tokenizer))


@pytest.mark.parametrize("is_logged", [False, True])
def test_ranks_add_up_their_experts_loads_only_for_a_logged_step(is_logged: bool) -> None:
    class Counting:
        """Stands for an actor with experts, and counts how often its ranks would have to wait for each other."""

        sums = 0

        def micro_batches(self, batch: TokenBatch) -> list[MicroBatch]:
            return []

        def update(self, *arguments: object, **options: object) -> UpdateResult:
            return UpdateResult(Metrics(), 1.0, 1e-3)

        def expert_load(self) -> dict[str, float]:
            self.sums += 1
            return {"experts/load": 1.0}

    actor = Counting()
    batch = TokenBatch.continuations([([1], np.array([2]))])
    metrics = _step(cast("Actor", actor), batch, is_logged)
    assert actor.sums == int(is_logged)
    assert ("experts/load" in metrics) == is_logged
