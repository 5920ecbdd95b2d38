"""Modules that are executed for one question: ``python -m benchmarks.modules_entered``.

The script runs one search of MCTS(10,3) without a store; its policy and its critic draw from a hash. A first run
imports all modules, so that only calls are counted in the second. Modules that are entered only before the run
reads its problem load the parts of the run.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import search
from benchmarks.store_reading import DrawnCritic
from mas_gym.policies import AsyncPolicy, Sample, SamplingReply, SamplingRequest
from mas_gym.tasks import Problem

ROOT = Path(search.__file__).parents[1]


class DrawnPolicy(AsyncPolicy):
    """Messages drawn from the seeds."""

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        texts = [f"It may be {seed % 977}. Final Answer: {seed % 5}" for seed in request.seeds]
        return SamplingReply(tuple(Sample(text, 10, None, "stop") for text in texts))


def question(seed: int, read: Callable[[], None] = lambda: None) -> None:
    def problems() -> Iterator[Problem]:
        read()
        yield Problem("p", "What is 3 modulo 5?", "3")

    parts = {"policy": DrawnPolicy(), "critic": DrawnCritic("first")}
    list(search.run("mcts:10,3", problems(), mas="rpsv", **parts, seed=seed, raise_errors=True))


def module(frame: FrameType | None) -> str | None:
    path = Path(frame.f_code.co_filename) if frame else ROOT
    if not path.is_relative_to(ROOT):
        return None
    name = str(path.relative_to(ROOT))
    return name if name.startswith(("mas_gym/", "search/", "rewardmodels/")) else None


def main() -> None:
    entered: Counter[str] = Counter()
    loading: Counter[str] = Counter()
    crossed: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        here = module(frame) if event == "call" else None
        if here is not None:
            entered[here] += 1
            caller = module(frame.f_back)
            if caller not in (None, here):
                crossed[caller or "", here] += 1

    sys.setprofile(note)
    threading.setprofile(note)
    question(1)
    entered.clear()
    crossed.clear()
    question(2, lambda: loading.update(entered))
    sys.setprofile(None)
    threading.setprofile(None)
    print(f"{len(entered)} modules, {entered.total():,} calls, {crossed.total():,} from one module to another")
    path = entered - loading
    print(f"{len(path)} of them after the run has read its problem")
    for name, calls in entered.items():
        print(f"{calls:7,}  {name}{'' if name in path else '  (loading)'}")
    print()
    for (caller, called), calls in crossed.most_common(20):
        print(f"{calls:7,}  {caller} -> {called}")


if __name__ == "__main__":
    main()
