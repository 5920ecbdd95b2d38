"""Prices of models, the column USD, and budgets in USD."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from search_worlds import HashCritic, chain, problems, talker
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from mas_gym.errors import ConfigError, UnknownNameError
from mas_gym.policies.per_agent import PerAgentPolicy
from search import Budget, Usage, as_prices

MAS = chain(3)
PRICES = {"talker": {"prompt": 0, "generated": 1000}, "hash": {"forward": 0.001}}
"""0.001 USD per generated token, and per critic forward."""


def run(planner: str = "sc:3", count: int = 8, **options: Any) -> search.Run:
    return search.run(planner, problems(count), **{"mas": MAS, "policy": talker(), **options})


def costs(plans: search.Run) -> dict[str, float | None]:
    return {plan.problem_id: plans.cost(plan.usage) for plan in plans}


def test_cost_includes_tokens_forward_passes_and_seconds() -> None:
    prices = as_prices(
        {
            "m": {"prompt": 2, "cached": 1, "generated": 10, "second": 0.5},
            "judge": {"forward": 0.25, "prompt": 4, "generated": 8},
        }
    )
    usage = Usage(
        prompt_tokens=100,
        cached_tokens=40,
        generated_tokens=7,
        reward_calls=3,
        critic_prompt_tokens=50,
        critic_tokens=6,
        grader_tokens=999,
        seconds=2,
    )
    agents = (60 * 2 + 40 * 1 + 7 * 10) / 1e6 + 2 * 0.5
    assert prices.rate("m").usd(usage) == pytest.approx(agents)
    assert prices.rate("m", "judge").usd(usage) == pytest.approx(agents + 3 * 0.25 + (50 * 4 + 6 * 8) / 1e6)


def test_cached_tokens_cost_as_much_as_prompt_tokens_by_default() -> None:
    rate = as_prices({"m": {"prompt": 3, "generated": 0}}).rate("m")
    assert rate.usd(Usage(prompt_tokens=10, cached_tokens=10)) == pytest.approx(30 / 1e6)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected lines such as"),
        ("[1, 2]", "expected lines such as"),
        ("tiny: 3", "expected a dict"),
        ("tiny: {}", "at least one of"),
        ("tiny: {prompt: 1}", "prices for both prompt and generated"),
        ("tiny: {cached: 1}", "prices for both prompt and generated"),
        ("tiny: {prompt: -1, generated: 1}", "prompt: expected a price of at least 0"),
        ("tiny: {prompt: .nan, generated: 1}", "prompt: expected a price of at least 0"),
        ("tiny: {prompt: .inf, generated: 1}", "prompt: expected a price of at least 0"),
        ("tiny: {prompt: true, generated: 1}", "prompt: expected a price of at least 0"),
        ("tiny: {prompt: '1', generated: 1}", "prompt: expected a price of at least 0"),
        ("tiny: {prompt: 1, generated: 1, second: -1}", "second: expected a price of at least 0"),
        ("tiny: {forward: null}", "forward: expected a price of at least 0"),
        ("tiny: {promt: 1, generated: 1}", "did you mean 'prompt'"),
        ("4: {second: 1}", "put it in quotes"),
        ("tiny: {second: 1}\ntiny: {second: 2}", "occurs twice"),
        ("tiny: {second: 1", "line 1"),
    ],
)
def test_invalid_price_files_are_rejected_with_a_reason(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(fault)) as caught:
        as_prices(path)
    assert str(caught.value).startswith("prices.yaml: ")


def test_missing_price_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        as_prices(tmp_path / "none.yaml")


@pytest.mark.parametrize(("policy", "critic"), [("talk", None), ("talker", "hush")])
def test_unknown_model_error_lists_priced_models(policy: str, critic: str | None) -> None:
    with pytest.raises(UnknownNameError, match=r"priced: 'talker', 'hash'.*add a line such as.*did you mean"):
        as_prices(PRICES).rate(policy, critic)


def test_prices_must_match_the_role_of_a_model() -> None:
    with pytest.raises(ConfigError, match="hash: expected prompt and generated, or second, for a policy"):
        as_prices(PRICES).rate("hash")
    with pytest.raises(ConfigError, match="talker: expected forward"):
        as_prices(PRICES).rate("talker", "talker")


def test_agents_with_different_prices_need_a_price_for_the_whole_policy() -> None:
    policy = PerAgentPolicy({"agent0": talker(), "*": talker()})
    assert costs(run(policy=policy, prices=PRICES)) == pytest.approx(costs(run(prices=PRICES)))
    mixed = {"a": {"second": 1}, "b": {"second": 2}}
    with pytest.raises(ConfigError, match=r"a, b have different prices.*add a price for 'x=a, \*=b'"):
        as_prices(mixed).rate("x=a, *=b")
    assert as_prices(mixed | {"x=a, *=b": {"second": 3}}).rate("x=a, *=b").usd(Usage(seconds=1)) == 3


def test_prices_survive_pickling() -> None:
    prices = as_prices(PRICES)
    assert pickle.loads(pickle.dumps(prices)) == prices


def test_runs_price_new_and_stored_plans(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    tokens = {plan.problem_id: plan.usage.generated_tokens for plan in run(store=store)}
    first, dearer = (run(prices=PRICES | {"talker": {"prompt": 0, "generated": n}}) for n in (1000, 2000))
    assert costs(first) == pytest.approx({name: number / 1000 for name, number in tokens.items()})
    assert costs(dearer) == pytest.approx({name: number / 500 for name, number in tokens.items()})
    again = run(prices=PRICES, store=store)
    assert costs(again) == pytest.approx({name: number / 1000 for name, number in tokens.items()})
    assert again.usage.agent_calls == 0, "prices are no part of the identity of a run"
    assert set(costs(run(store=store)).values()) == {None}


def test_critics_are_charged_per_forward_pass() -> None:
    plans = run("mcts:4,2", critic=HashCritic(), prices=PRICES)
    for plan in plans:
        expected = (plan.usage.generated_tokens + plan.usage.reward_calls) / 1000
        assert plans.cost(plan.usage) == pytest.approx(expected)
    with pytest.raises(UnknownNameError, match="no price for the critic 'hash'"):
        run("mcts:4,2", critic=HashCritic(), prices={"talker": {"second": 1}})
    # A critic that costs nothing, or that the planner does not use, needs no price.
    free = {"talker": {"second": 1}}
    assert None not in costs(run("sc:2", critic=HashCritic(), prices=free)).values()
    assert None not in costs(run("mcts:4,2", critic=search.PolicyLikelihood(), prices=free)).values()


def test_tables_have_a_usd_column_only_with_prices() -> None:
    options: dict[str, Any] = {"mas": MAS, "policy": talker(), "seeds": (1, 2)}
    plain = search.compare(["single", "sc:3"], problems(6), **options)
    priced = search.compare(["single", "sc:3"], problems(6), prices=PRICES, **options)
    forms = ("__str__", "to_markdown", "to_latex", "to_csv", "to_json", "_repr_html_")
    for form in forms:
        assert "usd" not in getattr(plain, form)().lower() and "usd" in getattr(priced, form)().lower()
    for row, line in zip(priced.rows, json.loads(priced.to_json())["rows"], strict=True):
        assert row.usd is not None and line["usd"] == row.usd.mean == pytest.approx(row.tokens.mean / 1000)
        assert line["usd_std"] == row.usd.std
    assert f"{priced.rows[0].tokens.mean / 1000:.4f}"[:5] in str(priced)


def test_prices_are_validated_before_the_first_search() -> None:
    policy = talker()
    prices = {"talker": {"second": 1}}
    with pytest.raises(UnknownNameError, match="no price for the critic 'hash'"):
        search.compare(["single", "mcts:4,2"], problems(2), mas=MAS, policy=policy, critics=HashCritic(), prices=prices)
    with pytest.raises(ConfigError, match=r"prices for usd=0\.1"):
        search.compare("sc:3", problems(2), mas=MAS, policy=policy, match="usd=0.1")


def test_match_usd_chooses_the_search_size() -> None:
    table = search.compare(["single", "sc:3"], problems(30), mas=MAS, policy=talker(), match="usd=0.25", prices=PRICES)
    [_, part] = table.calibrated
    assert part.spent == pytest.approx(0.25, rel=0.15) and part.size > 3
    with pytest.raises(ConfigError, match="cost 0 usd, because the prices are 0"):
        search.compare(
            "sc:3",
            problems(4),
            mas=MAS,
            policy=talker(),
            match="usd=0.1",
            prices={"talker": {"prompt": 0, "generated": 0}},
        )


@pytest.mark.parametrize("planner", ["sc:9", "bon:9", "mcts:12,3", "sc:9,stop=0.9"])
@pytest.mark.parametrize("usd", [0.0001, 0.02, 0.06])
def test_usd_budget_equals_a_token_budget_at_a_price_per_token(planner: str, usd: float) -> None:
    prices = PRICES | {"hash": {"forward": 0}}
    tokens = max(1, round(usd * 1000))
    one = run(planner, critic=HashCritic(), prices=prices, budget=Budget(usd=usd), concurrency=3, raise_errors=True)
    other = run(planner, critic=HashCritic(), budget=Budget(tokens=tokens))
    results = [{p.problem_id: (p.text, p.usage.agent_calls) for p in plans} for plans in (one, other)]
    assert results[0] == results[1]


def test_prices_are_part_of_the_identity_under_a_usd_budget(tmp_path: Path) -> None:
    def digests(**options: Any) -> set[str]:
        list(run(store=tmp_path / "runs.db", **options))
        with search.open_store(tmp_path / "runs.db") as opened:
            return {info.run for info in opened.runs()}

    budget = Budget(usd=0.05)
    assert len(digests()) == len(digests(prices=PRICES)) == 1
    assert len(digests(prices=PRICES, budget=budget)) == len(digests(prices=PRICES, budget=budget)) == 2
    assert len(digests(prices=PRICES | {"talker": {"second": 1}}, budget=budget)) == 3


def test_usd_budget_requires_prices() -> None:
    for name in ("budget", "run_budget"):
        with pytest.raises(ConfigError, match="prices for usd=2, got none; pass prices="):
            run(**{name: Budget(usd=2)})
    for usd in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="usd to be a positive number"):
            Budget(usd=usd)


@pytest.mark.parametrize("concurrency", [1, 16])
def test_run_stops_near_its_usd_budget_and_resumes_with_a_larger_one(concurrency: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prices": PRICES, "store": tmp_path / "runs.db", "concurrency": concurrency}
    plans = run("sc:3", 40, run_budget=Budget(usd=0.5), **options)
    ended = list(plans)
    largest = max(plans.cost(plan.usage) or 0 for plan in ended)
    spent = plans.usage.generated_tokens / 1000
    assert 0 < len(ended) < 40 and 0.5 - 2 * largest <= spent <= 0.5 + largest
    assert str(plans.stopped).startswith("budget of 0.5 USD spent")
    more = run("sc:3", 40, run_budget=Budget(usd=50), **options)
    assert len(list(more)) == 40 and more.stopped is None


def test_free_models_do_not_reduce_the_budget() -> None:
    free = {"talker": {"prompt": 0, "generated": 0}}
    free_run = run("sc:9", prices=free, budget=Budget(usd=1e-9), run_budget=Budget(usd=1e-9))
    plans = list(free_run)
    assert len(plans) == 8 and {plan.usage.agent_calls for plan in plans} == {27}
    assert {free_run.cost(plan.usage) for plan in plans} == {0.0}


def test_stored_runs_are_priced(tmp_path: Path) -> None:
    store, page, prices = tmp_path / "runs.db", tmp_path / "report.html", tmp_path / "prices.yaml"
    options: dict[str, Any] = {"mas": MAS, "policy": talker(), "critics": [HashCritic(), search.PolicyLikelihood()]}
    table = search.compare(["single", "mcts:3,2"], problems(6), store=store, prices=PRICES, **options)
    with search.open_store(store) as opened:
        stored = opened.compare(prices=PRICES)
        assert {row.label: row.usd for row in stored.rows} == {row.label: row.usd for row in table.rows}
        assert {row.usd for row in opened.compare().rows} == {None}
        with pytest.raises(UnknownNameError, match="no price for the critic 'hash'"):
            opened.compare(prices={"talker": {"second": 1}})
    prices.write_text(json.dumps(PRICES), encoding="utf-8")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["report", str(store), "--out", str(page), "--prices", str(prices)]
    )
    assert done.exit_code == 0 and " USD " in done.output and "USD" in page.read_text(encoding="utf-8")


def test_eval_accepts_prices(tmp_path: Path) -> None:
    prices, policy = tmp_path / "prices.yaml", tmp_path / "policy.py"
    prices.write_text("scripted: {prompt: 0.15, cached: 0.08, generated: 0.6}\n", encoding="utf-8")
    policy.write_text(
        "from mas_gym.policies import ScriptedPolicy\n\n\ndef make():\n"
        "    return ScriptedPolicy(lambda request, seed: 'Final Answer: 3')\n",
        encoding="utf-8",
    )

    def invoke(*arguments: object) -> str:
        words = ["eval", "-n", "2", "--policy", f"{policy}:make", "--planner", "sc:2", *map(str, arguments)]
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, words)
        text = re.sub(r"[\s│]+", " ", done.output)
        return text if done.exit_code == 0 else f"{text} {done.exception}"

    shown = invoke("--prices", prices, "--budget", "usd=0.01", "--run-budget", "usd=1")
    assert " USD " in shown and "USD: cost per problem" in shown
    for option in ("--budget", "--run-budget", "--match"):
        assert "prices for usd=1, got none; pass prices=, or --prices prices.yaml" in invoke(option, "usd=1")
    assert "expected limits on calls, tokens, seconds, usd" in invoke("--budget", "usdd=1")
    prices.write_text("script: {second: 1}\n", encoding="utf-8")
    shown = invoke("--prices", prices)
    assert "no price for the policy 'scripted'; priced: 'script'" in shown and "did you mean 'script'?" in shown
