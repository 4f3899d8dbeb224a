"""One trained model through the three backends of `megatron-rl evaluate`: its checkpoint, its export, a vLLM server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config.schema import EndpointConfig
from megatron_rl.rollout.endpoint_engine import EndpointEngine, find_server

from .conftest import Finished
from .job import RECIPE, Job, rows, samples
from .serving import VllmServer

pytestmark = pytest.mark.engine
Evaluated = tuple[dict[str, Any], list[dict[str, Any]], str]
SAMPLED = ("trainer.eval_rollouts=4", "trainer.eval_temperature=1.0")
STEPS = RECIPE["trainer"]["steps"]
ASKING = Path(__file__).with_name("asking.py")
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
CONVERSATIONS = 16


def talk(folder: Path) -> list[str]:
    """Overrides: a further task, of conversations."""
    prompts = folder / "talk.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+3="}) + "\n" for i in range(4)))
    agent = {"name": f"{ASKING}:twice", "max_turns": 2, "turn_tokens": 9}
    task = {"source": "jsonl", "path": str(prompts), "chat": True, "agent": agent}
    return [
        f"tasks.eval.talk={json.dumps(task)}",
        "rewards.correct.tasks=[sums,held_out]",
        "rewards.said={reward: agent, tasks: [talk]}",
    ]


def evaluated(folder: Path, *arguments: str) -> Evaluated:
    """One evaluation's evaluation.json, responses and terminal."""
    job = Job(folder, *arguments, command="evaluate")
    job.succeed()
    paths = [job.run_dir / "samples" / f"{task}.jsonl" for task in ("held_out", "talk")]
    responses = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return json.loads((job.run_dir / "evaluation.json").read_text()), responses, job.stdout


def interrupted_and_continued(folder: Path, *arguments: str) -> Evaluated:
    """As `evaluated`, but a first attempt fails in its rewards, and some of its responses are lost."""
    folder.mkdir()
    (folder / "bad.py").write_text("def bad():\n    return lambda completion, sample: None\n")
    bad = (f"rewards.bad.reward={folder}/bad.py:bad", "rewards.bad.tasks=[talk]")  # the second task
    failing = Job(folder, *arguments, *bad, command="evaluate")
    assert failing.finish() == 1, failing.stderr
    [kept] = (folder / "run" / "responses").glob("*.jsonl")
    lines = kept.read_text().splitlines()
    assert len(lines) == 64 + CONVERSATIONS
    kept.write_text("\n".join(lines[30:70]) + "\n" + lines[70][:30])
    return evaluated(folder, *arguments)


@pytest.fixture(scope="module")
def server(straight: Finished, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    options = ("--generation-config", "vllm", "--max-model-len", "64")
    seeded = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192")
    server = VllmServer(
        straight.run_dir / "export", tmp_path_factory.mktemp("server") / "server.log", *options, *seeded
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def backends(server: VllmServer, straight: Finished, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evaluated]:
    folder, run = tmp_path_factory.mktemp("backends"), straight.run_dir
    chat = shutil.copytree(run / "export", folder / "chat")  # the server needs no template: it is given tokens
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    sampled = (*SAMPLED, *talk(folder))
    found = {
        "checkpoint": evaluated(folder / "a", "--model", str(run / "checkpoints" / f"step_{STEPS}"), *SAMPLED),
        "engine": interrupted_and_continued(folder / "b", "--model", str(chat), *sampled),
    }
    asking = ("--model", str(chat), "--endpoint", server.url())
    found["endpoint"] = evaluated(folder / "c", *asking, *sampled)
    found["greedy"] = evaluated(folder / "d", *asking)
    return found


def test_a_server_scores_tokens_as_its_weights_do(server: VllmServer, straight: Finished) -> None:
    from transformers import AutoModelForCausalLM

    config = EndpointConfig()
    engine = EndpointEngine(find_server([server.url()], None, config, longest=0), config)
    sequences = [[3, 14, 15, 9, 2, 6], [5, 3, 5]]
    scores = engine.score(sequences)
    engine.shutdown()
    model = AutoModelForCausalLM.from_pretrained(straight.run_dir / "export", dtype=torch.float32)
    for tokens, scored in zip(sequences, scores, strict=True):
        ids = torch.tensor(tokens)
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(scored, expected.detach().numpy(), atol=1e-4)


def test_sampled_with_one_seed_all_backends_draw_the_same_responses(backends: dict[str, Any]) -> None:
    results = {backend: backends[backend] for backend in ("checkpoint", "engine", "endpoint")}
    for backend, (content, _, _) in results.items():
        assert content["model"]["backend"] == backend
        assert content["failed_requests"] == 0
    metrics = [
        {name: value for name, value in content["metrics"].items() if name.startswith("eval/held_out/")}
        for content, _, _ in results.values()
    ]
    assert metrics[0] == metrics[1] == metrics[2]
    texts = [[record["response"] for record in records[:64]] for _, records, _ in results.values()]
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 64
    assert len(set(texts[0])) > 16, "the responses were sampled"


def test_a_server_converses_as_the_engine_does(backends: dict[str, Any]) -> None:
    """Token for token; a conversation that was kept on disk is as it was held."""
    of_server, of_engine = (backends[backend][1][64:] for backend in ("endpoint", "engine"))
    assert of_server == of_engine
    assert len(of_server) == CONVERSATIONS
    for record in of_server:
        assert [message["role"] for message in record["conversation"]] == ["assistant", "user", "assistant"]
        assert record["tokens"] == sum(record["turn_tokens"])
        assert record["rewards"]["said"] == len(record["response"])
    content = backends["endpoint"][0]
    said = np.mean([record["rewards"]["said"] for record in of_server])
    assert content["metrics"]["eval/talk/reward/said"]["value"] == pytest.approx(said)
    assert content["metrics"]["eval/talk/pass@4"]["value"] <= 1


def test_an_interrupted_evaluation_draws_only_what_is_missing(backends: dict[str, Any]) -> None:
    assert "continuing an interrupted evaluation: 40 responses" in backends["engine"][2]
    assert "continuing" not in backends["checkpoint"][2]


def test_greedy_a_server_answers_as_the_run_itself_did(backends: dict[str, Any], straight: Finished) -> None:
    content, records, _ = backends["greedy"]
    last = rows(straight.run_dir)[-1]
    assert content["metrics"]["eval/held_out/avg@1"]["value"] == last["eval/held_out/avg@1"]
    own = samples(straight.run_dir, f"eval_held_out_step_{STEPS}.jsonl")
    assert [record["response"] for record in records] == [record["response"] for record in own]


def test_a_checkpoint_brings_its_own_recipe_and_its_results_lie_below_its_run(straight: Finished) -> None:
    from megatron_rl.commands import evaluate
    from megatron_rl.config import Machine

    checkpoint = straight.run_dir / "checkpoints" / f"step_{STEPS}"
    args = evaluate.argparse.Namespace(
        command="evaluate",
        recipe=None,
        overrides=[],
        model=str(checkpoint),
        endpoint=None,
        served_name=None,
        harness=None,
    )
    config, found = evaluate._resolve(args, Machine(gpus=0))
    assert config.run_dir == str(straight.run_dir / "evaluation" / checkpoint.name)
    assert config.tasks.eval.keys() == {"held_out"}
    assert found is not None
    assert found.folder == checkpoint
