"""A policy as a grader: it receives the question, the reference and the answer, and replies with a verdict.

The judge's tokens are counted in `Judge.spent` and never in a search's TOK, because they are a cost of
evaluation and not of answering. The verdict is the last line of a reply, in the form of
`mas_gym.tasks.grading.judge_verdicts`. A reply without a verdict is counted as a fault, and another
reply is requested with another seed; after `ATTEMPTS` replies, grading fails.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from importlib import resources

from mas_gym.errors import PolicyError
from mas_gym.internal.event_loop import from_thread
from mas_gym.policies import load_policy
from mas_gym.policies.base import AsyncPolicy, Policy, SamplingRequest, derive_seed
from mas_gym.policies.batch_queue import as_policy
from mas_gym.policies.reasoning import after_reasoning
from mas_gym.policies.usage_meters import Meter
from mas_gym.systems.prompts import ChatMessage
from mas_gym.tasks.base import Grade, Problem
from mas_gym.tasks.grading.answers import extract_answer, read_text
from mas_gym.tasks.grading.judge_verdicts import ask_verdict, read_verdict, verdict_lines

ATTEMPTS = 3
MAX_NEW_TOKENS = 512


_WORDS = ("correct", "incorrect")


class Judge:
    """Grades answers by the verdict of a policy.

    Attributes:
        policy: The judge.
        spent: Verdicts (``calls``), tokens, and unreadable replies (among ``faults``) so far.
    """

    def __init__(self, policy: Policy | AsyncPolicy | str, prompt: str | None = None) -> None:
        """Load the policy.

        Args:
            policy: The judge, or an argument of `mas_gym.policies.load_policy`; the latter can be pickled for other
                processes even if the policy cannot.
            prompt: System prompt of the judge; the bundled prompt by default. The message to the judge ends with the
                lines that state a verdict, correct or incorrect.
        """
        self._made_of = (policy, prompt)
        self.policy: AsyncPolicy = load_policy(policy) if isinstance(policy, str) else as_policy(policy)
        self.prompt = prompt or (resources.files("mas_gym.tasks.grading") / "judge.md").read_text(encoding="utf-8")
        self.spent = Meter()
        self._known: dict[tuple[str, str, str], Future[Grade]] = {}
        self._lock = threading.Lock()

    def identity(self) -> object:
        """Return the policy and the prompt."""
        return {"policy": self.policy, "prompt": self.prompt, "verdict": ask_verdict("", _WORDS)}

    def __reduce__(self) -> tuple[object, ...]:
        return Judge, self._made_of

    def __deepcopy__(self, memo: dict[int, object]) -> Judge:
        return self

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the answer as for kind ``"text"``."""
        return extract_answer(problem, text)

    def grade(self, problem: Problem, text: str) -> Grade:
        """Request a verdict on the answer in a message; equal answers are judged once, across all threads.

        Each grade contains the verdict's full cost, so that a search's cost does not depend on other searches.

        Raises:
            PolicyError: The policy failed, or no reply had a verdict.
        """
        answer = read_text(after_reasoning(text))
        if answer is None:
            return Grade(False, None, "no answer found")
        verdict = self._once((problem.question, problem.answer, answer), problem)
        return verdict._replace(extracted=self.extract(problem, text))

    def _once(self, key: tuple[str, str, str], problem: Problem) -> Grade:
        """Return the verdict on an answer; only the first caller requests it from the policy."""
        with self._lock:
            known = self._known.get(key)
            mine = self._known[key] = Future() if known is None else known
        if known is None:
            try:
                mine.set_result(self._verdict(problem, key[-1]))
            except BaseException as error:
                with self._lock:
                    # The next caller tries again.
                    self._known.pop(key, None)
                mine.set_exception(error)
        return mine.result()

    def _verdict(self, problem: Problem, answer: str) -> Grade:
        asked = f"Question:\n{problem.question}\n\nReference answer:\n{problem.answer}\n\nAnswer to grade:\n{answer}"
        messages = (ChatMessage("system", self.prompt), ChatMessage("user", ask_verdict(asked, _WORDS)))
        said, tokens, read = "", 0, 0
        for attempt in range(ATTEMPTS):
            seed = derive_seed(0, problem.id, answer.encode("utf-8", "replace"), attempt)
            # The first attempt is greedy; another greedy attempt would give the same reply.
            request = SamplingRequest(messages, (seed,), MAX_NEW_TOKENS, 0.7 if attempt else 0.0, agent="Judge")
            reply = from_thread(self.policy.sample_async(request))
            tokens, read = tokens + reply.samples[0].tokens, read + reply.prompt_tokens
            said = reply.samples[0].text
            verdict = read_verdict(said, asked, _WORDS)
            with self._lock:
                self.spent.add(reply.prompt_tokens, reply.cached_tokens, reply.samples[0].tokens)
                if verdict is None:
                    self.spent.faults["no verdict"] += 1
                self.spent.calls += verdict is not None
            if verdict is not None:
                return Grade(verdict == 0, None, f"judged {_WORDS[verdict]}", tokens, read)
        first, second = verdict_lines(asked, _WORDS)
        raise PolicyError(
            f"judge {self.policy.name}: expected one of {ATTEMPTS} replies to end with the line {first!r} or "
            f"{second!r}, but the last reply ended with {said[-200:]!r}; use a model that follows instructions"
        )
