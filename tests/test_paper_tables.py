"""The table scripts, end to end on a few problems with critics that have learned from a handful of trees."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mas_gym.tiny
import search
from benchmarks.paper import (
    agents,
    backbones,
    by_agent,
    claims,
    confidence,
    credit,
    difficulty,
    dylan,
    errors,
    frontier,
    graphs,
    heads,
    main,
    single,
    tasks,
    trainings,
    views,
    wordings,
)
from benchmarks.paper.all import TABLES
from benchmarks.paper.credit import Pass, judges_of, largest_drop, shares
from benchmarks.paper.lab import LIKELIHOOD, ORM, Lab, Setting, TinyShape, publish, row_of, rule_for, weights
from benchmarks.paper.options import PARTNERS, Options, read
from benchmarks.paper.page import REASONS, Claim, Page, claim, claim_of, write_page
from benchmarks.paper.published import lead, narrowing
from benchmarks.ranking import auc_difference, rank
from benchmarks.tiny.truth import FirstError, rights
from mas_gym.errors import ConfigError, DataError
from mas_gym.policies import load_policy
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import Action
from rewardmodels import stored_trees
from rewardmodels.training.train_critic import ROLLOUTS, trees
from search import ScoringContext
from search.compare.first_errors import auc
from search.results.intervals import Difference
from search.setup import RunSpec
from search.store import open_store


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    out = tmp_path_factory.mktemp("tables")
    other = f"transformers:{mas_gym.tiny.path()}"
    few = ("epochs=0.5", "evaluations=1", "checkpoints=1", "anchor=0.1")
    return Options(out, number=2, seeds=(42,), trees=8, dynamic_trees=4, dev_trees=3, settings=few, other_policy=other)


class SmallLab(Lab):
    """A lab with training searches of fewer simulations."""

    def rollouts(self, setting: Setting, split: str = "train", planner: str = ROLLOUTS) -> RunSpec:
        return super().rollouts(setting, split, "mcts:8,3" if planner == ROLLOUTS else planner)


@pytest.fixture(scope="module")
def lab(options: Options) -> Lab:
    return SmallLab(options)


def text_of(lab: Lab, page: Page) -> str:
    return publish(lab, page).read_text(encoding="utf-8")


def figures(text: str, first: str) -> list[str]:
    """Return the cells of the table row that begins with a cell."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def assert_rivals(text: str, name: str) -> None:
    """Check that a page compares MASPRM with policy likelihood, and with best-of-N at equal tokens."""
    assert f"| {name}mcts:10,3: MASPRM over policy likelihood |" in text
    assert re.search(rf"\| {name}MASPRM mcts:10,3 over bon:\d+ with the ORM, equal tokens \|", text)


# The tables


@pytest.mark.slow
def test_siblings_differ_only_in_the_last_message(tmp_path: Path) -> None:
    task, store = mas_gym.load_task("arithmetic", split="dev")[:6], tmp_path / "dev.db"
    run = search.run("mcts:8,3", task, mas="rpsv", policy=load_policy("tiny"), training=True, store=store)
    assert len(list(run)) == 6
    pairs = [pair for item in stored_trees(store) for pair in errors.twins(item, task.problem(item.problem_id))]
    assert len({pair.example.agent for pair in pairs}) > 1
    for example, right, wrong in pairs:
        problem = task.problem(example.problem_id)
        assert right.state.parent == wrong.state.parent
        assert rights(problem, spoken(right))[-1] and not rights(problem, spoken(wrong))[-1]
    assert str(errors.ordered_right(search.ConstantCritic(), pairs)[""]) == f"50.0 [50.0, 50.0] of {len(pairs)}"


def spoken(context: search.ScoringContext) -> list[tuple[str, str]]:
    state, found = context.state, []
    while state.parent is not None:
        found.append((context.mas.agents[state.speaker].name, state.text))
        state = state.parent
    return found[::-1]


