"""Convert chat messages to token ids and back, for any tokenizer.

* A tokenizer with a chat template renders the messages with it and opens the
  assistant's turn. If a template rejects or ignores the system role, the system
  prompt is put in front of the first other message, separated by a blank line.
* Without a chat template, the contents are joined by blank lines and followed by
  one. A template renders an empty content as an empty turn; without a template
  it is left out.
* A special token that occurs in a content is broken by a space, so that no
  message can end its own turn or open another one. A lone surrogate becomes U+FFFD.
* If a prompt does not fit the context window, its oldest text is removed, word by word, but
  never the system prompt or the last paragraph. The removed tokens are counted.

A chat template is a Jinja program from a model's files, so it is not trusted. It is
rendered as in transformers (same syntax, filters and globals, in Jinja's immutable
sandbox), but loop iterations, calls, filters and operators are counted. A template that
runs too long, builds too much text or fails raises a `PolicyError`.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mas_gym.errors import PolicyError, PromptTooLongError
from mas_gym.systems.prompts import ChatMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_STEPS = 200_000
"""Limit on loop iterations, calls and operations of one rendering."""

MAX_CHARS = 2**24
"""Limit on the characters of one rendering, and on the length of any text or list that it builds."""

MAX_SECONDS = 5.0
"""Time limit of one rendering."""

_MAX_SOURCE = 2**20
_MAX_BITS = 4096
# Operations with results that may be much longer than the arguments.
_GROWING = {
    *("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "range", "replace", "rjust"),
    *("slice", "tojson", "translate", "truncate", "wordwrap", "xmlattr", "zfill", "*"),
}
_WIDE_FIELD = re.compile(r"\d{5}")


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, source: str) -> None:
        """Compile the template. Raises `PolicyError` if it is invalid or longer than `_MAX_SOURCE` characters."""
        if len(source) > _MAX_SOURCE:
            raise PolicyError(f"chat template: expected at most {_MAX_SOURCE:,} characters, got {len(source):,}")
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:
            raise _explained(error) from error

    def render(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, object]) -> str:
        """Return the rendered messages, with the assistant's turn opened at the end.

        Args:
            messages: Mappings with role and content.
            variables: Further variables, such as the special tokens.

        Raises:
            PolicyError: The template raises an error or exceeds a limit. Its cause is a `jinja2.TemplateError` if the
                template rejected the messages.
        """
        self._environment.begin()
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True, **variables}
        try:
            return self._template.render(given)
        except Exception as error:
            raise _explained(error) from error


def _explained(error: Exception) -> PolicyError:
    what = (str(error) if isinstance(error, _LimitError) else f"{type(error).__name__}: {error}")[:300]
    return PolicyError(f"the model's chat template failed ({what!r}); fix chat_template in the tokenizer's files")


class _LimitError(Exception):
    """A template exceeded a limit."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers with counters; `begin` resets them."""

    intercepted_binops = frozenset({"*", "+", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self.shown
        )
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._limited("tojson", _tojson)
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        # lipsum generates random words, which no prompt needs.
        del self.globals["lipsum"]
        self.begin()

    def begin(self) -> None:
        """Reset the counters for a new rendering."""
        self._deadline, self._steps, self._chars = time.monotonic() + MAX_SECONDS, 0, 0

    def step(self, chars: int = 0) -> str:
        """Count a loop iteration, call or operation, and the characters that it outputs."""
        self._steps += 1
        self._chars += chars
        if self._steps > MAX_STEPS or time.monotonic() > self._deadline:
            raise _LimitError(f"it runs for more than {MAX_STEPS:,} steps or {MAX_SECONDS:g} seconds")
        if self._chars > MAX_CHARS:
            raise _LimitError(f"it writes more than {MAX_CHARS:,} characters")
        return ""

    def shown(self, value: object) -> object:
        """Count the output of an expression."""
        self.step(_size(value))
        return value

    def counted(self, items: Iterable[object]) -> Iterator[object]:
        """Count the iterations of a loop, including those that its condition skips."""
        for item in items:
            self.step()
            yield item

    def joined(self, *parts: object) -> str:
        """Return ``a ~ b ~ c``."""
        return str(self._fits("".join(map(str, parts))))

    def call(self, context: Context, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call a function or method of the template."""
        inner = getattr(function, "__wrapped__", function)
        owner = getattr(inner, "__self__", None)
        self._check(getattr(inner, "__name__", ""), (owner, *args, *kwargs.values()))
        return self._fits(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Evaluate an operator."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            if bits > _MAX_BITS:
                raise _LimitError(f"it computes integers of more than {_MAX_BITS} bits")
        else:
            self._check("format" if operator == "%" else operator, (left, right))
        return self._fits(super().call_binop(context, operator, left, right))

    def _limited(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        @wraps(function)
        def limited(*args: object, **kwargs: object) -> object:
            self._check(name, (*args, *kwargs.values()))
            return self._fits(function(*args, **kwargs))

        return limited

    def _check(self, name: str, values: tuple[object, ...]) -> None:
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

    def _fits(self, value: object) -> object:
        if _size(value) > MAX_CHARS:
            raise _LimitError(f"it builds texts or lists longer than {MAX_CHARS:,}")
        return value

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)


class _Counting(NodeTransformer):
    """Inserts calls of the environment's counters into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call("counted", [node.iter])
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        return self._with_step(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes)

    def _with_step(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call("step", [nodes.Const(chars)])))
        return node


class _Generation(Extension):
    """``{% generation %}``, which marks the assistant's text for training and is ignored here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _call(method: str, arguments: Sequence[nodes.Node]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _weight(value: object) -> int:
    """Return the result length that an argument can cause: an integer, or a length plus the integers inside."""
    if isinstance(value, int):
        return abs(value)
    inner = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
    return _size(value) + sum(abs(item) for item in inner if isinstance(item, int))


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _tojson(
    x: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


logger = logging.getLogger("mas_gym.policies")


class Prompt(NamedTuple):
    """An encoded prompt.

    Attributes:
        ids: Token ids, at least one.
        room: Number of tokens left in the window for the answer.
        dropped: Number of tokens cut from the oldest text to make the prompt fit.
    """

    ids: list[int]
    room: int
    dropped: int


class ChatFormat:
    """A tokenizer with its chat conventions.

    Args:
        tokenizer: Any tokenizer of transformers.
        window: Context window in tokens, for prompt and answer together.
        options: Extra variables for the chat template, such as ``{"enable_thinking": False}``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, window: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """Inspect the tokenizer's special tokens and how its template treats a system prompt.

        Raises:
            PolicyError: The template cannot render an ordinary message.
        """
        self.tokenizer = tokenizer
        # Truncation is handled here; the tokenizer would only add a warning.
        tokenizer.model_max_length = 1 << 40
        self.window = window
        self._options = dict(options or {})
        names = sorted({str(t) for t in tokenizer.all_special_tokens if len(str(t).strip()) > 1}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._templated = getattr(tokenizer, "chat_template", None) is not None
        self._template = self._own_template()
        self._system_role = self._templated and self._takes_system()
        self._warned = False

    @property
    def max_prompt_bytes(self) -> int:
        """Upper bound on the UTF-8 bytes of a message that fits the window, from the longest token."""
        return self.window * max(len(token.encode("utf-8", "replace")) for token in self.tokenizer.get_vocab())

    def _own_template(self) -> ChatTemplate | None:
        """Return the Jinja template; None without one, or if the tokenizer has a custom rendering method."""
        import transformers

        standard = transformers.PreTrainedTokenizerBase.apply_chat_template
        if not self._templated or getattr(type(self.tokenizer), "apply_chat_template", None) is not standard:
            return None
        try:
            source = self.tokenizer.get_chat_template(self._options.pop("chat_template", None))
        except (ValueError, TypeError, AttributeError) as error:
            raise PolicyError(f"expected a chat template in the tokenizer's files, got: {str(error)[:300]}") from error
        return ChatTemplate(source)

    def _takes_system(self) -> bool:
        user = ChatMessage("user", "quartz")
        try:
            return "zebra" in self._text([ChatMessage("system", "zebra"), user])
        except PolicyError as error:
            if not isinstance(error.__cause__, TemplateError):
                raise
        self._text([user])
        return False

    def _text(self, messages: Sequence[ChatMessage]) -> str:
        if self._template is None:
            return str(self._own(messages, tokenize=False))
        return self._template.render(*self._given(messages))

    def _ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        if self._template is None:
            return list(self._own(messages, tokenize=True))
        text = self._template.render(*self._given(messages))
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _given(self, messages: Sequence[ChatMessage]) -> tuple[list[dict[str, str]], dict[str, object]]:
        turns = [{"role": m.role, "content": m.content} for m in messages]
        return turns, {**self.tokenizer.special_tokens_map, **self._options}

    def _own(self, messages: Sequence[ChatMessage], tokenize: bool) -> Any:
        """Render messages with a tokenizer's custom method, such as Mistral's."""
        turns = [{"role": m.role, "content": m.content} for m in messages]
        options = {"add_generation_prompt": True, "return_dict": False, **self._options}
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=tokenize, **options)
        except Exception as error:
            raise PolicyError(f"the tokenizer cannot render chat messages: {str(error)[:300]}") from error

    def encode(self, messages: Sequence[ChatMessage], cap: int) -> Prompt:
        """Return the prompt's ids, shortened if necessary to leave room for the answer.

        Up to ``cap`` tokens are reserved for the answer, but at most a quarter of the window.

        Raises:
            PromptTooLongError: The system prompt and the newest message together exceed the window.
            PolicyError: The template fails.
        """
        limit = self.window - min(cap, max(1, self.window // 4))
        clean = [ChatMessage(m.role, self._clean(m.content)) for m in messages]
        ids = self._render(clean)
        if len(ids) <= limit:
            return Prompt(ids, self.window - len(ids), 0)
        short = self._shorten(clean, limit, len(ids))
        dropped = len(ids) - len(short)
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        text = "a prompt of %d tokens does not fit the window of %d: %d of its oldest tokens were dropped; %s"
        hint = "dropped_tokens counts them for each reply; later cases are logged at debug level"
        logger.log(level, text, len(ids), self.window, dropped, hint)
        return Prompt(short, self.window - len(short), dropped)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return a message's text, stripped, without special tokens or an incomplete last character."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).strip().rstrip("\ufffd")

    def _clean(self, text: str) -> str:
        if not text.isascii():
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if self._special is not None:
            text = self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return text

    def _render(self, messages: Sequence[ChatMessage]) -> list[int]:
        if not self._system_role and len(messages) > 1 and messages[0].role == "system":
            contents = [m.content for m in messages[:2] if m.content]
            messages = [ChatMessage(messages[1].role, "\n\n".join(contents)), *messages[2:]]
        if self._templated:
            ids = self._ids(messages)
        else:
            text = "\n\n".join(m.content for m in messages if m.content)
            ids = self.tokenizer(f"{text}\n\n" if text else "")["input_ids"]
        return list(ids) or [self._first_id()]

    def _first_id(self) -> int:
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    def _shorten(self, messages: Sequence[ChatMessage], limit: int, tokens: int) -> list[int]:
        """Keep as much of the newest text as fits, starting at a word."""
        head = [m for m in messages[:1] if m.role == "system"]
        body = [ChatMessage(m.role, m.content.strip()) for m in messages[len(head) :]]
        total = sum(len(m.content) for m in body)
        kept = len(body[-1].content.rpartition("\n\n")[2]) if body else 0
        best = self._render([*head, *_newest(body, kept)])
        if len(best) > limit:
            raise PromptTooLongError(
                f"expected a prompt of at most {limit} tokens (window {self.window}), got {tokens}, of which the "
                f"system prompt and the newest message take {len(best)}; use a model with a longer window, or "
                "lower the max_new_tokens of the agent that wrote the message"
            )
        step = max(16, kept)
        while step:
            ids = self._render([*head, *_newest(body, kept + step)]) if kept + step <= total else None
            if ids is not None and len(ids) <= limit:
                kept, best = kept + step, ids
                step *= 2
            else:
                step //= 2
        return best


def _newest(messages: Sequence[ChatMessage], characters: int) -> list[ChatMessage]:
    """Return the last ``characters`` characters of the messages, starting at a word."""
    result: list[ChatMessage] = []
    for message in reversed(messages):
        text = message.content
        cut = max(len(text) - characters, 0)
        if 0 < cut < len(text) and not text[cut - 1].isspace():
            # A truncated number would be a different number.
            word = re.search(r"\s\S", text[cut:])
            cut += word.start() + 1 if word else 0
        characters -= min(characters, len(text))
        if text[cut:] or not result:
            result.append(ChatMessage(message.role, text[cut:]))
    return result[::-1]
