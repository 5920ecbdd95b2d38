"""Utilization of an engine by search: vLLM in this process, or a server.

    python benchmarks/engines.py efficiency --policy vllm:PATH --problems 128
    python benchmarks/engines.py efficiency --policy openai:MODEL@URL --problems 128 --critic models/masprm
    python benchmarks/engines.py baseline --policy vllm:PATH --problems 128 --baseline-problems 8
    python benchmarks/engines.py prefix --policy vllm:PATH --problems 64
    python benchmarks/engines.py memory --searches 10000
    python benchmarks/engines.py service --searches 200
    python benchmarks/engines.py ray --policy tiny --problems 192 --actors 1
    python benchmarks/engines.py client --policy openai:MODEL@URL --problems 400
    python -m benchmarks.engines rates --policy transformers:FOLDER --gguf FILE.gguf --data test.jsonl --rows 48,128,256

* ``efficiency``: generated tokens per second in MCTS(10,3), divided by those of the same engine if it receives the same
  requests all at once.
* ``baseline``: wall-clock seconds per problem compared with one search at a time, one prompt per call and states scored
  individually, as in the authors' released code.
* ``prefix``: share of prompt tokens served from vLLM's prefix cache, and the throughput without it.
* ``memory``: memory of open searches. ``service``: the same in a service, with its threads.
* ``ray``: overhead of a fleet relative to `search.run`, from the first plan to the last, without the start of actors.
* ``client``: CPU time of this process for a request of three samples to a server.
* ``rates``: tokens per second of a transformers model, of transformers' ``generate`` and of llama.cpp on the same
  GSM8K questions, at several numbers of questions that are sampled together. On a machine with other load, compare
  tokens per CPU second.

The engine's cache is emptied before each measurement if possible (for vLLM's server, start it with
``VLLM_SERVER_DEV_MODE=1``). The script needs psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import psutil

import mas_gym
import search
from mas_gym.internal.event_loop import on_engine_loop
from mas_gym.policies import SamplingReply, SamplingRequest, load_policy
from mas_gym.policies.base import AsyncPolicy, Sample
from mas_gym.policies.batch_queue import as_policy
from rewardmodels import load_critic

PLANNER = "mcts:10,3"
ROUNDS = 12


class Watched:
    """Passes requests on and remembers them."""

    def __init__(self, policy: AsyncPolicy) -> None:
        self.policy, self.name, self.max_concurrency = policy, policy.name, policy.max_concurrency
        self.heard: list[SamplingRequest] = []
        self.prompt_tokens = self.cached_tokens = 0

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        self.heard.append(request)
        reply = await self.policy.sample_async(request)
        self.prompt_tokens += reply.prompt_tokens
        self.cached_tokens += reply.cached_tokens
        return reply


class OneByOne:
    """A critic that scores one state at a time."""

    def __init__(self, critic: Any) -> None:
        self.critic, self.max_batch, self.concurrent = critic, 1, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.critic, name)

    def score(self, contexts: Sequence[search.ScoringContext]) -> list[float]:
        return [self.critic.score([context])[0] for context in contexts]


class Figure(NamedTuple):
    """One measurement: generated tokens, wall-clock and CPU seconds of this process and its children, problems."""

    tokens: int
    seconds: float
    cpu: float
    problems: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def searched(
    policy: Watched,
    critic: Any,
    problems: int,
    concurrency: int,
    seed: int = 42,
    sampling: search.Sampling | None = None,
) -> Figure:
    task = mas_gym.load_task("arithmetic", split="test")[:problems]
    start, cpu = time.perf_counter(), cpu_seconds()
    more: dict[str, Any] = {"seed": seed, "concurrency": concurrency, "sampling": sampling}
    run = search.run(PLANNER, task, mas="rpsv", policy=policy, critic=critic, **more)
    plans = list(run)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    failed = [plan.error for plan in plans if plan.error]
    assert not failed, failed[0]
    return Figure(sum(plan.usage.generated_tokens for plan in plans), seconds, cpu, problems)


def at_once(policy: AsyncPolicy, requests: Sequence[SamplingRequest]) -> Figure:
    """Give the engine everything it can take at any time."""

    async def run() -> int:
        gate = asyncio.Semaphore(policy.max_concurrency)

        async def one(request: SamplingRequest) -> int:
            async with gate:
                return sum(sample.tokens for sample in (await policy.sample_async(request)).samples)

        return sum(await asyncio.gather(*map(one, requests)))

    start, cpu = time.perf_counter(), cpu_seconds()
    tokens = asyncio.run(on_engine_loop(run()))
    return Figure(tokens, time.perf_counter() - start, cpu_seconds() - cpu, 0)


def cpu_seconds() -> float:
    """Return the CPU seconds that this process and its living children have used."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def empty_cache(policy: Any) -> bool:
    """Empty the engine's prefix cache; return whether that was possible."""
    if hasattr(policy, "base_url"):
        url = policy.base_url.removesuffix("/v1") + "/reset_prefix_cache"
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).close()
        except urllib.error.HTTPError:
            return False
        return True
    if not hasattr(policy, "_engine"):
        return False

    async def reset() -> bool:
        llm = await policy._engine.llm()
        await llm.reset_prefix_cache()
        return True

    return asyncio.run(on_engine_loop(reset()))


