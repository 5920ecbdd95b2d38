"""Load a policy from a string such as ``"transformers:PATH#dtype=bfloat16"``, and state which model its files hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mas_gym.errors import ConfigError, MissingDependencyError
from mas_gym.plugins import build, is_user_code, load_user_code, unknown, written_options, written_value
from mas_gym.policies.base import AsyncPolicy, Policy, Purpose, as_policy, shortened

ENTRY_POINTS = "mas_gym.policies"
"""Entry-point group for third parties; each entry names a loader ``(argument, **options) -> policy``."""

Loader = Callable[..., Policy | AsyncPolicy]
PolicySpec = str | Mapping[str, str | Policy | AsyncPolicy]

_BUILTIN = {
    "tiny": "mas_gym.policies.registry:_tiny",
    "transformers": "mas_gym.policies.registry:_transformers",
    "recorded": "mas_gym.policies.registry:_recorded",
    "openai": "mas_gym.policies.openai:load_openai",
    "vllm": "mas_gym.policies.vllm:load_vllm",
}

_CLASSES = {
    "tiny": "mas_gym.policies.local.transformers:TransformersPolicy",
    "transformers": "mas_gym.policies.local.transformers:TransformersPolicy",
    "recorded": "mas_gym.policies.cache:RecordedPolicy",
    "openai": "mas_gym.policies.openai:OpenAIOptions",
    "vllm": "mas_gym.policies.vllm:VLLMPolicy",
}


def load_policy(spec: PolicySpec, **options: Any) -> Policy | AsyncPolicy:
    """Load a policy.

    Args:
        spec: ``"tiny"``, ``"transformers:PATH-OR-ID"``, ``"vllm:PATH-OR-ID"``, ``"openai:MODEL@URL"``,
            ``"recorded:FILE"``, ``"FILE.py:NAME:SETTINGS"`` for your own code (see `mas_gym.plugins`), or
            ``"NAME:ARGUMENT"`` for a loader registered under the entry-point group ``mas_gym.policies``.
            The string may contain options, as in ``"transformers:PATH#dtype=bfloat16&max_batch=128"``. A mapping
            from agents' names, or ``"*"`` for all others, to such strings or to loaded policies gives each agent
            its policy; equal strings are loaded once. The mapping may also be a string:
            ``"{Solver: 'openai:M@URL', '*': tiny}"``. The option ``cache=FILE`` adds a response cache to any
            policy.
        options: Options of the loader, such as ``max_batch``, ``threads``, ``device`` and ``window`` for local
            models (`TransformersPolicy`), or those of `OpenAIOptions` for servers.

    Raises:
        UnknownNameError: No loader has this name.
        MissingDependencyError: The loader needs a package that is not installed.
        ConfigError: An option or argument is wrong.
        PolicyError: The model or file cannot be loaded.
    """
    if isinstance(spec, str) and spec.startswith("{"):
        spec = _written_mapping(spec)
    if isinstance(spec, Mapping):
        return _per_agent(spec, options)
    spec, cache = _written_cache(spec)
    cache = options.pop("cache", cache)
    if is_user_code(spec):
        own = load_user_code("policy", spec)
    else:
        name = spec.partition(":")[0].partition("#")[0]
        own = build(name, _loader(name), spec[len(name) :].removeprefix(":"), **options)
    try:
        policy = as_policy(own)
    except ConfigError as error:
        raise ConfigError(f"policy {spec!r}: {error}") from None
    return policy if cache is None else _cached(policy, cache)


def known_policies() -> list[str]:
    """Return the names that `load_policy` knows, third parties' included."""
    return sorted({*_BUILTIN, *(point.name for point in _points())})


def policy_makers() -> dict[str, Callable[..., Any]]:
    """Return for each name the callable whose signature lists its options: a class, or the loader without one."""
    return {name: _class_of(name) for name in known_policies()}


def _class_of(name: str) -> Callable[..., Any]:
    module, _, attribute = _CLASSES.get(name, "").partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), attribute) if module else _loader(name)
    except ImportError:
        found = _loader(name)
    return found


def _points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINTS))