@pytest.mark.slow
def test_main_table_has_the_papers_rows_and_can_be_resumed(lab: Lab, options: Options) -> None:
    text = text_of(lab, main.run(lab))
    rows = [
        line for line in text.splitlines() if line.startswith(("| single", "| sc:", "| sbs:", "| mcts:", "| bon:"))
    ][:20]
    assert [row.split("|")[1].strip() for row in rows] == [
        *("single", "sc:5"),
        *["sc:5,weights=critic"] * 3,
        *["sbs:5,1"] * 2,
        *["sbs:5,3"] * 2,
        *["mcts:10,3"] * 3,
        *("bon:5", "bon:10", "mcts:20,2", "mcts:10,3,answer=best"),
        *("mcts:20,4,same=opening", "bon:7", "mcts:20,6,same=opening", "bon:11"),
    ]
    assert [row.split("|")[2].strip() for row in rows[2:]] == ["PL", "ORM", "MASPRM"] + ["PL", "MASPRM"] * 2 + [
        *("PL", "ORM", "MASPRM"),
        *("ORM", "ORM", "MASPRM", "ORM"),
        *("MASPRM", "ORM") * 2,
    ]
    for compared in ("MCTS(20,2) over best-of-5", "MCTS(10,3) over best-of-10", "MCTS(10,3) over ORM MCTS(10,3)"):
        assert f"| MASPRM {compared}" in text
    assert "SC@5: the gap from Hit@1 to Hit@5 shrinks with MASPRM | 7B: +6.6 +7.7 +12.7 +7.3 |" in text
    assert re.search(r"over a single pass .* \| no comparison: [\d.]+ times the tokens \|", text)
    assert "This page has 34 intervals at the 95% level" in text
    assert "python -m benchmarks.paper.main -n 2 --seeds 42 --trees 8" in text
    assert text.count("MASPRM over") == 7
    assert (options.folder / "main.png").read_bytes().startswith(b"\x89PNG")
    stores = {path: path.stat().st_mtime_ns for path in options.out.rglob("*.safetensors")}
    again = SmallLab(options)
    assert text_of(again, main.run(again)) == text
    assert {path: path.stat().st_mtime_ns for path in options.out.rglob("*.safetensors")} == stores
    document = json.loads((options.out / "results" / "main.json").read_text())
    assert len(document["rows"]) == 20


@pytest.mark.slow
def test_heads_are_trained_on_the_same_trees(lab: Lab) -> None:
    text = text_of(lab, heads.run(lab))
    assert len(figures(text, "MASPRM, BT")) == len(figures(text, "MASPRM, BT alone")) == 6
    assert "MASPRM: BT over MSE" in text
    assert "ORM: BCE over MSE" in text
    assert_rivals(text, "")
    # An ORM has an AUC and no pairs.
    [judged] = [line for line in text.splitlines() if line.startswith("| ORM, BCE |")][1:]
    assert re.fullmatch(r"(\| \W ){3}\| [01]\.\d{3} \| [^|]* \|", judged.removeprefix("| ORM, BCE "))


@pytest.mark.slow
def test_local_view_critic_is_trained(lab: Lab) -> None:
    text = text_of(lab, views.run(lab))
    assert [figures(text, name)[0] for name in ("policy likelihood", "full", "local")]
    assert_rivals(text, "")
    assert lab.critic(lab.home, views.Recipe(view="local")).info.view == "local"


@pytest.mark.slow
def test_main_critic_is_compared_with_dedicated_critics_on_other_graphs(lab: Lab) -> None:
    text = text_of(lab, graphs.run(lab))
    for graph in ("rpsv", "refine", "consensus"):
        assert_rivals(text, f"{graph}: ")
    assert len(figures(text, "best-of-N, own ORM")) == len(figures(text, "truth")) == 6
    # Of the Evaluator's right and wrong verdicts, for one.
    assert re.search(r"^\| refine: error of \| pairs \| its MASPRM \| policy likelihood \|", text, re.MULTILINE)
    assert "consensus: MCTS(10,3) with its own MASPRM over that of rpsv" in text
    assert len(figures(text, "mcts:10,3")) == 6
    assert "range over graphs: single pass over mcts:10,3+MASPRM" in text


