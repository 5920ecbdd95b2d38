"""The adapters to other people's trainers give one seeded batch the same advantages."""

from __future__ import annotations

import importlib.util
import runpy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mas_gym
import search
from mas_gym.policies import load_policy
from search.credit import credit

pytestmark = [
    pytest.mark.slow,
    # The trainers and their dependencies warn as they please.
    pytest.mark.filterwarnings("default"),
]
EXAMPLES = Path(__file__).parents[1] / "examples" / "trainers"
QUESTIONS = 2


def needs(package: str, install: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install {install}")


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.fixture(scope="module")
def batch() -> list[search.Plan]:
    """The trees of the first step of every adapter."""
    task = mas_gym.load_task("arithmetic", split="train", limit=QUESTIONS)
    found = search.run("siblings:2", task, mas="rpsv", policy=load_policy("tiny"), training=True, seed=0)
    return sorted(found, key=lambda plan: [problem.id for problem in task].index(plan.problem_id))


def advantages(batch: list[search.Plan]) -> list[float]:
    found = [one.advantage for messages in credit(batch, "leave-one-out") for one in messages]
    assert len(found) == len(batch) * 30 and any(found)
    return found


@pytest.mark.trl
@needs("trl", "'mas-gym[agents]'")
def test_grpo_trainer_advantages_are_the_credit(batch: list[search.Plan], tmp_path: Path) -> None:
    import pandas as pd
    import torch

    trainer = example("trl_grpo")["main"](str(tmp_path), 1, QUESTIONS)
    [table] = (tmp_path / "completions").glob("*.parquet")
    rows = pd.read_parquet(table)
    assert rows["completion"].tolist() == [state.text for plan in batch for state in plan.tree.states[1:]]
    assert rows["advantage"].tolist() == pytest.approx(advantages(batch), abs=1e-6)
    base = load_policy("tiny").model.state_dict()
    assert any(not torch.equal(one, base[name]) for name, one in trainer.model.state_dict().items())


@contextmanager
def served(app: Any) -> Iterator[str]:
    import uvicorn

    # OpenEnv 0.3 logs an error when a client disconnects.
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@needs("openenv", "openenv-core")
def test_openenv_client_rewards_give_the_credit(batch: list[search.Plan]) -> None:
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.generic_client import GenericEnvClient

    parts = example("openenv_server")
    app = create_fastapi_app(parts["MASServer"], parts["Message"], parts["Turn"])
    with served(app) as url, GenericEnvClient(url).sync() as client:
        found = parts["served_credit"](client, batch)
        turn = client.reset(problem_id=batch[0].problem_id).observation
        state = client.state()
    assert [one.advantage for messages in found for one in messages] == pytest.approx(advantages(batch), abs=1e-6)
    assert turn["agent"] == "Reader" and batch[0].tree.states[0].question in turn["prompt"][-1]["content"]
    assert (state["episode_id"], state["step_count"]) == (batch[0].problem_id, 0)


@needs("verifiers", "'verifiers>=0.4,<0.5'")
def test_verifiers_rollouts_give_the_credit(batch: list[search.Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    [plan] = batch[:1]
    problem = mas_gym.load_task("arithmetic", split="train").problem(plan.problem_id)
    traces, found = example("verifiers_program")["searched"]([problem])
    assert [one.advantage for messages in found for one in messages] == pytest.approx(advantages([plan]), abs=1e-6)
    answers = {one.state.text for one in plan.candidates}
    assert {trace.info["answer"] for trace in traces} == answers and all(trace.num_turns == 4 for trace in traces)
