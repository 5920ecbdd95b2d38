"""Policies made of other policies: asynchronous views, one per agent, and the response cache."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import pickle
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mas_gym
import search
from mas_gym.cli import app
from mas_gym.errors import ConfigError, DataError, EngineUnavailableError, PolicyError, UnknownNameError
from mas_gym.policies import RecordingPolicy, ScriptedPolicy, load_policy
from mas_gym.policies.base import AsyncPolicy, Policy, Sample, SamplingReply, SamplingRequest
from mas_gym.policies.batch_queue import as_policy
from mas_gym.policies.cache import CachedPolicy
from mas_gym.policies.usage_meters import money_of
from mas_gym.systems.prompts import ChatMessage
from search.results.run_info import RunInfo


def say(request: SamplingRequest, seed: int) -> str:
    return f"{request.messages[-1].content} {seed} {random.Random(seed).random():.6f}"


def request(i: int, n: int = 2, agent: str = "Solver", **changes: Any) -> SamplingRequest:
    messages = (ChatMessage("user", f"question {i}"),)
    return SamplingRequest(messages, tuple(range(10 * i, 10 * i + n)), agent=agent, **changes)


def ask(policy: AsyncPolicy, requests: Sequence[SamplingRequest]) -> list[SamplingReply | BaseException]:
    async def run() -> list[SamplingReply | BaseException]:
        return await asyncio.gather(*map(policy.sample_async, requests), return_exceptions=True)

    return asyncio.run(run())


class Counting:
    """A batch policy that records its calls and fails on request."""

    def __init__(self, max_batch: int = 8) -> None:
        self.name, self.max_batch = "counting", max_batch
        self.batches: list[int] = []
        self.threads: set[str] = set()
        self.fail: dict[str, Exception] = {}

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        self.batches.append(sum(len(r.seeds) for r in requests))
        self.threads.add(threading.current_thread().name)
        for r in requests:
            if r.messages[-1].content in self.fail:
                raise self.fail[r.messages[-1].content]
        return list(ScriptedPolicy(say).sample(requests))

    def identity(self) -> object:
        return say


class TestAsAsync:
    def test_batching_fills_batches_and_keeps_the_replies(self) -> None:
        policy = Counting(max_batch=8)
        requests = [request(i) for i in range(20)]
        assert ask(as_policy(policy), requests) == ScriptedPolicy(say).sample(requests)
        assert policy.batches == [8, 8, 8, 8, 8]

    def test_batching_works_across_event_loops(self) -> None:
        view = as_policy(Counting())
        assert [ask(view, [request(i)]) for i in range(3)] == [
            ScriptedPolicy(say).sample([request(i)]) for i in range(3)
        ]

    def test_asynchronous_policies_are_not_wrapped(self) -> None:
        view = as_policy(Counting())
        assert as_policy(view) is view

    def test_invalid_request_does_not_affect_other_requests(self) -> None:
        policy = Counting()
        policy.fail["question 1"] = PolicyError("no")
        replies = ask(as_policy(policy), [request(i) for i in range(3)])
        assert isinstance(replies[1], PolicyError)
        assert [replies[0], replies[2]] == ScriptedPolicy(say).sample([request(0), request(2)])

    @pytest.mark.parametrize("error", [EngineUnavailableError("gone"), ZeroDivisionError()])
    def test_engine_failure_fails_its_batch_and_later_calls_succeed(self, error: Exception) -> None:
        policy = Counting()
        policy.fail["question 1"] = error
        view = as_policy(policy)
        assert all(isinstance(reply, type(error)) for reply in ask(view, [request(i) for i in range(3)]))
        assert ask(view, [request(0)]) == ScriptedPolicy(say).sample([request(0)])

    def test_cancelled_requests_are_not_sent(self) -> None:
        policy = Counting()

        async def run() -> None:
            task = asyncio.create_task(as_policy(policy).sample_async(request(0)))
            other = asyncio.create_task(as_policy(policy).sample_async(request(1)))
            await asyncio.sleep(0)
            task.cancel()
            await other

        asyncio.run(run())
        assert policy.batches == [2]


class TestPerAgent:
    def test_each_agent_uses_its_policy(self) -> None:
        one, rest = ScriptedPolicy(lambda r, s: "one", "one"), ScriptedPolicy(lambda r, s: "rest", "rest")
        policy = load_policy({"Solver": one, "*": rest})
        assert isinstance(policy, AsyncPolicy)
        replies = ask(policy, [request(0, agent="Solver"), request(0, agent="Reader")])
        assert [r.samples[0].text for r in replies if isinstance(r, SamplingReply)] == ["one", "rest"]
        assert policy.name == "Solver=one, *=rest"

    def test_equal_specs_are_loaded_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("openai", reason="the openai package is not installed")
        policy = load_policy({"A": "openai:m@http://127.0.0.1:9/v1", "B": "openai:m@http://127.0.0.1:9/v1"})
        policies: dict[str, Policy] = policy.policies  # type: ignore[union-attr]
        assert policies["A"] is policies["B"]

    def test_mapping_may_be_given_as_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("openai", reason="the openai package is not installed")
        monkeypatch.setenv("OPENAI_API_KEY", "any")
        policy = load_policy("{Solver: 'openai:m@http://127.0.0.1:9/v1#timeout=3', '*': 'openai:m'}")
        assert policy.name == "Solver=openai:m, *=openai:m"
        for wrong in ("{Solver", "{Solver: 3}", "{3: tiny}"):
            with pytest.raises(ConfigError, match="expected a mapping"):
                load_policy(wrong)

    def test_cost_is_the_sum_over_policies(self, tmp_path: Path) -> None:
        pytest.importorskip("openai", reason="the openai package is not installed")
        one = load_policy("openai:m@http://127.0.0.1:9/v1#price=1,1,1")
        other = load_policy("openai:m@http://127.0.0.1:9/v1", price=(2, 2, 2))
        team = load_policy({"A": one, "B": one, "C": CachedPolicy(other, tmp_path / "c.db"), "*": ScriptedPolicy(say)})
        assert money_of(team.meters) == 0.0 and list(team.meters) == ["A=openai:m", "C=openai:m"]
        one.meter.add(10**6, 0, 0)  # type: ignore[union-attr]
        other.meter.add(0, 0, 10**6)  # type: ignore[union-attr]
        assert money_of(team.meters) == 3.0
        assert money_of(load_policy({"*": ScriptedPolicy(say)}).meters) is None

    def test_agent_without_a_policy_is_rejected(self) -> None:
        policy = load_policy({"Solver": ScriptedPolicy(say)})
        [error] = ask(policy, [request(0, agent="Reader")])  # type: ignore[arg-type]
        assert isinstance(error, PolicyError) and "'Reader'" in str(error)

    def test_invalid_mappings_are_rejected(self) -> None:
        with pytest.raises(ConfigError):
            load_policy({})
        with pytest.raises(ConfigError, match="several policies"):
            load_policy({"*": ScriptedPolicy(say)}, max_batch=3)
        with pytest.raises(UnknownNameError):
            load_policy({"*": "nonsense:x"})


def test_wrappers_of_a_policy_on_two_threads_do_not_call_it_at_once() -> None:
    class Alone(ScriptedPolicy):
        inside = most = 0

        def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.002)
            self.inside -= 1
            return super().sample(requests)

    policy = Alone(say)
    threads = [
        threading.Thread(target=lambda: [ask(as_policy(policy), [request(i)]) for i in range(20)]) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert policy.most == 1


class TestCache:
    def test_cached_rerun_makes_no_calls(self, tmp_path: Path) -> None:
        requests = [request(i, n=3) for i in range(10)]
        first, second = Counting(), Counting()
        cold, warm = CachedPolicy(first, tmp_path / "c.db"), CachedPolicy(second, tmp_path / "c.db")
        expected = ScriptedPolicy(say).sample(requests)
        assert ask(cold, requests) == expected
        replies = ask(warm, requests)
        assert [r.samples for r in replies if isinstance(r, SamplingReply)] == [r.samples for r in expected]
        assert second.batches == [] and (warm.hits, warm.misses) == (30, 0) and (cold.hits, cold.misses) == (0, 30)
        cold.close(), warm.close()

    def test_runs_beside_each_other_get_the_same_samples(self, tmp_path: Path) -> None:
        file = tmp_path / "c.db"

        class Unseeded(ScriptedPolicy):
            """A server that ignores seeds; the other run stores its samples while this one waits for it."""

            def identity(self) -> str:
                return "unseeded"

            def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
                if self.others is not None:
                    ask(self.others, requests)
                return super().sample(requests)

        draws, policies = random.Random(0), []
        for others in (None, True):
            inner = Unseeded(lambda request, seed: str(draws.random()), "unseeded")
            inner.others = policies[0] if others else None
            policies.append(CachedPolicy(inner, file))
        requests = [request(i) for i in range(3)]
        late, early = ask(policies[1], requests), ask(policies[0], requests)
        assert [reply.samples for reply in late] == [reply.samples for reply in early]
        for policy in policies:
            policy.close()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
    def test_forked_process_uses_the_cache(self, tmp_path: Path) -> None:
        policy = CachedPolicy(ScriptedPolicy(say), tmp_path / "c.db")
        first, second = [request(0)], [request(1)]
        before = ask(policy, first)

        def use() -> list[Any]:
            return [reply.samples for reply in ask(policy, [*first, *second])]  # type: ignore[union-attr]

        child = multiprocessing.get_context("fork").Process(target=use)
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert [reply.samples for reply in ask(policy, first)] == [reply.samples for reply in before]
        ask(policy, second)
        assert policy.misses == 2
        policy.close()

    def test_cache_requests_only_missing_samples(self, tmp_path: Path) -> None:
        policy = CachedPolicy(inner := Counting(), tmp_path / "c.db")
        ask(policy, [request(0, n=2)])
        [reply] = ask(policy, [request(0, n=5)])
        assert inner.batches == [2, 3]
        assert reply == ScriptedPolicy(say).sample([request(0, n=5)])[0]
        policy.close()

    @pytest.mark.parametrize("change", [{"temperature": 0.8}, {"top_p": 0.9}, {"max_new_tokens": 5}])
    def test_cache_distinguishes_parameters(self, tmp_path: Path, change: dict[str, Any]) -> None:
        policy = CachedPolicy(Counting(), tmp_path / "c.db")
        ask(policy, [request(0), request(0, **change), request(1)])
        assert (policy.hits, policy.misses) == (0, 6)
        policy.close()

    def test_cache_distinguishes_models(self, tmp_path: Path) -> None:
        policies = [CachedPolicy(ScriptedPolicy(say, name), tmp_path / "c.db") for name in ("a", "b")]
        for policy in policies:
            ask(policy, [request(0)])
            assert policy.misses == 2
            policy.close()

    def test_prompt_tokens_of_cached_replies_are_counted_as_cached(self, tmp_path: Path) -> None:
        class OneByOne(Counting):
            independent_samples, revision = True, 1

            def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply | PolicyError]:  # type: ignore[override]
                return [
                    r._replace(prompt_tokens=10 * len(r.samples), cached_tokens=4) for r in super().sample(requests)
                ]  # type: ignore[union-attr]

        policy = CachedPolicy(OneByOne(), tmp_path / "c.db")
        found = [ask(policy, [request(0, n=n)])[0] for n in (3, 2, 5, 5)]
        tokens = [(reply.prompt_tokens, reply.cached_tokens) for reply in found]
        assert tokens == [(30, 4), (20, 20), (50, 34), (50, 50)]
        policy.close()

    def test_samples_of_one_call_are_cached_together(self, tmp_path: Path) -> None:
        inner = Counting()
        inner.independent_samples = False  # type: ignore[attr-defined]
        policy = CachedPolicy(inner, tmp_path / "c.db")
        ask(policy, [request(0, n=2)])
        ask(policy, [request(0, n=3)])
        ask(policy, [request(0, n=3)])
        assert inner.batches == [2, 3]
        policy.close()

    def test_failures_are_not_cached(self, tmp_path: Path) -> None:
        inner = Counting()
        inner.fail["question 0"] = PolicyError("no")
        policy = CachedPolicy(inner, tmp_path / "c.db")
        assert isinstance(ask(policy, [request(0)])[0], PolicyError)
        inner.fail.clear()
        assert ask(policy, [request(0)]) == ScriptedPolicy(say).sample([request(0)])
        policy.close()

    def test_cache_preserves_text_and_numbers(self, tmp_path: Path) -> None:
        odd = Sample("\x00 \u202e tab\t " + "x" * 100_000, 3, -0.1 - 2**-40, "length")
        policy = CachedPolicy(ScriptedPolicy(functools.partial(lambda sample, r, s: sample, odd)), tmp_path / "c.db")
        for _ in range(2):
            [reply] = ask(policy, [request(0, n=1)])
            assert isinstance(reply, SamplingReply) and reply.samples == (odd,)
        policy.close()

    def test_uncacheable_replies_are_returned(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        policy = CachedPolicy(ScriptedPolicy(lambda r, s: Sample("\ud800", 1, None, "stop")), tmp_path / "c.db")
        [reply] = ask(policy, [request(0, n=1)])
        assert isinstance(reply, SamplingReply) and "not cached" in caplog.text
        policy.close()

    def test_files_that_are_not_caches_are_rejected_and_unchanged(self, tmp_path: Path) -> None:
        text, other = tmp_path / "text", tmp_path / "other.db"
        text.write_text("hello" * 500)
        database = sqlite3.connect(other)
        database.execute("CREATE TABLE mine (x)")
        database.close()
        for file in (text, other, tmp_path / "absent" / "c.db"):
            before = file.read_bytes() if file.exists() else None
            with pytest.raises(DataError, match="response cache"):
                CachedPolicy(ScriptedPolicy(say), file)
            assert (file.read_bytes() if file.exists() else None) == before

    @pytest.mark.parametrize("options", ["#cache={}", "#cache={}&timeout=7", "#timeout=7&cache={}&api=chat"])
    def test_cache_option_wraps_the_policy_at_any_position(self, tmp_path: Path, options: str) -> None:
        pytest.importorskip("openai", reason="the openai package is not installed")
        policy = load_policy("openai:m@http://127.0.0.1:9/v1" + options.format(tmp_path / "c.db"))
        assert isinstance(policy, CachedPolicy) and policy.file == tmp_path / "c.db"
        assert policy.policy.options.timeout == (7 if "timeout" in options else 300)
        policy.close()

    def test_cache_distinguishes_different_weights_at_the_same_path(self, tmp_path: Path) -> None:
        pytest.importorskip("torch", reason="torch is not installed")
        import local_models

        for seed in (0, 1):
            folder = local_models.save(tmp_path / "model", seed=seed)
            policy = load_policy(f"transformers:{folder}", cache=tmp_path / "c.db")
            assert isinstance(policy, CachedPolicy)
            for misses in (2, 2):
                ask(policy, [request(0, max_new_tokens=4)])
                assert policy.misses == misses
            policy.close()

    @pytest.mark.slow
    def test_cache_is_shared_by_processes_and_survives_sigkill(self, tmp_path: Path) -> None:
        code = (
            "import asyncio, sys\n"
            "from test_policy_wrappers import *\n"
            "policy = CachedPolicy(ScriptedPolicy(say), sys.argv[1])\n"
            "async def run():\n"
            "    for i in range(int(sys.argv[2]), 400): await policy.sample_async(request(i)); print(i, flush=True)\n"
            "asyncio.run(run())\n"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "c.db")]
        here = Path(__file__).parent
        workers = [
            subprocess.Popen([*command, start], cwd=here.parent, env=_env(here), stdout=subprocess.PIPE)
            for start in ("0", "0", "100")
        ]
        victim = workers[0]
        assert victim.stdout is not None
        while victim.stdout.readline() not in (b"50\n", b""):
            pass
        victim.kill()
        for worker in workers:
            worker.communicate(timeout=120)
        assert [worker.returncode for worker in workers[1:]] == [0, 0]
        policy = CachedPolicy(ScriptedPolicy(say), tmp_path / "c.db")
        requests = [request(i) for i in range(400)]
        replies = ask(policy, requests)
        assert policy.misses == 0
        expected = ScriptedPolicy(say).sample(requests)
        assert [r.samples for r in replies if isinstance(r, SamplingReply)] == [r.samples for r in expected]
        policy.close()
        with contextlib.closing(sqlite3.connect(tmp_path / "c.db")) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def _env(here: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{here.parent}{os.pathsep}{here}"}


class TestPoliciesOfAMAS:
    """``policies:`` in a MAS config: who writes whose messages where a run names no policy."""

    AGENTS = (
        "agents:\n  - {name: A, system_prompt: Say.}\n  - {name: B, system_prompt: Say.}\nedges: [[-1, 0], [0, 1]]\n"
    )

    def write(self, folder: Path, policies: str) -> Path:
        path = folder / "team.yaml"
        path.write_text(self.AGENTS + policies, encoding="utf-8")
        return path

    def recorded(self, folder: Path, name: str, text: str, mas: mas_gym.MAS, problems: Any) -> str:
        """Record an agent's messages in every search of ``problems``, and return the policy that replays them."""
        file = folder / f"{name}.jsonl"
        policy = RecordingPolicy(ScriptedPolicy(lambda request, seed: f"{text} by {request.agent}"), file)
        list(search.run("single", problems, mas=mas, policy=policy))
        return f"recorded:{file}"

    def test_from_config_uses_the_policies_of_the_mas(self, tmp_path: Path) -> None:
        problems = mas_gym.load_task("arithmetic", limit=3)
        one = self.recorded(tmp_path, "one", "one", mas_gym.load_mas(self.write(tmp_path, "")), problems)
        first = mas_gym.load_mas(self.write(tmp_path, f"policies: {{A: '{one}', '*': tiny}}\n"))
        assert first.policies == (("A", one), ("*", "tiny"))
        plans = list(search.run("single", problems, mas=first, policy="from-config"))
        for plan in plans:
            assert plan.error is None and plan.best is not None
            said = [state.text for state in plan.best.state.path()[1:]]
            assert said[0] == "one by A" and "one" not in said[1]

    def test_policies_are_not_part_of_the_mas_identity(self, tmp_path: Path) -> None:
        bare = mas_gym.load_mas(self.write(tmp_path, ""))
        mas = mas_gym.load_mas(self.write(tmp_path, "policies: {'*': tiny}\n"))
        assert mas == bare and hash(mas) == hash(bare) and mas.fingerprint == bare.fingerprint
        assert mas_gym.load_mas(mas.to_dict()) == mas
        assert pickle.loads(pickle.dumps(mas)).policies == mas.policies == (("*", "tiny"),)

    def test_run_without_any_policy_is_rejected(self) -> None:
        with pytest.raises(ConfigError, match=r"expected a policy, but the MAS 'rpsv' names none"):
            search.run("single", mas_gym.load_task("arithmetic", limit=1), mas="rpsv")

    @pytest.mark.parametrize(
        ("policies", "fault"),
        [
            ("tiny", "team.yaml:5: policies: expected a mapping from agents' names to policy strings, got 'tiny'"),
            ("{}", "team.yaml:5: policies: expected a mapping"),
            ("{A: tiny}", "team.yaml:5: policies: no policy for B: add each, or '*' for all others"),
            ("{A: tiny, Bb: tiny, '*': tiny}", "team.yaml:5: policies.Bb: unknown agent 'Bb': expected A, B or '*'"),
            ("{A: 3, B: tiny}", "team.yaml:5: policies.A: expected a policy string such as 'openai:MODEL@URL' or tiny"),
            ("{A: ' ', B: tiny}", "team.yaml:5: policies.A: expected a policy string"),
        ],
    )
    def test_invalid_policies_are_reported_with_their_location_and_a_fix(
        self, tmp_path: Path, policies: str, fault: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            mas_gym.load_mas(self.write(tmp_path, f"policies: {policies}\n"))
        assert [found for found in caught.value.faults if found.startswith(fault)], caught.value.faults
        assert len(caught.value.faults) == 1

    def test_agent_named_like_the_default_policy_entry_is_rejected(self) -> None:
        with pytest.raises(ConfigError, match="name of a special node"):
            mas_gym.load_mas({"agents": [{"name": "*", "system_prompt": "x"}], "edges": [[-1, 0]]})

    def test_policies_of_a_config_need_the_users_word(self, tmp_path: Path) -> None:
        (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef make(): ...\n", encoding="utf-8")
        path = self.write(tmp_path, f"policies: {{'*': '{tmp_path / 'evil.py'}:make'}}\n")
        problems = mas_gym.load_task("arithmetic", limit=1)
        for ask in (search.run, search.compare):
            with pytest.raises(ConfigError, match="policy='from-config'"):
                ask("single" if ask is search.run else ["single"], problems, mas=str(path))  # type: ignore[operator]
        for command in (["solve", "--task", "arithmetic"], ["eval", "-n", "1"], ["serve"], ["rollouts", "-n", "1"]):
            store = ["--store", str(tmp_path / "runs.db")] if command[0] == "rollouts" else []
            done = CliRunner(env={"COLUMNS": "400"}).invoke(app, [*command, *store, "--mas", str(path)])
            assert done.exit_code == 2 and "--policy from-config" in done.output, done.output
        done = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check", str(path)])
        assert done.exit_code == 0 and "evil.py:make" in done.output and "--policy from-config" in done.output
        assert not (tmp_path / "ran").exists()
        with pytest.raises(ConfigError, match="names none"):
            search.run("single", problems, mas="rpsv", policy="from-config")

    def test_config_in_a_store_carries_no_policies(self) -> None:
        config = {"mas": mas_gym.load_mas("rpsv").to_dict() | {"policies": {"*": "evil.py:make"}}}
        assert RunInfo("", None, config, {}, 0, 0).mas.policies == ()

    def test_command_line_uses_mas_policies_only_if_asked(self, tmp_path: Path) -> None:
        problems = mas_gym.load_task("arithmetic", limit=2)
        bare = mas_gym.load_mas(self.write(tmp_path, ""))
        said = {name: self.recorded(tmp_path, name, f"Final Answer: {name}", bare, problems) for name in ("1", "2")}
        path = self.write(tmp_path, f"policies: {{'*': '{said['1']}'}}\n")
        shared = ("--task", "arithmetic", "--mas", str(path), "--planner", "single")
        asked = ("--policy", "from-config")
        for options, answer in ((asked, "1"), (("--policy", said["2"]), "2")):
            done = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["solve", *shared, *options])
            assert done.exit_code == 0, done.output
            assert f"Answer: {answer}" in done.output
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["eval", *shared, *asked, "-n", "2"])
        assert done.exit_code == 0 and "*=recorded:" in done.output

    def test_cache_wraps_every_policy_of_a_mapping(self, tmp_path: Path) -> None:
        problems = mas_gym.load_task("arithmetic", limit=2)
        mas = mas_gym.load_mas(self.write(tmp_path, ""))
        inner = Counting()
        for _ in range(2):
            team = load_policy({"A": inner, "*": "tiny"}, cache=str(tmp_path / "replies.db"))
            plans = list(search.run("single", problems, mas=mas, policy=team))
            assert all(plan.error is None for plan in plans)
        assert sum(inner.batches) == 2
        with pytest.raises(ConfigError, match="only the option cache"):
            load_policy({"*": "tiny"}, max_batch=3)


@pytest.mark.parametrize("options", [("--actors", "2"), ("--gpus-per-actor", "0.5")])
def test_actors_option_requires_ray(options: tuple[str, str]) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["eval", "-n", "1", *options])
    assert done.exit_code == 2 and "--ray local" in done.output
