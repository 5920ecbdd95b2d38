"""Convert chat messages to token ids and back, for any tokenizer.

* A tokenizer with a chat template renders the messages with it and opens the
  assistant's turn. If a template rejects or ignores the system role, the system
  prompt is put in front of the first other message, separated by a blank line.
* Without a chat template, the contents are joined by blank lines and followed by
  a blank line. A template renders an empty message as an empty turn; without a
  template, empty messages are left out.
* A special token in a message's content is broken up by a space, so that no
  message can end its turn or open another turn. A lone surrogate becomes U+FFFD.
* A prompt that does not fit the context window is an error. With ``truncate``, its oldest text is removed, word by
  word, but never the system prompt or the last paragraph, and the removed tokens are counted.
* A message is the text after the model's reasoning (`mas_gym.policies.reasoning`).

Chat templates are rendered as by the tokenizer's ``apply_chat_template``, in a separate process with limits
(`mas_gym.policies.chat_templates`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mas_gym.errors import PolicyError
from mas_gym.policies.chat_templates import render_chat
from mas_gym.policies.prompt_length import reserved_tokens, too_long
from mas_gym.policies.reasoning import after_reasoning
from mas_gym.systems.prompts import ChatMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        tokenizer: Any transformers tokenizer.
        window: Context window in tokens, for prompt and answer together.
        options: Extra variables for the chat template, such as ``{"enable_thinking": False}``.
        truncate: Whether to remove the oldest text of a prompt that does not fit, in place of an error.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        window: int,
        options: Mapping[str, Any] | None = None,
        truncate: bool = False,
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
        self._truncate = truncate
        names = sorted({str(t) for t in tokenizer.all_special_tokens if len(str(t).strip()) > 1}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._templated = getattr(tokenizer, "chat_template", None) is not None
        self._system_role = self._templated and self._takes_system()
        self._warned = False

    @property
    def max_prompt_bytes(self) -> int:
        """Upper bound on the UTF-8 bytes of a message that fits the window, computed from the longest token."""
        return self.window * max(len(token.encode("utf-8", "replace")) for token in self.tokenizer.get_vocab())

    def _takes_system(self) -> bool:
        from jinja2 import TemplateError

        user = ChatMessage("user", "quartz")
        try:
            return "zebra" in self._text([ChatMessage("system", "zebra"), user])
        except PolicyError as error:
            if not isinstance(error.__cause__, TemplateError):
                raise
        self._text([user])
        return False

    def _text(self, messages: Sequence[ChatMessage]) -> str:
        return str(rendered(self.tokenizer, messages, tokenize=False, **self._options))

    def encode(self, messages: Sequence[ChatMessage], cap: int) -> Prompt:
        """Return the prompt's ids, which leave room for the answer.

        Up to ``cap`` tokens are reserved for the answer, but at most a quarter of the window.

        Raises:
            PromptTooLongError: The prompt exceeds the limit; with ``truncate``, its system prompt and the last
                paragraph of its newest message do.
            PolicyError: The template fails.
        """
        reserved = reserved_tokens(self.window, cap)
        limit = self.window - reserved
        clean = [ChatMessage(m.role, self._clean(m.content)) for m in messages]
        ids = self._render(clean)
        if len(ids) <= limit:
            return Prompt(ids, self.window - len(ids), 0)
        short = self._shorten(clean, limit) if self._truncate else None
        if short is None:
            raise too_long("the model", len(ids), self.window, reserved)
        dropped = len(ids) - len(short)
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        text = "a prompt of %d tokens does not fit the window of %d: %d of its oldest tokens were dropped; %s"
        hint = "dropped_tokens counts them for each reply; later cases are logged at debug level"
        logger.log(level, text, len(ids), self.window, dropped, hint)
        return Prompt(short, self.window - len(short), dropped)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return a message's text, stripped, without reasoning, special tokens or an incomplete last character."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return after_reasoning(str(text)).strip().rstrip("\ufffd")

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
            ids = rendered(self.tokenizer, messages, **self._options)
        else:
            text = "\n\n".join(m.content for m in messages if m.content)
            ids = self.tokenizer(f"{text}\n\n" if text else "")["input_ids"]
        return list(ids) or [self._first_id()]

    def _first_id(self) -> int:
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    def _shorten(self, messages: Sequence[ChatMessage], limit: int) -> list[int] | None:
        """Keep as much of the newest text as fits, starting at a word boundary; None if its last paragraph does not."""
        head = [m for m in messages[:1] if m.role == "system"]
        body = [ChatMessage(m.role, m.content.strip()) for m in messages[len(head) :]]
        total = sum(len(m.content) for m in body)
        kept = len(body[-1].content.rpartition("\n\n")[2]) if body else 0
        best = self._render([*head, *_newest(body, kept)])
        if len(best) > limit:
            return None
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
    """Return the last ``characters`` characters of the messages, starting at a word boundary."""
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


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[ChatMessage], **options: Any) -> Any:
    """Return the token ids of messages rendered with a tokenizer's chat template, followed by the generation prompt.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: At least one message.
        options: ``tokenize=False`` for the text, and JSON-serializable template variables.

    Raises:
        PolicyError: As for `mas_gym.policies.chat_templates.render_chat`; or there is no template.
    """
    turns = [{"role": m.role, "content": m.content} for m in messages]
    tokenize = options.pop("tokenize", True)
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise PolicyError(f"expected a chat template in the tokenizer's files, got none: {error}") from error
    values = {**tokenizer.special_tokens_map, "add_generation_prompt": True, **options}
    text = render_chat(template, turns, **values)
    return tokenizer(text, add_special_tokens=False)["input_ids"] if tokenize else text
