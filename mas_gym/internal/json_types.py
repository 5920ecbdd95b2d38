"""Types of JSON values, for what is read from files and servers or written to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

JSONObject: TypeAlias = dict[str, Any]
"""A JSON object. What comes from outside is checked where a value is read."""

JSONMapping: TypeAlias = Mapping[str, Any]
"""A JSON object that is only read."""
