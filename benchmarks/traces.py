"""Cost and correctness of token traces: ``python -m benchmarks.traces``; about two minutes on one core.

The script searches the same problems without and with traces, and prints the CPU seconds of both and the bytes per
message. Then it checks every trace: the ids decode to the message in the store, and the log-probabilities sum to the
stored one and equal those of a forward pass of the model in transformers. For a local model they may differ by half of
the grid. The last line is the number of messages for which tokenising the text again would give different ids.

``--policy`` selects another engine for the same weights, such as ``vllm:FOLDER`` or ``openai:NAME@URL``. The CPU
seconds are those of this process, without those of a server or of vLLM's engine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import mas_gym
import search
from mas_gym.policies import load_policy
from mas_gym.policies.local.decode import TOKEN_GRID
from mas_gym.policies.token_traces import Traces, traced, traces_folder


def searched(policy: Any, problems: int, store: Path) -> float:
    """Search training problems by trees of siblings, and return the CPU seconds."""
    task = mas_gym.load_task("arithmetic", split="train", limit=problems)
    start = time.process_time()
    for plan in search.run("siblings:2", task, mas="rpsv", policy=policy, training=True, store=store):
        assert plan.error is None
    return time.process_time() - start


def largest_gap(policy: Any, traces: Traces, rows: range) -> float:
    """Return the largest difference between stored log-probabilities and those of a padded forward pass."""
    found = [traces[row].trace for row in rows]
    width = max(len(one.prompt) + len(one.completion) for one in found)
    ids = torch.zeros((len(found), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, one in enumerate(found):
        tokens = one.prompt + one.completion
        ids[place, : len(tokens)], mask[place, : len(tokens)] = torch.tensor(tokens), 1
    with torch.inference_mode():
        logprobs = policy.model(ids, attention_mask=mask).logits.log_softmax(2)
    gaps = []
    for place, one in enumerate(found):
        steps = logprobs[place, len(one.prompt) - 1 : len(one.prompt) + len(one.completion) - 1]
        own = steps.gather(1, torch.tensor(one.completion)[:, None])[:, 0]
        gaps.append((own - torch.tensor(one.logprobs)).abs().max().item())
    return max(gaps)


def main(problems: int, spec: str, folder: Path) -> None:
    """Search, check and print."""
    local: Any = load_policy("tiny")
    policy = local if spec == "tiny" else load_policy(spec)
    searched(policy, 8, folder / "warm.db")
    store = folder / "traced.db"
    plain = searched(policy, problems, folder / "plain.db")
    recorded = searched(traced(policy, traces_folder(store)), problems, store)
    traces = Traces(traces_folder(store))
    size = sum(path.stat().st_size for path in traces_folder(store).iterdir())
    print(
        f"{len(traces):,} calls; CPU {plain:.1f} s without traces, {recorded:.1f} s with ({recorded / plain:.2f} times)"
    )
    print(f"{size / len(traces):.0f} bytes per message on disk; the store has {store.stat().st_size / len(traces):.0f}")
    differ = sums = again = 0
    tokenizer = local.format.tokenizer
    with search.open_store(store) as opened:
        seeds = dict(opened.message_seeds())
        for plan in opened.plans():
            for node in list(plan.tree)[1:]:
                trace = traces.find(seeds[plan.problem_id][node.id]).trace
                differ += local.format.decode(trace.completion) != node.state.text
                sums += abs(sum(trace.logprobs) - node.logprob) > 0.02 + TOKEN_GRID / 2 * node.tokens
                said = tokenizer(node.state.text, add_special_tokens=False)["input_ids"]
                again += tuple(said) != tuple(one for one in trace.completion if one not in local.end_tokens)
    batches = [range(start, min(start + 256, len(traces))) for start in range(0, len(traces), 256)]
    gap = max(largest_gap(local, traces, rows) for rows in batches)
    print(f"{differ} of {len(traces):,} differ from the message in the store, {sums} from its log-probability")
    print(f"largest difference from a forward pass: {gap:.5f} nats; half of the grid is {TOKEN_GRID / 2:.5f}")
    print(f"{again} of {len(traces):,} texts would be tokenised to other ids")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces", description="Check and price token traces.")
    parser.add_argument("-n", "--problems", type=int, default=334, help="problems; each has 30 calls")
    parser.add_argument("--policy", default="tiny", help="engine with the weights of tiny")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        main(given.problems, given.policy, Path(place))