@pytest.mark.slow
def test_critics_of_easy_and_hard_problems_are_compared(lab: Lab) -> None:
    text = text_of(lab, difficulty.run(lab, levels=(1, 3)))
    for level in "13":
        assert len(figures(text, level)) == 6
        assert_rivals(text, f"difficulty {level}: ")
    assert "difficulty 1: its own critic over that of the main table" in text


@pytest.mark.slow
def test_stories_of_one_difficulty_form_a_task(options: Options) -> None:
    lab = Lab(replace(options, task="stories-4"))
    [single] = lab.measure(lab.home, [row_of("single")])
    assert {problem.rsplit("/", 1)[0] for problem in single.shares} == {"stories-of-length/test/0/4"}
    assert PARTNERS["stories-4"] == "stories-3" and PARTNERS["stories-2"] == "arithmetic-5"
    assert PARTNERS["retold-3"] == "arithmetic-3"


@pytest.mark.slow
def test_rollout_temperature_applies_only_to_training_searches(options: Options) -> None:
    hot = Lab(replace(options, trees=2, rollout_temperature=1.3))
    plain = Lab(replace(options, trees=2))
    found = []
    for lab, split in ((hot, "train"), (plain, "train"), (hot, "dev")):
        store = lab.rollouts(lab.home, split).store
        assert store is not None
        with open_store(store) as opened:
            found += [(str(store), run.config["sampling"]["temperature"]) for run in opened.runs()]
    assert [temperature for _, temperature in found] == [1.3, 0.7, 0.7]
    assert len(dict(found)) == 3


@pytest.mark.slow
def test_critics_use_only_trees_of_their_temperature(options: Options, tmp_path: Path) -> None:
    given = replace(options, trees=2, rollouts=tmp_path / "rollouts.db")
    labs = [Lab(replace(given, out=tmp_path / str(t), rollout_temperature=t)) for t in (0.0, 1.3)]
    benches = [lab.rollouts(lab.home) for lab in labs]
    texts = [{str(tree.tree.states) for tree in trees(bench)} for bench in benches]
    assert [len(list(trees(bench))) for bench in benches] == [2, 2]
    assert not texts[0] & texts[1]


@pytest.mark.slow
def test_dynamic_graph_has_a_separate_critic(lab: Lab) -> None:
    text = text_of(lab, dylan.run(lab))
    assert text.count("| dynamic schedule |") == 5
    assert "| dynamic schedule | mcts:10,3 + truth |" in text
    assert re.search(r"^\| dylan: error of \| pairs \|", text, re.MULTILINE)
    assert_rivals(text, "fixed: ")
    assert_rivals(text, "dynamic: ")
    assert lab.critic(lab.home._replace(mas="dylan")).info.graphs.keys() == {"dylan"}


@pytest.mark.slow
def test_critic_transfer_to_another_task_is_measured(lab: Lab) -> None:
    text = text_of(lab, tasks.run(lab))
    assert "Hit@1 on ordering (logic)" in text
    assert len(figures(text, "MASPRM of ordering")) == 3
    assert_rivals(text, "ordering: ")
    assert_rivals(text, "arithmetic: ")
    assert "on ordering: its own critic over that of arithmetic" in text


@pytest.mark.slow
def test_critic_transfer_to_other_agents_is_measured(lab: Lab) -> None:
    text = text_of(lab, agents.run(lab))
    assert text.count("| mcts:10,3 | ") == 4
    assert "MASPRM mcts:10,3 over bon:" in text
    assert_rivals(text, "own critics: ")
    assert "a MASPRM of these agents over that of tiny" in text


