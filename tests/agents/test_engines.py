"""Conversations with engines of vLLM: one of two ranks, and two of one rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer

from megatron_rl.agents import guest
from megatron_rl.config import Machine, load_recipe, to_yaml
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.schema import TaskConfig
from megatron_rl.preflight.recipe import check_recipe
from megatron_rl.runtime.attempts import new_attempt, rank_environment
from megatron_rl.tasks.reset_step import prompts
from megatron_rl.weights.create import create_model
from tests.agents import inside, talking, walking
from tests.models import tiny
from tests.warm import run_ranks

GROUP = 2
BLOCK = 32  # tokens of vLLM's cache
GYMS = {"verifiers": "verifiers", "nemo_gym": "nemo-gym"}  # agents and their environments
PROGRAMS = Path(guest.__file__).with_name("guests")
TASKSETS = Path(__file__).with_name("tasksets")
RECORDS = (
    "u:{% for m in messages %}{{ m.role[0] }} {{ m.content }}{{ '\\n' }}{% endfor %}<eos>{{ '\\n' }}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
EXPERTS = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SCRIPT = str(Path(__file__).with_name("script.py"))


def agent(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": f"tests.agents.talking:{name}", "max_turns": 4, "turn_tokens": 12, "seconds": 100.0, **keys}


def gym_tasks(folder: Path) -> dict[str, Any]:
    """A taskset of verifiers and an example of NeMo-Gym's, a prompt each; `make agents-setup` makes what they run in."""
    block = {
        "taskset": {"id": "second_thoughts"},
        "agent": {"harness": {"id": "in_process"}, "runtime": {"type": "subprocess"}},
    }
    server = "resources_servers/example_multi_turn_gymnasium"
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "what is the capital?"}], "temperature": 0.3},
        "follow_ups": ["how many live there?", "name one sight."],
        "expected_answer": "e",
        "remark": "a line\u2028and another",
    }
    (folder / "rows.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    export("verifiers", json.dumps(block), str(folder / "verifiers.jsonl"), "--path", str(TASKSETS), "--size", "1")
    export("nemo_gym", str(folder / "rows.jsonl"), str(folder / "nemo_gym.jsonl"))
    params: dict[str, Any] = {
        "verifiers": {"environment": block, "path": str(TASKSETS)},
        "nemo_gym": {"config_paths": [f"{server}/configs/example_multi_turn_gymnasium.yaml"]},
    }
    return {
        name: {
            "source": "jsonl",
            "path": str(folder / f"{name}.jsonl"),
            "chat": True,
            "agent": {"name": name, "params": params[name], "turn_tokens": 12, "seconds": 300.0},
        }
        for name in GYMS
    }


def export(name: str, *arguments: str) -> None:
    """Leaves bytecode, which no installation did, to the guest that follows: half of its CPU seconds."""
    python = guest.ENVIRONMENTS / GYMS[name] / "bin" / "python"
    command = [str(python), str(PROGRAMS / f"run_{name}.py"), "export", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, timeout=900, env=environment)


def gyms_missing() -> str | None:
    """Why no gym can be tried here, in words; None: they can."""
    if all((guest.ENVIRONMENTS / name / ".installed").exists() for name in GYMS.values()):
        return None
    return "the environments of verifiers and NeMo-Gym have not been made: run `make agents-setup`"


def recipe(folder: Path, gyms: bool) -> Path:
    """A mixture of experts, whose routing is replayed. Prompts of six tasks: an agent in the process, one whose conversations
    part, one whose template rewrites histories, programs that speak responses and messages, steps, and none. `gyms`: and of
    two gyms."""
    # With the characters of special tokens' names, which the policy may draw: a template writes them as text.
    create = CreateModelConfig(
        characters=f"{talking.CHARACTERS}<>_", vocab_size=64, layers=2, hidden_size=64, init_std=0.3
    )
    create_model(folder / "model", create, 3)
    tiny.write(folder / "model", "qwen3_moe", **EXPERTS)
    (folder / "model" / "chat_template.jinja").write_text(talking.TEMPLATE)
    tasks: dict[str, Any] = {}
    for name, texts in (
        ("talk", ["what is 1+1?", "who are you?"]),
        ("outside", ["say something."]),
        ("parts", ["c?"]),
        ("records", ["d?"]),
        ("single", ["b?", "a?"]),
    ):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        tasks[name] = {"source": "jsonl", "path": str(path), "chat": True}
    tasks["talk"]["agent"] = agent("patient", params={"latency": 5})
    tasks["outside"]["agent"] = agent("program", params={"script": SCRIPT, "dialects": ["responses", "claude"]})
    tasks["parts"]["agent"] = agent("parting", sequences=4, params={"latency": 5}) | {"max_turns": 6, "turn_tokens": 4}
    (folder / "records.jinja").write_text(RECORDS)
    rendered = agent("patient", sequences=2, history="rendered", params={"latency": 5, "turns_each": 2})
    tasks["records"] |= {"agent": rendered | {"turn_tokens": 4}}  # a special token is many characters once it is text
    tasks["records"]["chat_template"] = str(folder / "records.jinja")
    walk = {
        "environment": f"{walking.__file__}:Walk",
        "python": sys.executable,
        "environment_params": {"latency": 0.01},
    }
    tasks["walk"] = {"source": "gymnasium", "params": walk, "size": 1, "chat": True}
    tasks["walk"]["agent"] = {**agent(""), "name": "gymnasium", "params": walk}
    if gyms:
        tasks |= gym_tasks(folder)
    held_out = {**tasks["talk"], "path": str(folder / "held_out.jsonl")}
    (folder / "held_out.jsonl").write_text('{"prompt": "how are you?"}\n')
    recipe = {
        "seed": 3,
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "tasks": {"train": tasks, "eval": {"held_out": held_out}},
        "rewards": {
            "letters": {"reward": "agent", "tasks": ["talk", "records", "held_out"], "params": {"column": "letters"}},
            "turns": {"reward": "agent", "tasks": ["outside", "parts"]},
            "walked": {"reward": "agent", "tasks": ["walk"]},
            "short": {"reward": "length", "params": {"limit": 12}},
            **{name: {"reward": "agent", "tasks": [name]} for name in GYMS if gyms},
        },
        "rollout": {
            "group_size": GROUP,
            "max_prompt_tokens": 32,
            "max_tokens": 128,
            "cpu_cache_gib": 0.1,
            "max_concurrent": 4,
        },
        "actor": {
            "parallel": {"tensor": 2, "sequence": True},
            "moe": {"routing_replay": "rollout"},
            "tokens_per_microbatch": 256,
            "optimizer": {"lr": 0.002},
        },
        "trainer": {"steps": 1, "prompts_per_step": 10 if gyms else 8},
        "algorithm": {"preset": "grpo"},
        "logging": {"report": False, "samples_per_step": 100},
        "checkpoint": {"every": 0},
        "launch": {"processes": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


class Ran:
    """What a run of two ranks has drawn, by row, and what it wrote."""

    def __init__(self, folder: Path, tensor_parallel: int, gyms: bool = False) -> None:
        run_dir = folder / "run"
        run_dir.mkdir()
        config = load_recipe(recipe(folder, gyms), [f"rollout.tensor_parallel={tensor_parallel}"])
        (run_dir / "recipe.yaml").write_text(to_yaml(check_recipe(config, "train", Machine())))
        environment = {**rank_environment(0), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        outcome = run_ranks([sys.executable, str(inside.__file__), str(run_dir)], 2, new_attempt(run_dir), environment)
        assert outcome.code == 0, outcome.message
        self.folder = folder
        self.prompts = 10 if gyms else 8
        records = [record for path in run_dir.glob("drawn_*.json") for record in json.loads(path.read_text())]
        self.drawn = {record["row"]: record for record in records}
        self.credit = json.loads((run_dir / "credit.json").read_text())
        self.misrouted = json.loads((run_dir / "misrouted.json").read_text())
        self.prefixes = json.loads((run_dir / "prefixes.json").read_text())
        self.samples = [json.loads(line) for line in (run_dir / "samples" / "step_1.jsonl").read_text().splitlines()]
        self.metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    if (missing := gyms_missing()) is not None and "MEGATRON_RL_CI" in os.environ:
        pytest.fail(missing)
    return Ran(tmp_path_factory.mktemp("of_two_ranks"), 2, gyms=missing is None)


@pytest.fixture(scope="session")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("two_engines"), 1)


def test_the_actor_finds_what_was_drawn_as_probable_as_the_engine(of_two_ranks: Ran, two_engines: Ran) -> None:
    for ran in (of_two_ranks, two_engines):
        assert sorted(ran.drawn) == [*range(ran.prompts * GROUP)]
        for record in ran.drawn.values():
            assert len(record["logprobs"]) == sum(record["mask"])
            assert np.abs(np.array(record["logprobs"]) - record["by_actor"]).max() < 2e-4
    turns = [record["turns"] for _, record in sorted(two_engines.drawn.items()) if not walked(record)]
    assert turns.count(3) == 3 * GROUP
    assert turns.count(1) == 2 * GROUP
    parted = [record for record in of_two_ranks.drawn.values() if len(record["sequences"]) > 1]
    assert {(record["id"], record["turns"], len(record["sequences"])) for record in parted} == {
        ("parts/0", 6, 4),
        ("records/0", 2, 2),
    }


def test_every_token_has_the_experts_that_transformers_chooses(of_two_ranks: Ran, two_engines: Ran) -> None:
    """Turns and what lies between them, in every sequence, but for its last token, of which nothing was computed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(two_engines.folder / "model", dtype=torch.float32)
    for ran in (of_two_ranks, two_engines):
        for record in ran.drawn.values():
            ends = np.cumsum(record["sequences"])[:-1]
            experts = np.split(np.array(record["experts"]), ends)
            for tokens, chosen in zip(np.split(np.array(record["tokens"]), ends), experts, strict=True):
                with torch.no_grad():
                    routers = model(torch.from_numpy(tokens)[None], output_router_logits=True).router_logits
                for layer, logits in enumerate(routers):
                    expected = logits.topk(EXPERTS["num_experts_per_tok"]).indices.sort().values
                    np.testing.assert_array_equal(np.sort(chosen[:-1, layer]), expected[:-1].numpy())


def test_a_router_that_chooses_otherwise_is_seen_and_named(of_two_ranks: Ran, two_engines: Ran) -> None:
    for ran, at in ((of_two_ranks, "[0] of 1"), (two_engines, "[1] of 2")):
        found, said, [row] = ran.misrouted, ran.misrouted["said"], [row for row in ran.metrics if row["step"] == 1]
        assert found["healthy"] == row["sync/experts_max_diff"] == 0
        assert f"not chosen {found['share']:.0%} of the experts that tokens go to in the engine's layer 1 (" in said
        assert f"may tip 12%. Engines affected: {at}. Every tensor was sent as the actor holds it" in said
        assert re.search(r"sent to the engine's experts in the actor too, 0\.\d+ of the mean is left", said)


def test_each_turn_is_drawn_behind_the_history_as_the_template_writes_it(of_two_ranks: Ran, two_engines: Ran) -> None:
    decode = AutoTokenizer.from_pretrained(str(two_engines.folder / "model")).decode
    for ran in (of_two_ranks, two_engines):
        records = [record for record in ran.drawn.values() if record["id"] == "records/0"]
        assert len(records) == GROUP
        for record in records:
            said = record["messages"]
            for number, (tokens, begin, end) in enumerate(turns_of(record)):
                before, turn = said[: 1 + 2 * number], said[1 + 2 * number]
                written = "".join(f"{message['role'][0]} {message['content']}\n" for message in before)
                assert decode(tokens[:begin]) == f"u:{written}<eos>\na:"
                assert decode(tokens[begin:end]).removesuffix("<eos>") == turn["content"]
                assert end == len(tokens)
            assert number == 1


def walked(record: dict[str, Any]) -> bool:
    return bool(record["messages"]) and record["messages"][0]["content"].startswith("at ")


def test_an_environment_with_steps_is_played_and_its_rewards_are_summed(of_two_ranks: Ran) -> None:
    played = [record for record in of_two_ranks.drawn.values() if walked(record)]
    assert len(played) == GROUP
    [item] = prompts(TaskConfig("gymnasium", params={"environment": f"{walking.__file__}:Walk"}, size=1))
    for record in played:
        walk, total = walking.Walk(), 0.0
        seen = walk.reset(seed=item.metadata["seed"])[0]
        for said, answer in zip(record["messages"][::2], record["messages"][1::2], strict=True):
            assert said["content"] == seen
            seen, reward, *_ = walk.step(answer["content"])
            total += reward
        assert record["rewards"]["walked"] == total


def test_two_engines_draw_what_one_engine_draws(of_two_ranks: Ran, two_engines: Ran) -> None:
    of_one = {(record["id"], record["index"]): record for record in of_two_ranks.drawn.values()}
    for other in two_engines.drawn.values():
        record = of_one[other["id"], other["index"]]
        for key in ("tokens", "mask", "sequences", "messages", "failed_by"):
            assert other[key] == record[key], key
        assert other["rewards"].items() <= record["rewards"].items()  # which has the gyms' columns, too
        assert np.abs(np.array(other["logprobs"]) - record["logprobs"]).max() < 1e-4


def test_turns_have_the_same_advantages_in_both_layouts_and_move_the_weights_alike(
    of_two_ranks: Ran, two_engines: Ran
) -> None:
    one, two = of_two_ranks.credit, two_engines.credit
    assert one["advantages"].keys() == two["advantages"].keys()
    for name, values in two["advantages"].items():
        np.testing.assert_allclose(one["advantages"][name], values, atol=1e-6)
    for name in ("actor/grad_norm", "token_advantage/abs_mean", "loss/objective"):
        assert one[name] == pytest.approx(two[name], rel=1e-3), name
    walks = [record for record in two_engines.drawn.values() if walked(record)]
    earned = []  # in each turn
    for record in walks:
        walk = walking.Walk()
        [item] = prompts(TaskConfig("gymnasium", params={"environment": f"{walking.__file__}:Walk"}, size=1))
        walk.reset(seed=item.metadata["seed"])
        earned.append([walk.step(message["content"])[1] for message in record["messages"][1::2]])
    values = [[sum(r * 0.5 ** (at - k) for at, r in enumerate(e) if at >= k) for k in range(len(e))] for e in earned]
    for record, own, other in zip(walks, values, values[::-1], strict=True):
        shorts = [each["rewards"]["short"] for each in (walks if record is walks[0] else walks[::-1])]
        got = two["advantages"][f"{record['id']} {record['index']}"]
        lengths = [end - begin for _, begin, end in turns_of(record)]
        expected = [
            own[k] - other[k] + shorts[0] * 0.5 ** (len(own) - 1 - k) - shorts[1] * 0.5 ** (len(other) - 1 - k)
            if k < len(other)
            else 0.0
            for k in range(len(own))
        ]
        np.testing.assert_allclose(got, np.repeat(expected, lengths), atol=1e-6)


def test_a_verifiers_taskset_and_a_nemo_gym_server_train(of_two_ranks: Ran) -> None:
    if (missing := gyms_missing()) is not None:
        pytest.skip(missing)
    asked = {"verifiers": ["are you sure?"], "nemo_gym": ["how many live there?", "name one sight."]}
    for name, questions in asked.items():
        records = [record for record in of_two_ranks.drawn.values() if record["id"] == f"{name}/0"]
        assert len(records) == GROUP
        for record in records:
            assert record["failed_by"] is None
            said = [message["content"] for message in record["messages"] if message["role"] == "user"]
            assert said[1:] == questions
            assert record["turns"] == len(questions) + 1
            last = record["messages"][-1]["content"]
            expected = 0.5 * ("a" in last) if name == "verifiers" else float("e" in last)
            assert record["rewards"][name] == expected
    [metrics] = [line for line in of_two_ranks.metrics if line.get("step") == 1]
    assert {f"reward/{name}" for name in GYMS} <= metrics.keys()


def test_a_step_trains_on_the_conversations_and_writes_them(of_two_ranks: Ran) -> None:
    [metrics] = [line for line in of_two_ranks.metrics if line.get("step") == 1]
    assert metrics["actor/updates"] == 1
    assert metrics["mismatch/abs_log_ratio_max"] < 2e-4  # as packed, several sequences of a rollout too
    assert metrics["conversation/sequences"] == np.mean([len(r["sequences"]) for r in of_two_ranks.drawn.values()])
    assert metrics["response_length/mean"] == np.mean([len(r["logprobs"]) for r in of_two_ranks.drawn.values()])
    for row, sample in enumerate(of_two_ranks.samples):
        record = of_two_ranks.drawn[row]
        assert sample["tokens"] == len(record["logprobs"])
        if record["messages"]:
            assert sample["response"] == record["messages"][-1]["content"]
    assert "eval/held_out/avg@1" in of_two_ranks.metrics[-1]


def test_turns_find_the_earlier_ones_in_the_cache_of_their_engine(of_two_ranks: Ran, two_engines: Ran) -> None:
    for ran in (of_two_ranks, two_engines):
        read = cached = 0
        for record in ran.drawn.values():
            computed = list[list[int]]()
            for sequence, begin, end in turns_of(record) if record["converses"] else ():
                found = max((common(sequence, earlier) for earlier in computed), default=0)
                read += begin
                cached += BLOCK * min((begin - 1) // BLOCK, found // BLOCK)
                computed.append(sequence[: end - 1])  # nothing is computed of the last token of a turn
        assert cached > 0
        assert ran.prefixes["found"] == cached / read
        assert ran.prefixes["warm"] > ran.prefixes["found"]


def turns_of(record: dict[str, Any]) -> Iterator[tuple[list[int], int, int]]:
    """Yields the tokens of a turn's sequence, and where in it the turn begins and ends."""
    at = 0
    for length in record["sequences"]:
        tokens, mask = record["tokens"][at : at + length], np.array([False, *record["mask"][at : at + length], False])
        for begin, end in zip(
            np.flatnonzero(~mask[:-1] & mask[1:]), np.flatnonzero(mask[:-1] & ~mask[1:]), strict=True
        ):
            yield tokens, int(begin), int(end)
        at += length


def common(one: list[int], other: list[int]) -> int:
    """Tokens that two sequences have in common at their beginnings."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_new_weights_use_no_keys_and_values_of_old_ones(of_two_ranks: Ran, two_engines: Ran) -> None:
    for ran in (of_two_ranks, two_engines):
        assert ran.prefixes["moved"] > 0.1
        assert ran.prefixes["stale"] < 2e-4
