"""`grouped`: commands whose parameters are dataclasses of options, with a check of the options as a whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import typer


def grouped(**defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Expand each parameter of a command that is a dataclass into the options that the dataclass lists.

    Args:
        defaults: New defaults, keyed by option name; False removes an option.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        groups: dict[str, tuple[type, list[str]]] = {}
        own = dict(inspect.signature(command, eval_str=True).parameters)
        passed = own.pop("context", None) is not None
        for part in own.values():
            members = [part]
            if isinstance(part.annotation, type) and is_dataclass(part.annotation):
                listed = inspect.signature(part.annotation, eval_str=True).parameters.values()
                members = [one for one in listed if defaults.get(one.name) is not False]
                groups[part.name] = part.annotation, [one.name for one in members]
            for one in members:
                default = defaults.get(one.name, one.default)
                parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=default))

        @functools.wraps(command)
        def run(context: typer.Context, **given: object) -> None:
            _check(context)
            made = {name: kind(**{one: given.pop(one) for one in members}) for name, (kind, members) in groups.items()}
            command(**made, **given, **({"context": context} if passed else {}))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {part.name: part.annotation for part in parameters}
        return run

    return decorate


def typed(context: typer.Context) -> dict[str, str]:
    """Return the options on the command line that have an effect, such as ``{"program": "--program"}``."""
    return {name: flag for name, flag, _, given in _options(context) if given}


def _check(context: typer.Context) -> None:
    from search.option_rules import check_options

    values = {name: f"{flag} {value}".strip() for name, flag, value, _ in _options(context)}
    check_options(typed(context), {name: text for name, text in values.items() if not context.params.get(name)})


def _options(context: Any) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the name, the flag and the allowed values of each option of a command, and whether it was given."""
    while context is not None:
        for option in context.command.params:
            source, value = context.get_parameter_source(option.name), context.params.get(option.name)
            was_typed = source is not None and not source.name.startswith("DEFAULT")
            given = was_typed and value is not None and value is not False
            yield option.name, max(option.opts, key=len), option.metavar or "", given
        context = context.parent