@pytest.mark.parametrize(("task", "retold"), [("arithmetic", "retold-3"), ("stories-4", "retold-4")])
def test_critic_is_transferred_to_a_wording_of_the_same_difficulty(
    options: Options, monkeypatch: pytest.MonkeyPatch, task: str, retold: str
) -> None:
    partners: list[Setting] = []
    monkeypatch.setattr(wordings, "transfer", lambda lab, page, partner, *leads: partners.append(partner))
    lab = SmallLab(replace(options, task=task))
    assert wordings.run(lab).name == "wordings" and partners == [lab.home._replace(task=retold)]


@pytest.mark.slow
def test_critics_on_other_backbones_use_the_same_searches(
    options: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shapes = zip(backbones.BACKBONES, [(64, 1), (128, 1), (128, 1, "audit"), (128, 2, "", 1e-3)], strict=True)
    monkeypatch.setattr(backbones, "BACKBONES", {name: TinyShape(*shape) for name, shape in shapes})
    lab = SmallLab(replace(options, other_steps=2))
    text = text_of(lab, backbones.run(lab))
    counts = [int(figures(text, name)[1].replace(",", "")) for name in backbones.BACKBONES]
    assert counts[0] < counts[1] == counts[2] < counts[3] == 509_312
    assert text.count("mcts:10,3 + MASPRM, ") == 4
    assert "| MASPRM: with the Auditor over without |" in text
    assert "| large: MASPRM over best-of-N with the ORM, equal tokens |" in text
    assert "- backbones trained for 2 steps each" in text
    assert len(re.findall(r"^- backbone-[\w.-]+-2: weights [0-9a-f]{12}$", text, re.MULTILINE)) == 4


def test_rule_for_equal_messages_depends_on_the_task_family() -> None:
    rules = {
        name: rule_for(Setting(name, "rpsv", "tiny")) for name in ("arithmetic-1", "retold-3", "stories-4", "gsm8k")
    }
    assert rules == {"arithmetic-1": "opening", "retold-3": "opening", "stories-4": "text", "gsm8k": "text"}


@pytest.mark.slow
def test_single_agent_has_the_token_budget_of_the_system(lab: Lab) -> None:
    text = text_of(lab, single.run(lab))
    assert len(re.findall(r"^\| one agent \| bon:\d+ \+ ORM of one agent \|", text, re.MULTILINE)) >= 2
    assert re.search(r"mcts:10,3 \+ MASPRM over bon:\d+ of one agent, equal tokens", text)
    assert "| mcts:10,3: MASPRM over policy likelihood |" in text
    assert re.search(r"\| MASPRM mcts:10,3 over bon:\d+ with the ORM, equal tokens \|", text)
    assert "no comparison" in next(line for line in text.splitlines() if "mcts:10,3+MASPRM over one agent" in line)


@pytest.mark.slow
def test_frontier_searches_are_compared_with_best_of_n_at_equal_tokens(lab: Lab) -> None:
    text = text_of(lab, frontier.run(lab))
    searches = [*frontier.SEARCHES, *(f"{spec},same=opening" for spec in frontier.MERGED)]
    for spec in searches:
        assert re.search(rf"^\| {re.escape(spec)} with MASPRM over bon:\d+ with the ORM \|", text, re.MULTILINE)
    rows = [line.split("|") for line in text.splitlines() if re.match(r"\| [a-z:0-9,=]+ \+ (ORM|MASPRM) \|", line)]
    tokens = [float(row[4].replace(",", "")) for row in rows]
    assert len(tokens) > len(searches) - 3 and tokens == sorted(tokens)
    assert "- 2 problems of arithmetic, dev split; run seed 42" in text


@pytest.mark.slow
def test_critic_is_replaced_for_one_agent_at_a_time(lab: Lab) -> None:
    text = text_of(lab, by_agent.run(lab))
    rows = re.findall(
        r"^\| sbs:5,3 \| MASPRM, but (policy likelihood|ground truth) for the (\w+) \|", text, re.MULTILINE
    )
    agents = [agent.name for agent in mas_gym.load_mas("rpsv").agents]
    assert rows == [(name, agent) for name in ("policy likelihood", "ground truth") for agent in agents]
    assert "- 2 problems of arithmetic, dev split; run seed 42" in text
    hits = dict(re.findall(r"^\| sbs:5,3 \| ([^|]+) \| ([\d.]+)", text, re.MULTILINE))
    assert float(hits["ground truth"]) >= float(hits["MASPRM"])


def test_rows_of_different_settings_are_separate(lab: Lab) -> None:
    critic = lab.load(LIKELIHOOD)
    rows = [row_of(spec, critic, "PL") for spec in ("sc:3,weights=critic", "sc:3,weights=critic,values=outcome")]
    assert [row.label for row in rows] == ["sc:3,weights=critic + PL", "sc:3,weights=critic,values=outcome + PL"]
    single, passes = lab.measure(lab.home, [row_of("single"), replace(row_of("sc:3"), name="single")])
    assert (single.row.agent_calls.mean, passes.row.agent_calls.mean) == (4, 12)


def test_replacement_critic_scores_only_one_agents_messages() -> None:
    class Fixed:
        terminal_only, free = False, True

        def __init__(self, name: str, value: float) -> None:
            self.name, self.value = name, value
            self.asked: list[int] = []

        def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
            self.asked.append(len(contexts))
            return [self.value] * len(contexts)

    usual, other = Fixed("usual", 0.25), Fixed("other", 0.75)
    critic = by_agent.Replaced(usual, other, "Planner")
    mas = mas_gym.load_mas("rpsv")
    dynamics = Dynamics(mas)
    states = [dynamics.initial_state("q")]
    for text in ("facts", "plan", "work"):
        states.append(dynamics.transition(states[-1], Action(text, mas.ALL)))
    contexts = [ScoringContext(state, mas, None) for state in states[1:]]
    assert critic.score(contexts) == [0.25, 0.75, 0.25]
    assert (usual.asked, other.asked) == ([2], [1])
    assert critic.score(contexts[:1]) == [0.25] and other.asked == [1]


@pytest.mark.slow
def test_intervals_include_variance_over_problems_and_training_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "TRAININGS", (1, 2))
    text = text_of(lab, trainings.run(lab))
    assert len(re.findall(r"^\| mcts:10,3 \+ (?:MASPRM|ORM), seed [12] \|", text, re.MULTILINE)) == 4
    assert "mcts:10,3: MASPRM over ORM" in text
    folders = {lab.folder(lab.home, replace(ORM, seed=seed)) for seed in trainings.TRAININGS}
    assert len(folders) == 2
    counts = r"^- MASPRM, (?:MSE|BT alone): [\d.]+ epochs, (\d+) updates; the main training config: (\d+)"
    noted = re.findall(counts, text, re.M)
    assert len(noted) == 2 and all(ours == main for ours, main in noted)
    assert "| MASPRM: BT over MSE, equal updates |" in text


