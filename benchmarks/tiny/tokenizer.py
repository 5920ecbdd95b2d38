"""The tiny model's tokenizer and chat template.

Words, numbers below 100 and line breaks are one token each. Any other text is encoded in
bytes, so every text can be encoded and decodes to itself. The system prompt of a shipped
agent is one token after the inputs, so that agents with the same question share its
encoding. Any other system prompt is encoded as text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.tiny.vocabulary import WORDS

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

PAD, END, USER, SYSTEM, OUT = "<|pad|>", "<|end|>", "<|user|>", "<|system|>", "<|out|>"
RESERVED = 7
VOCABULARY_SIZE = 1024
CONTEXT = 1024

# A phrase that only this agent's shipped system prompt contains. The Auditor belongs to no shipped graph: it reads
# a whole RPSV or Logic transcript and names its first error.
ROLE_PHRASES: dict[str, str] = {
    "Reader": "You are the Reader.",
    "Planner": "You are the Planner.",
    "Solver": "You are the Solver.",
    "Verifier": "You are the Verifier.",
    "Single": "You are an intelligent assistant",
    "RefineSolver": "You are a math solver. Solve the problem",
    "Evaluator": "You are a checker.",
    "Reflector": "You are an advisor.",
    "Reviser": "You are a math solver. A previous answer was wrong.",
    "SolverA": "You are Solver A.",
    "SolverB": "You are Solver B.",
    "ConsensusJudge": "You are the Judge/Verifier.",
    "MathAnalyst": "You are a careful Math Analyst.",
    "AlgebraSolver": "You are an Algebra Solver.",
    "ArithmeticReasoner": "You are an Arithmetic Reasoner.",
    "DylanJudge": "You are the Judge. You receive the original question and three",
    "RefinerA": "You are Refiner A.",
    "RefinerB": "You are Refiner B.",
    "RefinerC": "You are Refiner C.",
    "FinalJudge": "You are the Final Judge.",
    "Angel": "You are a helpful debater.",
    "Devil": "You are a skeptical debater.",
    "DebateJudge": "You are the Judge. Read the question and both",
    "ConstraintExtractor": "You are the Constraint Extractor.",
    "WorldBuilder": "You are the World Builder.",
    "QueryChecker": "You are the Query Checker.",
    "Auditor": "You are the Auditor.",
}


def role_token(role: str) -> str:
    """Return the special token of a shipped agent's system prompt."""
    return f"<|{role}|>"


def chat_template() -> str:
    """Return the Jinja template: inputs first, then the role, then the answer."""
    phrases = ", ".join(f"({phrase!r}, {role_token(role)!r})" for role, phrase in ROLE_PHRASES.items())
    # Line breaks inside a prompt are joined before the phrase is looked for; '<|' in a message must never become
    # a special token, or a message could pose as a system prompt.
    return (
        "{%- set ns = namespace(role='" + OUT + "') -%}"
        "{%- for m in messages -%}"
        "{%- if m['role'] == 'system' -%}"
        "{%- set text = m['content'] | trim | replace('<|', '< |') -%}"
        "{%- set flat = text.split() | join(' ') -%}"
        "{%- set ns.role = '" + SYSTEM + "' + text + '" + OUT + "' -%}"
        "{%- for phrase, token in [" + phrases + "] -%}"
        "{%- if phrase in flat -%}{%- set ns.role = token -%}{%- endif -%}"
        "{%- endfor -%}"
        "{%- elif m['role'] == 'assistant' -%}"
        "{{- ns.role + (m['content'] | replace('<|', '< |')) + '" + END + "' -}}"
        "{%- else -%}"
        "{{- '" + USER + "' + (m['content'] | trim | replace('<|', '< |')) -}}"
        "{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- ns.role -}}{%- endif -%}"
    )


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer; the same vocabulary and ids each time.

    It is of the class that transformers loads for any Qwen2 folder, whatever the folder says, so what is saved is
    what is loaded. That class splits numbers into digits; words and numbers are therefore *added* tokens, which
    are matched, longest first, before any splitting.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    special = [PAD, END, USER, SYSTEM, OUT, *map(role_token, ROLE_PHRASES)]
    special += [f"<|reserved{i}|>" for i in range(RESERVED)]
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(
        vocab=alphabet,
        merges=[],
        unk_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template(),
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    numbers = [f" {n}" for n in range(100)] + [str(n) for n in range(10, 100)]
    # A word in small letters opens no message and no line, so it needs no form without a blank before it.
    words = [f" {word}" for word in WORDS] + [word for word in WORDS if word[0].isupper() and len(word) > 1]
    marks = [f" {mark}" for mark in "+-*/=<>$(\"'"] + ["\n\n"]
    plain = list(dict.fromkeys([*numbers, *marks, *words]))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    if len(tokenizer) > VOCABULARY_SIZE:
        raise ValueError(f"expected at most {VOCABULARY_SIZE} tokens, got {len(tokenizer)}; shorten the word list")
    return tokenizer
