"""`MASEnv.step` accepts any pair of a str and an int; it reports invalid actions in the info and never raises."""

import warnings

import numpy as np
import pytest
from env_data import IDS, make
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

NUMBERS = ["1e1000000", "-1e-999999999", "1/0", "9" * 5000, "0x10", "1_000", "\u0663", "NaN", "inf", "1e400", "-0"]
LATEX = [r"\frac{1}{0}", r"\boxed{" * 50, r"\sqrt[0]{x}", "{" * 500, r"\frac12", "x" + "'" * 99, r"\left(", "$$"]
LATEX += ["2^9999", "10^{10^{10}}"]
WORDS = ["5 people sitting around the circular table without restrictions whatsoever + 1", "VERDICT: DISAGREE", "(A)"]
PIECES = st.sampled_from(
    [*NUMBERS, *LATEX, *WORDS, "Final Answer: ", "The answer is ", "####", "\n", " ", "\x00", "\ud800"]
)
# Surrogates included: a damaged reply may contain them.
TEXTS = st.lists(PIECES | st.text(max_size=20) | st.characters(), max_size=8).map("".join)
RECIPIENTS = st.integers(-3, 12) | st.sampled_from([10**5000, -(10**5000), 2**63, True]) | st.integers()


@pytest.mark.parametrize(("grading", "view"), [("strict", "full"), ("paper", "local")])
@pytest.mark.parametrize("env_id", IDS)
def test_step_accepts_any_pair_of_text_and_number(env_id: str, grading: str, view: str, tmp_path) -> None:
    env = make(env_id, tmp_path, grading=grading, view=view, render_mode="ansi").unwrapped

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.tuples(TEXTS, RECIPIENTS), max_size=3), TEXTS, st.integers(0, 9))
    @example([], "Final Answer: 1e1000000", 0)
    @example([], "Final Answer: -1e-1000000000", 0)
    @example([("VERDICT: DISAGREE", 10**5000)], "", 0)
    def play(first: list[tuple[str, int]], last: str, seed: int) -> None:
        env.reset(seed=seed)
        env.on_invalid = "retry"
        terminated = False
        turns = max(len(env.mas.agents), env.dynamics.max_depth) * (env.max_retries + 1)
        for action in [*first, *[(last, env.ALL)] * (turns + 1)]:
            if terminated:
                break
            observation, reward, terminated, truncated, info = env.step(action)
            assert observation in env.observation_space
            assert reward in (-1.0, 0.0, 1.0)
            assert (reward != 0.0) == terminated
            assert info["action_mask"].dtype == np.int8 and info["action_mask"].shape == (env.ALL + 1,)
            assert not truncated
            assert len(info.get("invalid_action", "")) < 1000
            assert isinstance(env.render(), str)
        assert terminated

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play()


@pytest.mark.parametrize("env_id", IDS)
def test_messages_over_the_length_limit_are_rejected(env_id: str, tmp_path) -> None:
    env = make(env_id, tmp_path, max_bytes=4096).unwrapped
    for text in (
        "a" * 4096,
        "9" * 4097,
        "\U0001f600" * 1024,
        "\ud800" * 2000,
        "{" * 4096,
        "Final Answer: " + "(" * 4000,
    ):
        env.reset(seed=1)
        terminated = False
        while not terminated:
            _, reward, terminated, _, info = env.step((text, np.int64(env.ALL)))
        assert reward == -1.0
        assert not info["correct"]
