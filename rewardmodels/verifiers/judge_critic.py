"""A language model as a critic: its verdict on a state, or its preference between two siblings.

There are three modes:

* ``logprob``: the probability of "yes" against "no" as the first word of the verdict, from the
  engine's log-probabilities: ``p = P(yes) / (P(yes) + P(no))``;
* ``share``: the share of "yes" among the valid verdicts of ``n`` samples, each in the format of
  `mas_gym.tasks.grading.judge_verdicts`;
* ``pairwise``: the mean probability of being preferred to a sibling, over all siblings that the search
  scores in the same request. Each pair is compared in both orders. A comparison of a state with itself
  is a tie, so an only child gets 1/2.

The value is ``2 p - 1``. Replies without a valid verdict are counted and get no default verdict: a state without
any valid verdict has no value, and its search fails with this reason.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from mas_gym.errors import ConfigError, DataNotFoundError, EngineUnavailableError, PolicyError, shown, whole_number
from mas_gym.internal.event_loop import from_thread, together
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.policies.base import AsyncPolicy, Choice, Policy, SamplingReply, SamplingRequest
from mas_gym.policies.batch_queue import as_policy
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.state import MASState
from mas_gym.tasks.grading.judge_verdicts import ask_verdict, read_verdict
from rewardmodels.model.model_critic import rounded
from search.protocol import Critic, Scores, ScoringContext

logger = logging.getLogger("rewardmodels.verifiers")

Mode = Literal["auto", "logprob", "share", "pairwise"]

PROMPT = """\
You check the work of a team of agents that answer a question step by step.

Question:
{question}

The team's messages so far:
{transcript}

Is every message correct and helpful, so that the team is on the way to the right answer?"""
"""The prompt of the modes ``logprob`` and ``share``."""

PAIR_PROMPT = """\
You compare two messages that an agent of a team could write to answer a question step by step.

Question:
{question}

The team's messages before:
{transcript}

Message A of {agent}:
{first}

Message B of {agent}:
{second}