@pytest.mark.slow
def test_credit_tables_need_only_the_main_critics(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(lab, credit.run(lab))
    assert figures(text, "chance")[1] == "25.0"
    monkeypatch.setattr(confidence, "FEWEST", 1)
    text = text_of(lab, confidence.run(lab))
    assert "| search | temperature |" in text and "| rpsv: error of |" in text
    assert "| AUC for the " in text or "Omitted because they have fewer than" in text


def test_pages_have_the_digest_of_the_shipped_weights() -> None:
    # The table of claims is made from the others.
    pages = [page for page in sorted(claims.PAGES.glob("*.md")) if page.name != "claims.md"]
    assert len(pages) >= 10
    for page in pages:
        text = page.read_text(encoding="utf-8")
        marks = ("--{0} tiny-{0}", "with tiny-{0}\n")
        given = {kind: f"tiny-{kind}" for kind in ("masprm", "orm") if any(mark.format(kind) in text for mark in marks)}
        assert f"- {weights(Options(**given))}\n" in text, f"{page.name} was made with other weights: make it again"


def test_pages_of_tiny_natural_state_the_digest_of_its_weights() -> None:
    agents_folder = claims.PAGES.parent / "tiny" / "tiny-natural"
    card = (agents_folder / "README.md").read_text(encoding="utf-8")
    # This page has the model's card, the others its figures.
    of_card, *pages = sorted((claims.PAGES / "natural").rglob("*.md"))
    assert card.partition("Single passes")[2] in of_card.read_text(encoding="utf-8")
    assert len(pages) >= 5
    for page in pages:
        stated = f"- {weights(Options(policy=f'transformers:{agents_folder}'))}\n"
        assert stated in page.read_text(encoding="utf-8"), f"{page.name} was made with other weights: make it again"


def test_claims_table_matches_the_pages() -> None:
    text = (claims.PAGES / "claims.md").read_text(encoding="utf-8")
    assert text == claims.document(), "write it again: python -m benchmarks.paper.claims"
    folders = [claims.PAGES / folder for folder in claims.AGENTS]
    for text, rows in (pair for made in (*claims.CLAIMS.values(), claims.OURS) for pair in made.items()):
        for row in rows:
            assert any(list(claims.found(folder, [row])) for folder in folders), (text, *row)
    with pytest.raises(DataError, match="six cells"):
        claims.differences("## Differences\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    assert claims.differences("# A page without differences\n") == []


def test_every_table_has_a_page_and_is_run_by_the_all_command() -> None:
    modules = {path.stem for path in Path(main.__file__).parent.glob("*.py")}
    rest = {
        "__init__",
        "all",
        "claims",
        "held_out",
        "lab",
        "errors",
        "options",
        "oracle",
        "page",
        "published",
        "rivals",
    }
    assert set(TABLES) == modules - rest
    for name in TABLES:
        source = Path(main.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        assert f'command(run, "{name}")' in source


def test_given_critic_folder_is_used_instead_of_training(tmp_path: Path) -> None:
    lab = Lab(Options(tmp_path, orm="models/orm"))
    assert lab.folder(lab.home, ORM) == Path("models/orm")


# Credit assignment, by hand

ERRORS = {"a": 1, "b": 2}


def passes(values: Mapping[str, tuple[float, ...]]) -> list[Pass]:
    agents = ("Reader", "Planner", "Solver")
    return [
        Pass(key, agents, {"critic": row}, FirstError(ERRORS[key], agents[ERRORS[key]], "wrong sum"), False)
        for key, row in values.items()
    ]


def test_blame_selects_the_largest_drop_in_value_and_divides_it_among_ties() -> None:
    assert largest_drop([0.5, -0.5, -0.6], 0.4).tolist() == [0, 1, 0]
    assert largest_drop([0.2, 0.1, 0.1], 0.9).tolist() == [1, 0, 0]
    assert largest_drop([0.5, 0.25, 0.0], 0.5).tolist() == [0, 0.5, 0.5]


def test_blame_equals_hand_computed_values() -> None:
    both = passes({"a": (0.8, -0.2, -0.3), "b": (0.8, 0.7, -0.9)})
    judges = judges_of(both, ["critic"], "Solver")
    assert shares(both, judges["critic, drop"]) == {"a": 1.0, "b": 1.0}
    assert shares(both, judges["most frequent agent"]) == {"a": 0.0, "b": 1.0}
    assert shares(both, judges["chance"]) == pytest.approx({"a": 1 / 3, "b": 1 / 3})


def test_messages_after_the_first_error_are_excluded() -> None:
    values = {"PL": (0.4, 0.3, 0.2)}
    agents = ("Reader", "Planner", "Solver")
    failed = Pass("1", agents, values, FirstError(1, "Planner", "missing step"), correct=False)
    passed = Pass("2", agents, values, None, correct=True)
    found = confidence.messages([failed, passed])
    assert [(one.agent, one.right, one.values["PL"]) for one in found] == [
        ("Reader", True, 0.4),
        ("Planner", False, 0.3),
        *(("Reader", True, 0.4), ("Planner", True, 0.3), ("Solver", True, 0.2)),
    ]


def test_auc_of_grouped_values_equals_auc_of_the_concatenated_values() -> None:
    rng = np.random.default_rng(0)
    truth = [rng.random(size) < 0.5 for size in (3, 1, 4, 2)]
    values = [rng.integers(0, 4, len(one)).astype(float) for one in truth]
    ranking = rank(truth, [values])
    assert float(ranking.auc(np.ones(4))) == pytest.approx(auc(np.concatenate(values), np.concatenate(truth)))
    # A problem that is drawn twice counts twice.
    twice = auc(np.concatenate([*values, values[2]]), np.concatenate([*truth, truth[2]]))
    assert float(ranking.auc(np.array([1.0, 1.0, 2.0, 1.0]))) == pytest.approx(twice)
    assert auc_difference(ranking, ranking)[:3] == (0.0, 0.0, 0.0)


def test_centering_subtracts_the_mean_fall_in_value_at_each_depth() -> None:
    # Values fall at the second message everywhere; only "b" falls at the third, where it erred.
    both = passes({"a": (0.8, -0.4, -0.4), "b": (0.8, -0.1, -0.6)})
    judges = judges_of(both, ["critic"], "Solver")
    assert shares(both, judges["critic, drop"])["b"] == 0.0
    assert shares(both, judges["critic, centered"]) == {"a": 1.0, "b": 1.0}


# Pages and options


def test_claim_verdict_follows_its_interval() -> None:
    sure = claim("x", "+1", {f"p{i}": 1.0 for i in range(40)}, {f"p{i}": float(i % 2) for i in range(40)})
    assert (sure.verdict, sure.here.mean) == ("holds", 0.5)
    turned = claim("x", "+1", {f"p{i}": float(i % 2) for i in range(40)}, {f"p{i}": 1.0 for i in range(40)})
    assert turned.verdict == "**contrary**"
    assert claim("x", "+1", {"p": 1.0, "q": 0.0}, {"p": 0.0, "q": 1.0}).verdict == "undecided"
    assert sure._replace(tokens=(640.0, 68.0)).verdict == "no comparison: 9.4 times the tokens"
    assert sure._replace(tokens=(68.0, 640.0)).verdict == "no comparison: 9.4 times the tokens"
    assert sure._replace(tokens=(640.0, 675.0)).verdict == "holds"


def test_published_differences_cover_the_papers_four_datasets() -> None:
    assert lead("mcts:10,3", "MASPRM", "PL") == "1.5B: +7.3 +4.8 +8.3 +5.7; 7B: +20.4 +9.3 +14.7 +9.0"
    assert lead("sc:5,weights=critic", "MASPRM", "ORM") == "1.5B: -1.2 -0.6 -0.2 +0.0; 7B: +1.2 +1.4 +4.1 +1.4"
    assert narrowing("mcts:10,3") == "7B: +14.3 +9.4 +8.6 +8.9"


@pytest.mark.parametrize("paper", ["1.5B: +3.0 +3.4; 7B: +14.5 +5.6", "+14.5 +3.0", "+3.0 to +14.5"])
@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.05, 0.06, "holds"),
        (0.01, 0.04, "holds"),
        (0.14, 0.20, "holds"),
        (0.01, 0.20, "holds"),
        (0.15, 0.20, "beyond"),
        (0.01, 0.02, "below"),
        (-0.01, 0.05, "undecided"),
        (-0.05, -0.01, "**contrary**"),
    ],
)
def test_verdict_uses_the_range_of_the_papers_differences(paper: str, low: float, high: float, verdict: str) -> None:
    assert Claim("x", paper, Difference((low + high) / 2, low, high, 100)).verdict == verdict


