"""``mas-gym solve``: run a search on one question and print the chosen transcript, the answer and the cost."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout
from mas_gym.cli.evaluate import pair_rows
from mas_gym.cli.option_groups import grouped
from mas_gym.cli.option_values import check_folder, check_kind, load_weights, read_policy, read_prices
from mas_gym.cli.progress import RunProgress
from mas_gym.cli.run_notes import note_costs, note_judge, note_order, warn_of_misuse
from mas_gym.errors import ConfigError, SearchError
from mas_gym.internal.text import cut, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mas_gym.systems.graph import MAS
    from mas_gym.systems.state import MASState
    from mas_gym.tasks.base import Task
    from search import Plan
    from search.compare.comparison_runs import Row
    from search.setup import RunSpec

COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
LONGEST = 20_000


@grouped(number=False, grading=False)
def solve(
    source: opt.TaskSource,
    agents: opt.AgentSource,
    question: Annotated[str | None, typer.Argument(help="Question; '-' reads it from standard input.")] = None,
    planner: opt.PlannerName = "mcts:10,3",
    critic: opt.CriticName = None,
    seed: opt.Seed = 42,
    prices: opt.PricesFile = None,
    tree: Annotated[Path | None, typer.Option("--tree", help="Write the search tree as an HTML page.")] = None,
    problem_id: Annotated[
        str | None, typer.Option("--problem-id", help="Problem of --task; by default the first.")
    ] = None,
) -> None:
    """Run a search on one question or a task's problem; print the chosen transcript, the answer and the cost."""
    from search import Budget
    from search.runs import start

    task = source.task
    if (question is None) == (task is None):
        raise ConfigError('expected either a question, such as mas-gym solve "Tom has 3 pens ...", or --task NAME')
    check_folder(tree)
    if question is not None:
        problems = _own(sys.stdin.read() if question == "-" else question, source)
    else:
        problems = source.load()
        problems = problems[:1] if problem_id is None else problems.only(problem_id)
    spec = agents.load(None if task is None else problems, source.kind)
    policy = agents.policy_spec(spec.mas)
    warn_of_misuse(policy, task, spec.mas, problems[0].question)
    [row] = pair_rows([planner], [critic] if critic else None)
    load_weights([row])
    engine = read_policy(policy, agents.cache)
    spec = replace(spec, problems=problems, policy=engine, concurrency=1, budget=Budget(prices=read_prices(prices)))
    with RunProgress([row.label], 1, graded=task is not None) as progress:
        run = start(row.of(spec, seed, partial(progress.update, row.label, seed)))
        [plan] = run
    show(plan, spec, run.cost(plan.usage), graded=task is not None)
    note_costs(engine)
    note_judge(problems)
    if tree is not None:
        write_page(plan, row.of(spec, seed), row, tree, engine.name, graded=task is not None)
    if plan.error is not None:
        raise SearchError(f"the search failed: {plan.error}")


def _own(question: str, source: opt.TaskSource) -> Task:
    from mas_gym.tasks import Problem, ProblemTask
    from mas_gym.tasks.grading.answers import Ungraded

    if not question.strip():
        raise ConfigError("expected a question, got an empty string")
    problem = Problem("question", question.strip(), "", check_kind(source.kind))
    return ProblemTask.of([problem], grader=Ungraded(decimal=source.base_grader().decimal))


def show(plan: Plan, spec: RunSpec, usd: float | None, graded: bool) -> None:
    """Print the chosen transcript, the answer and the usage of a plan; ``usd`` is None without prices."""
    from rich.text import Text

    console = stdout()
    if plan.best is not None:
        console.print(_transcript(spec.mas, plan.best.state, plan))
    answer = Text("Answer: ", style="bold")
    answer.append("none" if plan.answer is None else one_line(plan.answer), style="bold cyan")
    if graded:
        reference = spec.problems.problem(plan.problem_id).answer
        verdict = ("right", "green") if plan.correct else (f"wrong; the reference is {one_line(reference)}", "red")
        answer.append(f"  ({verdict[0]})", style=verdict[1])
    console.print(answer)
    console.print(_cost(plan, usd), style="dim")
    note_order(plan.order_varied)


