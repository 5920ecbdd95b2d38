"""Every claim of the paper in one table, generated from the pages: ``python -m benchmarks.paper.claims``.

The table links to the pages, which have the commands, figures and causes. It is generated from their tables of
differences. A test fails if it is out of date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.paper.page import markdown_table
from mas_gym.errors import DataError

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


class Difference(NamedTuple):
    """One row of a page's table of differences, as the page writes it."""

    text: str
    paper: str
    here: str
    interval: str
    verdict: str
    problems: str


class PaperClaim(NamedTuple):
    """A claim of the paper."""

    text: str
    source: str
    rows: Rows


CLAIMS = (
    PaperClaim(
        "MCTS: MASPRM is above an ORM of the same size, with one training run of each and with three",
        "main results",
        [("main", "mcts:10,3: MASPRM over ORM"), ("trainings", "mcts:10,3: MASPRM over ORM")],
    ),
    PaperClaim("MCTS: MASPRM is above policy likelihood", "main results", [("main", "mcts:10,3: MASPRM over PL")]),
    PaperClaim(
        "SBS(5,1) and SBS(5,3): MASPRM is above policy likelihood",
        "main results",
        [("main", "sbs:5,1: MASPRM over PL"), ("main", "sbs:5,3: MASPRM over PL")],
    ),
    PaperClaim(
        "Weighted vote: MASPRM is above policy likelihood",
        "main results",
        [("main", "sc:5,weights=critic: MASPRM over PL")],
    ),
    PaperClaim(
        "Weighted vote: MASPRM ties with the ORM",
        "main results",
        [("main", "sc:5,weights=critic: MASPRM over ORM")],
    ),
    PaperClaim(
        "MCTS: a larger MASPRM and ORM are above those of the agents' size, and these above smaller ones",
        "main results, two sizes",
        [
            ("backbones", "MASPRM: large over"),
            ("backbones", "ORM: large over"),
            ("backbones", "MASPRM: the agents' size over"),
            ("backbones", "ORM: the agents' size over"),
        ],
    ),
    PaperClaim(
        "MCTS(10,3) and SC@5: the gap from Hit@1 to Hit@5 shrinks",
        "Hit@k",
        [("main", "MCTS(10,3): the gap"), ("main", "SC@5: the gap")],
    ),
    PaperClaim(
        "Bradley-Terry, with and without the anchor, is above regression for MASPRM",
        "head ablation",
        [
            ("heads", "MASPRM: BT over MSE"),
            ("heads", "MASPRM: BT alone over MSE"),
            ("trainings", "MASPRM: BT over MSE"),
            ("trainings", "MASPRM: BT alone over MSE"),
        ],
    ),
    PaperClaim(
        "Cross-entropy is above regression for the ORM, or ties with it",
        "head ablation",
        [("heads", "ORM: BCE over MSE")],
    ),
    PaperClaim("The full view is above the local view", "local observability", [("views", "full view over")]),
    PaperClaim("The local view is above policy likelihood", "local observability", [("views", "local view over")]),
    PaperClaim(
        "SBS(5,1), SBS(5,3) and MCTS(10,3) depend less on the graph than a single pass",
        "graph sensitivity",
        [("graphs", "range over graphs")],
    ),
    PaperClaim(
        "Single pass and MCTS(10,3): the dynamic graph is above the fixed one",
        "dynamic scheduler",
        [("dylan", "single pass: dynamic"), ("dylan", "MCTS(10,3): dynamic")],
    ),
    PaperClaim(
        "On Arithmetic and on Ordering, a critic of the other task is below the critic of the same task",
        "cross-dataset transfer",
        [("tasks", "on arithmetic: its own"), ("tasks", "on ordering: its own")],
    ),
    PaperClaim(
        "On Arithmetic and on Ordering, a critic of the other task is above policy likelihood",
        "cross-dataset transfer",
        [("tasks", "on arithmetic: that of"), ("tasks", "on ordering: that of")],
    ),
    PaperClaim(
        "Between wordings of one task, the critic of the same wording is above the critic of the other wording",
        "cross-dataset transfer",
        [("wordings", "on arithmetic: its own"), ("wordings", "on retold-3: its own")],
    ),
    PaperClaim(
        "Between wordings of one task, a critic of the other wording is above policy likelihood",
        "cross-dataset transfer",
        [("wordings", "on arithmetic: that of"), ("wordings", "on retold-3: that of")],
    ),
    PaperClaim(
        "On the easiest and hardest problems, a critic trained on them is above the critic of the default difficulty",
        "cross-dataset transfer",
        [("difficulty", "difficulty 1: its own"), ("difficulty", "difficulty 5: its own")],
    ),
    PaperClaim(
        "With other agents, MCTS(10,3) and SBS(5,1): MASPRM is above policy likelihood",
        "cross-agent transfer",
        [("agents", "mcts:10,3: MASPRM over PL"), ("agents", "sbs:5,1: MASPRM over PL")],
    ),
    PaperClaim(
        "With other agents, MCTS(10,3): MASPRM is above the ORM",
        "cross-agent transfer",
        [("agents", "mcts:10,3: MASPRM over ORM")],
    ),
    PaperClaim(
        "SBS(5,3) and MCTS(10,3) of the system are above a single agent",
        "single-agent context",
        [("single", "sbs:5,3+MASPRM over one"), ("single", "mcts:10,3+MASPRM over one")],
    ),
)

