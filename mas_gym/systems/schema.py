"""The JSON Schema of a MAS config, for editors.

The schema is generated from the rules of `mas_gym.systems.validation`. It checks one value at a time. It accepts every
valid config and rejects most invalid ones. Errors that involve the whole graph (cycles, unreachable agents, duplicate
names, unknown nodes) and invalid regular expressions are found by ``mas-gym check``.
"""

from __future__ import annotations

from typing import get_args

from mas_gym.internal.json_types import JSONObject
from mas_gym.systems.graph import SCHEMA, History, Route
from mas_gym.systems.validation import (
    ANYONE,
    CONDITION_KINDS,
    DEFAULT_MAX_NEW_TOKENS,
    LEAST_TOP_P,
    LONGEST_NAME,
    MAX_NEW_TOKENS,
    MAX_TEMPERATURE,
    MAX_TURNS,
    RESERVED,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {"type": "string", "pattern": r"\S"}


def json_schema() -> JSONObject:
    """Return the JSON Schema (draft 2020-12) of a MAS config."""
    return {
        "$schema": DIALECT,
        "title": "MAS-Gym multi-agent system",
        "type": "object",
        "properties": _config_properties(),
        "required": ["agents", "edges"],
        "dependentRequired": {"min_turns": ["max_turns"], "fallback": ["max_turns"]},
        "additionalProperties": False,
        "$defs": {"agent": _agent(), "edge": _edge()},
    }


def _config_properties() -> JSONObject:
    kinds = ", ".join(f"`{kind}:`" for kind in CONDITION_KINDS)
    return {
        "schema": {"const": SCHEMA, "default": SCHEMA, "description": "Version of the format."},
        "name": {**_TEXT, "description": "Name in reports; by default the file's name."},
        "agents": {
            "type": "array",
            "minItems": 1,
            "items": {"$ref": "#/$defs/agent"},
            "description": "The agents in the order in which they act.",
        },
        "edges": {
            "type": "array",
            "minItems": 1,
            "items": {"$ref": "#/$defs/edge"},
            "description": "Connections between nodes, as `[source, target]` or `[source, target, condition]`. "
            f"Conditions: {kinds}. The last agent writes to `sink` without an edge.",
        },
        "policies": {
            "anyOf": [{"type": "object", "minProperties": 1, "additionalProperties": _TEXT}, {"type": "null"}],
            "description": "The policy of each agent by name, or of all others under "
            f"`{ANYONE}`; used with `--policy from-config`.",
        },
        "max_turns": {
            **_count(MAX_TURNS),
            "description": "Allows cycles: agents act as messages arrive, for at most this many turns.",
        },
        "min_turns": {
            **_count(MAX_TURNS),
            "default": 1,
            "description": "With `max_turns`: no message reaches `sink` before this turn.",
        },
        "history": {
            "enum": list(get_args(History)),
            "default": get_args(History)[0],
            "description": "An agent's prompt: the messages that reached it (`inputs`), or all that it sent or "
            "received (`private`).",
        },
        "route": {**_route(), "description": "The `route` of agents that do not set it."},
        "fallback": {**_fallback(), "description": "The `fallback` of agents that do not set it."},
    }


def _agent() -> JSONObject:
    properties = {
        "name": {
            **_TEXT,
            "maxLength": LONGEST_NAME,
            "not": {"pattern": rf"^\s*({'|'.join(map(_any_case, RESERVED))})\s*$"},
            "description": f"A unique name; not {', '.join(RESERVED)}.",
        },
        "system_prompt": {**_TEXT, "description": "The instructions that precede its inputs."},
        "max_new_tokens": {
            **_count(MAX_NEW_TOKENS),
            "default": DEFAULT_MAX_NEW_TOKENS,
            "description": "Maximum tokens of one message.",
        },
        "temperature": {
            "type": "number",
            "minimum": 0,
            "maximum": MAX_TEMPERATURE,
            "description": "Sampling temperature of its messages; by default that of the run.",
        },
        "top_p": {
            "type": "number",
            "minimum": LEAST_TOP_P,
            "maximum": 1,
            "description": "Probability mass of its nucleus sampling; by default that of the run.",
        },
        "route": {
            **_route(),
            "description": "Recipients of its messages: every agent that its edges allow (`edges`), or the recipient "
            "that the message names, as in `RECIPIENT: Critic` (`message`, which needs `max_turns`).",
        },
        "fallback": {
            **_fallback(),
            "description": "With `route: message`: recipient of messages that name no legal recipient. Without it, "
            "such a message is an invalid action.",
        },
    }
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "system_prompt"],
        "additionalProperties": False,
    }


def _edge() -> JSONObject:
    question = {"enum": [-1, "q"]}
    node = {"anyOf": [{"type": "integer", "minimum": -1}, _TEXT]}
    condition = {
        "anyOf": [{"type": "string", "pattern": rf"^({'|'.join(CONDITION_KINDS)}):[\s\S]"}, {"type": "null"}],
    }
    return {
        "type": "array",
        "prefixItems": [
            {"allOf": [node, {"not": {"const": "sink"}}]},
            {"allOf": [node, {"not": question}]},
            condition,
        ],
        "items": False,
        "minItems": 2,
        # The question sends no message, so nothing can be tested and no agent can be skipped.
        "if": {"prefixItems": [question]},
        "then": {"prefixItems": [True, {"not": {"const": "sink"}}, {"type": "null"}]},
        "description": "`[source, target]` or `[source, target, condition]`. A node is an agent's name or its index "
        "from 0, `q` or -1 for the question, `sink` for the end.",
    }


def _route() -> JSONObject:
    return {"enum": list(get_args(Route)), "default": get_args(Route)[0]}


def _fallback() -> JSONObject:
    return {"anyOf": [{"type": "integer", "minimum": 0}, {**_TEXT, "not": {"const": "q"}}]}


def _count(most: int) -> JSONObject:
    return {"type": "integer", "minimum": 1, "maximum": most}


def _any_case(name: str) -> str:
    # JSON Schema has no flag for case-insensitive patterns.
    return "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else f"\\{c}" for c in name)
