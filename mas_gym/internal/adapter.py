"""Adapters, which add the attributes of a base class to objects that define only the required method."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class ClassName:
    """The default of an attribute ``name``: the name of the object's class."""

    def __get__(self, part: object, owner: type) -> str:
        return type(part.identical_to).__name__ if isinstance(part, Adapter) else owner.__name__


class Adapter:
    """Adds a base class's defaults to an object; all other attributes come from the object."""

    identical_to: Any

    def __init__(self, part: object, base: type) -> None:
        """Copy those attributes of the object that the base class or one of its bases declares."""
        for owner in base.__mro__:
            for name in vars(owner).get("__annotations__", ()):
                value = getattr(part, name, _ABSENT)
                if value is not _ABSENT:
                    setattr(self, name, value)
        self.identical_to = part

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "identical_to":
            raise AttributeError(name)
        return getattr(self.identical_to, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Adapter) and bool(self.identical_to == other.identical_to)

    def __hash__(self) -> int:
        """Hash the object's class, because the object may have no hash."""
        return hash(type(self.identical_to))


def wrapped_part(part: object) -> object:
    """Return the object that a wrapper names in ``identical_to``, or the argument if it is not a wrapper."""
    inner: object = getattr(part, "identical_to", None)
    return part if inner is None else inner


def has_method(part: object, name: str) -> bool:
    """Return whether an object has a method; False for a class."""
    return not isinstance(part, type) and callable(getattr(part, name, None))


def describe_type(part: object) -> str:
    """Return a description of an object for error messages: its class name, or ``the class NAME`` for a class."""
    return f"the class {part.__name__}" if isinstance(part, type) else type(part).__name__
