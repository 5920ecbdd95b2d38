"""Policy strings from outside: what cannot be read is a `ConfigError` in one short line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mas_gym.errors import ConfigError, MASGymError
from mas_gym.plugins import Spec
from mas_gym.policies import load_policy

VALUES = [
    "!!bool x",
    "[" * 100_000,
    "9" * 100_000,
    "!!timestamp 1",
    "2000-99-99",
    "*x",
    "!!python/name:os.system",
    "\x00",
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:12])
def test_unreadable_option_values_are_rejected(value: str) -> None:
    for spec in (f"tiny#threads={value}", f"{{a: {value}}}"):
        with pytest.raises(ConfigError) as caught:
            load_policy(spec)
        assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


@given(st.text(alphabet="#&=:{}[]!*'\"@ab1,\n- ") | st.text())
def test_arbitrary_options_are_read_or_rejected(text: str) -> None:
    try:
        Spec.parse("model#" + text).options()
    except MASGymError:
        return
