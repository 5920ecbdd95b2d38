"""The policy contract, the registry, recordings and seeds; nothing here needs torch."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from search_worlds import WholeBatches

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, MASGymError, PolicyError, UnknownNameError
from mas_gym.internal.identity import identity_of
from mas_gym.plugins import Spec
from mas_gym.policies import (
    AsyncPolicy,
    Policy,
    RecordedPolicy,
    RecordingPolicy,
    Sample,
    SamplingReply,
    SamplingRequest,
    ScriptedPolicy,
    known_policies,
    load_policy,
)
from mas_gym.policies.base import derive_seed, fitted
from mas_gym.policies.batch_queue import BatchedPolicy, as_policy, sample_all
from mas_gym.policies.per_agent import PerAgentPolicy
from mas_gym.systems.prompts import ChatMessage
from mas_gym.tasks import Problem


def request(text: str = "14 + 3?", seeds: tuple[int, ...] = (1, 2), **changes: Any) -> SamplingRequest:
    messages = (ChatMessage("system", "You are the Solver."), ChatMessage("user", text))
    return SamplingRequest(messages, seeds, **{"agent": "Solver", **changes})


def answers(policy: object, requests: Sequence[SamplingRequest]) -> list[SamplingReply | Exception]:
    return sample_all(as_policy(policy), requests)


def replies(policy: object, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
    found = answers(policy, requests)
    assert all(isinstance(reply, SamplingReply) for reply in found), found
    return [reply for reply in found if isinstance(reply, SamplingReply)]


def echo() -> ScriptedPolicy:
    return ScriptedPolicy(lambda request, seed: f"{request.messages[-1].content} {seed}", name="echo")


def run_python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, **options
    )


# Seeds


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed(42, "gsm8k/test/17", bytes(range(16)), 0) == 8550947657585614694


@given(st.integers(), st.text(st.characters(codec=None)), st.binary(max_size=16), st.integers(0))
def test_seeds_are_in_range_and_depend_on_every_argument(run: int, problem: str, digest: bytes, index: int) -> None:
    seed = derive_seed(run, problem, digest, index)
    assert 0 <= seed < 2**63
    others = [
        derive_seed(run + 1, problem, digest, index),
        derive_seed(run, problem + "0", digest, index),
        derive_seed(run, problem, digest + b"0", index),
        derive_seed(run, problem, digest, index + 1),
    ]
    assert len({seed, *others}) == 5


def test_seed_depends_on_the_boundaries_between_fields() -> None:
    assert derive_seed(1, "ab", b"c", 0) != derive_seed(1, "a", b"bc", 0)
    assert derive_seed(1, "0|x", b"", 2) != derive_seed(1, "x", b"", 20)


# Requests and replies


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seeds": ()}, "0 seeds"),
        ({"messages": ()}, "0 messages"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seeds": (1, -1)}, "seeds in"),
        ({"seeds": (2**63,)}, "seeds in"),
    ],
)
def test_request_with_invalid_fields_is_rejected(changes: dict[str, Any], match: str) -> None:
    fields: dict[str, Any] = {"messages": request().messages, "seeds": (1,)}
    with pytest.raises(ConfigError, match=match):
        SamplingRequest(**{**fields, **changes})


def test_mean_log_probability_is_per_token() -> None:
    assert Sample("17", 4, -2.0, "stop").mean_logprob == -0.5
    assert Sample("17", 4, None, "stop").mean_logprob is None


# The registry


@pytest.mark.parametrize(
    ("name", "near"), [("tyni", "tiny"), ("transformer:x", "transformers"), ("Recorded:f", "recorded")]
)
def test_unknown_policy_error_lists_known_names_and_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{near}'") as caught:
        load_policy(name)
    assert all(known in str(caught.value) for known in known_policies())


@pytest.mark.parametrize(
    "spec", ["", ":", "tiny:big", "transformers:", "transformers", "recorded:", "tiny#oops", "tiny#a=["]
)
def test_incomplete_policy_spec_is_rejected(spec: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=r"expected|takes no argument"):
        load_policy(spec)


def test_options_are_parsed_as_numbers_text_and_booleans() -> None:
    spec = Spec.parse("a/b#x=3&y=cuda:1&z=true&w=")
    assert (spec.name, spec.options()) == ("a/b", {"x": 3, "y": "cuda:1", "z": True, "w": None})


@pytest.mark.slow
@settings(max_examples=300)
@given(st.text(max_size=30))
@example("recorded:\x00")
@example("recorded:/")
def test_arbitrary_spec_raises_a_mas_gym_error(spec: str) -> None:
    if spec.startswith(("tiny", "transformers")):
        return
    with pytest.raises(MASGymError):
        load_policy(spec)


def test_error_for_an_unsupported_option_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'speed'"):
        load_policy(f"recorded:{tmp_path / 'r.jsonl'}", speed=3)


def test_missing_torch_error_names_the_extra() -> None:
    ran = run_python("""
        import sys
        import mas_gym.policies
        assert "torch" not in sys.modules and "transformers" not in sys.modules
        sys.modules["torch"] = None
        for spec in ("tiny", "transformers:somewhere"):
            try:
                mas_gym.policies.load_policy(spec)
            except ImportError as error:
                print(type(error).__name__, error)
        """)
    assert ran.stdout.count("MissingDependencyError") == 2, ran.stderr
    assert ran.stdout.count("pip install 'mas-gym[local]'") == 2


# Batches


def test_batch_policy_receives_full_batches() -> None:
    sizes: list[int] = []

    class Counting(ScriptedPolicy):
        def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
            sizes.append(sum(len(one.seeds) for one in requests))
            return super().sample(requests)

    policy = Counting(lambda request, seed: str(seed), max_batch=8)
    asked = [request(seeds=tuple(range(n))) for n in (3, 3, 3, 20, 1, 8)]
    assert [len(reply.samples) for reply in replies(policy, asked)] == [3, 3, 3, 20, 1, 8]
    assert sizes == [6, 3, 20, 1, 8]


def test_lost_replies_are_detected() -> None:
    class Lossy(ScriptedPolicy):
        def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
            return super().sample(requests)[1:]

    for reply in answers(Lossy(lambda request, seed: "x"), [request(), request()]):
        assert "expected 2 replies, got 1" in str(reply)


# Recordings


def record(file: Path, count: int = 5) -> list[SamplingRequest]:
    asked = [request(f"question {i}\ud800", (i, i + 100)) for i in range(count)]
    replies(RecordingPolicy(echo(), file), asked)
    return asked


def test_recording_returns_the_recorded_messages(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "r.jsonl"
    asked = record(file)
    replay: Any = load_policy(f"recorded:{file}")
    assert replay.name == "recorded:echo"
    for heard, said in zip(replay.sample(asked), echo().sample(asked), strict=True):
        assert (heard.samples, heard.prompt_tokens) == (said.samples, said.prompt_tokens)
    subset = request("question 3\ud800", (103,))
    assert replay.sample([subset])[0].samples == echo().sample([subset])[0].samples


def test_sample_key_depends_on_every_request_field(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    base = request()
    replies(RecordingPolicy(echo(), file), [base])
    replay = RecordedPolicy(file)
    others = [
        request("14 + 4?"),
        request(seeds=(3,)),
        request(agent="Planner"),
        request(temperature=0.8),
        request(top_p=0.9),
        request(max_new_tokens=512),
        SamplingRequest(base.messages[1:], base.seeds, agent="Solver"),
        SamplingRequest((ChatMessage("user", base.messages[0].content), base.messages[1]), base.seeds, agent="Solver"),
    ]
    replay.sample([base])
    for other in others:
        with pytest.raises(PolicyError, match="no recorded message"):
            replay.sample([other])


def test_missing_recorded_request_is_reported_with_a_suggested_fix(tmp_path: Path) -> None:
    record(tmp_path / "r.jsonl")
    with pytest.raises(PolicyError, match=r"'Solver' for seed 999 .*another one.*RecordingPolicy"):
        RecordedPolicy(tmp_path / "r.jsonl").sample([request("another one", (999,))])


def test_recording_resumes_without_duplicates(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    record(file, 3)
    before = file.read_bytes()
    record(file, 3)
    assert file.read_bytes() == before
    record(file, 4)
    assert file.read_bytes().startswith(before)
    assert len(file.read_text().splitlines()) == 1 + 2 * 4


@pytest.mark.parametrize("lost", [1, 2, 30])
def test_broken_last_line_is_skipped_reported_and_repaired(
    tmp_path: Path, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "r.jsonl"
    asked = record(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-lost])
    with caplog.at_level(logging.WARNING, "mas_gym.policies"):
        replay = RecordedPolicy(file)
    assert "incomplete" in caplog.text
    replay.sample(asked[:-1])
    with pytest.raises(PolicyError):
        replay.sample(asked[-1:])
    record(file)
    assert file.read_bytes() == whole


def test_recorded_sample_is_not_requested_again(tmp_path: Path) -> None:
    asked: list[int] = []

    def script(request: SamplingRequest, seed: int) -> str:
        asked.append(seed)
        return f"said {seed}"

    policy = RecordingPolicy(ScriptedPolicy(script, name="echo"), tmp_path / "r.jsonl")
    replies(policy, [request("q", (1, 2))])
    [reply] = replies(policy, [request("q", (3, 2, 1))])
    assert asked == [1, 2, 3] and [sample.text for sample in reply.samples] == ["said 3", "said 2", "said 1"]
    known, partly = replies(policy, [request("q", (2, 3)), request("q", (3, 4))])
    assert asked == [1, 2, 3, 4]
    assert [sample.text for sample in known.samples] == ["said 2", "said 3"]
    assert [sample.text for sample in partly.samples] == ["said 3", "said 4"]


WRITER = """
    import sys
    from mas_gym.policies import RecordingPolicy, SamplingRequest, ScriptedPolicy
    from mas_gym.policies.batch_queue import sample_all
    from mas_gym.systems.prompts import ChatMessage
    policy = RecordingPolicy(ScriptedPolicy(lambda request, seed: "x" * 2000, name="echo"), sys.argv[1])
    for i in range(10**9):
        sample_all(policy, [SamplingRequest((ChatMessage("user", str(i)),), (i,))])
        print(i, flush=True)
