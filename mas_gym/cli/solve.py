"""One problem: ``mas-gym solve`` searches it; with ``mas-gym play`` a person or another program plays its agents."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import RunProgress, note, stdout
from mas_gym.cli.evaluate import pair_arms
from mas_gym.errors import ConfigError, SearchError, unknown_name
from mas_gym.render import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mas_gym.env import MASEnv
    from mas_gym.graph import MAS
    from mas_gym.policies import AsyncPolicy, Policy, SamplingRequest
    from mas_gym.state import MASState
    from mas_gym.tasks.base import Task
    from search import Plan
    from search.compare import Arm, Bench


COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
_LONGEST = 20_000


@opt.with_task(number=False, grading=False)
def solve(
    source: opt.TaskSource,
    question: Annotated[str | None, typer.Argument(help="Question; '-' reads it from standard input.")] = None,
    planner: opt.PlannerName = "mcts:10,3",
    policy: opt.PolicyName = None,
    cache: opt.Cache = None,
    critic: opt.CriticName = None,
    mas: opt.MASName = None,
    program: opt.ProgramSpec = None,
    program_file: opt.ProgramFiles = None,
    seed: opt.Seed = 42,
    tree: Annotated[Path | None, typer.Option("--tree", help="Write the search tree as an HTML page.")] = None,
    problem_id: Annotated[
        str | None, typer.Option("--problem-id", help="Problem of --task; by default the first.")
    ] = None,
) -> None:
    """Search one question, or a problem of a task; print the chosen transcript, the answer and the cost."""
    from search.compare.bench import Bench, start

    task = source.task
    if (question is None) == (task is None):
        raise ConfigError(
            'expected a question, as in: mas-gym solve "Tom has 3 pens ...", or --task NAME, and not both'
        )
    opt.check_folder(tree)
    if question is not None:
        problems = _own(sys.stdin.read() if question == "-" else question, source.kind)
    else:
        problems = _known(source.load(), problem_id)
    system, code = opt.read_system(mas, program, program_file, None if task is None else problems, source.kind)
    spec = opt.chosen_policy(policy, system)
    opt.warn_of_misuse(spec, task, system, problems[0].question)
    [arm] = pair_arms([planner], [critic] if critic else None)
    agents = opt.read_policy(spec, cache)
    bench = Bench(problems, system, agents, [seed], concurrency=1, program=code)
    with RunProgress([arm.label], 1, graded=task is not None) as progress:
        plans = list(start(arm, bench, seed, partial(progress.update, 0, seed)))
    show(plans[0], bench, graded=task is not None)
    opt.note_costs(agents)
    opt.note_judge(problems)
    if tree is not None:
        write_page(plans[0], bench, arm, tree, agents.name, graded=task is not None)
    if plans[0].error is not None:
        raise SearchError(f"the search failed: {plans[0].error}")


def _own(question: str, kind: str | None) -> Task:
    from mas_gym.tasks import Problem, ProblemTask
    from mas_gym.tasks.graders import Ungraded

    if not question.strip():
        raise ConfigError("expected a question, got an empty text")
    return ProblemTask.of([Problem("question", question.strip(), "", opt.check_kind(kind))], grader=Ungraded())


def _known(task: Task, problem_id: str | None) -> Task:
    from mas_gym.tasks.sequences import ProblemSequence

    if problem_id is None:
        return task[:1]
    if isinstance(task, ProblemSequence):
        part: Task = task.only(problem_id)
        return part
    place = [problem.id for problem in task].index(task.problem(problem_id).id)
    return task[place : place + 1]


def show(plan: Plan, bench: Bench, graded: bool) -> None:
    """Print the chosen transcript, the answer and the usage of a plan.

    Args:
        plan: The plan.
        bench: The setup of the search; its task holds the problem.
        graded: Whether the problem has a reference answer.
    """
    from rich.text import Text

    console = stdout()
    if plan.best is not None:
        console.print(transcript(bench.mas, plan.best.state, plan))
    answer = Text("Answer: ", style="bold")
    answer.append("none" if plan.answer is None else one_line(plan.answer), style="bold cyan")
    if graded:
        reference = bench.task.problem(plan.problem_id).answer
        verdict = ("right", "green") if plan.correct else (f"wrong; the reference is {one_line(reference)}", "red")
        answer.append(f"  ({verdict[0]})", style=verdict[1])
    console.print(answer)
    console.print(Text(_cost(plan), style="dim"))


def _cost(plan: Plan) -> str:
    usage = plan.usage
    parts = [
        f"AC {usage.agent_calls:,}",
        f"TOK {usage.generated_tokens:,}",
        f"RC {usage.reward_calls:,}",
        f"{usage.prompt_tokens:,} prompt tokens",
        *_critic_cost(plan),
        f"{len(plan.candidates)} candidate{'s' * (len(plan.candidates) != 1)}",
        f"{usage.seconds:.1f} s",
    ]
    if usage.dropped_tokens:
        parts.append(f"{usage.dropped_tokens:,} prompt tokens dropped: the context was too long")
    return "  ".join(parts)


def _critic_cost(plan: Plan) -> list[str]:
    """Return what the critic spent besides its forwards, if anything."""
    usage = plan.usage
    read, written = usage.critic_prompt_tokens, usage.critic_tokens
    costs = [f"judge: {read:,} prompt tokens, {written:,} generated"] if read or written else []
    return [*costs, f"{usage.unread_verdicts:,} unread verdicts"] if usage.unread_verdicts else costs


def write_page(plan: Plan, bench: Bench, arm: Arm, path: Path, policy: str, graded: bool) -> None:
    """Write a plan's search tree as a page; print the file, or why there is none."""
    from mas_gym.report import write_plan_page

    if plan.tree is None:
        note(f"{arm.name} keeps no tree: {path} was not written", "yellow")
        return
    facts = {
        "problem": plan.problem_id,
        "planner": arm.name,
        "critic": arm.critic_name or "none",
        bench.mas.kind: bench.mas.name,
        "policy": policy,
        "seed": ", ".join(map(str, bench.seeds)),
    }
    problem = bench.task.problem(plan.problem_id)
    # A judge's verdicts cost calls that belong to no search.
    grade = partial(bench.task.grade, problem) if graded and problem.kind != "judge" else None
    write_plan_page(plan, path, facts, reference=problem.answer if graded else None, grade=grade)
    note(f"wrote {path}")


