"""``mas-gym report`` and ``mas-gym blame``: their output equals the content of the store."""

from __future__ import annotations

import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from search_worlds import HashCritic, chain, problems, talker
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from mas_gym.cli.view import Pages
from mas_gym.policies import ScriptedPolicy
from search import open_store
from search.compare.reliability import ScoredState, tree_states, value_bins
from search.report.report_data import read_reports
from search.report.report_figures import figures_of
from search.report.tensorboard import write_tensorboard
from search.results.anytime_curve import anytime_curve
from search.results.outcomes import Outcome

pytest.importorskip("matplotlib", reason="reports draw with the extra 'plot'")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "runs.db"
    planners, critics = ["single", "sbs:4,2", "mcts:8,3"], {"hash": HashCritic()}
    search.compare(planners, problems(8), mas=chain(3), policy=talker(), critics=critics, seeds=(1, 2), store=path)
    return path


def command(*arguments: Any) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_page_is_self_contained_and_has_every_row(store: Path, tmp_path: Path) -> None:
    page, figures, latex = tmp_path / "report.html", tmp_path / "figures", tmp_path / "table.tex"
    board, markdown = tmp_path / "board", tmp_path / "table.md"
    files = ("--figures", figures, "--latex", latex, "--tensorboard", board, "--markdown", markdown)
    command("report", store, "--out", page, "--against", "single", *files)
    text = page.read_text()
    for label in ("single", "sbs:4,2", "mcts:8,3"):
        assert f"<td>{label}</td>" in text and label in latex.read_text() and label in markdown.read_text()
    assert "http" not in text.replace("http-equiv", "") and "<script" not in text
    drawn = {path.stem for path in figures.iterdir()}
    assert drawn == {"accuracy-tokens", "accuracy-calls", "anytime", "hits", "calibration"}
    assert text.count("data:image/svg+xml") == len(drawn)
    rows = {"1 single", "1 sbs:4,2 + hash", "1 mcts:8,3 + hash"}
    assert {path.name for path in board.iterdir()} == rows | {"1 figures"}


def test_page_compares_stopped_searches_with_their_expected_accuracy(tmp_path: Path) -> None:
    planners = ["bon:8,stop=0.7", "mcts:8,3", "sc:9,stop=0.6"]
    options: dict[str, Any] = {"mas": chain(2), "policy": talker(), "critics": {"hash": HashCritic()}}
    table = search.compare(planners, problems(16), store=tmp_path / "runs.db", **options)
    command("report", tmp_path / "runs.db", "--out", tmp_path / "report.html")
    [page] = [part for part in (tmp_path / "report.html").read_text().split("<table>") if "Settled early" in part]
    rows = [re.findall("<td>(.*?)</td>", row) for row in page.partition("</table>")[0].split("<tr>")[2:]]
    stopped = [one for one in table.outcomes if one.planner == "bon:8,stop=0.7" and one.stopped]
    assert 0 < len(stopped) < 16
    [yes, no] = [row for row in rows if row[0] == "bon:8,stop=0.7 + hash"]
    assert yes[1:3] == ["yes", f"{len(stopped)} of 16"] and no[1:3] == ["no", f"{16 - len(stopped)} of 16"]
    assert yes[3].startswith(f"{100 * sum(one.correct for one in stopped) / len(stopped):.1f} (")
    claims = [float(str(one.stopped).split("probability ")[1].split()[0]) for one in stopped]
    assert yes[4] == f"{100 * sum(claims) / len(claims):.1f}" and no[4] == ""
    assert not [row for row in rows if row[0].startswith("mcts")] and any(row[0].startswith("sc:") for row in rows)


