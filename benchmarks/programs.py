"""Cost of searching a program relative to a MAS with the same plans: `python benchmarks/programs.py`.

Reader, Planner, Solver and Verifier run as the shipped MAS and as three functions, with 64 open searches: with
`client=` (no socket), with `base_url` (through the gateway's loopback port) and a new client in each run, and with
clients that share a TLS context. The engines take 20 ms per call and handle 8 calls at once, 64 (the number of
searches), or any number, so that the program's cost is not hidden. The last engine is the tiny agents, which compute on
the CPU. Brackets contain the ratios of wall-clock time and CPU time to the MAS.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import tempfile
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

import mas_gym
import search
from mas_gym.policies import SamplingReply, SamplingRequest, load_policy
from mas_gym.policies.base import Sample
from mas_gym.programs import Program

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "programs" / "plain_openai.py"
AGENTS = ["Reader", "Planner", "Solver", "Verifier"]


class Slow:
    """An engine that takes some seconds a call, and works on some calls at once."""

    name = "slow"

    def __init__(self, seconds: float, at_once: int = 10_000) -> None:
        self.seconds, self.max_concurrency = seconds, at_once

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        await asyncio.sleep(self.seconds)
        texts = [f"{request.agent} {seed % 5}. Final Answer: {seed % 3}" for seed in request.seeds]
        return SamplingReply(tuple(Sample(text, 8, -4.0, "stop") for text in texts))


ENGINES: dict[str, Any] = {
    "8-at-once": lambda: Slow(0.02, 8),
    "64-at-once": lambda: Slow(0.02, 64),
    "all-at-once": lambda: Slow(0.02),
    "tiny": lambda: load_policy("tiny"),
}


def by_url(shared: bool = False) -> Any:
    """Return the example as a function with ``base_url``, whose clients may share a TLS context."""
    from mas_gym.programs.program_kinds import PROGRAMS

    inner = PROGRAMS.find(PROGRAMS.parse(f"{EXAMPLE}:solve"))

    context = ssl.create_default_context() if shared else None

    async def solve(question: str, base_url: str) -> str:
        http = DefaultAsyncHttpxClient(verify=context) if context is not None else None
        async with AsyncOpenAI(base_url=base_url, api_key="any", http_client=http) as client:
            return str(await inner(question, client))

    return solve


KINDS: dict[str, Any] = {
    "MAS": lambda: None,
    "client": lambda: Program(f"{EXAMPLE}:solve", agents=AGENTS),
    "base_url": lambda: Program(by_url(), agents=AGENTS),
    "one-tls-context": lambda: Program(by_url(shared=True), agents=AGENTS),
}


def timed(planner: str, task: Any, policy: Any, program: Any) -> tuple[float, float, list[Any]]:
    """Return the seconds of a run, on the wall and of CPU, and its plans' answers and costs."""
    system = {"mas": "rpsv"} if program is None else {"program": program}
    begun, worked = time.perf_counter(), time.process_time()
    critic = search.PolicyLikelihood()
    plans = list(search.run(planner, task, policy=policy, critic=critic, concurrency=64, **system))
    assert not any(plan.error for plan in plans), next(plan.error for plan in plans if plan.error)
    seconds = time.perf_counter() - begun, time.process_time() - worked
    return *seconds, sorted((p.problem_id, p.answer, p.usage.agent_calls, p.usage.generated_tokens) for p in plans)


def compare(planners: list[str], task: Any, policies: dict[str, Any], kinds: dict[str, Any], repeats: int) -> None:
    """Print the seconds of each kind, the best of some repeats, and their ratio to the MAS."""
    print(f"{'engine':12} {'planner':10} " + " ".join(f"{kind:>28}" for kind in kinds))
    for engine, policy in policies.items():
        for planner in planners:
            found = {kind: [] for kind in kinds}
            for program in kinds.values():
                # Everything is loaded before the clock starts.
                timed(planner, task[:4], policy, program)
            for _ in range(repeats):
                for kind, program in kinds.items():
                    found[kind].append(timed(planner, task, policy, program))
            assert all(plans == found["MAS"][0][2] for runs in found.values() for _, _, plans in runs), "plans differ"
            best = {kind: (min(run[0] for run in runs), min(run[1] for run in runs)) for kind, runs in found.items()}
            wall, cpu = best["MAS"]
            cells = [f"{w:7.2f} s ({w / wall:5.2f}x, {c / cpu:5.2f}x)" for w, c in best.values()]
            print(f"{engine:12} {planner:10} " + " ".join(f"{cell:>28}" for cell in cells), flush=True)


def same(file: Path, planners: list[str], count: int, seed: int, cache: Path | None) -> None:
    """Search a program and the MAS with the tiny agents, and compare answers, transcripts, visits and Hit@1.

    Replies are cached: a request of the program that is not one of the MAS's would cost a call, and is counted.
    """
    task = mas_gym.load_task("arithmetic", split="test", limit=count)
    print(f"{file.name}\n{'planner':10} problems  equal  Hit@1 MAS  Hit@1 program  agent calls  other requests  CPU s")
    with tempfile.TemporaryDirectory() as folder:
        policy = load_policy("tiny", cache=str(cache or f"{folder}/replies.db"))
        common: dict[str, Any] = {"policy": policy, "critic": search.PolicyLikelihood(), "seed": seed}
        program = Program(f"{file}:solve", agents=AGENTS)
        for planner in planners:
            native = {plan.problem_id: plan for plan in search.run(planner, task, mas="rpsv", **common)}
            misses, worked = policy.misses, time.process_time()
            found = {plan.problem_id: plan for plan in search.run(planner, task, program=program, **common)}
            worked = time.process_time() - worked
            equal = sum(_shape(found[key]) == _shape(plan) for key, plan in native.items())
            hits = [sum(plan.correct for plan in plans.values()) / count for plans in (native, found)]
            calls = sum(plan.usage.agent_calls for plan in found.values())
            row = f"{planner:10} {count:8} {equal:6} {hits[0]:10.3f} {hits[1]:14.3f} {calls:12}"
            print(f"{row} {policy.misses - misses:15} {worked:6.0f}", flush=True)
        policy.close()


def _shape(plan: Any) -> tuple[Any, ...]:
    assert plan.error is None, plan.error_details
    return plan.answer, plan.usage.agent_calls, [s.transcript for s in plan.tree.states], list(plan.tree.visits)


def main() -> None:
    """Measure."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("-n", type=int, default=64)
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--engine", nargs="+", choices=[*ENGINES], default=[*ENGINES])
    options.add_argument("--kind", nargs="+", choices=[*KINDS][1:], default=[*KINDS][1:])
    options.add_argument("--planner", nargs="+", default=["sc:5", "sbs:5,1", "mcts:10,3"])
    options.add_argument("--same", type=int, metavar="N", help="compare the plans on N problems, and measure nothing")
    options.add_argument("--seed", type=int, default=7)
    options.add_argument("--program", type=Path, default=EXAMPLE, help="with --same: the file whose solve is compared")
    options.add_argument("--cache", type=Path, help="with --same: keeps the agents' replies for the next program")
    given = options.parse_args()
    if given.same:
        same(given.program.resolve(), ["single", *given.planner], given.same, given.seed, given.cache)
        return
    policies = {name: ENGINES[name]() for name in given.engine}
    task = mas_gym.load_task("arithmetic", split="test", limit=given.n)
    kinds = {name: KINDS[name]() for name in ["MAS", *given.kind]}
    compare(given.planner, task, policies, kinds, given.repeats)


if __name__ == "__main__":
    main()
