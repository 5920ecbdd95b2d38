"""Reads DyLAN's recordings on MATH for `mas_gym.import_transcripts`: each message of each agent is one sample.

mas-gym import dylan_math.jsonl.gz --format benchmarks/real/dylan_reader.py:read --kind expression --store math.db
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

from mas_gym.logs import LoggedMessage, Transcript

_MATRIX = re.compile(r"\\begin\{[pbvV]?matrix\}.*?\\end\{[pbvV]?matrix\}", re.DOTALL)
_ROW_END = re.compile(r"(?<!\\)\\(?=[-\d])")


def read(path: str | Path) -> Iterator[Transcript]:
    """Yield one transcript of a single message per agent and round; ``sample_id`` names both, from 0."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            for agent, messages in enumerate(row["messages"]):
                for number, text in enumerate(messages):
                    yield Transcript(
                        row["question"],
                        (LoggedMessage(f"Agent {agent + 1}", text),),
                        reference=with_rows(row["answer"]),
                        question_id=row["id"],
                        sample_id=f"{agent} {number}",
                        kind="expression",
                    )


def with_rows(answer: str) -> str:
    r"""Return a reference answer with the row ends of its matrices restored.

    The recording has one backslash for each two of MATH, which changes matrices alone:

    >>> print(with_rows(r"\begin{pmatrix}2&7\13&-2\end{pmatrix}"))
    \begin{pmatrix}2&7\\13&-2\end{pmatrix}
    """
    return _MATRIX.sub(lambda found: _ROW_END.sub(r"\\\\", found[0]), answer)