def test_tensorboard_reads_the_figures_and_scalars_back(store: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    with open_store(store) as opened:
        reports = read_reports(opened)
    write_tensorboard(reports, tmp_path)

    def read(name: str) -> Any:
        found = reader.EventAccumulator(str(tmp_path / name), size_guidance={reader.TENSORS: 0})
        return found.Reload()

    images = read("1 figures")
    assert set(images.Tags()["images"]) == set(figures_of(reports[0]))
    for name in images.Tags()["images"]:
        [image] = images.Images(name)
        assert image.encoded_image_string.startswith(b"\x89PNG")
        # Width and height are at byte 16 of every PNG file.
        assert struct.unpack(">II", image.encoded_image_string[16:24]) == (image.width, image.height)
    for row in reports[0].comparison.rows:
        scalars = read(f"1 {row.label}")

        def values(tag: str, events: Any = scalars) -> list[float]:
            return [float(one.tensor_proto.float_val[0]) for one in events.Tensors(tag)]

        assert values("tokens") == pytest.approx([row.tokens.mean])
        assert values("hit@1") == pytest.approx([row.hits[1].mean])
        if row.curve:
            assert values("hit@1 over tokens") == pytest.approx([point.hit for point in row.curve])


def test_different_settings_have_separate_sections(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    for turns in (2, 3):
        search.compare(["sc:2"], problems(3), mas=chain(turns), policy=talker(), store=path)
    command("report", path, "--out", tmp_path / "r.html", "--figures", tmp_path / "f")
    assert (tmp_path / "r.html").read_text().count("<section>") == 2
    assert {file.name[:2] for file in (tmp_path / "f").iterdir()} == {"1-", "2-"}


def test_missing_run_or_store_is_reported(store: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(store), "--run", "nothing", "--out", str(tmp_path / "r.html")])
    assert done.exit_code == 2 and "found 0" in done.output and not (tmp_path / "r.html").exists()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "none.db"), "--out", str(tmp_path / "r.html")])
    assert done.exit_code == 2 and "no such file" in done.output


EVIL = "<script>alert(1)</script>\x1b[31m"


def test_hostile_texts_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    policy = ScriptedPolicy(lambda request, seed: f"{EVIL} Final Answer: {seed % 3}", EVIL, 1)
    list(search.run("sc:2", problems(3), mas=chain(2), policy=policy, store=path))
    output = command("report", path, "--out", tmp_path / "r.html")
    assert "<script" not in (tmp_path / "r.html").read_text() and "\x1b[31m" not in output


def test_calibration_is_shown_by_depth(store: Path) -> None:
    states = [ScoredState(1 + i % 2, i / 100, float(i >= 50)) for i in range(100)]
    bins = value_bins(states)
    assert list(bins) == [1, 2] and all(
        len(depth) == 10 and sum(b.states for b in depth) == 50 for depth in bins.values()
    )
    assert [one.right for one in bins[1]] == [0.0] * 5 + [1.0] * 5
    assert [one.value for one in bins[1]] == sorted(one.value for one in bins[1])
    assert value_bins([ScoredState(1, 0.5, 1.0)]) == {1: [(0.5, 1.0, 1)]}
    with open_store(store) as opened:
        run = next(one for one in opened.runs() if one.facts["planner"] == "mcts:8,3")
        plan, (_, document) = next(opened.plans(run.run)), next(opened.documents(run.run))
    assert plan.tree is not None
    expected = []
    for node in list(plan.tree)[1:]:
        below = [bool(c.correct) for c in plan.candidates if c.node is not None and node.id in plan.tree.path(c.node)]
        if below and node.value is not None:
            expected.append(ScoredState(node.state.speaker, node.value, sum(below) / len(below)))
    scored = value_bins(tree_states(document))
    assert scored == value_bins(expected) and len(scored) == 3


def test_anytime_curve_has_confidence_intervals_and_ends_at_the_final_accuracy() -> None:
    group = [
        Outcome(
            "mcts", "", seed, f"p{i}", correct=i % 2 == 0, tokens=100 + i, anytime=((20, False), (60 + i, i % 2 == 0))
        )
        for i in range(40)
        for seed in (1, 2)
    ]
    curve = anytime_curve(group)
    assert curve[-1].hit == 0.5 and curve[0].hit == 0 and curve[0].tokens == 20
    assert all(point.interval.low - 1e-9 <= point.hit <= point.interval.high + 1e-9 for point in curve)
    assert [point.tokens for point in curve] == sorted(point.tokens for point in curve)
    assert anytime_curve([Outcome("single", "", 1, "p", tokens=3)]) == []


