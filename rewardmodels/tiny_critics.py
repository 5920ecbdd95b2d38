"""This package's critics by name; `search.load_critic` finds them through the entry-point group ``mas_gym.critics``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def shipped(kind: Literal["masprm", "orm"]) -> Path:
    """Return the folder of a shipped critic for the bundled model."""
    return Path(__file__).parent / "shipped" / kind


TINY_MASPRM = shipped("masprm")
TINY_ORM = shipped("orm")