def _loader(name: str) -> Loader:
    if name in _BUILTIN:
        module, _, attribute = _BUILTIN[name].partition(":")
        builtin: Loader = getattr(import_module(module), attribute)
        return builtin
    for point in _points():
        if point.name == name:
            third_party: Loader = point.load()
            return third_party
    raise unknown("policy", name, known_policies(), ENTRY_POINTS)


def local_module() -> Any:
    """Import `mas_gym.policies.local.transformers`. Raises `MissingDependencyError` if torch is not installed."""
    try:
        return import_module("mas_gym.policies.local.transformers")
    except ImportError as error:
        raise MissingDependencyError(
            f"running a model in this process needs torch and transformers ({error}): pip install 'mas-gym[local]'"
        ) from error


def _written_mapping(spec: str) -> Mapping[str, str]:
    read = written_value(spec, "policy: expected a mapping such as {Solver: 'openai:M@URL', '*': tiny}")
    if not isinstance(read, dict) or not all(isinstance(part, str) for pair in read.items() for part in pair):
        raise ConfigError(f"expected a mapping from agents' names to policy strings, got {shortened(spec, 200)}")
    return read


def _written_cache(spec: str) -> tuple[str, str | None]:
    """Remove the option ``cache=FILE``, which any policy takes, from a policy string."""
    found = re.search(r"[#&]cache=([^&]*)", spec)
    if found is None:
        return spec, None
    rest = spec[: found.start()] + spec[found.end() :]
    # If it was the first option, the next one becomes the first and needs the '#'.
    return (rest.replace("&", "#", 1) if found[0][0] == "#" else rest), found[1]


def _per_agent(specs: Mapping[str, str | Policy | AsyncPolicy], options: Mapping[str, Any]) -> AsyncPolicy:
    from mas_gym.policies.per_agent import PerAgentPolicy

    others = ", ".join(name for name in options if name != "cache")
    if others:
        raise ConfigError(
            f"expected no options but cache beside a mapping of policies, got {others}; write them into each string"
        )
    loaded = {spec: load_policy(spec) for spec in {spec: None for spec in specs.values() if isinstance(spec, str)}}
    team = {agent: loaded[spec] if isinstance(spec, str) else spec for agent, spec in specs.items()}
    if "cache" in options:
        kept = {id(policy): _cached(policy, options["cache"]) for policy in team.values()}
        team = {agent: kept[id(policy)] for agent, policy in team.items()}
    return PerAgentPolicy(team)


def _cached(policy: Policy | AsyncPolicy, file: str) -> AsyncPolicy:
    from mas_gym.policies.cache import CachedPolicy

    return policy if isinstance(policy, CachedPolicy) else CachedPolicy(policy, file)


def _tiny(argument: str, **options: Any) -> Policy:
    import mas_gym.tiny

    rest, written = written_options(argument)
    if rest:
        raise ConfigError(f"policy 'tiny' takes no argument, got {rest!r}; for another model use 'transformers:PATH'")
    options = {"name": "tiny", **written, **options}
    policy: Policy = build("tiny", local_module().TransformersPolicy, mas_gym.tiny.path(), **options)
    policy.made_for = purpose_of("tiny")
    return policy


def purpose_of(policy: PolicySpec | Policy | AsyncPolicy | None) -> Purpose | None:
    """Return what a policy, loaded or not, was made for; None if it does not say."""
    if isinstance(policy, str) and re.split("[:#]", policy)[0] == "tiny":
        import mas_gym.tiny

        return Purpose(mas_gym.tiny.GRAPHS, mas_gym.tiny.knows)
    return None if policy is None or isinstance(policy, str | Mapping) else policy.made_for


def _transformers(argument: str, **options: Any) -> Policy:
    model, written = written_options(argument)
    if not model:
        raise ConfigError("expected 'transformers:PATH-OR-ID', got no path or id")
    policy: Policy = build("transformers", local_module().TransformersPolicy, model, **{**written, **options})
    return policy


def _recorded(argument: str, **options: Any) -> Policy:
    from mas_gym.policies.cache import RecordedPolicy

    if not argument:
        raise ConfigError("expected 'recorded:FILE', got no file")
    policy: Policy = build("recorded", RecordedPolicy, argument, **options)
    return policy
