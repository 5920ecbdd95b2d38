"""Throughput of search with a transformers engine: tokens per CPU second relative to ``generate`` on equal prompts.

Run with one thread, on an otherwise idle core::

    OMP_NUM_THREADS=1 python benchmarks/local_engine.py
    OMP_NUM_THREADS=1 python benchmarks/local_engine.py --model transformers:PATH --problems 64

The script prints three results: the throughput of MCTS at concurrency 64 relative to ``generate`` at batch 64 with the
same prompts, once in the order of the search and once sorted by length, the best order for ``generate``; the throughput
of both on single passes at several batch sizes; and whether the same seed gives the same reply.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import transformers

import mas_gym
import search
from mas_gym.policies import SamplingReply, SamplingRequest, SamplingSession, TransformersPolicy, load_policy
from mas_gym.policies.local.decode import DecodeStats


class Listening:
    """Passes requests on and remembers them."""

    def __init__(self, policy: TransformersPolicy) -> None:
        """Listen to one policy."""
        self.policy, self.name, self.max_batch = policy, policy.name, policy.max_batch
        self.heard: list[SamplingRequest] = []

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        """Answer a batch."""
        self.heard += requests
        return self.policy.sample(requests)

    def open(self) -> SamplingSession:
        """Start a session that is listened to."""
        session = self.policy.open()
        submit = session.submit

        def listen(key: Hashable, request: SamplingRequest) -> None:
            self.heard.append(request)
            submit(key, request)

        session.submit = listen  # type: ignore[method-assign]
        return session


def searched(policy: TransformersPolicy, problems: int, concurrency: int) -> tuple[list[SamplingRequest], float, int]:
    """Return the requests of MCTS(10,3) under policy likelihood, the CPU seconds and the useful tokens."""
    listening = Listening(policy)
    task = mas_gym.load_task("arithmetic", split="test")
    planner = search.MCTS(n_simulations=10, max_children=3)
    start = time.process_time()
    plans = list(
        search.run(
            planner,
            task[:problems],
            mas=mas_gym.load_mas("rpsv"),
            policy=listening,
            critic=search.PolicyLikelihood(),
            seed=42,
            concurrency=concurrency,
        )
    )
    seconds = time.process_time() - start
    failed = [plan.error for plan in plans if plan.error]
    assert not failed, failed[0]
    return listening.heard, seconds, sum(plan.usage.generated_tokens for plan in plans)


def raw(
    policy: TransformersPolicy,
    requests: Sequence[SamplingRequest],
    batch: int,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the useful tokens per second of ``generate``, CPU seconds by default; tokenising is not counted."""
    model, pad = policy.model, policy.format.tokenizer.pad_token_id or 0
    rows = [policy.format.encode(r.messages, r.max_new_tokens).ids for r in requests for _ in r.seeds]
    ends = torch.tensor(sorted(policy.end_tokens), device=model.device)
    longest = max(request.max_new_tokens for request in requests)
    useful = 0
    start = clock()
    for first in range(0, len(rows), batch):
        chunk = rows[first : first + batch]
        width = max(map(len, chunk))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in chunk], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in chunk], device=model.device)
        said = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
            top_k=0,
            max_new_tokens=min(longest, policy.format.window - width),
            eos_token_id=ends.tolist(),
            pad_token_id=pad,
        )[:, width:]
        over = torch.isin(said, ends)
        useful += int(torch.where(over.any(1), over.int().argmax(1) + 1, said.shape[1]).sum())
    return useful / (clock() - start)


def single_passes(policy: TransformersPolicy, requests: Sequence[SamplingRequest]) -> float:
    """Return the useful tokens per CPU second of the policy on one sample of each request."""
    start = time.process_time()
    replies = policy.sample(requests)
    return sum(s.tokens for reply in replies for s in reply.samples) / (time.process_time() - start)


def measure(spec: str, problems: int, concurrency: int) -> None:
    """Print the figures."""
    policy: Any = load_policy(spec)
    policy.sample([SamplingRequest((mas_gym.ChatMessage("user", "1 + 1"),), (1,))])
    policy.stats = DecodeStats()
    requests, seconds, tokens = searched(policy, problems, concurrency)
    stats = policy.stats
    rate = tokens / seconds
    print(f"MCTS(10,3), {problems} problems, concurrency {concurrency}: {tokens} tokens in {seconds:.1f} CPU s")
    print(f"  rows per decode step          {stats.row_steps / stats.steps:8.1f}")
    print(f"  decode steps per problem      {stats.steps / problems:8.1f}")
    encoded = stats.prompt_tokens - stats.reused_tokens
    print(f"  prompt tokens per useful one  {stats.prompt_tokens / tokens:8.2f}, encoded {encoded / tokens:.2f}")
    print(f"  reference passes per 1000     {1000 * stats.rechecks / tokens:8.2f}")
    print(f"  search                        {rate:8.0f} tokens/CPU s")
    came = raw(policy, requests, 64)
    lengths = {id(r): len(policy.format.encode(r.messages, 1).ids) for r in requests}
    kind = raw(policy, sorted(requests, key=lambda r: (r.agent, lengths[id(r)])), 64)
    print(f"  generate, as they came        {came:8.0f} tokens/CPU s; search efficiency {rate / came:.2f}")
    print(f"  generate, sorted              {kind:8.0f} tokens/CPU s; search efficiency {rate / kind:.2f}")
    for batch in (1, 8, 64):
        some = [SamplingRequest(r.messages, r.seeds[:1], agent=r.agent) for r in requests[: max(24, 4 * batch)]]
        policy.max_batch = batch
        print(f"batch {batch:2}: policy {single_passes(policy, some):6.0f}, generate {raw(policy, some, batch):6.0f}")


def agreement(spec: str, problems: int) -> None:
    """Print how many samples change if only the batch changes, with and without the float64 reference."""
    for exact in (True, False):
        policy: Any = load_policy(spec, exact=exact)
        requests, _, _ = searched(policy, problems, 64)
        texts = []
        for batch, order in ((64, 1), (7, -1)):
            policy.max_batch = batch
            texts.append([s for reply in policy.sample(requests[::order])[::order] for s in reply.samples])
        tokens = sum(sample.tokens for sample in texts[0])
        changed = sum(a.text != b.text for a, b in zip(*texts, strict=True))
        unequal = sum(a != b for a, b in zip(*texts, strict=True))
        print(
            f"exact={exact}: of {len(texts[0])} samples ({tokens} tokens), texts changed {changed}, replies {unequal}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    measure(options.model, options.problems, options.concurrency)
    agreement(options.model, max(8, options.problems // 4))
