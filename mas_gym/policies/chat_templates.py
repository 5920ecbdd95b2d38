"""Rendering of chat templates in a separate process with a time and a memory limit.

A template comes with a model's files, and Jinja's sandbox stops neither nested loops nor long texts. The process
renders as transformers does: with the same sandbox, options, filters and tags.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from mas_gym.errors import PolicyError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.workers import LineProcess

if TYPE_CHECKING:
    from jinja2 import Template

SECONDS = 10.0
"""Time limit of one rendering."""
MEMORY = 2 * 2**30
"""Memory limit of the process, in bytes."""
LONGEST = 16 * 2**20
"""Maximum number of characters of a rendered prompt."""

_process = LineProcess("mas_gym.policies.chat_templates:_prepare", quiet=True)


def render_chat(template: str, turns: Sequence[Mapping[str, str]], **values: object) -> str:
    """Return messages rendered with a chat template.

    Args:
        template: The template's source.
        turns: The messages, with ``role`` and ``content``.
        values: Further JSON-serializable variables of the template.

    Raises:
        PolicyError: The template fails or exceeds a limit. Its cause is a `jinja2.TemplateError` if the template
            rejects the messages.
    """
    from jinja2 import TemplateError

    try:
        reply = _process.ask([template, {"tools": None, "documents": None, **values, "messages": turns}], SECONDS)
    except TimeoutError:
        raise _failed(f"it takes more than {SECONDS:g} seconds") from None
    except (ChildProcessError, EOFError) as error:
        raise _failed(f"its process ended: {error}") from error
    if "text" in reply:
        return str(reply["text"])
    raise _failed(reply["error"]) from (TemplateError(reply["error"]) if reply["rejected"] else None)


def _failed(what: str) -> PolicyError:
    return PolicyError(f"the model's chat template failed ({what[:300]!r}); fix chat_template in the tokenizer's files")


def _prepare() -> Callable[[tuple[str, JSONObject]], JSONObject]:
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from jinja2 import TemplateError

    def reply(request: tuple[str, JSONObject]) -> JSONObject:
        source, values = request
        try:
            text = _compiled(source).render(**values)
            # A tokenizer cannot encode a lone surrogate.
            text.encode()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:300], "rejected": isinstance(error, TemplateError)}
        if len(text) > LONGEST:
            return {"error": f"expected at most {LONGEST:,} characters, got {len(text):,}", "rejected": False}
        return {"text": text}

    return reply


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag ``generation``, which marks the assistant's text for training and renders its body."""

        tags = {"generation"}  # noqa: RUF012 - the type in Jinja's base class

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
