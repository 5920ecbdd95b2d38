"""Every claim of the paper in one table, generated from the pages: ``python -m benchmarks.paper.claims``.

The table links to the pages, which have the commands, figures and causes. It is generated from their tables of
differences. A test fails if it is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.paper.page import markdown_table
from mas_gym.errors import DataError
from mas_gym.internal.whole_files import write_file

PAGES = Path(__file__).resolve().parents[1] / "pages"
AGENTS = {
    "": "bundled agents",
    "natural": "agents with natural errors, longer stories",
    "natural/reworded": "the same, unseen words",
    "qwen": "a real model, GSM8K",
}
"""Folder of pages to the agents of its experiments."""

Rows = Sequence[tuple[str, str]]
"""Pages, each with how a difference on it begins."""

Claims = Mapping[str, Rows]
"""Claims, each with the rows that measure it."""


class Difference(NamedTuple):
    """One row of a page's table of differences, as the page writes it."""

    text: str
    paper: str
    here: str
    interval: str
    verdict: str
    problems: str


CLAIMS: Mapping[str, Claims] = {
    "main results": {
        "MCTS: MASPRM is above an ORM of the same size, with one training run of each and with three": [
            ("main", "mcts:10,3: MASPRM over ORM"),
            ("trainings", "mcts:10,3: MASPRM over ORM"),
        ],
        "MCTS: MASPRM is above policy likelihood": [("main", "mcts:10,3: MASPRM over PL")],
        "SBS(5,1) and SBS(5,3): MASPRM is above policy likelihood": [
            ("main", "sbs:5,1: MASPRM over PL"),
            ("main", "sbs:5,3: MASPRM over PL"),
        ],
        "Weighted vote: MASPRM is above policy likelihood": [("main", "sc:5,weights=critic: MASPRM over PL")],
        "Weighted vote: MASPRM ties with the ORM": [("main", "sc:5,weights=critic: MASPRM over ORM")],
    },
    "main results, two sizes": {
        "MCTS: a larger MASPRM and ORM are above those of the agents' size, and these above smaller ones": [
            ("backbones", "MASPRM: large over"),
            ("backbones", "ORM: large over"),
            ("backbones", "MASPRM: the agents' size over"),
            ("backbones", "ORM: the agents' size over"),
        ]
    },
    "Hit@k": {
        "MCTS(10,3) and SC@5: the gap from Hit@1 to Hit@5 shrinks": [
            ("main", "MCTS(10,3): the gap"),
            ("main", "SC@5: the gap"),
        ]
    },
    "head ablation": {
        "Bradley-Terry, with and without the anchor, is above regression for MASPRM": [
            ("heads", "MASPRM: BT over MSE"),
            ("heads", "MASPRM: BT alone over MSE"),
            ("trainings", "MASPRM: BT over MSE"),
            ("trainings", "MASPRM: BT alone over MSE"),
        ],
        "Cross-entropy is above regression for the ORM, or ties with it": [("heads", "ORM: BCE over MSE")],
    },
    "local observability": {
        "The full view is above the local view": [("views", "full view over")],
        "The local view is above policy likelihood": [("views", "local view over")],
    },
    "graph sensitivity": {
        "SBS(5,1), SBS(5,3) and MCTS(10,3) depend less on the graph than a single pass": [
            ("graphs", "range over graphs")
        ]
    },
    "dynamic scheduler": {
        "Single pass and MCTS(10,3): the dynamic graph is above the fixed one": [
            ("dylan", "single pass: dynamic"),
            ("dylan", "MCTS(10,3): dynamic"),
        ]
    },
    "cross-dataset transfer": {
        "On Arithmetic and on Ordering, a critic of the other task is below the critic of the same task": [
            ("tasks", "on arithmetic: its own"),
            ("tasks", "on ordering: its own"),
        ],
        "On Arithmetic and on Ordering, a critic of the other task is above policy likelihood": [
            ("tasks", "on arithmetic: that of"),
            ("tasks", "on ordering: that of"),
        ],
        "Between wordings of one task, the critic of the same wording is above the critic of the other wording": [
            ("wordings", "on arithmetic: its own"),
            ("wordings", "on retold-3: its own"),
        ],
        "Between wordings of one task, a critic of the other wording is above policy likelihood": [
            ("wordings", "on arithmetic: that of"),
            ("wordings", "on retold-3: that of"),
        ],
        "On the easiest and hardest problems, a critic trained on them is above the critic of the default difficulty": [
            ("difficulty", "difficulty 1: its own"),
            ("difficulty", "difficulty 5: its own"),
        ],
    },
    "cross-agent transfer": {
        "With other agents, MCTS(10,3) and SBS(5,1): MASPRM is above policy likelihood": [
            ("agents", "mcts:10,3: MASPRM over PL"),
            ("agents", "sbs:5,1: MASPRM over PL"),
        ],
        "With other agents, MCTS(10,3): MASPRM is above the ORM": [("agents", "mcts:10,3: MASPRM over ORM")],
    },
    "single-agent context": {
        "SBS(5,3) and MCTS(10,3) of the system are above a single agent": [
            ("single", "sbs:5,3+MASPRM over one"),
            ("single", "mcts:10,3+MASPRM over one"),
        ]
    },
}
"""The paper's claims, by their place in the paper."""

