"""The check of identities: parts that behave differently state different values, and one part always the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from mas_gym.errors import IdentityError
from mas_gym.identity import digest_of, identity_of
from mas_gym.testing.episodes import Findings


def stated(findings: Findings, part: object) -> str:
    """Return the digest of a part's identity; note a fault and return "" if it cannot state one."""
    try:
        return digest_of(identity_of(part))
    except IdentityError as error:
        findings.expect(False, f"no run with store= accepts it: {error}")
        return ""


def check_steady(findings: Findings, part: object, before: str) -> None:
    """Expect a part to state after its work what it stated before it."""
    if before:
        fault = "its identity changed while it worked: leave counters, caches and generators out of identity()"
        findings.expect(stated(findings, part) == before, fault)


def check_apart(findings: Findings, first: str, second: str, alike: bool, difference: str) -> None:
    """Expect two parts that behave differently to state different identities."""
    if first and second and not alike:
        fault = f"{difference} changes what it does and not its identity: state it in identity()"
        findings.expect(first != second, fault)


def variants(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a part with one numeric setting changed, and the name of the setting.

    A changed setting need not be valid: what such a copy raises says nothing about the part.
    """
    names = [*getattr(part, "__dict__", {}), *getattr(type(part), "__slots__", ())]
    for name in dict.fromkeys(names):
        changed = _changed(getattr(part, name, None))
        if changed is None:
            continue
        other = copy.copy(part)
        # Settings of frozen dataclasses are changed too.
        object.__setattr__(other, name, changed)
        yield name, other


def _changed(value: Any) -> Any:
    """Return another value of the same kind; None if there is none to be had."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list | tuple) and value and (first := _changed(value[0])) is not None:
        return type(value)((first, *value[1:])) if type(value) in (list, tuple) else None
    return None