def shortened(text: str) -> str:
    """Return the first 20,000 characters of a message, and how many were cut."""
    more = len(text) - _LONGEST
    return text[:_LONGEST] + (f" ... ({more:,} more characters)" if more > 0 else "")


def names(mas: MAS, recipients: tuple[int, ...]) -> str:
    """Return readable names of recipients, in order."""
    return ", ".join(one_line(mas.node_name(node)) for node in recipients) or "nobody"


def message_panel(mas: MAS, speaker: int, recipients: tuple[int, ...], text: str, remark: str = "") -> RenderableType:
    """Return one message in a box with its speaker's colour.

    Args:
        mas: The system.
        speaker: Node index; -1 for the question node.
        recipients: Nodes that received it.
        text: The message.
        remark: Text at the lower edge.
    """
    from rich.panel import Panel
    from rich.text import Text

    colour = "white" if speaker < 0 else COLOURS[speaker % len(COLOURS)]
    title = Text(one_line(mas.node_name(speaker)), style=f"bold {colour}")
    if recipients:
        title.append(f" to {names(mas, recipients)}", style=colour)
    body = Text(shortened(text)) if text.strip() else Text("(empty message)", style="dim italic")
    note = Text(remark, style="dim") if remark else None
    return Panel(body, title=title, title_align="left", subtitle=note, subtitle_align="right", border_style=colour)


def transcript(mas: MAS, state: MASState, plan: Plan | None = None) -> RenderableType:
    """Return the question and every message of a state; with a plan, also values and visits."""
    from rich.console import Group

    listeners = tuple(agent for agent, hears in enumerate(mas.sees_question) if hears)
    parts = [message_panel(mas, -1, listeners, state.question)]
    remarks = _remarks(plan) if plan is not None else {}
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


