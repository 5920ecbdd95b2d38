"""Types of JSON values that are exchanged with files and servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

JSONObject: TypeAlias = dict[str, Any]
"""A JSON object. External data is validated where a value is read."""

JSONMapping: TypeAlias = Mapping[str, Any]
"""A read-only JSON object."""

JSONValue: TypeAlias = bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"] | None
"""A value of a JSON document."""