OWN = (("graphs", "rpsv"), ("graphs", "refine"), ("graphs", "consensus"), ("dylan", "dynamic"), ("tasks", "ordering"))
"""Pages of graphs with their own critics, and the names of the graphs there."""

OURS: Claims = {
    "MCTS(20,2) and MCTS(10,3) with MASPRM are above best-of-N with the ORM at equal tokens": [
        ("main", "MASPRM MCTS(20,2) over best"),
        ("main", "MASPRM MCTS(10,3) over best"),
    ],
    "MCTS(20,4) and MCTS(20,6) with MASPRM and merged duplicates are above best-of-N with the ORM at equal tokens": [
        ("main", "MASPRM mcts:20,4,same"),
        ("main", "MASPRM mcts:20,6,same"),
    ],
    "MASPRM is above the ORM with the best leaf as the answer": [("main", "MASPRM MCTS(10,3) over ORM MCTS")],
    "SBS(5,3) and MCTS(10,3) of the system are above best-of-N of one agent at equal tokens": [
        ("single", "sbs:5,3 + MASPRM over bon"),
        ("single", "mcts:10,3 + MASPRM over bon"),
    ],
    "A MASPRM of the same graph is above policy likelihood: RPSV, Refine, Consensus, DyLAN, Logic": [
        (page, f"{graph}: mcts:10,3: MASPRM over policy") for page, graph in OWN
    ],
    "A MASPRM of the same graph is above best-of-N with an ORM of this graph at equal tokens, on these graphs": [
        (page, f"{graph}: MASPRM mcts:10,3 over bon") for page, graph in OWN
    ],
    "One MASPRM is above policy likelihood on difficulties 1 to 5": [
        ("difficulty", f"difficulty {level}: mcts:10,3: MASPRM over policy") for level in range(1, 6)
    ],
    "One MASPRM is above best-of-N with one ORM at equal tokens on difficulties 1 to 5": [
        ("difficulty", f"difficulty {level}: MASPRM mcts:10,3 over bon") for level in range(1, 6)
    ],
    "MASPRM and the ORM improve with a backbone that was trained as an Auditor": [
        ("backbones", "MASPRM: with the Auditor"),
        ("backbones", "ORM: with the Auditor"),
    ],
    "MASPRM tells right messages of the Reader and of the Solver from wrong ones better than policy likelihood "
    "(AUC in points)": [("confidence", f"AUC for the {agent}: MASPRM") for agent in ("Reader", "Solver")],
    "MASPRM finds the agent that erred first more often than the ORM, and more often than policy likelihood": [
        ("credit", "MASPRM over ORM"),
        ("credit", "MASPRM over PL"),
    ],
}
"""Comparisons that the paper does not make."""

HEAD = """# Claims of the paper with their verdicts

Figures are differences in Hit@1, in percentage points, with 95% intervals over problems in brackets. Each verdict links
to its page, which has the rows, the command, the paper's figures and, if the result differs from the paper, the causes
that were tested. If a claim has several figures, they are in the order in which the claim names them. *no comparison*
means that one side uses more than 1.5 times the tokens of the other. A dash means that the claim was not measured.

The bundled agents make errors by design. The errors of the agents with natural errors are not designed. They occur on
longer stories ([pages/natural](natural/main.md)) or on unseen words
([pages/natural/reworded](natural/reworded/main.md)). The real model is Qwen2.5-Coder-0.5B-Instruct. Its critics are
heads on its frozen backbone, and the searches use recorded trees of dev problems ([pages/qwen](qwen/main.md)).

```console
python -m benchmarks.paper.claims
```
"""


def differences(text: str) -> list[Difference]:
    """Return the table of differences on a page; empty if it has none.

    Raises:
        DataError: A row has not six cells.
    """
    section = re.search(r"^## Differences\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    lines = [line for line in (section[1] if section else "").splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    if any(len(row) != len(Difference._fields) for row in rows):
        raise DataError("expected six cells in each row of a page's differences; write the page again by its command")
    return [Difference(*row) for row in rows]


def found(folder: Path, rows: Rows) -> Iterator[str]:
    """Yield the results for a claim on the pages of a folder: the verdict, the difference, its interval, and a link."""
    for page, beginning in rows:
        file = folder / f"{page}.md"
        for row in differences(file.read_text(encoding="utf-8")) if file.exists() else []:
            if row.text.startswith(beginning):
                low, _, high = row.interval.partition(" to ")
                verdict = row.verdict.partition(":")[0]
                yield f"[{verdict}]({file.relative_to(PAGES).as_posix()}) {row.here} [{low}, {high}]"


def results(text: str, rows: Rows, *source: str) -> tuple[str, ...]:
    """Return a claim's row of the table."""
    return text, *source, *("<br>".join(found(PAGES / folder, rows)) or "\N{EN DASH}" for folder in AGENTS)


def document() -> str:
    paper = [results(text, rows, place) for place, claims in CLAIMS.items() for text, rows in claims.items()]
    head = ("claim", "in the paper", *AGENTS.values())
    ours = [results(text, rows) for text, rows in OURS.items()]
    parts = [HEAD, "## The paper's claims\n", markdown_table(head, paper, len(head))]
    parts += ["## Comparisons that are not in the paper\n", markdown_table((head[0], *head[2:]), ours, len(head) - 1)]
    return "\n".join(parts)


if __name__ == "__main__":
    write_file(PAGES / "claims.md", document())