EVERYONE = "all"


class _Gone(Exception):
    """The input ended."""


@opt.with_task(number=False, grading=False, option=False)
def play(
    source: opt.TaskSource,
    env_id: Annotated[str, typer.Argument(metavar="ENV-ID", help="A registered id, such as MAS-Arithmetic-v0.")],
    agent: Annotated[str, typer.Option("--agent", help="Agent to play; 'all' for every agent.")] = EVERYONE,
    policy: Annotated[str, typer.Option("--policy", help="Policy of the other agents.")] = "tiny",
    problem_id: Annotated[
        str | None, typer.Option("--problem-id", help="Problem; by default drawn with --seed.")
    ] = None,
    seed: opt.Seed = 42,
    mas: opt.MASName = None,
) -> None:
    """Play one agent, or every agent, with its local view.

    An empty line ends a message. If the graph allows several recipients, one more line names one of them; an empty
    line means ALL, or the recipient that the message itself names. Ctrl-D quits.
    """
    env = _make(env_id, source, mas)
    mine = _seats(env, agent)
    others = opt.read_policy(policy) if len(mine) < len(env.mas.agents) else None
    if others is not None:
        opt.warn_of_misuse(policy, env.task.name, env.mas)
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    options = {"problem_id": problem_id} if problem_id is not None else None
    observation, info = env.reset(seed=seed, options=options)
    try:
        _episode(env, observation, info, mine, others, seed)
    except _Gone:
        note("End of input: the episode ends without a result.", "yellow")
    except KeyboardInterrupt:
        note("Stopped.", "yellow")
        raise typer.Exit(130) from None


def _make(env_id: str, source: opt.TaskSource, mas: str | None) -> MASEnv:
    import gymnasium as gym

    import mas_gym
    from mas_gym.cli.listings import registered

    specs = registered()
    name = env_id.removeprefix("mas_gym:")
    if name not in specs:
        raise unknown_name("environment", env_id, specs)
    given = {"task": source.task, "mas": mas}
    kwargs = {key: value for key, value in given.items() if value is not None} | source.options
    env = gym.make(
        name, split=source.split, view="local", on_invalid="retry", disable_env_checker=True, **kwargs
    ).unwrapped
    assert isinstance(env, mas_gym.MASEnv)
    return env


def _seats(env: MASEnv, agent: str) -> frozenset[int]:
    names = [each.name for each in env.mas.agents]
    if agent == EVERYONE:
        return frozenset(range(len(names)))
    folded = [name.casefold() for name in names]
    if agent.casefold() not in folded:
        raise unknown_name("agent", agent, [*names, EVERYONE])
    return frozenset([folded.index(agent.casefold())])


def _episode(
    env: MASEnv,
    observation: dict[str, Any],
    info: dict[str, Any],
    mine: frozenset[int],
    others: Policy | AsyncPolicy | None,
    seed: int,
) -> None:
    from rich.text import Text

    console = stdout()
    console.print(Text(one_line(f"{info['problem_id']}, {env.mas.name}: {_order(env, mine)}"), style="bold"))
    over, reward = False, 0.0
    while not over:
        acting = observation["acting"]
        if acting in mine:
            _show_view(env, observation)
            action = _ask(env, info)
        else:
            assert others is not None
            action = _sample(env, others, seed)
        before = env.state
        observation, reward, over, _, info = env.step(action)
        if "invalid_action" in info:
            console.print(Text(f"Not possible: {info['invalid_action']}.", style="red"))
        elif acting not in mine:
            reached = tuple(sorted(set(env.state.recipients)))
            hidden = not mine & set(reached) and env.state.acting != env.sink
            text = "(you are not among its readers)" if hidden else env.state.text
            console.print(message_panel(env.mas, before.acting, reached, text))
    _finish(env, info, reward)


