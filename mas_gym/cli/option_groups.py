"""`grouped`: commands whose parameters are dataclasses of options, with a check of the options as a whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import typer


def grouped(**defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each parameter of a command whose type is a dataclass by the options that the dataclass lists.

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
    return {name: flag for name, flag, given in _options(context) if given}


def _check(context: typer.Context) -> None:
    from search.option_rules import check_options

    check_options(typed(context), {name: flag for name, flag, _ in _options(context) if not context.params.get(name)})


def _options(context: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield the name and the flag of each option of a command and its parents, and whether it was given."""
    while context is not None:
        for option in context.command.params:
            source, value = context.get_parameter_source(option.name), context.params.get(option.name)
            was_typed = source is not None and not source.name.startswith("DEFAULT")
            yield option.name, max(option.opts, key=len), was_typed and value is not None and value is not False
        context = context.parent
