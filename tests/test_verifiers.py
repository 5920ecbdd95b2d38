"""Verifiers of others as critics: their values are those of the reference formulae, and their cost is counted."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="local models need the extra 'local'")
pytest.importorskip("transformers", reason="local models need the extra 'local'")

import local_models
import torch
from search_worlds import verdict

import mas_gym
import search
from mas_gym.errors import ConfigError, CriticError, PolicyError, UnknownNameError
from mas_gym.internal.identity import identity_of
from mas_gym.policies import SamplingRequest, load_policy
from mas_gym.policies.base import Certainty, Choice, Sample, first_tokens
from mas_gym.policies.batch_queue import as_policy
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.systems.prompts import ChatMessage
from mas_gym.testing import check_critic
from rewardmodels import load_critic
from rewardmodels.verifiers.judge_critic import JudgeCritic
from search import Proposal, ScoringContext
from search.critics import Agreement, RandomCritic, Uncertainty
from search.protocol import Peers

RPSV = mas_gym.load_mas("rpsv")
DYNAMICS = mas_gym.Dynamics(RPSV)
WORDS = "ba de fi go ku"


def state_of(*texts: str, question: str = "ba de fi?") -> mas_gym.MASState:
    state = DYNAMICS.initial_state(question)
    for text in texts:
        state = DYNAMICS.transition(state, mas_gym.Action(text, RPSV.ALL))
    return state


def context(*texts: str, certainty: Certainty | None = None) -> ScoringContext:
    state = state_of(*texts)
    proposal = Proposal(mas_gym.Action(texts[-1], RPSV.ALL), 5, -2.0, "stop", certainty)
    return ScoringContext(state, RPSV, proposal)


def peers(state: mas_gym.MASState, *siblings: mas_gym.MASState) -> ScoringContext:
    return ScoringContext(state, RPSV, None, Peers(siblings=siblings))


def problems(count: int) -> list[Any]:
    return list(mas_gym.load_task("arithmetic", split="test")[:count])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_models.save(tmp_path_factory.mktemp("model"))


# ---- how sure a policy was


@pytest.mark.parametrize(("exact", "near"), [(False, 1e-5), (True, 2**-5)])
def test_certainty_equals_the_value_computed_from_the_distributions(folder: Path, exact: bool, near: float) -> None:
    policy: Any = load_policy(f"transformers:{folder}", exact=exact)
    asked = SamplingRequest((ChatMessage("user", WORDS),), (1, 2, 3, 4), 12)
    # The text is the message's token ids.
    policy.format.decode = lambda tokens: " ".join(map(str, tokens))
    [reply] = policy.sample([asked])
    prompt = policy.format.encode(asked.messages, 12).ids
    for sample in reply.samples:
        written = list(map(int, sample.text.split()))
        logits = policy.model(torch.tensor([[*prompt, *written]])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.double(), dim=1)
        known = [logprobs[i, token].item() for i, token in enumerate(written)]
        assert len(known) == sample.tokens
        entropy = -(logprobs.exp() * logprobs).sum(dim=1).mean().item()
        uniform = -(logprobs + math.log(logprobs.shape[1])).mean().item()
        assert sample.certainty == pytest.approx((min(known), entropy, uniform), abs=near)


def test_certainty_is_independent_of_the_batch(folder: Path) -> None:
    policy: Any = load_policy(f"transformers:{folder}", exact=True)
    asked = [SamplingRequest((ChatMessage("user", f"{WORDS} {i}"),), (i,), 30) for i in range(24)]
    together = policy.sample(asked)
    alone = [policy.sample([one])[0] for one in asked]
    assert [reply.samples for reply in together] == [reply.samples for reply in alone]
    assert len({reply.samples[0].certainty for reply in alone}) > 12


def test_entropy_with_excluded_tokens_is_finite() -> None:
    from mas_gym.policies.local.decode import spread

    entropy, certainty = spread(torch.tensor([[0.0, 0.0, -math.inf]]))
    assert entropy.item() == pytest.approx(math.log(2)) and certainty.item() == math.inf


def test_uncertainty_critic_scores_equal_their_formulas() -> None:
    sure = Certainty(least=-0.5, entropy=0.25, self_certainty=4.0)
    for kind, value in (("least", math.exp(-0.5)), ("entropy", math.exp(-0.25)), ("self-certainty", 0.8)):
        critic = load_critic(f"uncertainty:{kind}")
        assert critic.score([context("a", certainty=sure)]) == [pytest.approx(value)]
        assert critic.free and critic.name == f"uncertainty:{kind}"
    assert load_critic("uncertainty").name == "uncertainty:entropy"
    assert len({str(identity_of(Uncertainty(kind))) for kind in ("least", "entropy", "self-certainty")}) == 3


def test_uncertainty_without_statistics_is_rejected() -> None:
    with pytest.raises(CriticError, match=r"uncertainty:entropy.* or uncertainty:least"):
        Uncertainty("entropy").score([context("a", certainty=Certainty(least=-1.0))])
    with pytest.raises(CriticError, match="uncertainty:least"):
        Uncertainty("least").score([context("a")])
    with pytest.raises(CriticError, match="uncertainty"):
        Uncertainty().score([ScoringContext(state_of("a"), RPSV, None)])
    with pytest.raises(UnknownNameError, match="self-certainty"):
        load_critic("uncertainty:certainty")


# ---- agreement and chance


def test_agreement_is_the_share_of_equal_answers() -> None:
    task = problems(3)
    policy = load_policy("tiny")
    plans = sorted(
        search.run("bon:8", task, mas="rpsv", policy=policy, critic=Agreement(), seed=3),
        key=lambda plan: plan.problem_id,
    )
    votes = sorted(search.run("sc:8", task, mas="rpsv", policy=policy, seed=3), key=lambda plan: plan.problem_id)
    assert [plan.answer for plan in plans] == [plan.answer for plan in votes]
    for plan in plans:
        answers = [candidate.answer for candidate in plan.candidates]
        for candidate in plan.candidates:
            share = answers.count(candidate.answer) / 8 if candidate.answer is not None else 0.0
            assert candidate.score == pytest.approx(2 * share - 1)
        assert plan.usage.reward_calls == 0


def test_agreement_critic_requires_a_search() -> None:
    with pytest.raises(CriticError, match="agreement"):
        Agreement().score([ScoringContext(state_of("a", "b", "c", "d"), RPSV, None)])
    with pytest.raises(ConfigError, match="no argument"):
        load_critic("agreement:x")


def test_random_critic_is_uniform_and_reproducible() -> None:
    contexts = [ScoringContext(state_of(f"m{i}"), RPSV, None) for i in range(2000)]
    values = load_critic("random").score(contexts)
    assert values == RandomCritic().score(contexts[:1000]) + RandomCritic().score(contexts[1000:])
    assert min(values) < -0.99 and max(values) > 0.99 and abs(sum(values) / 2000) < 0.05
    assert values != load_critic("random:7").score(contexts)
    with pytest.raises(ConfigError, match="an integer"):
        load_critic("random:x")


# ---- judges


class Chooser:
    """A policy that returns log-probabilities of first words from a table, by a word of the prompt."""

    name, max_batch = "chooser", 4

    def __init__(self, table: dict[str, tuple[float, float]]) -> None:
        self.table, self.batches = table, []

    def identity(self) -> dict[str, tuple[float, float]]:
        return self.table

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Any]:
        raise AssertionError("asked for a text")

    def choose(self, prompts: Sequence[Sequence[ChatMessage]], words: Sequence[str]) -> list[Choice]:
        self.batches.append(len(prompts))
        found = []
        for [message] in prompts:
            [key] = [key for key in self.table if key in message.content.rpartition("messages so far")[2]]
            found.append(Choice(self.table[key], 10))
        return found


def talker(*texts: str) -> ScriptedPolicy:
    """A judge whose n replies are the texts; a text that is a word of a verdict is stated as one."""

    def script(request: SamplingRequest, seed: int) -> Sample:
        text = texts[request.seeds.index(seed) % len(texts)]
        return Sample(verdict(request, text) if text in ("yes", "no", "A", "B") else text, 3, None, "stop")

    script.revision = str(texts)  # type: ignore[attr-defined]
    return ScriptedPolicy(script, name="talker")


def test_judge_score_is_computed_from_the_probability_of_yes() -> None:
    policy = Chooser({"good": (math.log(0.6), math.log(0.2)), "bad": (math.log(0.01), math.log(0.03))})
    critic = JudgeCritic(policy)
    scores = critic.score([context("good"), context("bad"), context("good")])
    assert list(scores) == pytest.approx([0.5, -0.5, 0.5], abs=1e-6)
    # Equal requests are sent once and counted for both.
    assert policy.batches == [2] and scores[0] == scores[2]
    assert (scores.tokens, scores.prompt_tokens, scores.unread) == ((1, 1, 1), (10, 10, 10), (0, 0, 0))


def test_local_judge_logprobs_equal_those_of_the_model(folder: Path) -> None:
    policy: Any = load_policy(f"transformers:{folder}")
    prompts = [(ChatMessage("user", f"{WORDS} {'ba ' * i}"),) for i in range(7)]
    choices = policy.choose(prompts, ("ba", "de"))
    vocabulary = policy.format.tokenizer.get_vocab()
    for prompt, choice in zip(prompts, choices, strict=True):
        ids = policy.format.encode(prompt, 1).ids
        logprobs = torch.log_softmax(policy.model(torch.tensor([ids])).logits[0, -1].double(), dim=0)
        expected = [logprobs[vocabulary[word]].item() for word in ("ba", "de")]
        assert choice.logprobs == pytest.approx(expected, abs=1e-5)
        assert choice.prompt_tokens == len(ids)


def test_first_tokens_include_all_variants_of_a_word() -> None:
    table = {"yes": [1], "Yes": [2], "YES": [3, 4], " yes": [5], " Yes": [9, 2], " YES": [9, 3], "no": [6, 7]}
    assert first_tokens(["yes", "no"], lambda text: table.get(text, [6, 8])) == [[1, 2, 5], [6]]
    with pytest.raises(PolicyError, match="differ in their first token"):
        first_tokens(["yes", "yet"], lambda text: [4, 5])


@pytest.mark.parametrize(
    ("texts", "value", "unread"),
    [(("yes", "no", "yes"), 1 / 3, 0), (("yes", "hm", "no"), 0.0, 1), (("perhaps",), None, 3)],
)
def test_sampled_verdicts_are_averaged_and_unreadable_ones_are_counted(
    texts: tuple[str, ...], value: float | None, unread: int
) -> None:
    for policy in (talker(*texts), as_policy(talker(*texts))):
        critic = JudgeCritic(policy, n=3)
        scores = critic.score([context("a")])
        assert critic.mode == "share" and not critic.concurrent
        assert (scores.tokens, scores.unread) == ((9,), (unread,))
        if value is None:
            assert math.isnan(scores[0]) and scores.reasons[0] == "none of 3 replies ends with the verdict yes or no"
        else:
            assert scores[0] == pytest.approx(value, abs=1e-6)


def test_pairs_are_compared_in_both_orders() -> None:
    strength = {"weak": 1.0, "fair": 2.0, "good": 6.0}

    class Ranker(Chooser):
        def choose(self, prompts: Sequence[Sequence[ChatMessage]], words: Sequence[str]) -> list[Choice]:
            assert list(words) == ["A", "B"]
            found = []
            for [message] in prompts:
                first, second = (message.content.split(f"Message {x} of")[1].split("\n")[1] for x in "AB")
                # It prefers the first message by a factor of 3.
                found.append(Choice((math.log(3 * strength[first]), math.log(strength[second])), 5))
            return found

    states = [state_of(name) for name in strength]
    critic = JudgeCritic(Ranker({}), mode="pairwise")
    scores = critic.score([peers(one, *(other for other in states if other != one)) for one in states])

    def wins(a: float, b: float) -> float:
        return (3 * a / (3 * a + b) + 1 - 3 * b / (3 * b + a)) / 2

    for (name, own), score in zip(strength.items(), scores, strict=True):
        others = [wins(own, other) for key, other in strength.items() if key != name]
        assert score == pytest.approx(2 * (0.5 + sum(others)) / 3 - 1, abs=1e-6)
    assert set(scores.tokens) == {4} and set(scores.prompt_tokens) == {20}
    assert sum(scores) == pytest.approx(0, abs=1e-5)
    alone = critic.score([peers(states[0])])
    assert (list(alone), alone.tokens) == ([0.0], (0,))
    assert critic.reads_peers and not JudgeCritic(Ranker({})).reads_peers


def test_judge_guides_a_search_and_its_cost_is_stored(tmp_path: Path) -> None:
    def run(store: Path) -> Any:
        options: dict[str, Any] = {"policy": load_policy("tiny"), "critic": load_critic("judge:tiny")}
        return search.run("sbs:3,1", problems(3), mas="rpsv", store=store, **options)

    first = run(tmp_path / "a.db")
    plans = {plan.problem_id: plan.usage for plan in first}
    assert all(usage.critic_tokens == usage.reward_calls > 0 for usage in plans.values())
    assert all(usage.critic_prompt_tokens > 10 * usage.critic_tokens for usage in plans.values())
    again = run(tmp_path / "a.db")
    assert {plan.problem_id: plan.usage for plan in again} == plans and again.usage.agent_calls == 0
    with search.open_store(tmp_path / "a.db") as store:
        assert {plan.problem_id: plan.usage for plan in store.plans(trees=False)} == plans
        [info] = store.runs()
        assert info.spent.critic_tokens == sum(usage.critic_tokens for usage in plans.values())


def test_search_without_a_readable_verdict_fails_and_keeps_its_cost() -> None:
    def script(request: SamplingRequest, seed: int) -> Sample:
        unsure = task[0].question in request.messages[0].content
        return Sample("hm" if unsure else verdict(request, "yes"), 2, None, "stop")

    task = problems(3)
    judge = JudgeCritic(ScriptedPolicy(script, name="half"), n=2)
    plans = {p.problem_id: p for p in search.run("sbs:2,1", task, mas="rpsv", policy=load_policy("tiny"), critic=judge)}
    failed = plans.pop(task[0].id)
    assert failed.error == (
        "CriticError: critic 'judge:half' has no value for the state after turn 1: none of 2 replies ends with the "
        "verdict yes or no"
    )
    assert failed.usage.unread_verdicts == failed.usage.critic_tokens / 2 > 0
    assert all(plan.error is None and plan.usage.unread_verdicts == 0 for plan in plans.values())


def test_critic_token_column_is_shown_only_if_used() -> None:
    from search.results.outcomes import Outcome
    from search.results.summary import summarize
    from search.results.table import Comparison
    from search.results.table_formats import to_markdown

    def rows(spent: int) -> Any:
        return summarize([Outcome("bon:2", "judge", 1, "p", True, 1, 2, 30, 8, 2, critic_tokens=spent)])

    assert "Critic TOK" not in to_markdown(rows(0)) and "| Critic TOK |" in to_markdown(rows(7))
    assert "critic_tokens" in Comparison(tuple(rows(7))).to_csv().splitlines()[0]


def test_judge_identity_contains_policy_prompt_and_settings(tmp_path: Path, folder: Path) -> None:
    prompt = tmp_path / "p.txt"
    prompt.write_text("{question} {transcript} yes or no?")
    shutil.copy(prompt, tmp_path / "q.txt")
    (tmp_path / "r.txt").write_text("{question} {transcript} yes or no??")
    spec = f"judge:transformers:{folder}#max_batch=8"
    same = [f"{spec}&prompt={tmp_path / name}" for name in ("p.txt", "q.txt")]
    others = [spec, f"{spec}&prompt={tmp_path / 'r.txt'}", f"{spec}&mode=share", f"{spec}&mode=share&n=4"]
    others += [f"{spec}&mode=pairwise", f"{spec}&mode=share&temperature=0.2"]
    stated = [str(identity_of(load_critic(one))) for one in (*same, *others)]
    assert stated[0] == stated[1] and len(set(stated)) == 1 + len(others)


def test_judge_and_policy_options_are_separate(folder: Path) -> None:
    critic = load_critic(f"judge:transformers:{folder}#mode=share&n=2&max_batch=5")
    assert (critic.max_batch, critic._n, critic.mode) == (5, 2, "share")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"mdoe.*options of the judge: mode, n, prompt"):
        load_critic(f"judge:transformers:{folder}#mdoe=share")
    for wrong in ("mode=maybe", "mode=share&n=0", "mode=share&max_tokens=x", "mode=share&temperature=-1"):
        with pytest.raises(ConfigError, match=r"expected"):
            load_critic(f"judge:transformers:{folder}#{wrong}")
    with pytest.raises(ConfigError, match="judge:POLICY"):
        load_critic("judge")
    with pytest.raises(ConfigError, match="mode=share"):
        JudgeCritic(talker("yes"), mode="logprob")


def test_judges_pass_the_critic_check() -> None:
    check_critic(JudgeCritic(talker("yes", "no"), n=2))
    check_critic(RandomCritic())


def test_judge_is_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from mas_gym.policies import ScriptedPolicy\n"
        "def make(word):\n"
        "    def write(request, seed):\n"
        "        lines = request.messages[-1].content.splitlines()\n"
        "        return next(line for line in lines if line.startswith('Verdict') and line.endswith(word))\n"
        "    return ScriptedPolicy(write, name=word)\n"
    )
    [score] = load_critic(f"judge:{tmp_path / 'mine.py'}:make:no").score([context("a")])
    assert score == -1.0


def test_server_request_contains_top_logprobs() -> None:
    pytest.importorskip("openai", reason="the openai package is not installed")
    from fastapi import FastAPI, Request
    from loopback import serving

    app, seen = FastAPI(), []

    async def answer(request: Any) -> dict[str, Any]:
        seen.append(await request.json())
        likely = [{"token": word, "logprob": math.log(p)} for word, p in (("Yes", 0.5), (" yes", 0.1), ("no", 0.2))]
        step = {"token": "Yes", "logprob": math.log(0.5), "top_logprobs": likely if len(seen) < 3 else []}
        choice = {"index": 0, "finish_reason": "length", "message": {"content": "Yes"}, "logprobs": {"content": [step]}}
        return {"choices": [choice], "usage": {"prompt_tokens": 40, "completion_tokens": 1}}

    # The annotations of this file are texts, and FastAPI would not find its class.
    answer.__annotations__["request"] = Request
    app.post("/v1/chat/completions")(answer)
    with serving(app) as base:
        critic = load_critic(f"judge:openai:m@{base}/v1")
        # The first request finds out whether the server lists likely tokens.
        scores = critic.score([context("a")])
        unread = critic.score([context("b")])
    assert critic.mode == "logprob" and critic.concurrent  # type: ignore[attr-defined]
    assert scores[0] == pytest.approx(2 * 0.6 / 0.8 - 1, abs=1e-6)
    assert (scores.tokens, scores.prompt_tokens) == ((1,), (40,))  # type: ignore[attr-defined]
    assert (seen[0]["max_tokens"], seen[0]["logprobs"], seen[0]["top_logprobs"]) == (1, True, 20)
    assert math.isnan(unread[0]) and "lists neither" in unread.reasons[0]  # type: ignore[attr-defined]
    assert load_critic(f"judge:openai:m@{base}/v1#logprobs=false").mode == "share"  # type: ignore[attr-defined]


def test_states_of_many_searches_share_a_judge_batch() -> None:
    class Yes(Chooser):
        def choose(self, prompts: Sequence[Sequence[ChatMessage]], words: Sequence[str]) -> list[Choice]:
            self.batches.append(len(prompts))
            return [Choice((-1.0, -2.0), 10) for _ in prompts]

    policy = Yes({})
    policy.max_batch = 64
    plans = list(search.run("sbs:2,1", problems(8), mas="rpsv", policy=load_policy("tiny"), critic=JudgeCritic(policy)))
    calls = sum(plan.usage.reward_calls for plan in plans)
    assert max(policy.batches) >= 8 and len(policy.batches) < calls / 3


def test_caches_and_recordings_preserve_certainty(tmp_path: Path, folder: Path) -> None:
    import asyncio

    from mas_gym.policies.cache import CachedPolicy, RecordedPolicy, RecordingPolicy

    policy: Any = load_policy(f"transformers:{folder}")
    asked = SamplingRequest((ChatMessage("user", WORDS),), (1, 2), 8)
    [fresh] = policy.sample([asked])
    assert all(None not in sample.certainty for sample in fresh.samples)
    cache = CachedPolicy(policy, tmp_path / "c.db")
    for _ in range(2):
        assert asyncio.run(cache.sample_async(asked)).samples == fresh.samples
    assert cache.hits == 2
    cache.close()
    asyncio.run(RecordingPolicy(policy, tmp_path / "r.jsonl").sample_async(asked))
    [recorded] = RecordedPolicy(tmp_path / "r.jsonl").sample([asked])
    assert recorded.samples == fresh.samples
