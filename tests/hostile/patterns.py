"""Find every regular expression of a package, and build the texts that would make a backtracking matcher slow."""

import ast
import importlib
import pkgutil
import random
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import permutations, product
from pathlib import Path
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

ALPHABET = " \t\n.,;:-+*/^_=<>'\"`~!?@#$%&|()[]{}\\019abezAZ√é"
KILLERS = ("", "\x00", " ", "!", "x", "1", "\n", "}", "\\", " + 1")
OPENERS = ("is ", "a b ", "ab", "1,234", "1.", "\\text{", "\\frac{", "\\frac1", "sqrt(", "\\binom ", "1/", "answer ")
BRACKETS = " .$\\(){[1a"
METHODS = ("search", "match", "fullmatch", "finditer", "findall", "sub", "split")


class Use(NamedTuple):
    """A compiled pattern and a method that the code calls on it."""

    where: str
    pattern: re.Pattern[str]
    method: str

    def run(self, text: str) -> None:
        """Apply it as the code does, to the end."""
        match self.method:
            case "sub":
                self.pattern.sub("", text)
            case "finditer":
                for _ in self.pattern.finditer(text):
                    pass
            case _:
                getattr(self.pattern, self.method)(text)


def sources(package: str) -> Iterator[tuple[str, ast.Module, Any]]:
    """Yield name, syntax tree and module of every module of a package."""
    root = importlib.import_module(package)
    for info in pkgutil.iter_modules(root.__path__):
        name = f"{package}.{info.name}"
        module = importlib.import_module(name)
        assert module.__file__ is not None
        yield name, ast.parse(Path(module.__file__).read_text(encoding="utf-8")), module


def inline_calls(package: str) -> list[str]:
    """List the calls of `re` that are not a module's own ``NAME = re.compile(...)``."""
    found = []
    for name, tree, _ in sources(package):
        own = {id(node.value) for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and id(node) not in own:
                found.append(f"{name}:{node.lineno} {ast.unparse(node)[:60]}")
    return found


def uses(package: str) -> list[Use]:
    """List every compiled pattern of a package with each method that is called on it, two if none is seen."""
    called: dict[int, set[str]] = {}
    patterns: dict[int, tuple[str, re.Pattern[str]]] = {}
    for name, tree, module in sources(package):
        for key, value in vars(module).items():
            for place, member in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(member, re.Pattern):
                    patterns.setdefault(id(member), (f"{name}.{key}[{place}]", member))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in METHODS:
                value = getattr(module, node.value.id, None)
                if isinstance(value, re.Pattern):
                    called.setdefault(id(value), set()).add(node.attr)
    return [
        Use(where, pattern, method)
        for key, (where, pattern) in patterns.items()
        for method in sorted(called.get(key, {"sub", "fullmatch"}))
    ]


def attacks(pattern: re.Pattern[str], count: int) -> Iterator[Callable[[int], str]]:
    """Yield functions from a size to a text: near matches of which one repeat, the whole or a beginning is pumped."""
    tree = _parser.parse(pattern.pattern, pattern.flags)
    for number, target in product(range(count), [None, *_repeats(tree)]):
        rng = random.Random(f"{number}")
        unit = _sample(tree, rng, None, 0)
        killer = rng.choice(KILLERS)
        if target is None:
            unit = unit[: rng.randint(1, len(unit))] if unit and number % 2 else unit or "a"
            yield lambda size, unit=unit, killer=killer: unit * (size // len(unit) + 1) + killer  # type: ignore[misc]
        else:
            yield lambda size, number=number, target=target, killer=killer: (  # type: ignore[misc]
                _sample(tree, random.Random(f"{number}"), target, size) + killer
            )
    for unit in (*ALPHABET, *OPENERS):
        yield lambda size, unit=unit: unit * (size // len(unit))  # type: ignore[misc]
    for unit in (*ALPHABET, *map("".join, permutations(BRACKETS, 2))):
        yield lambda size, unit=unit: "5" + unit * (size // len(unit)) + "\x00"  # type: ignore[misc]


def _repeats(tree: Any) -> list[Any]:
    found = []
    for kind, argument in tree:
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            if argument[1] > 9:
                found.append(argument)
            found += _repeats(argument[2])
        elif kind is op.SUBPATTERN:
            found += _repeats(argument[3])
        elif kind is op.ATOMIC_GROUP:
            found += _repeats(argument)
        elif kind is op.BRANCH:
            for branch in argument[1]:
                found += _repeats(branch)
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            found += _repeats(argument[1])
    return found


def _sample(tree: Any, rng: random.Random, target: Any, size: int) -> str:
    """Write a text that the pattern nearly matches; the target repeat fills it to about the size."""
    return "".join(_piece(kind, argument, rng, target, size) for kind, argument in tree)


def _holds(tree: Any, target: Any) -> bool:
    return target is not None and any(target is repeat for repeat in _repeats(tree))


def _piece(kind: Any, argument: Any, rng: random.Random, target: Any, size: int) -> str:
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        low, high, body = argument
        if argument is target:
            unit = "".join(_sample(body, rng, None, 0) for _ in range(rng.randint(1, 3))) or "a"
            return unit * (size // len(unit) + 1)
        times = max(rng.randint(low, max(low, min(high, low + 2))), _holds(body, target))
        return "".join(_sample(body, rng, target, size) for _ in range(times))
    if kind is op.SUBPATTERN:
        return _sample(argument[3], rng, target, size)
    if kind is op.ATOMIC_GROUP:
        return _sample(argument, rng, target, size)
    if kind is op.BRANCH:
        holding = [branch for branch in argument[1] if _holds(branch, target)]
        return _sample(rng.choice(holding or argument[1]), rng, target, size)
    if kind in (op.ASSERT, op.ASSERT_NOT):
        behind = kind is op.ASSERT and (argument[0] < 0 or rng.random() < 0.5)
        return _sample(argument[1], rng, target, size) if behind or _holds(argument[1], target) else ""
    if kind is op.LITERAL:
        return chr(argument)
    if kind in (op.IN, op.NOT_LITERAL, op.ANY):
        items = argument if kind is op.IN else [(op.NEGATE, None), (op.LITERAL, argument)]
        fit = ALPHABET if kind is op.ANY else _fitting(tuple(items))
        return rng.choice(fit) if fit else chr(items[0][1] if items[0][0] is op.LITERAL else items[0][1][0])
    return ""


@lru_cache(maxsize=1024)
def _fitting(items: tuple[Any, ...]) -> str:
    return "".join(character for character in ALPHABET if _inside(items, character))


def _inside(items: Any, character: str) -> bool:
    code, negated, found = ord(character), False, False
    for kind, value in items:
        if kind is op.NEGATE:
            negated = True
        elif kind is op.LITERAL:
            found |= code == value
        elif kind is op.RANGE:
            found |= value[0] <= code <= value[1]
        else:
            name = str(value).rsplit("_", 1)[-1][0].lower()
            found |= (re.match(rf"\{name}", character) is not None) != ("NOT" in str(value))
    return found != negated