def load(arguments: argparse.Namespace, **options: Any) -> tuple[Any, Any]:
    policy = load_policy(arguments.policy, **options)
    at_once(as_policy(policy), [SamplingRequest((mas_gym.ChatMessage("user", "1 + 1"),), (1,))])
    return policy, load_critic(arguments.critic)


def efficiency(arguments: argparse.Namespace) -> None:
    policy, critic = load(arguments)
    ratios = []
    for repeat in range(arguments.repeats):
        watched = Watched(as_policy(policy))
        emptied = empty_cache(policy)
        ours = searched(watched, critic, arguments.problems, arguments.concurrency, seed=42 + repeat)
        share = watched.cached_tokens / max(watched.prompt_tokens, 1)
        empty_cache(policy)
        full = at_once(watched.policy, watched.heard)
        ratios.append(ours.rate / full.rate)
        print(f"MCTS(10,3), {ours.problems} problems, {ours.tokens} tokens, cache emptied first: {emptied}")
        print(f"  search                     {ours.rate:9.0f} tokens/s  ({ours.seconds:.1f} s)")
        print(f"  same requests, all at once {full.rate:9.0f} tokens/s  ({full.seconds:.1f} s)")
        print(f"  search / all at once       {ratios[-1]:9.2f}")
        # On a machine that does other things too, the same ratio in CPU seconds is the one to trust.
        print(f"  the same in CPU seconds    {(ours.tokens / ours.cpu) / (full.tokens / full.cpu):9.2f}")
        print(f"  prompt tokens from cache   {share:9.1%}")
    print(f"efficiency, median of {len(ratios)}: {sorted(ratios)[len(ratios) // 2]:.2f}")


class Steps:
    """Counts the steps of vLLM's engine: each answers once for all that it runs."""

    def __init__(self, policy: Any) -> None:
        self.steps = 0

        async def watch() -> None:
            core = (await policy._engine.llm()).engine_core
            answer = core.get_output_async

            async def counted() -> Any:
                outputs = await answer()
                self.steps += 1
                return outputs

            core.get_output_async = counted

        asyncio.run(on_engine_loop(watch()))


def baseline(arguments: argparse.Namespace) -> None:
    policy, critic = load(arguments)
    empty_cache(policy)
    steps = Steps(policy) if hasattr(policy, "_engine") else getattr(policy, "stats", None)
    before = steps.steps if steps else 0
    options = {} if arguments.critic == "policy-likelihood" else {"share": False}
    whole = OneByOne(load_critic(arguments.critic, **options))
    alone = searched(Watched(as_policy(policy)), whole, arguments.baseline_problems, 1)
    between = steps.steps if steps else 0
    empty_cache(policy)
    ours = searched(Watched(as_policy(policy)), critic, arguments.problems, arguments.concurrency)
    per = [figure.seconds / figure.problems for figure in (alone, ours)]
    print(f"one search at a time, one prompt per call, states scored one by one: {per[0]:.3f} s per problem")
    print(f"driver, concurrency {arguments.concurrency}: {per[1]:.3f} s per problem; {per[0] / per[1]:.1f} times less")
    cpu = alone.cpu / alone.problems, ours.cpu / ours.problems
    print(f"CPU seconds per problem: {cpu[0]:.3f} and {cpu[1]:.3f}, {cpu[0] / cpu[1]:.1f} times less")
    if steps:
        was, now = (between - before) / alone.problems, (steps.steps - between) / ours.problems
        print(f"sequential decode steps per problem: {was:.0f} and {now:.1f}, {was / now:.0f} times fewer")


