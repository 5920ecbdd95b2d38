"""Chat templates of models, rendered within limits of time, memory and output.

A chat template is a Jinja program that comes with a model's files. It renders here as in
transformers (the same syntax, filters and globals, in Jinja's immutable sandbox), except that
loop passes, calls, filters and operators are counted. A template that runs for too long or
builds too much text ends in a `PolicyError`, and so does every other error in it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mas_gym.errors import PolicyError

MAX_STEPS = 200_000
"""Loop passes, calls and operations of one rendering."""

MAX_CHARS = 2**24
"""Characters of one rendering, and length of any text or list that it builds."""

MAX_SECONDS = 5.0
"""Duration of one rendering."""

_MAX_SOURCE = 2**20
_MAX_BITS = 4096
# Operations whose result may be much longer than what they are given.
_GROWING = {
    *("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "range", "replace", "rjust"),
    *("slice", "tojson", "translate", "truncate", "wordwrap", "xmlattr", "zfill", "*"),
}
_WIDE_FIELD = re.compile(r"\d{5}")


class ChatTemplate:
    """One template of one tokenizer."""

    def __init__(self, source: str) -> None:
        """Compile the template. Raises `PolicyError` if it is broken or longer than a megabyte."""
        if len(source) > _MAX_SOURCE:
            raise PolicyError(f"chat template: expected at most {_MAX_SOURCE:,} characters, got {len(source):,}")
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:
            raise _explained(error) from error

    def render(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> str:
        """Return the rendered messages, with the assistant's turn opened at the end.

        Args:
            messages: Dicts with role and content.
            variables: Further variables, such as the special tokens.

        Raises:
            PolicyError: The template raises or goes beyond a limit; a `jinja2.TemplateError` is its cause where the
                template refused the messages.
        """
        self._environment.begin()
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True, **variables}
        try:
            return self._template.render(given)
        except Exception as error:
            raise _explained(error) from error


def _explained(error: Exception) -> PolicyError:
    what = (str(error) if isinstance(error, _LimitError) else f"{type(error).__name__}: {error}")[:300]
    return PolicyError(f"the model's chat template failed ({what!r}); mend chat_template in its tokenizer's files")


class _LimitError(Exception):
    """A template went beyond a limit."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers with counters; `begin` sets them back."""

    intercepted_binops = frozenset({"*", "+", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self.shown
        )
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._limited("tojson", _tojson)
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        # It writes random words, which no prompt needs.
        del self.globals["lipsum"]
        self.begin()

    def begin(self) -> None:
        """Start a rendering."""
        self._deadline, self._steps, self._chars = time.monotonic() + MAX_SECONDS, 0, 0

    def step(self, chars: int = 0) -> str:
        """Count a loop pass, a call or an operation, and the characters that it writes."""
        self._steps += 1
        self._chars += chars
        if self._steps > MAX_STEPS or time.monotonic() > self._deadline:
            raise _LimitError(f"it runs for more than {MAX_STEPS:,} steps or {MAX_SECONDS:g} seconds")
        if self._chars > MAX_CHARS:
            raise _LimitError(f"it writes more than {MAX_CHARS:,} characters")
        return ""

    def shown(self, value: Any) -> Any:
        """Count what is written."""
        self.step(_size(value))
        return value

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Count the passes of a loop, also those that its condition skips."""
        for item in items:
            self.step()
            yield item

    def joined(self, *parts: Any) -> str:
        """Return ``a ~ b ~ c``."""
        return str(self._fits("".join(map(str, parts))))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template or a method."""
        inner = getattr(function, "__wrapped__", function)
        owner = getattr(inner, "__self__", None)
        self._check(getattr(inner, "__name__", ""), (owner, *args, *kwargs.values()))
        return self._fits(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operator."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            if bits > _MAX_BITS:
                raise _LimitError(f"it computes integers of more than {_MAX_BITS} bits")
        else:
            self._check("format" if operator == "%" else operator, (left, right))
        return self._fits(super().call_binop(context, operator, left, right))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._check(name, (*args, *kwargs.values()))
            return self._fits(function(*args, **kwargs))

        return limited

    def _check(self, name: str, values: tuple[Any, ...]) -> None:
        self.step()
        if name not in _GROWING:
            return
        product = 1
        for value in values:
            product *= 1 + _weight(value)
            if isinstance(value, str) and name in ("format", "format_map") and _WIDE_FIELD.search(value):
                product = MAX_CHARS + 1
        if product > MAX_CHARS:
            raise _LimitError(f"it builds texts or lists that may be longer than {MAX_CHARS:,} with {name!r}")

    def _fits(self, value: Any) -> Any:
        if _size(value) > MAX_CHARS:
            raise _LimitError(f"it builds texts or lists longer than {MAX_CHARS:,}")
        return value

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)


class _Counting(NodeTransformer):
    """Writes calls of the environment's counters into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call("counted", [node.iter])
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_step(self.generic_visit(node))

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_step(self.generic_visit(node))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes)

    def _with_step(self, node: Any) -> nodes.Node:
        chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call("step", [nodes.Const(chars)])))
        result: nodes.Node = node
        return result


class _Generation(Extension):
    """``{% generation %}``, which marks the assistant's text for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _call(method: str, arguments: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _weight(value: Any) -> int:
    """Return how long a result a value can ask for: an integer itself, a length plus the integers inside."""
    if isinstance(value, int):
        return abs(value)
    inner = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
    return _size(value) + sum(abs(item) for item in inner if isinstance(item, int))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
