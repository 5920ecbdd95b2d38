"""What critics return, how costs are shared, and the defaults of critics and planners that only have their method."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from search_worlds import chain, comparable, noise, problems, talker

import search
from mas_gym.critics import ScoringContext, score_batch, scores_of
from mas_gym.errors import ConfigError, CriticError, MASGymError
from mas_gym.internal.identity import identity_of
from mas_gym.systems.dynamics import Dynamics
from mas_gym.testing import check_planner
from search import BestOfN, ChosenRecipients, Scores, SelfConsistency, SinglePass, as_critic, as_planner
from search.critics import ConstantCritic, Ensemble

CHAIN = chain(2)
MODEL = Dynamics(CHAIN)
CONTEXTS = [ScoringContext(MODEL.initial_state(f"Question {i}?"), CHAIN, None) for i in range(3)]


class Says(search.Critic):
    """Returns a function of the values, which depend on the state."""

    def __init__(self, make: Any, free: bool = False) -> None:
        self.make, self.free = make, free

    def identity(self) -> str:
        return "says"

    def score(self, contexts: Sequence[ScoringContext]) -> Any:
        return self.make([noise(context.state.digest) for context in contexts])


FORMS = {
    "list": list,
    "tuple": tuple,
    "float64": np.array,
    "float32": lambda values: np.array(values, dtype=np.float32),
    "numpy scalars": lambda values: [np.float64(value) for value in values],
    "scalar arrays": lambda values: [np.array(value) for value in values],
    "scores": Scores,
    "scores of arrays": lambda values: Scores(np.array(values), tokens=np.ones(len(values), dtype=int)),
}


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_critic_may_return_any_sequence_of_numbers(form: str, free: bool) -> None:
    def run(make: Any) -> list[Any]:
        plans = search.run("bon:3", problems(2), mas=CHAIN, policy=talker(), critic=Says(make, free))
        return sorted((plan.problem_id, plan.error, plan.answer) for plan in plans)

    assert run(FORMS[form]) == run(list) and run(list)[0][1] is None


COST = "given as one non-negative integer for all, or one per value"
WRONG = {
    "short": (lambda values: values[1:], "expected 3 values, got 2"),
    "long": (lambda values: [*values, 0.0], "expected 3 values, got 4"),
    "number": (lambda values: 0.5, "expected 3 values, as a list"),
    "none": (lambda values: None, "got None"),
    "text": (lambda values: "0.5", "got '0.5'"),
    "generator": (iter, "list_iterator"),
    "0-d array": (lambda values: np.array(0.5), "expected 3 values, as a list"),
    "reasons": (
        lambda values: Scores(values, reasons=["one"]),
        "got the reasons ['one']",
    ),
    "reason": (lambda values: Scores(values, reasons="one"), "got the reasons 'one'"),
    "no reasons": (lambda values: Scores(values, reasons=None), "got the reasons None"),
    "matrix": (lambda values: np.ones((2, 3)), "got 2"),
    "tokens": (lambda values: Scores(values, tokens=[1]), f"with Scores.tokens {COST}"),
    "negative": (lambda values: Scores(values, unread=-1), f"with Scores.unread {COST}"),
    "fraction": (lambda values: Scores(values, prompt_tokens=1.5), f"with Scores.prompt_tokens {COST}"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_result_error_names_the_critic_and_the_mismatch(case: str) -> None:
    make, words = WRONG[case]
    with pytest.raises(CriticError, match=r"critic 'Says': ") as caught:
        scores_of(Says(make), CONTEXTS)
    assert words in str(caught.value) and isinstance(caught.value, MASGymError)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5", True, [0.5], np.array([0.5]), 10**400])
@pytest.mark.parametrize("free", [True, False])
def test_invalid_critic_value_fails_only_the_search_that_requested_it(value: Any, free: bool) -> None:
    class One(search.Critic):
        def score(self, contexts: Sequence[ScoringContext]) -> list[Any]:
            return [value if "Question 1:" in c.state.question else 0.5 for c in contexts]

    critic = One()
    critic.free = free
    plans = search.run("bon:2", problems(3), mas=CHAIN, policy=talker(), critic=critic)
    errors = {plan.problem_id: plan.error for plan in plans}
    assert "CriticError: critic 'One' has no value for the state after turn" in (errors.pop("toy/1") or "")
    assert set(errors.values()) == {None}


def test_critic_reason_is_part_of_the_plan_error() -> None:
    unsure = Says(lambda values: Scores([math.nan] * len(values), reasons=["the judge said nothing"] * len(values)))
    [plan] = search.run("bon:2", problems(1), mas=CHAIN, policy=talker(), critic=unsure)
    assert plan.error is not None and plan.error.endswith(": the judge said nothing")


def test_total_cost_is_divided_among_states_and_costs_per_state_are_kept() -> None:
    divided = scores_of(Says(lambda values: Scores(values, tokens=7, prompt_tokens=[1, 2, 3])), CONTEXTS)
    assert (divided.tokens, divided.prompt_tokens, divided.cost()) == ((3, 2, 2), (1, 2, 3), (7, 6, 0))
    shares = dict(score_batch(Says(lambda values: Scores(values, tokens=7)), {"a": CONTEXTS[:1], "b": CONTEXTS[1:]}))
    assert [share.cost()[0] for share in shares.values() if isinstance(share, Scores)] == [3, 4]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_critic_cost_of_a_search_is_summed(concurrency: int) -> None:
    critic = Says(lambda values: Scores(values, tokens=[2] * len(values), prompt_tokens=[5] * len(values)))
    options: dict[str, Any] = {"mas": CHAIN, "policy": talker(), "critic": critic, "concurrency": concurrency}
    for plan in search.run("bon:3", problems(4), **options):
        usage = plan.usage
        assert (usage.critic_tokens, usage.critic_prompt_tokens) == (2 * usage.reward_calls, 5 * usage.reward_calls)


def test_ensemble_adds_costs_and_joins_reasons() -> None:
    costly = Says(lambda values: Scores(values, tokens=[1] * len(values)))
    blind = Says(lambda values: Scores([math.nan] * len(values), reasons=["a"] * len(values)))
    found = Ensemble([costly, costly, ConstantCritic()]).score(CONTEXTS)
    assert list(found.tokens) == [2, 2, 2] and found.cost() == (6, 0, 0)
    assert list(Ensemble([costly, blind, blind]).score(CONTEXTS).reasons) == ["a; a"] * 3


# ---- defaults


class Plain:
    """Likes some states."""

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        return [noise(context.state.digest) for context in contexts]


def test_plain_critic_gets_the_declared_defaults() -> None:
    critic, declared = as_critic(Plain()), as_critic(ConstantCritic())
    facts = (critic.name, critic.terminal_only, critic.free, critic.concurrent, critic.reads_peers, critic.max_batch)
    assert facts == ("Plain", False, False, False, False, 64)
    assert as_critic(critic) is critic and type(declared) is ConstantCritic
    assert identity_of(critic) == identity_of(Plain()) and pickle.loads(pickle.dumps(critic)).name == "Plain"
    for wrong in (Plain, "tiny-masprm", 3, None):
        with pytest.raises(ConfigError, match="critic: expected"):
            as_critic(wrong)


@dataclass
class Ends:
    """Passes side by side; the plan has a tree and no nodes."""

    passes: int = 2

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        tree, ends = search.Tree(root), []
        for _ in range(self.passes):
            state = root
            while not model.is_terminal(state):
                [[proposal]] = yield [search.Propose(state)]
                state = model.transition(state, proposal.action)
            ends.append(state)
        first = tree.add(0, ends[0].path()[1], None, model.is_terminal(ends[0].path()[1]))
        assert first == 1
        points = (search.AnytimePoint(1, 1, ends[0]),)
        return search.Plan(tuple(search.Candidate(end) for end in dict.fromkeys(ends)), tree, points)


def test_plain_planner_gets_the_declared_defaults() -> None:
    planner = as_planner(Ends(3))
    assert planner.needs_critic and planner.size_setting == "" and planner.for_run(None, False) is planner
    assert as_planner(planner) is planner and planner == as_planner(Ends(3)) != as_planner(Ends(2))
    assert identity_of(planner) == identity_of(Ends(3)) and search.planner_spec(planner) == "Ends"
    for wrong in (Ends, "mcts", None):
        with pytest.raises(ConfigError, match="plan method"):
            as_planner(wrong)


def test_combinators_report_the_attributes_of_the_wrapped_planner() -> None:
    class Free(search.Planner):
        needs_critic, size_setting = False, "width"

        def __init__(self) -> None:
            self.width = 2

        def plan(self, model: Any, root: Any, rng: Any) -> Any:
            return (yield from SinglePass().plan(model, root, rng))

    assert not ChosenRecipients(Free(), "schedule").needs_critic
    assert ChosenRecipients(Free(), "critic").needs_critic
    assert ChosenRecipients(Ends(), "schedule").needs_critic and ChosenRecipients(BestOfN(), "uniform").needs_critic
    assert not SelfConsistency(3).needs_critic and SelfConsistency(3, "critic").needs_critic
    wrapped = ChosenRecipients(Free(), "uniform")
    resized: Any = wrapped.resized(5)
    assert (wrapped.size_setting, wrapped.current_size(), resized.planner.width) == ("width", 2, 5)
    assert ChosenRecipients(BestOfN(3), "uniform").resized(7) == ChosenRecipients(BestOfN(7), "uniform")


def test_unknown_size_setting_is_rejected() -> None:
    class Lost(search.Planner):
        size_setting = "width"

        def plan(self, model: Any, root: Any, rng: Any) -> Any:
            return (yield from SinglePass().plan(model, root, rng))

    with pytest.raises(ConfigError, match=r"Lost.*'width'"):
        Lost().current_size()


# ---- plans of custom planners


def test_plan_with_a_tree_but_without_candidate_nodes_is_stored(tmp_path: Any) -> None:
    check_planner(Ends())
    options: dict[str, Any] = {"mas": CHAIN, "policy": talker(), "store": tmp_path / "runs.db"}
    first = [comparable(plan) for plan in search.run(Ends(3), problems(3), **options)]
    again = [comparable(plan) for plan in search.run(Ends(3), problems(3), **options)]
    assert sorted(first, key=str) == sorted(again, key=str)
    for plan in search.run(Ends(3), problems(3), **options):
        assert plan.error is None and plan.tree is not None
        assert all(plan.tree.states[one.node] == one.state for one in plan.candidates)  # type: ignore[index]
        assert plan.anytime[0].node is not None and plan.tree[plan.candidates[0].node].finish_reason == "stop"  # type: ignore[index]


class Astray(Ends):
    """Returns a plan whose parts a function changes."""

    def __init__(self, change: Any) -> None:
        super().__init__(1)
        self.change = change

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        return self.change((yield from super().plan(model, root, rng)), model)


def _elsewhere(plan: search.Plan, model: Any) -> search.Plan:
    return search.Plan(plan.candidates, search.Tree(model.initial_state("Another?")))


def _list(plan: search.Plan, model: Any) -> search.Plan:
    return search.Plan(plan.candidates, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [_elsewhere, _list])
def test_tree_of_another_search_is_rejected(change: Any) -> None:
    [plan] = search.run(Astray(change), problems(1), mas=CHAIN, policy=talker())
    assert plan.error is not None and "expected the plan's tree to be a search.Tree(root)" in plan.error


def test_wrong_node_of_a_candidate_is_corrected() -> None:
    def wrong(plan: search.Plan, model: Any) -> search.Plan:
        return search.Plan((search.Candidate(plan.candidates[0].state, node=0),), plan.tree)

    [plan] = search.run(Astray(wrong), problems(1), mas=CHAIN, policy=talker())
    assert plan.tree is not None and plan.best is not None and plan.best.node == 2
    with pytest.raises(MASGymError, match="a candidate's node is 0"):
        check_planner(Astray(wrong))
