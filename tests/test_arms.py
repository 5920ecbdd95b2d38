"""Policies with several models: specs, choice by planners, usage and cost by arm."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_worlds import HashCritic, by_problem, chain, command, noise, problems, said, talk

import search
from mas_gym.errors import ConfigError, MASGymError, PolicyError, SearchError, UnknownNameError
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.policies import SamplingRequest, ScriptedPolicy, load_policy
from mas_gym.policies.arms_policy import ArmsPolicy, read_arms
from mas_gym.policies.cache import CachedPolicy
from mas_gym.policies.per_agent import PerAgentPolicy
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.prompts import ChatMessage
from mas_gym.testing import check_planner
from search import AskTell, Propose, TagUsage, Usage
from search.pages import tree_page
from search.planners.chosen_arms import ChosenArms
from search.planners.registry import PLANNERS
from search.tree import Tree

PRICES = {"talker": {"prompt": 1, "generated": 3}, "echo": {"prompt": 0.5, "generated": 1}, "hash": {"forward": 0}}
SETTINGS = {"cascade": ":single>mcts:6,2@0.6", "mcts": ":6,3", "adaptive": ":8", "puct": ":6,3", "halving": ":8,3"}
SPECS = [name + SETTINGS.get(name, "") for name in PLANNERS.shipped if name != "siblings"]


def arms(**names: str) -> ArmsPolicy:
    """Two models that write different messages, some of them equal."""
    told = {
        "talker": ScriptedPolicy(talk, "talker", 4),
        "echo": ScriptedPolicy(lambda request, seed: f"Echo. Final Answer: {seed % 3}", "echo", 4),
    }
    return ArmsPolicy({arm: told[model] for arm, model in (names or {"large": "talker", "small": "echo"}).items()})


class Likes(HashCritic):
    """Prefers the messages of the talker."""

    def score(self, contexts: Any) -> list[float]:
        return [0.4 * ("says" in c.state.text) + 0.2 * noise(c.state.digest) for c in contexts]


def run(spec: Any, policy: Any = None, n: int = 4, critic: Any = None, **options: Any) -> list[search.Plan]:
    options = {"mas": chain(3), "seed": 5, "raise_errors": True, **options}
    plans = search.run(spec, problems(n), policy=policy or arms(), critic=critic or HashCritic(), **options)
    return sorted(plans, key=lambda plan: plan.problem_id)


# ---- specs


def test_read_arms_keeps_options_of_each_policy() -> None:
    assert read_arms("arms: a = tiny#max_batch=8 ,b=openai:m@http://127.0.0.1:1/v1") == {
        "a": "tiny#max_batch=8",
        "b": "openai:m@http://127.0.0.1:1/v1",
    }


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("arms:", "at least one arm"),
        ("arms:  ", "at least one arm"),
        ("arms:a=", "expected NAME=POLICY"),
        ("arms:a", "expected NAME=POLICY"),
        ("arms:=tiny", "name of an arm"),
        ("arms:a b=tiny", "name of an arm"),
        ("arms:a=tiny,", "expected NAME=POLICY"),
        ("arms:a=tiny,a=tiny", "'a' twice"),
        ("arms:a=arms:b=tiny", "a single-model policy"),
        ("arms:a=nope", "unknown policy 'nope'"),
        ("arms:a=my.py:Model:1,2", "has commas"),
        ("{'*': {}}", "at least one arm"),
        ("{'*': {a: 3}}", "mappings of arms"),
        ("{'*': {a: {b: tiny}}}", "mappings of arms"),
    ],
)
def test_load_policy_rejects_malformed_arms(spec: str, said: str) -> None:
    with pytest.raises(MASGymError, match=said):
        load_policy(spec)


def test_load_policy_rejects_options_with_arms() -> None:
    with pytest.raises(ConfigError, match="cache"):
        load_policy("arms:a=tiny", max_batch=2)


def test_per_agent_policy_is_rejected_as_an_arm() -> None:
    inner = PerAgentPolicy({"*": ScriptedPolicy(talk)})
    with pytest.raises(ConfigError, match="single-model policy"):
        ArmsPolicy({"a": inner})


@given(st.text(max_size=30))
def test_read_arms_raises_only_config_error_for_arbitrary_text(text: str) -> None:
    try:
        found = read_arms("arms:" + text)
    except ConfigError:
        return
    assert found and all(found.values())


def test_load_policy_accepts_arms_of_one_agent_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.write_text(
        "from mas_gym.policies import ScriptedPolicy\n"
        "def make(name='a'):\n    return ScriptedPolicy(lambda request, seed: name, name)\n"
    )
    policy = load_policy(f"{{agent0: {{one: '{file}:make', two: '{file}:make:b'}}, '*': '{file}:make:c'}}")
    assert policy.name == "agent0=arms:one=a|two=b, *=c"
    assert policy.tags("agent0") == ("one", "two") and policy.tags("agent1") == ()
    [plan] = run("bon:6", policy, 1)
    assert {arm.tag: arm.calls for arm in plan.usage.tags} == {"one": 3, "two": 3}
    assert plan.usage.agent_calls == 18
    combined = load_policy({"agent0": f"arms:one={file}:make", "*": ScriptedPolicy(talk)})
    assert combined.tags("agent0") == ("one",)


# ---- choice of arms


def test_arms_take_turns_in_an_order_that_depends_on_the_state() -> None:
    plans = run("bon:5", n=12)
    counts = [{arm.tag: arm.calls for arm in plan.usage.tags} for plan in plans]
    # 5 messages at the root, and one at each of 10 other states.
    assert all(6 <= count["large"] + count["small"] - 4 <= 15 for count in counts)
    assert len({count["large"] for count in counts}) > 1
    assert 0.4 < sum(count["large"] for count in counts) / (12 * 15) < 0.6


def test_single_arm_gives_the_same_plans_as_its_policy() -> None:
    alone = by_problem(run("mcts:6,3", ScriptedPolicy(talk, "talker", 4)))
    single = by_problem(run("mcts:6,3", arms(only="talker")))
    for plans in (alone, single):
        for plan in plans.values():
            plan["usage"].pop("tags")
            plan["tree"].pop("tag", None)
    assert single == alone


@pytest.mark.parametrize("rule", ["", "thompson", "cost"])
@pytest.mark.parametrize("spec", SPECS)
def test_planner_with_arms_is_reproducible_at_any_concurrency(spec: str, rule: str) -> None:
    if rule and spec.startswith("cascade"):
        spec = f"cascade:single>mcts:6,2,arms={rule}@0.9"
    elif rule:
        if not search.load_planner(spec).needs_critic:
            with pytest.raises(ConfigError, match="learns from values"):
                search.load_planner(f"{spec}{',' if ':' in spec else ':'}arms={rule}")
            return
        spec = f"{spec}{',' if ':' in spec else ':'}arms={rule}"
    planner = search.load_planner(spec)
    assert search.load_planner(search.planner_spec(planner)) == planner
    alone, together = (run(spec, concurrency=number, prices=PRICES) for number in (1, 4))
    assert by_problem(alone) == by_problem(together)
    for plan in alone:
        usage, best = plan.usage, plan.best
        assert best is not None
        for whole, part in (("agent_calls", "calls"), ("generated_tokens",) * 2, ("prompt_tokens",) * 2):
            assert getattr(usage, whole) == sum(getattr(arm, part) for arm in usage.tags)
        assert sum(arm.chosen for arm in usage.tags) == best.state.depth
        costs = {"large": (1, 3), "small": (0.5, 1)}
        usd = sum(
            arm.prompt_tokens * costs[arm.tag][0] + arm.generated_tokens * costs[arm.tag][1] for arm in usage.tags
        )
        assert search.as_prices(PRICES).rate(arms().name, "hash").usd(usage) == pytest.approx(usd / 1e6)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    spec, store = "adaptive:8,arms=thompson", tmp_path / "runs.db"
    whole = by_problem(run(spec, n=6))
    run(spec, n=2, store=store)
    resumed = run(spec, n=6, store=store)
    assert by_problem(resumed) == whole
    stored = search.open_store(store)
    read = sorted(stored.plans(), key=lambda plan: plan.problem_id)
    assert [plan.usage.tags for plan in read] == [plan.usage.tags for plan in resumed]
    [row] = stored.compare(prices=PRICES).rows
    assert {share.arm for share in row.arms} == {"large", "small"}
    assert sum(share.chosen for share in row.arms) == pytest.approx(1)
    assert row.usd is not None and row.usd.mean > 0
    [info] = stored.runs()
    assert info.spent.tags == sum((plan.usage for plan in resumed), Usage()).tags


def shown_arms(plan: search.Plan) -> object:
    [data] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', tree_page(plan), re.DOTALL)
    return json.loads(data)["nodes"].get("tag")


def test_trees_and_pages_contain_the_arm_of_each_node(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    found = run("mcts:6,3,arms=thompson", n=2, store=store)
    for plan, read in zip(found, sorted(search.open_store(store).plans(), key=lambda p: p.problem_id), strict=True):
        assert plan.tree is not None and read.tree is not None and plan.mas is not None
        nodes = list(plan.tree)[1:]
        # The models of `arms` write different texts.
        assert [node.tag for node in nodes] == ["large" if "says" in node.state.text else "small" for node in nodes]
        assert {node.tag for node in nodes} == {"large", "small"} and plan.tree[0].tag == ""
        again = Tree.from_dict(json.loads(json.dumps(plan.tree.to_dict())), Dynamics(plan.mas))
        assert read.tree.tags == again.tags == plan.tree.tags
        assert shown_arms(read) == ["", *(node.tag for node in nodes)]
    alone = run("mcts:6,3", ScriptedPolicy(talk, "talker", 4), n=1)[0]
    assert alone.tree is not None and "tag" not in alone.tree.to_dict() and shown_arms(alone) is None


def test_identity_depends_on_arms_rule_and_prices(tmp_path: Path) -> None:
    store, seen = tmp_path / "runs.db", []
    for spec, policy, prices in [
        ("mcts:4,2", arms(), PRICES),
        ("mcts:4,2", arms(large="echo", small="talker"), PRICES),
        ("mcts:4,2,arms=thompson", arms(), PRICES),
        ("mcts:4,2,arms=thompson", arms(), {**PRICES, "echo": {"prompt": 9, "generated": 9}}),
        ("mcts:4,2,arms=cost", arms(), PRICES),
        ("mcts:4,2,arms=cost", arms(), {**PRICES, "echo": {"prompt": 9, "generated": 9}}),
    ]:
        run(spec, policy, n=1, store=store, prices=prices)
        seen.append(len(search.open_store(store).runs()))
    # Prices are part of the identity only if they change the search.
    assert seen == [1, 2, 3, 3, 4, 5]


def test_thompson_rule_prefers_the_arm_with_higher_scoring_messages() -> None:
    def share(spec: str) -> float:
        used = sum((plan.usage for plan in run(spec, critic=Likes(), n=8)), Usage())
        calls = {arm.tag: arm.calls for arm in used.tags}
        return calls["large"] / sum(calls.values())

    assert share("mcts:20,3") < 0.6 < 0.75 < share("mcts:20,3,arms=thompson")


@pytest.mark.parametrize("spec", ["sc:4", "bon:4", "mcts:6,3", "sbs:2,2"])
def test_fixed_arm_rule_uses_just_the_given_arm(spec: str) -> None:
    planner = search.load_planner(f"{spec},arms=only:small")
    assert search.planner_spec(planner) == f"{spec},arms=only:small"
    for plan in run(planner):
        assert {arm.tag for arm in plan.usage.tags if arm.calls} == {"small"}


def test_cascade_uses_the_large_arm_only_if_it_does_not_stop_early() -> None:
    spec = "cascade:bon:2,arms=only:small>mcts:6,3,arms=only:large@0.55"
    ended = Counter()
    for plan in run(spec, n=12):
        used = {arm.tag for arm in plan.usage.tags if arm.calls}
        assert used == ({"small"} if plan.stopped else {"small", "large"})
        ended[plan.stopped is None] += 1
    assert len(ended) == 2


def test_fixed_arm_rule_rejects_an_unknown_arm() -> None:
    with pytest.raises(SearchError, match="small"):
        run("mcts:4,2,arms=only:smal")
    with pytest.raises(SearchError, match="small"):
        run("mcts:4,2,arms=only:smal", policy=ArmsPolicy({"small": ScriptedPolicy(talk, "small", 4)}))
    with pytest.raises(ConfigError, match="name of an arm"):
        search.load_planner("mcts:4,2,arms=only:")


def test_cost_rule_prefers_the_cheaper_of_equal_arms() -> None:
    policy = ArmsPolicy({name: ScriptedPolicy(talk, name, 4) for name in ("large", "small")})

    def share(large: float) -> float:
        prices = {"large": {"prompt": 0, "generated": large}, "small": {"prompt": 0, "generated": 1}}
        plans = run("mcts:20,3,arms=cost", policy, n=8, prices={**prices, "hash": {"forward": 0}})
        used = {arm.tag: arm.calls for arm in sum((plan.usage for plan in plans), Usage()).tags}
        return used.get("large", 0) / sum(used.values())

    assert share(20) < 0.2 < 0.35 < share(1) < 0.65


def test_cost_rule_without_prices_is_rejected() -> None:
    with pytest.raises(ConfigError, match="prices"):
        run("mcts:4,2,arms=cost")


def test_cost_rule_works_with_prices_of_zero() -> None:
    free = {"prompt": 0, "generated": 0}
    prices = {"talker": free, "echo": free, "hash": {"forward": 0}}
    plans = run("mcts:4,2,arms=cost", prices=prices)
    assert all(search.as_prices(prices).rate(arms().name, "hash").usd(plan.usage) == 0 for plan in plans)


@pytest.mark.parametrize("rule", ["ucb", "", "none"])
def test_unknown_rule_is_rejected(rule: str) -> None:
    with pytest.raises(ConfigError, match="turns, thompson, cost or only:NAME"):
        search.load_planner(f"mcts:4,2,arms={rule}")


@pytest.mark.parametrize("rule", ["thompson", "cost"])
@pytest.mark.parametrize("inner", ["mcts:6,3", "adaptive:8", "sbs:2,1", "rebase:6"])
def test_wrapped_planner_passes_the_planner_check(inner: str, rule: Any) -> None:
    check_planner(ChosenArms(search.load_planner(inner), rule))


def test_arm_and_recipient_rules_can_be_combined() -> None:
    planner = search.load_planner("mcts:4,2,arms=thompson,recipients=uniform")
    assert search.planner_spec(planner) == "mcts:4,2,arms=thompson,recipients=uniform"
    assert run(planner)[0].usage.tags


class AsksFor(search.Planner):
    """Asks one arm throughout."""

    needs_critic = False

    def __init__(self, arm: str) -> None:
        self.arm = arm

    def plan(self, model: Any, root: Any, rng: random.Random) -> Any:
        state = root
        while not model.is_terminal(state):
            [arms, [first, second]] = yield [search.Tags(state), Propose(state, 2, self.arm)]
            assert [arm.name for arm in arms] == ["large", "small"] and first.tag == second.tag == self.arm
            state = model.transition(state, first.action)
        return search.Plan.single(state)


def test_planner_can_request_an_arm() -> None:
    [plan, *_] = run(AsksFor("small"))
    assert plan.usage.tags == (TagUsage("small", 6, plan.usage.generated_tokens, plan.usage.prompt_tokens, 0, 3),)


@pytest.mark.parametrize("policy", [None, ScriptedPolicy(talk)])
def test_request_for_an_unknown_arm_fails(policy: Any) -> None:
    with pytest.raises(SearchError, match=r"'agent0'.*'huge'"):
        run(AsksFor("huge"), policy)


def test_arm_that_raises_fails_only_its_searches() -> None:
    def broken(request: Any, seed: int) -> str:
        if "Question 1" in str(request.messages):
            raise PolicyError("the large model is gone")
        return "Final Answer: 1"

    policy = ArmsPolicy({"large": ScriptedPolicy(broken, "broken", 4), "small": ScriptedPolicy(talk, "talker", 4)})
    plans = run("bon:4", policy, raise_errors=False)
    assert [plan.error is not None for plan in plans] == [False, True, False, False]
    assert "the large model is gone" in str(plans[1].error)


def test_budget_stops_planners_with_arms() -> None:
    for spec in ("mcts:20,3,arms=thompson", "adaptive:20,arms=thompson", "sbs:3,2,arms=thompson"):
        for plan in run(spec, budget=search.Budget(calls=7)):
            assert plan.usage.agent_calls <= 7 and plan.candidates


async def _reply(policy: Any, arm: str) -> str:
    request = SamplingRequest((ChatMessage("user", "q"),), (1,), tag=arm)
    return (await policy.sample_async(request)).samples[0].text


def test_cache_separates_arms(tmp_path: Path) -> None:
    import asyncio

    policy = ArmsPolicy({name: ScriptedPolicy(partial(lambda name, r, s: name, name), name) for name in ("a", "b")})
    cached = CachedPolicy(policy, tmp_path / "cache.db")
    for _ in range(2):
        assert [asyncio.run(_reply(cached, arm)) for arm in ("a", "b", "")] == ["a", "b", "a"]
    assert (cached.hits, cached.misses) == (3, 3)
    assert cached.tags("x") == ("a", "b")


def test_cached_arm_shares_replies_with_its_policy(tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.write_text(
        "from mas_gym.policies import ScriptedPolicy\n"
        "def make(name='a'):\n    return ScriptedPolicy(lambda request, seed: f'{name} Final Answer: 1', name)\n"
    )
    cache = tmp_path / "cache.db"
    alone = load_policy(f"{file}:make#cache={cache}")
    run("bon:4", alone, 1)
    policy = load_policy(f"arms:only={file}:make", cache=str(cache))
    run("bon:4", policy, 1)
    [inner] = policy.policies.values()
    assert (inner.hits, inner.misses) == (12, 0)


# ---- prices


def rate(policy: str, prices: Any) -> Any:
    return search.as_prices(prices).rate(policy)


def test_arms_have_separate_prices() -> None:
    price = {"prompt": 1, "generated": 2}
    one = rate("arms:a=m|b=n", {"m": price, "n": {"prompt": 2, "generated": 4}})
    used = Usage(generated_tokens=30, tags=(TagUsage("a", 1, 10), TagUsage("b", 1, 20)))
    assert one.usd(used) == pytest.approx((10 * 2 + 20 * 4) / 1e6)
    assert (one.generated("a"), one.generated("b")) == (2, 4)
    # A price under the name of an arm takes precedence; models of one name need it.
    named = rate("arms:a=m|b=m", {"a": price, "b": {"prompt": 0, "generated": 8}})
    assert named.usd(used) == pytest.approx((10 * 2 + 20 * 8) / 1e6)
    mixed = rate("Solver=arms:a=m|b=n, *=n", {"m": price, "n": {"prompt": 2, "generated": 4}})
    assert mixed.usd(Usage(generated_tokens=35, tags=used.tags)) == pytest.approx((20 + 25 * 4) / 1e6)
    assert rate("arms:a=m|b=m", {"m": {"second": 1}}).usd(Usage(seconds=2)) == 2


def test_arm_without_a_price_and_arm_with_a_price_per_second_are_rejected() -> None:
    with pytest.raises(UnknownNameError, match="'n'"):
        rate("arms:a=m|b=n", {"m": {"prompt": 1, "generated": 2}})
    with pytest.raises(ConfigError, match="seconds"):
        rate("arms:a=m|b=n", {"m": {"prompt": 1, "generated": 2}, "n": {"second": 1}})


def test_usage_is_added_and_subtracted_by_arm_name() -> None:
    left, right = Usage(tags=(TagUsage("b", 1, 2),)), Usage(tags=(TagUsage("a", 1), TagUsage("b", 3, 4, chosen=1)))
    assert (left + right).tags == (TagUsage("a", 1), TagUsage("b", 4, 6, chosen=1))
    assert (left + right - left).tags == right.tags


# ---- output


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("arms") / "models.py"
    file.write_text(
        "from mas_gym.policies import ScriptedPolicy\n"
        "def make(name='a'):\n"
        "    return ScriptedPolicy(lambda request, seed: f'{name} {seed % 9}. Final Answer: {seed % 5}', name)\n"
        "class Longest:\n"
        "    name, terminal_only, free = 'longest', False, False\n"
        "    def score(self, contexts):\n"
        "        return [len(context.state.text) / 100 for context in contexts]\n"
    )
    return file


def test_eval_and_report_show_arms(models: Path, tmp_path: Path) -> None:
    policy = f"{{'*': {{small: '{models}:make', large: '{models}:make:large'}}}}"
    store, out = tmp_path / "runs.db", tmp_path / "rows.json"
    arguments = ["--task", "arithmetic", "-n", 3, "--policy", policy, "--critic", f"{models}:Longest", "--store", store]
    result = command("eval", *arguments, "--planner", "mcts:5,2,arms=thompson", "--json", out)
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.output.splitlines() if str(out) not in line) <= 80
    shown = said(result)
    assert "Messages by arm" in shown and "large" in shown and "small" in shown
    import json

    [row] = json.loads(out.read_text())["rows"]
    assert Counter(share["arm"] for share in row["arms"]) == {"large": 1, "small": 1}
    page = tmp_path / "report.html"
    assert command("report", store, "--out", page).exit_code == 0
    assert "Messages by arm" in page.read_text()


def test_solve_shows_calls_by_arm(models: Path) -> None:
    policy = f"{{'*': {{small: '{models}:make', large: '{models}:make:large'}}}}"
    result = command("solve", "What is 3 + 4?", "--mas", "rpsv", "--policy", policy, "--planner", "bon:4",
                     "--critic", f"{models}:Longest")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "by arm: large" in said(result)


def test_ask_tell_offers_arms_as_actions() -> None:
    treequest = pytest.importorskip("treequest", reason="TreeQuest is not installed")
    import numpy

    # TreeQuest draws from NumPy's global generator, so the order of concurrent searches would change the result.
    numpy.random.seed(0)
    plans = run(AskTell(treequest.ABMCTSA(), 16), critic=Likes(), n=12, concurrency=1)
    used = {arm.tag: arm.calls for arm in sum((plan.usage for plan in plans), Usage()).tags}
    assert used["large"] > used["small"] > 0


def test_identity_of_arms_depends_on_their_policies() -> None:
    assert digest_of(identity_of(arms())) == digest_of(identity_of(arms()))
    assert digest_of(identity_of(arms())) != digest_of(identity_of(arms(small="talker", large="echo")))
