"""Speed and memory of importing transcripts: ``python -m benchmarks.importing`` (10,000 by default).

The script writes a log in the format ``chat``, with ten messages per transcript and four samples per question,
scattered over the file, and imports it in a fresh process. A second log size shows that memory does not grow with the
log.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from mas_gym.logs import read_transcripts
from search import import_transcripts

WORDS = ("the", "sum", "of", "both", "terms", "is", "checked", "again", "before", "we", "answer")


def write(path: Path, transcripts: int) -> None:
    rng = random.Random(0)
    order = [*range(transcripts)]
    rng.shuffle(order)
    with path.open("w", encoding="utf-8") as file:
        for number in order:
            question = number // 4
            said = [f"Step {turn}: " + " ".join(rng.choices(WORDS, k=60)) for turn in range(10)]
            # Two of the four samples share their first three messages.
            for turn in range(3 if number % 4 < 2 else 0):
                said[turn] = f"Step {turn} of question {question}: " + " ".join(WORDS * 5)
            said[-1] += f" Final Answer: {question + number % 3}"
            messages = [{"role": "assistant", "name": f"Agent{i % 4}", "content": text} for i, text in enumerate(said)]
            row = {"question": f"What is {question}?", "answer": str(question), "messages": messages}
            file.write(json.dumps(row) + "\n")


def measure(folder: str, transcripts: int) -> None:
    log, store = Path(folder) / f"{transcripts}.jsonl", Path(folder) / f"{transcripts}.db"
    write(log, transcripts)
    start = perf_counter()
    read = sum(1 for _ in read_transcripts(log))
    reading = perf_counter() - start
    start, used = perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    done = import_transcripts(log, store)
    seconds, used = perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_utime - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read == done.transcripts == transcripts
    print(
        f"{transcripts:>9,} transcripts, {log.stat().st_size / 2**20:,.0f} MiB: read in {reading:.1f} s, imported in "
        f"{seconds:.1f} s ({transcripts / seconds:,.0f}/s, CPU {used:.1f} s), peak memory {peak / 1024:.0f} MiB, "
        f"store {store.stat().st_size / 2**20:,.0f} MiB",
        flush=True,
    )


def main(*numbers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers or (10_000, 2_500):
            # Peak memory is that of a whole process.
            code = f"from benchmarks.importing import measure; measure({folder!r}, {number})"
            subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