def _order(env: MASEnv, mine: frozenset[int]) -> str:
    # Where messages choose who acts next, there is no order to show.
    arrow = " → " if env.mas.max_turns is None else ", "
    return arrow.join(f"[{a.name}, you]" if i in mine else a.name for i, a in enumerate(env.mas.agents))


def _show_view(env: MASEnv, observation: dict[str, Any]) -> None:
    from rich.panel import Panel
    from rich.text import Text

    console = stdout()
    acting = observation["acting"]
    colour = COLOURS[acting % len(COLOURS)]
    console.print()
    console.rule(Text(f"Your turn: {one_line(env.mas.agents[acting].name)}", style=f"bold {colour}"), style=colour)
    console.print(
        Panel(
            Text(shortened(observation["messages"][0].content), style="dim"),
            title=Text("Your instructions"),
            title_align="left",
            border_style="dim",
        )
    )
    if env.mas.sees_question[acting]:
        console.print(message_panel(env.mas, -1, (acting,), observation["question"]))
    own = env.mas.history == "private"
    heard = [message for message in observation["transcript"] if own or message.speaker != acting]
    for message in heard:
        console.print(message_panel(env.mas, message.speaker, (message.recipient,), message.text))
    if not heard and not env.mas.sees_question[acting]:
        console.print(Text("No message has reached you.", style="dim"))


def _ask(env: MASEnv, info: dict[str, Any]) -> tuple[str, int]:
    from rich.text import Text

    console = stdout()
    legal = [node for node, allowed in enumerate(info["action_mask"]) if allowed]
    named = ", ".join(f"{node} = {env.mas.node_name(node)}" for node in legal)
    console.print(Text(f"You may write to: {one_line(named)}", style="dim"))
    console.print(Text("Your message, then an empty line:", style="bold"))
    text = "\n".join(_lines())
    if len(legal) <= 2:
        return text, env.ALL
    while True:
        others = "the one that your message names" if env.mas.agents[env.state.acting].route == "message" else "ALL"
        console.print(Text(f"To (empty for {others}): ", style="bold"), end="")
        answer = _line().strip()
        recipient = _recipient(env, legal, answer)
        if recipient is not None:
            return text, recipient
        console.print(Text(f"{answer!r} is none of: {one_line(named)}", style="red"))


def _recipient(env: MASEnv, legal: list[int], answer: str) -> int | None:
    if not answer:
        return env.ALL
    for node in legal:
        if answer.casefold() in (str(node), env.mas.node_name(node).casefold()):
            return node
    return None


def _line() -> str:
    try:
        return input()
    except EOFError:
        raise _Gone from None


def _lines() -> Iterator[str]:
    """Yield the lines of one message; the end of input ends a message that has begun."""
    begun = False
    while True:
        try:
            line = input()
        except EOFError:
            if not begun:
                raise _Gone from None
            return
        if not line.strip():
            if begun:
                return
            continue
        begun = True
        yield line


def _sample(env: MASEnv, policy: Policy | AsyncPolicy, seed: int) -> tuple[str, int]:
    from mas_gym.policies.base import derive_seed

    request = env.request((derive_seed(seed, env.problem_id, env.state.digest, 0),))
    return answer(policy, request), env.ALL


def answer(policy: Policy | AsyncPolicy, request: SamplingRequest) -> str:
    """Return the policy's message for a request with one seed."""
    from mas_gym.policies import AsyncPolicy

    if isinstance(policy, AsyncPolicy):
        return asyncio.run(policy.sample_async(request)).samples[0].text
    return policy.sample([request])[0].samples[0].text


def _finish(env: MASEnv, info: dict[str, Any], reward: float) -> None:
    from rich.text import Text

    read = "no answer" if info.get("extracted") is None else f"answer {one_line(info['extracted'])}"
    reference = env.task.problem(env.problem_id).answer
    verdict = "right" if info.get("correct") else f"wrong; the reference is {one_line(reference)}"
    style = "bold green" if info.get("correct") else "bold red"
    stdout().print(Text(f"The end: {read}, {verdict} (reward {reward:+g}).", style=style))
    if info.get("invalid_action"):
        note(f"Ended by: {info['invalid_action']}")
