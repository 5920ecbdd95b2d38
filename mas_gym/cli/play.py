"""``mas-gym play``: play one agent or all agents, in a terminal or through a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout
from mas_gym.cli.option_groups import grouped
from mas_gym.cli.option_values import read_policy
from mas_gym.cli.run_notes import warn_of_misuse
from mas_gym.cli.solve import COLORS, LONGEST, message_panel
from mas_gym.internal.suggestions import unknown_name
from mas_gym.internal.text import cut, one_line

if TYPE_CHECKING:
    from mas_gym.envs.env import Info, MASEnv, Observation
    from mas_gym.policies import AsyncPolicy

EVERYONE = "all"


@grouped(number=False, grading=False, option=False)
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
    others = read_policy(policy) if len(mine) < len(env.mas.agents) else None
    if others is not None:
        warn_of_misuse(policy, env.task.name, env.mas)
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    options = {"problem_id": problem_id} if problem_id is not None else None
    observation, info = env.reset(seed=seed, options=options)
    try:
        _episode(env, observation, info, mine, others, seed)
    except EOFError:
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
    observation: Observation,
    info: Info,
    mine: frozenset[int],
    others: AsyncPolicy | None,
    seed: int,
) -> None:
    console = stdout()
    console.print(one_line(f"{info['problem_id']}, {env.mas.name}: {_order(env, mine)}"), style="bold")
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
            console.print(f"Not possible: {info['invalid_action']}.", style="red")
        elif acting not in mine:
            reached = tuple(sorted(set(env.state.recipients)))
            hidden = not mine & set(reached) and env.state.acting != env.sink
            text = "(you cannot read it)" if hidden else env.state.text
            console.print(message_panel(env.mas, before.acting, reached, text))
    _finish(env, info, reward)


def _order(env: MASEnv, mine: frozenset[int]) -> str:
    # If messages choose the next agent, there is no fixed order to show.
    arrow = " → " if env.mas.max_turns is None else ", "
    return arrow.join(f"[{a.name}, you]" if i in mine else a.name for i, a in enumerate(env.mas.agents))


def _show_view(env: MASEnv, observation: Observation) -> None:
    from rich.panel import Panel
    from rich.text import Text

    console = stdout()
    acting = observation["acting"]
    color = COLORS[acting % len(COLORS)]
    console.print()
    console.rule(Text(f"Your turn: {one_line(env.mas.agents[acting].name)}", style=f"bold {color}"), style=color)
    for message in observation["messages"]:
        body = Text(cut(message.content, LONGEST), style="dim" if message.role == "system" else "")
        console.print(Panel(body, title=Text(message.role), title_align="left", border_style="dim"))


def _ask(env: MASEnv, info: Info) -> tuple[str, int]:
    console = stdout()
    legal = [node for node, allowed in enumerate(info["action_mask"]) if allowed]
    named = one_line(", ".join(f"{node} = {env.mas.node_name(node)}" for node in legal))
    console.print(f"You may write to: {named}", style="dim")
    console.print("Your message, then an empty line:", style="bold")
    text = _message()
    if len(legal) <= 2:
        return text, env.ALL
    known = {"": env.ALL} | {str(node): node for node in legal}
    known |= {env.mas.node_name(node).casefold(): node for node in legal}
    while True:
        others = "the one that your message names" if env.mas.agents[env.state.acting].route == "message" else "ALL"
        console.print(f"To (empty for {others}): ", style="bold", end="")
        answer = input().strip().casefold()
        if answer in known:
            return text, known[answer]
        console.print(f"expected one of {named}, got {answer!r}", style="red")


def _message() -> str:
    """Return the lines of one message; the end of the input also ends an unfinished message."""
    lines: list[str] = []
    while True:
        try:
            line = input()
        except EOFError:
            if not lines:
                raise
            return "\n".join(lines)
        if line.strip():
            lines.append(line)
        elif lines:
            return "\n".join(lines)


def _sample(env: MASEnv, policy: AsyncPolicy, seed: int) -> tuple[str, int]:
    from mas_gym.policies.base import derive_seed

    request = env.request((derive_seed(seed, env.problem_id, env.state.digest, 0),))
    return asyncio.run(policy.sample_async(request)).samples[0].text, env.ALL


def _finish(env: MASEnv, info: Info, reward: float) -> None:
    read = "no answer" if info.get("extracted") is None else f"answer {one_line(info['extracted'])}"
    reference = env.task.problem(env.problem_id).answer
    verdict = "right" if info.get("correct") else f"wrong; the reference is {one_line(reference)}"
    style = "bold green" if info.get("correct") else "bold red"
    stdout().print(f"The end: {read}, {verdict} (reward {reward:+g}).", style=style)
    if info.get("invalid_action"):
        note(f"Ended by: {info['invalid_action']}")