@pytest.mark.parametrize("planner", ["sbs:4,2", "mcts:8,3"])
def test_tree_page_marks_every_candidate(planner: str, store: Path) -> None:
    with open_store(store) as opened:
        run = next(one for one in opened.runs() if one.facts["planner"] == planner)
        plans = list(opened.plans(run.run))
    for plan in plans:
        page = Pages(store).page(f"/tree/{run.run}", {"problem": plan.problem_id})
        [data] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
        nodes = json.loads(data)["nodes"]
        assert plan.tree is not None
        marked = [node for node, right in enumerate(nodes["correct"]) if right is not None]
        assert marked == sorted(one.node for one in plan.candidates if one.node is not None)
        for candidate in plan.candidates:
            assert candidate.node is not None
            assert (nodes["answer"][candidate.node], nodes["correct"][candidate.node]) == (
                candidate.answer,
                candidate.correct,
            )


def test_report_rejects_an_unknown_baseline(store: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(store), "--out", str(tmp_path / "r.html"), "--against", "zzz"])
    assert done.exit_code == 2 and not (tmp_path / "r.html").exists()
    said = " ".join(done.output.replace("│", " ").split())
    assert "the label of one row ('single', 'sbs:4,2 + hash', 'mcts:8,3 + hash'), got 'zzz'" in said


def test_calibration_bins_are_independent_of_order() -> None:
    states = [ScoredState(1, i % 3 / 2, float(i < 30)) for i in range(60)]
    [bins] = value_bins(states).values()
    assert bins == [(value, 0.5, 20) for value in (0.0, 0.5, 1.0)]
    assert value_bins(reversed(states)) == {1: bins}


def test_report_of_a_graph_with_a_cycle_has_one_calibration_line_per_agent(tmp_path: Path) -> None:
    critic = HashCritic()
    critic.name = "$\\bad{$ _x$"
    loop = {
        "agents": [{"name": name, "system_prompt": "Help."} for name in ("$a", "b$")],
        "edges": [["q", "$a"], ["$a", "b$"], ["b$", "$a"], ["b$", "sink"]],
        "max_turns": 12,
    }
    path = tmp_path / "runs.db"
    options: dict[str, Any] = {"mas": loop, "policy": talker(), "critics": critic, "store": path}
    search.compare(["sbs:4,2"], problems(4), **options)
    with open_store(path) as opened:
        [report] = read_reports(opened)
    [groups] = report.calibration.values()
    assert set(groups) <= {0, 1}
    figure = figures_of(report)["calibration"]
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    [agents] = report.agents.values()
    assert said == [rf"after {agents[i].replace('$', chr(92) + '$')}" for i in sorted(groups)] + ["calibrated"]
    for axes in figure.axes:
        assert [[-1, 0], [1, 100]] in [line.get_xydata().tolist() for line in axes.lines]
        assert sum(len(bars.get_segments()) for bars in axes.collections) == sum(len(bins) for bins in groups.values())
    assert all(axes.get_legend() is None for axes in figure.axes)
    command("report", path, "--out", tmp_path / "report.html")
    pages = Pages(path)
    pictures = re.findall(r'src="(/plot/[^"]+)"', pages.page("/", {}))
    assert len(pictures) == (len(report.comparison.rows) > 1)
    assert "<p>1 row</p>" in pages.page("/", {})
    assert all(pages.plot(picture).count("</svg>") == 1 for picture in pictures)


def test_figures_follow_the_color_scheme(store: Path, tmp_path: Path) -> None:
    command("report", store, "--out", tmp_path / "report.html")
    for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", (tmp_path / "report.html").read_text()):
        drawn = base64.b64decode(data).decode()
        assert "@media (prefers-color-scheme:dark)" in drawn
        assert not re.search(r"(fill|stroke): #(ffffff|22262b|000000)", drawn)


def test_index_and_problem_pages_mark_rows_with_different_problem_sets(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    options: dict[str, Any] = {"mas": chain(2), "policy": talker(), "store": path}
    search.compare(["single", "sc:2"], problems(8), seeds=(1,), **options)
    search.compare(["sc:2"], problems(3), seeds=(2,), **options)
    search.compare(["sc:3"], problems(3), seeds=(1,), **options)
    pages = Pages(path)
    index = pages.page("/", {})
    assert ">8 S1<" in index and ">8 S1*<" in index and ">3 S2<" in index
    assert "ran on different sets of problems" in index and "<p>3 rows</p>" in index
    first, _, last = re.findall(r'name="a" value="([^"]+)"', index)
    both = pages.page("/problems", {"a": first, "b": last})
    assert "Difference in Hit@1, single minus sc:3:" in both and "too few problems, 3 common problems" in both
    assert ">differing<" in both and ">differing<" not in pages.page("/problems", {"a": first})
