"""The template engine of all pages and drawings: Jinja with autoescape, and the content security policy of the pages.

Templates, styles and scripts are files of this package. Every value in a template is escaped. The policy allows only
this package's own styles and script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

DRAWING_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
"""The content security policy of SVG files, which contain inline styles."""
_STYLES, _SCRIPTS = ("listing.css", "tree.css"), ("tree.js",)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def render(template: str, **values: object) -> str:
    """Return a template filled with values, which are escaped; a missing value raises `jinja2.UndefinedError`."""
    # Models can emit lone surrogates, which are not valid characters.
    return _LONE_SURROGATE.sub("\ufffd", _environment().get_template(template).render(values))


@cache
def page_policy() -> str:
    """Return the content security policy of every HTML page."""

    def sources(names: tuple[str, ...]) -> str:
        digests = (hashlib.sha256(_asset(name).encode()).digest() for name in names)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {sources(_SCRIPTS)}; style-src {sources(_STYLES)}; img-src 'self' data:; "
        "base-uri 'none'; form-action 'self'"
    )


def _asset(name: str) -> Markup:
    from markupsafe import Markup

    return Markup((resources.files("search.pages") / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    # Only commands and functions that write a page need Jinja, which takes longer to import than this package.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("search.pages", ""),
        autoescape=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    made.globals |= {"asset": _asset, "policy": page_policy()}
    return made