Which message brings the team closer to the right answer?"""
"""The prompt of the mode ``pairwise``."""

FIELDS = {
    "verdict": ("question", "transcript", "message", "agent"),
    "pair": ("question", "transcript", "agent", "first", "second"),
}
"""Placeholders of verdict prompts and of comparison prompts."""

_NEEDED = {"verdict": (("transcript", "message"),), "pair": (("first",), ("second",))}
_WORDS = {"verdict": ("yes", "no"), "pair": ("A", "B")}
_FIRST_WORD = {"verdict": " Reply with one\nword, yes or no.", "pair": " Reply with one letter, A or B."}
_PROBE = "Which of two words comes first, {} or {}? Reply with that word."


class JudgeReply(NamedTuple):
    """The outcome of one question to the judge.

    Attributes:
        share: Probability of the verdict "yes" or "A", in ``[0, 1]``; None if no verdict could be parsed.
        tokens: Number of generated tokens.
        prompt_tokens: Number of tokens in the prompts.
        unread: Number of verdicts that could not be parsed.
        reason: Reason for a missing share.
    """

    share: float | None
    tokens: int = 0
    prompt_tokens: int = 0
    unread: int = 0
    reason: str = ""


class JudgeCritic(Critic):
    """Scores states by the verdicts of a policy.

    Args:
        policy: The policy that acts as the judge.
        mode: ``"logprob"``, ``"share"`` or ``"pairwise"``; ``"auto"`` is ``"logprob"`` if the policy's engine returns
            log-probabilities of first words (local models, vLLM, servers with ``logprobs``), else
            ``"share"``. Comparisons use log-probabilities under the same condition. A server is asked one short
            question to find out, when the first identity or value is requested.
        n: Number of sampled verdicts per state, or comparisons per pair and order.
        prompt: A text file that replaces the prompt, with the placeholders of `FIELDS`; literal braces must be doubled.
            If verdicts are sampled, the lines with the verdict format are appended. Otherwise the file must request
            the verdict as the first word.
        temperature: Temperature for sampling verdicts.
        max_tokens: Longest sampled reply, in tokens.

    Attributes:
        name: ``"judge:POLICY"``.
        free: False: each state is one reward call. Its tokens are counted as ``critic_tokens``, separately from TOK.
        concurrent: True if the policy's engine is not in this process, in which case scoring overlaps with generation.
        max_batch: Preferred number of states per call.
        reads_peers: True for comparisons.

    Raises:
        ConfigError: A setting is invalid, or the prompt file has unknown placeholders.
        DataNotFoundError: There is no prompt file.
    """

    terminal_only = False
    free = False

    def __init__(
        self,
        policy: Policy | AsyncPolicy,
        *,
        mode: Mode = "auto",
        n: int = 3,
        prompt: str | Path | None = None,
        temperature: float = 0.7,
        max_tokens: int = 256,
    ) -> None:
        """Check the settings and read the prompt."""
        choice("judge: mode", mode, get_args(Mode))
        whole_number("judge: n", n, at_least=1)
        whole_number("judge: max_tokens", max_tokens, at_least=1)
        policy = as_policy(policy)
        self._kind = "pair" if mode == "pairwise" else "verdict"
        self._wanted = mode
        if mode == "logprob" and policy.chooses is False:
            raise ConfigError(
                f"judge: the policy {policy.name!r} reports no log-probabilities for a reply's first word; use "
                "mode=share, a local model, vllm:, or openai: with log-probabilities"
            )
        self._policy, self._n, self._temperature, self._max_tokens = policy, n, temperature, max_tokens
        self._own_prompt = prompt is not None
        self._question_text = read_prompt(prompt, self._kind)
        # This checks the ranges.
        self._request("", 0)
        self.reads_peers = mode == "pairwise"
        self.name = f"judge:{policy.name}"
        self.concurrent = policy.local_batch is None
        self.max_batch = policy.local_batch or policy.max_concurrency

    @cached_property
    def _likely(self) -> bool:
        """Whether verdicts are read from the log-probabilities of the first word."""
        if self._wanted == "share" or self._policy.chooses is False:
            return False
        return self._wanted == "logprob" or self._policy.chooses is True or self._lists_words()

    def _lists_words(self) -> bool:
        words = _WORDS[self._kind]
        [reply] = from_thread(self._asked([_PROBE.format(*words)], likely=True))
        if reply.share is None:
            logger.warning("judge %s: verdicts are sampled, because %s", self._policy.name, reply.reason)
        return reply.share is not None

    @property
    def mode(self) -> str:
        """The mode in use."""
        return "pairwise" if self._kind == "pair" else "logprob" if self._likely else "share"

    @property
    def _prompt(self) -> str:
        return self._question_text + (_FIRST_WORD[self._kind] if self._likely and not self._own_prompt else "")

    def identity(self) -> JSONObject:
        """Return the policy, the mode, the prompt's text and the sampling parameters."""
        stated = {"policy": self._policy, "mode": self.mode, "likely": self._likely, "prompt": self._prompt}
        if self._likely:
            return stated
        verdict = ask_verdict("", _WORDS[self._kind])
        return {**stated, "verdict": verdict, "n": self._n, "temperature": self._temperature, "cap": self._max_tokens}

    def score(self, contexts: Sequence[ScoringContext]) -> Scores:
        """Return one value in ``[-1, 1]`` per state, in order; NaN for a state without a valid verdict.

        Raises:
            EngineUnavailableError: The judge's engine is down.
        """
        if self._kind == "verdict":
            verdicts = self._verdicts([self._question(context) for context in contexts])
            return Scores.from_rows(_scored([verdict]) for verdict in verdicts)
        asked = [self._comparisons(context) for context in contexts]
        answers = iter(self._verdicts([prompt for prompts in asked for prompt in prompts]))
        return Scores.from_rows(_compared([next(answers) for _ in prompts]) for prompts in asked)

    def _question(self, context: ScoringContext) -> str:
        state, mas = context.state, context.mas
        speaker = mas.agents[state.speaker].name if state.speaker >= 0 else ""
        return self._prompt.format(
            question=state.question, transcript=transcript(context, state), message=state.text, agent=speaker
        )

    def _comparisons(self, context: ScoringContext) -> list[str]:
        """Return the prompts that compare a state with each sibling, with the state as A and then as B."""
        state = context.state
        if context.peers is None or state.parent is None:
            return []
        shared = {
            "question": state.question,
            "transcript": transcript(context, state.parent),
            "agent": context.mas.agents[state.speaker].name,
        }
        prompts = []
        for other in context.peers.siblings:
            prompts.append(self._prompt.format(first=state.text, second=other.text, **shared))
            prompts.append(self._prompt.format(first=other.text, second=state.text, **shared))
        return prompts

    def _verdicts(self, prompts: Sequence[str]) -> list[JudgeReply]:
        """Request the verdicts of all distinct prompts together, each once."""
        fresh = list(dict.fromkeys(prompts))
        found = dict(zip(fresh, from_thread(self._asked(fresh, self._likely)) if fresh else [], strict=True))
        # Each prompt is billed in full, so that the cost of a search does not depend on the rest of its batch.
        return [found[prompt] for prompt in prompts]

    async def _asked(self, prompts: Sequence[str], likely: bool) -> list[JudgeReply]:
        policy = self._policy
        slots = asyncio.Semaphore(policy.max_concurrency)
        words = _WORDS[self._kind]

        async def one(prompt: str) -> JudgeReply:
            async with slots:
                try:
                    if likely:
                        return _likely(await policy.choose_async(_messages(prompt), words), words)
                    return _read(await policy.sample_async(self._request(prompt, self._n)), prompt, words)
                except EngineUnavailableError:
                    raise
                except PolicyError as error:
                    return JudgeReply(None, unread=1, reason=f"the judge failed: {error}")

        return await together(map(one, prompts))

    def _request(self, prompt: str, n: int) -> SamplingRequest:
        """Return a request with seeds that depend only on the prompt, so verdicts do not depend on their batch."""
        digest = blake2b(prompt.encode("utf-8", "replace"), digest_size=7).digest()
        start = int.from_bytes(digest, "big")
        seeds = tuple(start + i for i in range(max(n, 1)))
        messages = _messages(ask_verdict(prompt, _WORDS[self._kind]))
        return SamplingRequest(messages, seeds, self._max_tokens, self._temperature, 0.95, "judge")


