"""Invalid output of a judge, a reward model's folder or a server fails that search with a clear error."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="local models need the extra 'local'")
pytest.importorskip("transformers", reason="local models need the extra 'local'")

import torch
from search_worlds import verdict
from test_reward_models import CONTEXTS, RPSV, add_tensors, context, language_model, qwen_prm, replying, scalar_model

import mas_gym
import search
from mas_gym.critics import scores_of
from mas_gym.errors import ConfigError, DataError, DataNotFoundError, EngineUnavailableError, MASGymError
from mas_gym.policies import SamplingRequest, load_policy
from mas_gym.policies.base import Choice, Sample
from mas_gym.policies.openai_format import BadReply, parse_reply
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.systems.prompts import ChatMessage
from rewardmodels import load_critic
from rewardmodels.verifiers.judge_critic import JudgeCritic

NONSENSE = (
    *("", "\x00\x1b[2J", "yes and no", "No/yes", "A or B", "ja", "{}{0}{question}", "yes", "A", "Verdict:"),
    *("Verdict: yes", "Verdict 00000000: A", "verdict: maybe", "y" * 100_000),
)


# ---- judges


@pytest.mark.parametrize("mode", ["share", "pairwise"])
@pytest.mark.parametrize("text", NONSENSE)
def test_meaningless_reply_is_not_a_verdict(text: str, mode: str) -> None:
    policy = ScriptedPolicy(lambda request, seed: Sample(text, 1, None, "stop"), name="mad")
    critic = JudgeCritic(policy, mode=mode, n=2)  # type: ignore[arg-type]
    one = context("a")._replace(peers=search.protocol.Peers(siblings=(context("b").state,)))
    scores = critic.score([one])
    assert math.isnan(scores[0]) and scores.unread == ((2 if mode == "share" else 4),)
    assert "none of 2 replies" in scores.reasons[0]


def test_judge_error_fails_only_its_search() -> None:
    task = mas_gym.load_task("arithmetic", split="test")[:2]

    def script(request: SamplingRequest, seed: int) -> Sample:
        if task[0].question in request.messages[0].content:
            raise mas_gym.errors.PromptTooLongError("too long for me")
        return Sample(verdict(request, "yes"), 1, None, "stop")

    critic = JudgeCritic(ScriptedPolicy(script, name="brittle"))
    plans = {
        p.problem_id: p.error
        for p in search.run("sbs:2,1", task, mas="rpsv", policy=load_policy("tiny"), critic=critic)
    }
    assert plans[task[1].id] is None and "the judge failed: too long for me" in str(plans[task[0].id])


@pytest.mark.parametrize("pair", [(-math.inf, -math.inf), (math.nan, -1.0), (-1.0, math.nan)])
def test_uninformative_log_probabilities_give_no_verdict(pair: tuple[float, float]) -> None:
    class Chooser:
        name, max_batch = "chooser", 8

        def sample(self, requests: Any) -> Any:
            raise AssertionError

        def choose(self, prompts: Sequence[Sequence[ChatMessage]], words: Sequence[str]) -> list[Choice]:
            return [Choice(pair, 3) for _ in prompts]

    scores = JudgeCritic(Chooser()).score([context("a")])
    assert math.isnan(scores[0]) and scores.unread == (1,) and "lists neither 'yes' nor 'no'" in scores.reasons[0]


@pytest.mark.parametrize(
    ("listed", "fine"),
    [
        ([{"token": "yes", "logprob": -0.5}, {"token": " No", "logprob": -1}], True),
        ([{"token": 7, "logprob": -0.5}], True),
        ([{"token": "yes", "logprob": "high"}], False),
        ([{"token": "yes", "logprob": 3.5}], False),
        ([{"token": "yes"}], False),
        ([None], True),
        ("yes", True),
        (None, True),
    ],
)
def test_top_log_probabilities_are_validated(listed: Any, fine: bool) -> None:
    step = {"token": "yes", "logprob": -0.5, "top_logprobs": listed}
    choice = {"index": 0, "finish_reason": "length", "message": {"content": "yes"}, "logprobs": {"content": [step]}}
    raw = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}).encode()
    if not fine:
        with pytest.raises(BadReply, match="log-probability"):
            parse_reply(raw, 1, "chat", True)
        return
    assert all(isinstance(token, str) and value <= 0 for token, value in parse_reply(raw, 1, "chat", True).first)


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{question} {transcript} {reference}", "no placeholders except .*reference"),
        ("{question.title} {0} {transcript}", "no placeholders except"),
        ("{} {transcript}", "no placeholders except"),
        ("{question}: yes or no?", "got none"),
        ("", "got none"),
        ("{transcript", "expected '}'"),
        ("} {transcript}", "Single '}'"),
        (b"\xff\xfe{transcript}", "can't decode"),
    ],
)
def test_invalid_prompt_files_are_rejected(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path / "p.txt", text)
    with pytest.raises(ConfigError, match=message):
        load_critic(f"judge:tiny#prompt={path}")


def test_missing_prompt_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="expected a prompt file"):
        load_critic(f"judge:tiny#prompt={tmp_path / 'none.txt'}")


def test_braces_in_messages_are_literal() -> None:
    seen: list[str] = []

    def script(request: SamplingRequest, seed: int) -> Sample:
        seen.append(request.messages[0].content)
        return Sample("yes", 1, None, "stop")

    JudgeCritic(ScriptedPolicy(script, name="j"), n=1).score([context("{question} {0.__class__} }{")])
    assert "{question} {0.__class__} }{" in seen[0]


# ---- folders of reward models


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_model(tmp_path_factory.mktemp("plain") / "model", "Llama")


@pytest.mark.parametrize("format", ["qwen", "skywork"])
def test_model_without_reward_head_is_rejected(plain: Path, format: str) -> None:
    with pytest.raises(DataError, match="expected a head with"):
        load_critic(f"prm:{plain}#format={format}")


def test_weights_with_nan_are_rejected(tmp_path: Path) -> None:
    add_tensors(qwen_prm(tmp_path / "q"), score__2__bias=torch.full((2,), math.nan))
    critic = load_critic(f"prm:{tmp_path / 'q'}")
    with pytest.raises(MASGymError, match="got nan"):
        critic.score(CONTEXTS)


def test_folders_without_reward_model_are_rejected(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing: score.weight"):
        load_critic(f"rm:{plain}")
    (tmp_path / "empty").mkdir()
    for name in ("prm", "rm"):
        with pytest.raises(MASGymError):
            load_critic(f"{name}:{tmp_path / 'empty'}")
    cut = scalar_model(tmp_path / "cut")
    write(cut / "model.safetensors", (cut / "model.safetensors").read_bytes()[:999])
    with pytest.raises(DataError, match="damaged"):
        load_critic(f"rm:{cut}")


def test_unsafe_and_failing_templates_are_rejected(tmp_path: Path) -> None:
    folder = scalar_model(tmp_path / "rm")
    for template, message in (
        ("{{ messages.__class__.__mro__ }}", "chat template failed"),
        ("{{ raise_exception('no') }}", "chat template failed"),
    ):
        write(folder / "chat_template.jinja", template)
        with pytest.raises(MASGymError, match=message):
            load_critic(f"rm:{folder}")


# ---- servers


@pytest.mark.parametrize(
    ("endpoint", "reply", "message"),
    [
        ("pooling", {"data": [{"data": [[0.1, 0.9]]}]}, "expected 2 rows, one per step, got 1 rows"),
        ("pooling", {"data": [{"data": [[0.1, 0.9]] * 500}]}, "got 500 rows; serve the model with step pooling"),
        ("pooling", {"data": [{"data": [[0.1, 0.9], [0.1]]}]}, "one or two numbers"),
        ("pooling", {"data": [{"data": [[0.1, 0.9], [0.1, 7.5]]}]}, "expected a probability, got 7.5"),
        ("pooling", {"data": [{"data": [[0.1, None], [0.1, True]]}]}, "expected a finite number"),
        ("pooling", {"data": [{"data": "c29tZSBieXRlcw=="}]}, "expected 2 rows"),
        ("pooling", {"data": []}, "data with one entry"),
        ("pooling", {}, "data with one entry"),
        ("classify", {"data": [{"probs": [0.2, 0.8]}]}, "a model with one label"),
        ("classify", '{"data": [{"probs": [1e999]}]}', "finite number"),
        ("classify", '{"data": [{"probs": [NaN]}]}', "not JSON"),
        ("score", {"data": [{"score": "0.5"}]}, "finite number"),
        ("score", '{"data": [{"score": ' + "9" * 5000 + "}]}", "number|JSON"),
        ("score", "[" * 100_000, "JSON"),
        ("score", {"error": {"message": "boom"}}, "data with one entry"),
    ],
)
def test_faulty_server_replies_are_rejected(endpoint: str, reply: Any, message: str) -> None:
    with replying(reply() if callable(reply) else reply) as (base, _):
        critic = load_critic(f"{base}/{endpoint}#model=m&prefixes=true&max_attempts=1&timeout=20")
        scores = scores_of(critic, [context("one", "two")])
    assert math.isnan(scores[0])
    assert re.search(message, scores.reasons[0]), scores.reasons


def test_unreachable_server_ends_the_run() -> None:
    pytest.importorskip("openai", reason="the openai package is not installed")
    task = mas_gym.load_task("arithmetic", split="test")[:2]
    critic = load_critic("http://127.0.0.1:9/pooling#model=m&patience=0.5&timeout=2")
    with pytest.raises(EngineUnavailableError, match="did not respond"):
        list(search.run("sbs:2,1", task, mas=RPSV, policy=load_policy("tiny"), critic=critic))