def _cost(plan: Plan, usd: float | None) -> str:
    from search.results.summary import Spread
    from search.results.table_formats import dollars

    usage = plan.usage
    parts = [
        f"AC {usage.agent_calls:,}",
        f"TOK {usage.generated_tokens:,}",
        *([] if usd is None else [f"USD {dollars(Spread(usd, None))}"]),
        f"RC {usage.reward_calls:,}",
        f"{usage.prompt_tokens:,} prompt tokens",
        *_critic_cost(plan),
        f"{len(plan.candidates)} candidate{'s' * (len(plan.candidates) != 1)}",
        f"{usage.seconds:.1f} s",
    ]
    if usage.tags:
        parts.append("by arm: " + ", ".join(f"{part.tag} {part.calls} calls" for part in usage.tags))
    if usage.dropped_tokens:
        parts.append(f"{usage.dropped_tokens:,} prompt tokens dropped: the context was too long")
    if usage.reasoning_only:
        parts.append(f"{usage.reasoning_only:,} replies were only reasoning; raise --max-tokens")
    return "  ".join(parts)


def _critic_cost(plan: Plan) -> list[str]:
    """Return the critic's cost, excluding its reward calls; empty if there is none."""
    usage = plan.usage
    read, written = usage.critic_prompt_tokens, usage.critic_tokens
    costs = [f"judge: {read:,} prompt tokens, {written:,} generated"] if read or written else []
    return [*costs, f"{usage.unread_verdicts:,} unreadable verdicts"] if usage.unread_verdicts else costs


def write_page(plan: Plan, spec: RunSpec, row: Row, path: Path, policy: str, graded: bool) -> None:
    """Write a plan's search tree as a page; print the file name, or the reason why there is no page."""
    from search.pages.tree_page import write_tree_page

    if plan.tree is None:
        note(f"{row.name} builds no tree, so {path} was not written", "yellow")
        return
    facts = {
        "problem": plan.problem_id,
        "planner": row.name,
        "critic": row.critic_name or "none",
        spec.mas.kind: spec.mas.name,
        "policy": policy,
        "seed": str(spec.seed),
    }
    write_tree_page(plan, path, facts, spec.problems.problem(plan.problem_id).answer if graded else None)
    note(f"wrote {path}")


def message_panel(mas: MAS, speaker: int, recipients: tuple[int, ...], text: str, remark: str = "") -> RenderableType:
    """Return one message in a box with its speaker's color."""
    from rich.panel import Panel
    from rich.text import Text

    color = "white" if speaker < 0 else COLORS[speaker % len(COLORS)]
    title = Text(one_line(mas.node_name(speaker)), style=f"bold {color}")
    if recipients:
        title.append(f" to {', '.join(one_line(mas.node_name(node)) for node in recipients)}", style=color)
    body = Text(cut(text, LONGEST)) if text.strip() else Text("(empty message)", style="dim italic")
    note = Text(remark, style="dim") if remark else None
    return Panel(body, title=title, title_align="left", subtitle=note, subtitle_align="right", border_style=color)


def _transcript(mas: MAS, state: MASState, plan: Plan) -> RenderableType:
    """Return the question and every message of a state, with values and visits."""
    from rich.console import Group

    listeners = tuple(agent for agent, hears in enumerate(mas.sees_question) if hears)
    parts = [message_panel(mas, -1, listeners, state.question)]
    remarks = _remarks(plan)
    for depth, link in enumerate(state.path()[1:], 1):
        parts.append(message_panel(mas, link.speaker, link.recipients, link.text, remarks.get(depth, "")))
    return Group(*parts)


def _remarks(plan: Plan) -> dict[int, str]:
    if plan.tree is None or plan.best is None or plan.best.node is None:
        return {}
    remarks: dict[int, str] = {}
    for depth, index in enumerate(plan.tree.path(plan.best.node)):
        node = plan.tree[index]
        figures = [("value", node.value), ("Q", node.q)]
        shown = [f"{name} {figure:.3f}" for name, figure in figures if figure is not None]
        shown += [f"N {node.visits}"] if node.visits else []
        shown += [f"{node.tokens} tokens"] if node.tokens else []
        remarks[depth] = "  ".join(shown)
    return remarks
