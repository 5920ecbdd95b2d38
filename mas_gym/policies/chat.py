"""From chat messages to token ids and back, for any tokenizer.

The rules, in one place:

* A tokenizer with a chat template renders the messages with it and opens the
  assistant's turn. If a template refuses or ignores the system role, the system
  prompt goes in front of the first other message, with a blank line between.
* A tokenizer without one gets the contents joined by blank lines, and a blank
  line at the end. An empty content is an empty turn in a template and is left
  out without one.
* Text is data: a content that spells a special token has it broken by a space,
  so that no message can end its own turn or open another's. A lone surrogate
  becomes U+FFFD.
* A prompt that does not fit the window loses its oldest text, word by word,
  never the system prompt and never the last paragraph, and the loss is counted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from mas_gym.errors import PolicyError, PromptTooLongError
from mas_gym.policies.templates import ChatTemplate
from mas_gym.prompts import ChatMessage

logger = logging.getLogger("mas_gym.policies")


class Prompt(NamedTuple):
    """A prompt ready for a model.

    Attributes:
        ids: Token ids, at least one.
        room: Tokens that the window leaves for the answer.
        dropped: Tokens cut from the oldest text to make it fit.
    """

    ids: list[int]
    room: int
    dropped: int


class ChatFormat:
    """A tokenizer with its chat conventions.

    Args:
        tokenizer: Any tokenizer of transformers.
        window: Tokens that the model can hold, prompt and answer together.
        options: Extra variables for the chat template, such as ``{"enable_thinking": False}``.
    """

    def __init__(self, tokenizer: Any, window: int, options: Mapping[str, Any] | None = None) -> None:
        """Inspect the tokenizer's special tokens and how its template treats a system prompt.

        Raises:
            PolicyError: The template cannot render an ordinary message.
        """
        self.tokenizer = tokenizer
        # Truncation is handled here; the tokenizer would only add a warning of its own.
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
        """Return the Jinja template; None for a tokenizer without one, or one that renders messages in its own way."""
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

    def _given(self, messages: Sequence[ChatMessage]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        turns = [{"role": m.role, "content": m.content} for m in messages]
        return turns, {**self.tokenizer.special_tokens_map, **self._options}

    def _own(self, messages: Sequence[ChatMessage], tokenize: bool) -> Any:
        """Render messages with a tokenizer that does so in its own way, such as Mistral's."""
        turns = [{"role": m.role, "content": m.content} for m in messages]
        options = {"add_generation_prompt": True, "return_dict": False, **self._options}
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=tokenize, **options)
        except Exception as error:
            raise PolicyError(f"the tokenizer cannot render chat messages: {str(error)[:300]}") from error

    def encode(self, messages: Sequence[ChatMessage], cap: int) -> Prompt:
        """Return the prompt's ids, shortened if they would not leave room for an answer.

        Room is kept for ``cap`` tokens, but for no more than a quarter of the window.

        Raises:
            PromptTooLongError: The system prompt and the newest message alone do not fit.
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
        text = "a prompt of %d tokens does not fit the window of %d: %d tokens of its oldest text were cut; %s"
        hint = "each reply counts its own in dropped_tokens; later cuts are logged at debug level"
        logger.log(level, text, len(ids), self.window, dropped, hint)
        return Prompt(short, self.window - len(short), dropped)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return a message's text without special tokens, stripped; half a character at the end is dropped."""
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
        """Keep as much of the newest text as fits, from a word's beginning on."""
        head = [m for m in messages[:1] if m.role == "system"]
        body = [ChatMessage(m.role, m.content.strip()) for m in messages[len(head) :]]
        total = sum(len(m.content) for m in body)
        kept = len(body[-1].content.rpartition("\n\n")[2]) if body else 0
        best = self._render([*head, *_newest(body, kept)])
        if len(best) > limit:
            raise PromptTooLongError(
                f"expected a prompt of at most {limit} tokens (window {self.window}), got {tokens}, of which the "
                f"system prompt and the newest message alone take {len(best)}; use a model with a longer window, or "
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
    """Return the last ``characters`` characters of some messages, from where a word begins."""
    result: list[ChatMessage] = []
    for message in reversed(messages):
        text = message.content
        cut = max(len(text) - characters, 0)
        if 0 < cut < len(text) and not text[cut - 1].isspace():
            # A number cut in the middle would be another number.
            word = re.search(r"\s\S", text[cut:])
            cut += word.start() + 1 if word else 0
        characters -= min(characters, len(text))
        if text[cut:] or not result:
            result.append(ChatMessage(message.role, text[cut:]))
    return result[::-1]
