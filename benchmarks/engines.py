"""Tokens per second of local engines on GSM8K questions: ``transformers:``, ``gguf:`` and transformers' ``generate``.

    python -m benchmarks.engines --policy transformers:FOLDER --gguf FILE.gguf --data test.jsonl --rows 48,128,256

Each engine receives as many questions at once as ``--rows`` states. On a machine with other load, compare tokens per
CPU second. The script needs psutil.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
from transformers import AutoModelForCausalLM

import mas_gym
from mas_gym.internal.adapter import wrapped_part
from mas_gym.policies import AsyncPolicy, SamplingRequest, load_policy
from mas_gym.policies.batch_queue import sample_all

PROMPT = mas_gym.ChatMessage("system", "Think step by step. End with Final Answer: and the number.")


class Figure(NamedTuple):
    """Generated tokens, wall-clock seconds, and CPU seconds of this process and its children."""

    tokens: int
    seconds: float
    cpu: float


def cpu_seconds() -> float:
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def sampled(policy: AsyncPolicy, requests: Sequence[SamplingRequest]) -> Figure:
    start, cpu = time.perf_counter(), cpu_seconds()
    tokens = 0
    for reply in sample_all(policy, requests):
        if isinstance(reply, Exception):
            raise reply
        tokens += sum(sample.tokens for sample in reply.samples)
    return Figure(tokens, time.perf_counter() - start, cpu_seconds() - cpu)


def generated(engine: Any, model: Any, requests: Sequence[SamplingRequest]) -> Figure:
    """Sample all requests in one batch of ``generate``."""
    import torch

    pad = engine.format.tokenizer.pad_token_id or 0
    start, cpu = time.perf_counter(), cpu_seconds()
    rows = [engine.format.encode(request.messages, request.max_new_tokens).ids for request in requests]
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    one, ends = requests[0], sorted(engine.end_tokens)
    sampling = {"do_sample": True, "temperature": one.temperature, "top_p": one.top_p, "top_k": 0}
    limits = {"max_new_tokens": one.max_new_tokens, "eos_token_id": ends, "pad_token_id": pad}
    with torch.inference_mode():
        said = model.generate(input_ids=ids, attention_mask=mask, **sampling, **limits)[:, width:]
    over = torch.isin(said, torch.tensor(ends, device=model.device))
    tokens = int(torch.where(over.any(1), over.int().argmax(1) + 1, said.shape[1]).sum())
    return Figure(tokens, time.perf_counter() - start, cpu_seconds() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--gguf", help="without it, llama.cpp is not measured")
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", default="48,128,256")
    parser.add_argument("--cap", type=int, default=64, help="tokens of a reply")
    parser.add_argument("--rivals", type=int, default=48, help="questions that llama.cpp and generate receive at most")
    given = parser.parse_args()
    ours, llama = load_policy(given.policy), None if given.gguf is None else load_policy(given.gguf)
    engine, folder = wrapped_part(ours), given.policy.partition(":")[2].partition("#")[0]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=engine.model.dtype).to(engine.model.device)
    task = mas_gym.load_task("gsm8k", split="test", data=given.data)
    for rows in map(int, given.rows.split(",")):
        requests = [
            SamplingRequest((PROMPT, mas_gym.ChatMessage("user", problem.question)), (seed,), given.cap)
            for seed, problem in enumerate(task[:rows])
        ]
        few = requests[: given.rivals]
        found = {"transformers:": sampled(ours, requests)}
        if llama is not None:
            found["gguf:"] = sampled(llama, few)
        found["generate"] = generated(engine, plain, few)
        for name, one in found.items():
            rates = one.tokens / one.seconds, one.tokens / one.cpu
            print(f"{rows:4} rows  {name:14} {rates[0]:7.1f} tokens/s {rates[1]:7.1f} per CPU second", flush=True)


if __name__ == "__main__":
    main()