def prefix(arguments: argparse.Namespace) -> None:
    for caching in (True, False):
        policy, critic = load(arguments, engine={"enable_prefix_caching": caching, **arguments.engine})
        watched = Watched(policy)
        figure = searched(watched, critic, arguments.problems, arguments.concurrency)
        share = watched.cached_tokens / max(watched.prompt_tokens, 1)
        print(f"prefix caching {caching}: {figure.rate:.0f} tokens/s, {share:.1%} of prompt tokens from the cache")
        policy.close()


class Holding:
    """A policy that holds its replies once each of ``searches`` searches has sent about `ROUNDS` requests."""

    name, max_concurrency = "holding", 10**9

    def __init__(self, searches: int) -> None:
        self.searches, self.asked, self.held, self.all_asked = searches, 0, 0, asyncio.Event()

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        self.asked += 1
        if self.asked == self.searches * ROUNDS:
            self.held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.all_asked.set()
        if self.asked > self.searches * (ROUNDS - 1):
            await self.all_asked.wait()
        text = "The plan is to add what was bought to what was there, step by step. " * 4
        return SamplingReply(tuple(Sample(f"{text}{s}", 60, -30.0, "stop") for s in request.seeds), 100)


def memory(arguments: argparse.Namespace) -> None:
    policy = Holding(arguments.searches)
    problems = [
        replace(problem, id=f"{problem.id}/{i}")
        for i, problem in enumerate(mas_gym.load_task("arithmetic", split="test")[:1])
        for i in range(arguments.searches)
    ]
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = search.run(
        PLANNER, problems, mas="rpsv", policy=policy, critic=search.PolicyLikelihood(), concurrency=arguments.searches
    )
    while not policy.held:
        run._turn()
    run.close()
    grown = (policy.held - start) / 1024
    print(
        f"{arguments.searches} searches open: {grown:.0f} MiB, {1024 * grown / arguments.searches:.1f} KiB per search"
    )


def service(arguments: argparse.Namespace) -> None:
    from search.run_spec import RunSpec
    from search.service.search_pool import SearchPool, Service

    policy, planner, count = Holding(arguments.searches), search.load_planner(PLANNER), arguments.searches
    spec = RunSpec((), mas_gym.load_mas("rpsv"), policy, planner, search.PolicyLikelihood(), concurrency=count)
    pool = SearchPool(Service(spec, queue=0))
    start, threads = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, threading.active_count()
    [problem] = mas_gym.load_task("arithmetic", split="test")[:1]
    for seed in range(count):
        pool.submit(problem.question, seed, search.Sampling(), lambda: None)
    while not policy.held:
        time.sleep(0.01)
    grown, more = (policy.held - start) / 1024, threading.active_count() - threads
    pool.close()
    print(f"{count} searches open in a service: {grown:.1f} MiB and {more} threads more")


def fleet(arguments: argparse.Namespace) -> None:
    """Search the same problems in one process and on a fleet; compare the time after the first plan."""
    from functools import partial

    from search.engine.ray_actors import Fleet, run_ray

    task = mas_gym.load_task("arithmetic", split="test")[: arguments.problems]
    common: dict[str, Any] = {"mas": "rpsv", "concurrency": arguments.concurrency}
    figures = []
    for _ in range(arguments.repeats):
        plain = search.run(
            PLANNER, task, policy=load_policy(arguments.policy), critic=load_critic(arguments.critic), **common
        )
        spread = run_ray(
            PLANNER,
            task,
            make_policy=partial(load_policy, arguments.policy),
            make_critic=partial(load_critic, arguments.critic),
            fleet=Fleet(actors=arguments.actors, address="local"),
            **common,
        )
        first, second = after_first(plain), after_first(spread)
        figures.append((second.seconds / first.seconds, second.cpu / first.cpu))
        print(f"plain driver: {first.seconds:.1f} s, {first.cpu:.1f} CPU seconds for {first.problems} problems")
        print(f"{arguments.actors} actors:     {second.seconds:.1f} s, {second.cpu:.1f} CPU seconds", flush=True)
    for name, ratios in zip(("seconds", "CPU seconds"), zip(*figures, strict=True), strict=True):
        print(f"fleet / plain in {name}, median of {len(ratios)}: {sorted(ratios)[len(ratios) // 2]:.2f}")