def test_claim_without_a_published_range_is_judged_by_its_sign() -> None:
    assert Claim("x", "+5.5", Difference(0.4, 0.3, 0.5, 100)).verdict == "holds"
    assert Claim("x", "not compared", Difference(0.4, 0.3, 0.5, 100)).verdict == "holds"
    # A range on both sides of zero claims no sign, so a small negative difference agrees with it.
    assert Claim("x", "-1.2 / +1.2", Difference(-0.01, -0.015, -0.005, 100)).verdict == "holds"
    assert Claim("x", "-1.2 / +1.2", Difference(-0.07, -0.08, -0.05, 100)).verdict == "**contrary**"


def test_statistic_of_several_accuracies_has_an_interval_over_problems() -> None:
    columns = [{f"p{i}": float(i % k == 0) for i in range(60)} for k in (1, 2, 3)]
    found = claim_of("range", "+9", columns, lambda means: means.max(axis=-1) - means.min(axis=-1))
    assert found.here.mean == pytest.approx(1 - 1 / 3)
    assert found.here.low < found.here.mean < found.here.high
    assert found.here.problems == 60
    plain = claim("difference", "", columns[0], columns[1])
    same = claim_of("difference", "", columns[:2], lambda means: means[..., 0] - means[..., 1])
    assert np.allclose(same.here[:3], plain.here[:3], atol=0.02)