def transcript(context: ScoringContext, state: MASState) -> str:
    """Return a state's messages, each as ``Agent: text``; a dash if there are none."""
    turns = [f"{context.mas.agents[turn.speaker].name}: {turn.text}" for turn in state.path()[1:]]
    return "\n".join(turns) or "-"


def read_prompt(file: str | Path | None, kind: str) -> str:
    """Return the default prompt, or the contents of a file after checking its placeholders.

    Args:
        file: A UTF-8 text file; None for the default.
        kind: ``"verdict"`` or ``"pair"``.

    Raises:
        DataNotFoundError: There is no such file.
        ConfigError: The file is not UTF-8, or has wrong placeholders.
    """
    if file is None:
        return PAIR_PROMPT if kind == "pair" else PROMPT
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
        text.format(**dict.fromkeys(FIELDS[kind], ""))
    except OSError as error:
        raise DataNotFoundError(f"judge: expected a prompt file at {str(file)!r}, got: {error}") from error
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"judge: {path.name}: expected UTF-8 text with no placeholders except {_named(FIELDS[kind])}, got "
            f"{shown(str(error))}; write other braces twice, as {{{{ and }}}}"
        ) from error
    for needed in _NEEDED[kind]:
        if not any(f"{{{name}}}" in text for name in needed):
            either = _named(needed).replace(", ", " or ")
            raise ConfigError(f"judge: {path.name}: expected the placeholder {either}, got none")
    return text


def _named(placeholders: Sequence[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in placeholders)


def _messages(prompt: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", prompt),)


def _likely(choice: Choice, words: Sequence[str]) -> JudgeReply:
    """Return the probability of the first word, normalized over the two words."""
    first, second = choice.logprobs
    if max(first, second) == -math.inf or math.isnan(first + second):
        reason = f"the engine lists neither {words[0]!r} nor {words[1]!r} among the likely first tokens"
        return JudgeReply(None, choice.tokens, choice.prompt_tokens, 1, reason)
    share = 1 / (1 + math.exp(min(second - first, 700.0)))
    return JudgeReply(share, choice.tokens, choice.prompt_tokens)


def _read(reply: SamplingReply, prompt: str, words: Sequence[str]) -> JudgeReply:
    """Return the share of the first of the two words among the valid verdicts."""
    found = [read_verdict(sample.text, prompt, words) for sample in reply.samples]
    readable = [one for one in found if one is not None]
    tokens = sum(sample.tokens for sample in reply.samples)
    share = readable.count(0) / len(readable) if readable else None
    if len(readable) < len(found):
        example = reply.samples[found.index(None)].text
        logger.debug("expected the verdict %s or %s in the last line of a reply, got: %s", *words, shown(example))
    reason = "" if readable else f"none of {len(found)} replies ends with the verdict {words[0]} or {words[1]}"
    return JudgeReply(share, tokens, reply.prompt_tokens, len(found) - len(readable), reason)


def _scored(verdicts: Sequence[JudgeReply], shares: Sequence[float] | None = None) -> tuple[float, int, int, int, str]:
    """Return the value of the mean share, with the cost of all verdicts."""
    shares = [v.share for v in verdicts if v.share is not None] if shares is None else shares
    value = rounded(2 * math.fsum(shares) / len(shares) - 1) if shares else math.nan
    tokens, read = sum(v.tokens for v in verdicts), sum(v.prompt_tokens for v in verdicts)
    reason = "" if shares else next(verdict.reason for verdict in verdicts)
    return value, tokens, read, sum(v.unread for v in verdicts), reason


def _compared(verdicts: Sequence[JudgeReply]) -> tuple[float, int, int, int, str]:
    """Return the value of a state from its comparisons, in which it alternates between A and B."""
    wins = []
    for first, second in zip(verdicts[::2], verdicts[1::2], strict=True):
        known = [] if first.share is None else [first.share]
        known += [] if second.share is None else [1 - second.share]
        wins += [math.fsum(known) / len(known)] if known else []
    if verdicts and not wins:
        return _scored(verdicts, [])
    return _scored(verdicts, [0.5, *wins])


def judge(
    argument: str,
    *,
    mode: Mode = "auto",
    n: int = 3,
    prompt: str | None = None,
    temperature: float = 0.7,
    max_tokens: int = 256,
    **policy: object,
) -> JudgeCritic:
    """An LLM's verdicts: ``"judge:POLICY"`` with any policy; further options are passed to the policy."""
    from mas_gym.policies import load_policy

    if not argument:
        raise ConfigError("expected judge:POLICY, such as judge:openai:MODEL@http://127.0.0.1:8000/v1, got no policy")
    try:
        loaded = load_policy(argument, **policy)
    except ConfigError as error:
        own = "mode, n, prompt, temperature, max_tokens"
        raise type(error)(f"{error} (options of the judge: {own})") from error
    return JudgeCritic(loaded, mode=mode, n=n, prompt=prompt, temperature=temperature, max_tokens=max_tokens)