def after_first(plans: Iterable[search.Plan]) -> Figure:
    """Measure from the first plan to the last."""
    found = iter(plans)
    next(found)
    start, cpu = time.perf_counter(), cpu_seconds()
    rest = list(found)
    tokens = sum(plan.usage.generated_tokens for plan in rest)
    return Figure(tokens, time.perf_counter() - start, cpu_seconds() - cpu, len(rest))


def client(arguments: argparse.Namespace) -> None:
    policy = load_policy(arguments.policy)
    words = "Maya has fourteen marbles, gives some of them away, and then buys as many as she had. " * 8
    requests = [
        SamplingRequest((mas_gym.ChatMessage("user", f"{words} {i}"),), (3 * i, 3 * i + 1, 3 * i + 2), 64)
        for i in range(2 * arguments.problems)
    ]
    # The first half opens the connections.
    at_once(as_policy(policy), requests[: arguments.problems])
    start = time.process_time()
    at_once(as_policy(policy), requests[arguments.problems :])
    print(f"{(time.process_time() - start) / arguments.problems * 1000:.2f} ms of CPU time per request of 3 samples")


def rates(arguments: argparse.Namespace) -> None:
    policy, llama = load_policy(arguments.policy), load_policy(arguments.gguf)
    task = mas_gym.load_task("gsm8k", split="test", data=arguments.data)
    system = mas_gym.ChatMessage("system", "Think step by step. End with Final Answer: and the number.")
    for rows in (int(count) for count in arguments.rows.split(",")):
        requests = [
            SamplingRequest((system, mas_gym.ChatMessage("user", problem.question)), (seed,), arguments.cap)
            for seed, problem in enumerate(task[:rows])
        ]
        found = {
            "transformers:": at_once(as_policy(policy), requests),
            "gguf:": at_once(as_policy(llama), requests[: arguments.llama_rows]),
        }
        found["generate"] = generated(policy, requests[: arguments.generate_rows])
        ours = found["transformers:"]
        for name, one in found.items():
            ratio = ours.rate / one.rate, (ours.tokens / ours.cpu) / (one.tokens / one.cpu)
            print(
                f"{rows:4} rows, {name:14} {one.rate:7.1f} tokens/s, {one.tokens / one.cpu:7.1f} per CPU second; "
                f"transformers: is {ratio[0]:.1f} and {ratio[1]:.1f} times as fast",
                flush=True,
            )


def generated(policy: Any, requests: Sequence[SamplingRequest]) -> Figure:
    """Sample all requests in one batch of ``generate``."""
    import torch

    model, pad = policy.model, policy.format.tokenizer.pad_token_id or 0
    start, cpu = time.perf_counter(), cpu_seconds()
    rows = [policy.format.encode(request.messages, request.max_new_tokens).ids for request in requests]
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    one, ends = requests[0], sorted(policy.end_tokens)
    sampling = {"do_sample": True, "temperature": one.temperature, "top_p": one.top_p, "top_k": 0}
    limits = {"max_new_tokens": one.max_new_tokens, "eos_token_id": ends, "pad_token_id": pad}
    with torch.inference_mode():
        said = model.generate(input_ids=ids, attention_mask=mask, **sampling, **limits)[:, width:]
    over = torch.isin(said, torch.tensor(ends, device=model.device))
    tokens = int(torch.where(over.any(1), over.int().argmax(1) + 1, said.shape[1]).sum())
    return Figure(tokens, time.perf_counter() - start, cpu_seconds() - cpu, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", choices=("efficiency", "baseline", "prefix", "memory", "service", "ray", "client", "rates")
    )
    parser.add_argument("--policy", default="tiny")
    parser.add_argument("--critic", default="policy-likelihood")
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--baseline-problems", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--searches", type=int, default=10_000)
    parser.add_argument("--gguf", default="")
    parser.add_argument("--data", default=None)
    parser.add_argument("--rows", default="48,128,256")
    parser.add_argument("--cap", type=int, default=128)
    parser.add_argument("--generate-rows", type=int, default=256)
    parser.add_argument("--llama-rows", type=int, default=256)
    arguments = parser.parse_args()
    arguments.engine = {}
    if arguments.policy.startswith("vllm:") and "engine=" in arguments.policy:
        from mas_gym.plugins import Spec

        arguments.engine = Spec.parse(arguments.policy).options().get("engine", {})
    (fleet if arguments.what == "ray" else globals()[arguments.what])(arguments)


if __name__ == "__main__":
    main()