"""


@pytest.mark.slow
def test_recording_survives_sigkill(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    for wanted in (20, 50, 90):
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(file)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        last = next(int(line) for line in writer.stdout if int(line) >= wanted)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        replay = RecordedPolicy(file)
        for i in range(last + 1):
            replay.sample([SamplingRequest((ChatMessage("user", str(i)),), (i,))])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "first line"),
        ("hello\n", "first line"),
        ("[]\n", "first line"),
        ('{"format": "mas-gym-recording", "schema": 99, "policy": "x"}\n', "schema 1, got 99"),
        ('{"format": "mas-gym-recording", "schema": 1, "policy": "x"}\n{"key": 3}\n{}\n', "line 2"),
        ('{"format": "mas-gym-recording", "schema": 1, "policy": "x"}\nnot json\n', "line 2"),
    ],
)
def test_file_that_is_not_a_recording_is_rejected(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(DataError, match=match):
        RecordedPolicy(tmp_path / "r.jsonl")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"{}", b'{"key": "a"}', b"[1]", b"null"]), max_size=5))
def test_arbitrary_bytes_do_not_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    header = json.dumps({"format": "mas-gym-recording", "schema": 1, "policy": "x"}).encode()
    file.write_bytes(b"\n".join([header, *lines]))
    try:
        RecordedPolicy(file)
    except DataError as error:
        assert "line" in str(error)


def test_missing_recording_and_recording_of_another_policy_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="RecordingPolicy"):
        load_policy(f"recorded:{tmp_path / 'none.jsonl'}")
    record(tmp_path / "r.jsonl")
    with pytest.raises(DataError, match="expected the recorded policy 'echo', got 'other'"):
        RecordingPolicy(ScriptedPolicy(lambda request, seed: "", name="other"), tmp_path / "r.jsonl")


# -------------------------------------------------------------------------------------------- base class and adapters


class Bare:
    """Only has the required method."""

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        return list(echo().sample(requests))


class BareAsync:
    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        return echo().sample([request])[0]


class BareStreaming(Bare):
    def open(self) -> Any:
        return WholeBatches(echo())


class Derived(Policy):
    def sample(self, requests: Sequence[SamplingRequest]) -> Sequence[SamplingReply]:
        return echo().sample(requests)


@pytest.mark.parametrize("made", [Bare(), BareStreaming(), BareAsync()])
def test_as_policy_adds_missing_attributes_with_defaults(made: object) -> None:
    policy = as_policy(made)
    assert isinstance(policy, AsyncPolicy) and isinstance(policy, BatchedPolicy) is not isinstance(made, BareAsync)
    assert answers(policy, [request()]) == list(echo().sample([request()]))
    assert policy.name == type(made).__name__ and as_policy(policy) is policy
    assert (policy.takes_extra_body, policy.independent_samples, policy.chooses) == (False, None, False)
    assert (policy.max_prompt_bytes, dict(policy.meters), policy.made_for) == (None, {}, None)
    assert identity_of(policy) == identity_of(made)


def test_as_policy_keeps_the_attributes_of_the_object() -> None:
    part = Bare()
    vars(part).update(name="mine", max_batch=3, takes_extra_body={"stop"}, other=5)
    policy: Any = as_policy(part)
    assert (policy.name, policy.max_batch, policy.takes_extra_body, policy.other) == ("mine", 3, {"stop"}, 5)


def test_derived_policy_has_defaults_and_runs_in_a_search() -> None:
    import search

    policy = Derived()
    assert policy.name == "Derived" and policy.max_batch == 64 and as_policy(policy).local_batch == 64
    for each in (policy, Bare(), BareAsync()):
        [plan] = search.run("single", [Problem("p", "1 + 1?", "2")], mas="single", policy=each)  # type: ignore[arg-type]
        assert plan.error is None


@pytest.mark.parametrize("part", [None, "tiny", object(), Bare, Policy, 3, {"sample": 1}])
def test_as_policy_rejects_objects_that_are_not_policies(part: object) -> None:
    with pytest.raises(ConfigError, match="expected a policy with sample"):
        as_policy(part)


def test_wrappers_support_the_request_fields_of_the_wrapped_policy(tmp_path: Path) -> None:
    asked = '{"response_format": 1}'
    taking, plain = Bare(), Bare()
    vars(taking).update(takes_extra_body=True)

    class Wrapper(Bare):
        def __init__(self, inner: object) -> None:
            self.identical_to = inner

    team = PerAgentPolicy({"Solver": as_policy(taking), "*": as_policy(plain)})
    for wrapper in (
        as_policy(team),
        as_policy(Wrapper(team)),
        RecordingPolicy(as_policy(Wrapper(team)), tmp_path / "r"),
    ):
        assert fitted(wrapper, "Solver", request().messages, asked) == (request().messages, asked)
        with pytest.raises(PolicyError, match="response_format: expected none"):
            fitted(wrapper, "Critic", request().messages, asked)


def test_choose_raises_without_log_probabilities_of_first_words() -> None:
    with pytest.raises(PolicyError, match="no first-word log-probabilities"):
        Derived().choose([request().messages], ["yes", "no"])