OURS = (
    PaperClaim(
        "MCTS(20,2) and MCTS(10,3) with MASPRM are above best-of-N with the ORM at equal tokens",
        "",
        [("main", "MASPRM MCTS(20,2) over best"), ("main", "MASPRM MCTS(10,3) over best")],
    ),
    PaperClaim(
        "MCTS(20,4) and MCTS(20,6) with MASPRM and merged duplicates are above best-of-N with the ORM at equal tokens",
        "",
        [("main", "MASPRM mcts:20,4,same"), ("main", "MASPRM mcts:20,6,same")],
    ),
    PaperClaim(
        "MASPRM is above the ORM with the best leaf as the answer", "", [("main", "MASPRM MCTS(10,3) over ORM MCTS")]
    ),
    PaperClaim(
        "SBS(5,3) and MCTS(10,3) of the system are above best-of-N of one agent at equal tokens",
        "",
        [("single", "sbs:5,3 + MASPRM over bon"), ("single", "mcts:10,3 + MASPRM over bon")],
    ),
    PaperClaim(
        "A MASPRM of the same graph is above policy likelihood: RPSV, Refine, Consensus, DyLAN, Logic",
        "",
        [
            ("graphs", "rpsv: mcts:10,3: MASPRM over policy"),
            ("graphs", "refine: mcts:10,3: MASPRM over policy"),
            ("graphs", "consensus: mcts:10,3: MASPRM over policy"),
            ("dylan", "dynamic: mcts:10,3: MASPRM over policy"),
            ("tasks", "ordering: mcts:10,3: MASPRM over policy"),
        ],
    ),
    PaperClaim(
        "A MASPRM of the same graph is above best-of-N with an ORM of this graph at equal tokens, on these graphs",
        "",
        [
            ("graphs", "rpsv: MASPRM mcts:10,3 over bon"),
            ("graphs", "refine: MASPRM mcts:10,3 over bon"),
            ("graphs", "consensus: MASPRM mcts:10,3 over bon"),
            ("dylan", "dynamic: MASPRM mcts:10,3 over bon"),
            ("tasks", "ordering: MASPRM mcts:10,3 over bon"),
        ],
    ),
    PaperClaim(
        "One MASPRM is above policy likelihood on difficulties 1 to 5",
        "",
        [("difficulty", f"difficulty {level}: mcts:10,3: MASPRM over policy") for level in range(1, 6)],
    ),
    PaperClaim(
        "One MASPRM is above best-of-N with one ORM at equal tokens on difficulties 1 to 5",
        "",
        [("difficulty", f"difficulty {level}: MASPRM mcts:10,3 over bon") for level in range(1, 6)],
    ),
    PaperClaim(
        "MASPRM and the ORM improve with a backbone that was trained as an Auditor",
        "",
        [("backbones", "MASPRM: with the Auditor"), ("backbones", "ORM: with the Auditor")],
    ),
    PaperClaim(
        "MASPRM tells right messages of the Reader and of the Solver from wrong ones better than policy "
        "likelihood (AUC in points)",
        "",
        [("confidence", f"AUC for the {agent}: MASPRM") for agent in ("Reader", "Solver")],
    ),
    PaperClaim(
        "MASPRM finds the agent that erred first more often than the ORM, and more often than policy likelihood",
        "",
        [("credit", "MASPRM over ORM"), ("credit", "MASPRM over PL")],
    ),
)
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


def table(claims: Sequence[PaperClaim]) -> str:
    """Return the claims with the results on the pages."""
    named = [claim for claim in claims if claim.source]
    header = ("claim", *(["in the paper"] if named else []), *AGENTS.values())
    rows = [
        (
            claim.text,
            *([claim.source] if named else []),
            *("<br>".join(found(PAGES / folder, claim.rows)) or "\N{EN DASH}" for folder in AGENTS),
        )
        for claim in claims
    ]
    return markdown_table(header, rows, left=len(header))


def document() -> str:
    parts = [HEAD, "## The paper's claims\n", table(CLAIMS), "## Comparisons that are not in the paper\n", table(OURS)]
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.claims", description=(__doc__ or "").split("\n")[0]
    )
    parser.parse_args(arguments)
    (PAGES / "claims.md").write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