def test_written_reasons_are_kept_when_a_page_is_rewritten(tmp_path: Path) -> None:
    page = Page("heads", "Heads", "What for.")
    page.table(("a", "b"), [("x|y", 1)])
    path = write_page(page, tmp_path, "command", ["fact"])
    assert "| x\\|y | 1 |" in path.read_text()
    path.write_text(path.read_text().replace("Nothing is written here yet.", "Too few trees: tested."))
    page.blocks = ["new figures\n"]
    text = write_page(page, tmp_path, "command", ["fact"]).read_text()
    assert "new figures" in text
    assert text.endswith(f"{REASONS}\n\nToo few trees: tested.\n")


def test_page_contains_its_settings_and_no_local_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "masprm").mkdir()
    words = ["--out", str(tmp_path), "-n", "9", "--seeds", "1,2", "--set", "epochs=1", "--set", "seed=3"]
    options = read("prog", "about", [*words, "--masprm", str(tmp_path / "masprm"), "--task", "gsm8k"])
    assert options.shown() == "--task gsm8k -n 9 --seeds 1,2 --set epochs=1 --set seed=3 --masprm masprm"
    assert (options.system, options.folder) == ("rpsv", tmp_path / "pages")
    # A path inside the checkout is the same everywhere; one outside is not.
    assert Options(base="benchmarks/tiny/tiny-natural").shown() == "--base benchmarks/tiny/tiny-natural"
    monkeypatch.chdir(tmp_path / "masprm")
    assert Options(masprm="../masprm").shown() == "--masprm masprm"
    with pytest.raises(SystemExit):
        read("prog", "about", ["--seeds", "one"])
    assert "whole numbers with commas" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        read("prog", "about", ["--seeds", "1,1"])
    assert "different seeds" in capsys.readouterr().err
    assert options.training() == {"epochs": 1, "seed": 3}
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        Options(settings=("epochs",)).training()
    assert read("prog", "about", ["main", "heads"], tuple(TABLES)).tables == ("main", "heads")
    with pytest.raises(SystemExit):
        read("prog", "about", ["mains"], tuple(TABLES))
    assert "expected tables of main, frontier, single" in capsys.readouterr().err
