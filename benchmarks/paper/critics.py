"""Verifiers as critics: twelve verifiers in beam search, tree search and best-of-N, at equal tokens."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paper.lab import LIKELIHOOD, MCTS, ORM, Lab, Score, Setting, command, keep_rows, row_of
from benchmarks.paper.page import NEW, Page, claim
from search.results.table_formats import to_markdown

BEAM, PASSES = "sbs:5,1", "bon:10"
PAIRS = "judge, pairs"
"""Guides the beam search alone: comparing all siblings in both orders is the most expensive verdict."""

CRITICS = {
    "random": "random",
    "PL": "policy-likelihood",
    "entropy": "uncertainty:entropy",
    "self-certainty": "uncertainty:self-certainty",
    "least likely token": "uncertainty:least",
    "agreement": "agreement",
    "judge": "judge:AGENTS",
    PAIRS: "judge:AGENTS#mode=pairwise",
    "ORM": "",
    "MASPRM": "",
    "MASPRM + ORM": "",
    "MASPRM + PL": "",
}
"""Names in the table, and specs. The learned critics are those of the run; AGENTS is replaced by the agents' model."""

WHOLE = ("uncertainty:entropy", "uncertainty:self-certainty")
"""Need whole next-token distributions, which only a model in this process reports."""

ASKS = """
This page compares the accuracy and cost of verifiers as critics in beam search SBS(5,1), tree search MCTS(10,3) and
best-of-10. The baseline of every row is best-of-N with the ORM at equal tokens. The paper has no such comparison.

There are three groups of critics:

- Cost-free critics: random scores (`random`); policy likelihood (PL); the agents' uncertainty (mean entropy,
  self-certainty and the least likely token of a message); agreement, the share of leaves with the same answer.
- An LLM judge: the agents' model. In the small-scale experiment, it has two million parameters and was not trained to
  judge, so its rows show the cost of a judge and not its quality. It judges each state individually, and in beam search
  also by comparing siblings, which has the highest cost.
- Learned critics: ORM, MASPRM, and means of two critics. The ORM scores only finished transcripts, so MASPRM + ORM
  ranks only leaves.

The agreement critic and every critic that includes the ORM cannot be used in a beam search, because they score only
finished transcripts.
"""


def run(lab: Lab) -> Page:
    page = Page("critics", "Verifiers as critics", ASKS)
    # The searches of different critics share most of their messages.
    setting = lab.home._replace(policy=with_option(lab.home.policy, f"cache={lab.options.out / 'samples.db'}"))
    searches = [
        row_of(planner, critic, name)
        for name, critic in critics(lab).items()
        for planner in ((BEAM,) if name == PAIRS else (BEAM, MCTS, PASSES))
        if planner != BEAM or not critic.terminal_only
    ]
    scores = lab.measure(setting, searches)
    page.blocks.append(to_markdown([score.row for score in scores]))
    baselines = equal_passes(lab, setting, scores)
    page.blocks.append("Best-of-N with the ORM, for comparison at equal tokens:\n")
    page.blocks.append(to_markdown([score.row for score in baselines.values()]))
    for score in scores:
        other = baselines[passes(score, scores)]
        if score.row.label != other.row.label:
            text = f"{score.row.label} over {other.row.label}"
            page.claims.append(claim(text, NEW, score.shares, other.shares))
    keep_rows(lab, page.name, [*scores, *baselines.values()])
    return page


def critics(lab: Lab) -> dict:
    """Return the critics by name, the learned ones trained on the home setting."""
    orm, masprm = lab.folder(lab.home, ORM), lab.folder(lab.home)
    learned = {
        "ORM": str(orm),
        "MASPRM": str(masprm),
        "MASPRM + ORM": f"ensemble:{masprm},{orm}",
        "MASPRM + PL": f"ensemble:{masprm},{LIKELIHOOD}",
    }
    return {name: lab.load(spec or learned[name]) for name, spec in specs_for(lab.home.policy).items()}


def specs_for(policy: str) -> dict[str, str]:
    """Return the critics' specs by name for agents of this policy, whose model is also the judge; learned: empty."""
    local = policy.startswith(("tiny", "transformers:"))
    found: dict[str, str] = {}
    for name, spec in CRITICS.items():
        if local or spec not in WHOLE:
            kind, _, option = spec.partition("#")
            kind = kind.replace("AGENTS", policy)
            found[name] = with_option(kind, option) if option else kind
    return found


def with_option(spec: str, option: str) -> str:
    """Add an option to a policy or critic string, which may have some."""
    return f"{spec}{'&' if '#' in spec else '#'}{option}"


def passes(score: Score, scores: Sequence[Score]) -> int:
    """Return how many passes spend about as many tokens as a row."""
    ten = next(other.row.tokens.mean for other in scores if other.row.planner == PASSES)
    return max(1, round(10 * score.row.tokens.mean / ten))


def equal_passes(lab: Lab, setting: Setting, scores: Sequence[Score]) -> dict[int, Score]:
    """Return best-of-N with the ORM for every N that a row is compared with."""
    sizes = sorted({passes(score, scores) for score in scores})
    orm = lab.guides()["ORM"]
    return dict(zip(sizes, lab.measure(setting, [row_of(f"bon:{n}", orm, "ORM") for n in sizes]), strict=True))


if __name__ == "__main__":
    command(run, "critics")
