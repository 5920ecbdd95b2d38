"""Load a policy from a string such as ``"transformers:PATH#dtype=bfloat16"``, and return a policy's purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeGuard

from mas_gym.errors import ConfigError, MissingDependencyError, shown
from mas_gym.plugins import Registry, Spec, build, yaml_value
from mas_gym.policies.base import ARMS, AsyncPolicy, Policy, Purpose
from mas_gym.policies.batch_queue import as_policy

Arms = Mapping[str, str | Policy | AsyncPolicy]
PolicySpec = str | Mapping[str, str | Policy | AsyncPolicy | Arms]

POLICIES = Registry(
    "policy",
    "mas_gym.policies",
    {
        "tiny": "mas_gym.policies.registry:_tiny",
        "transformers": "mas_gym.policies.registry:_transformers",
        "recorded": "mas_gym.policies.cache:RecordedPolicy",
        "openai": "mas_gym.policies.openai:load_openai",
        "vllm": "mas_gym.policies.vllm:VLLMPolicy",
        "gguf": "mas_gym.policies.gguf:GGUFPolicy",
        "ollama": "mas_gym.policies.openai:load_ollama",
        "lmstudio": "mas_gym.policies.openai:load_lmstudio",
        "arms": "mas_gym.policies.registry:_arms",
    },
    settings=False,
)
"""Names of policies; an entry point names a class or loader ``(argument, **options) -> policy``."""

_CLASSES = Registry(
    "policy",
    "mas_gym.policies",
    {
        "tiny": "mas_gym.policies.local.transformers:TransformersPolicy",
        "transformers": "mas_gym.policies.local.transformers:TransformersPolicy",
        "openai": "mas_gym.policies.openai:OpenAIOptions",
        "ollama": "mas_gym.policies.openai:OpenAIOptions",
        "lmstudio": "mas_gym.policies.openai:OpenAIOptions",
    },
)
"""Callables with a policy's options as parameters, for policies with a loader that lacks them."""

_ARGUMENTS = {"transformers": "PATH-OR-ID", "vllm": "PATH-OR-ID", "gguf": "FILE", "recorded": "FILE"}


def load_policy(spec: PolicySpec, **options: object) -> AsyncPolicy:
    """Load a policy.

    Args:
        spec: ``"tiny"``, ``"transformers:PATH-OR-ID"``, ``"gguf:FILE"`` or ``"FILE.gguf"``, ``"vllm:PATH-OR-ID"``,
            ``"openai:MODEL@URL"``, ``"ollama:NAME"`` and ``"lmstudio:NAME"`` for these servers on this machine,
            ``"recorded:FILE"``, ``"FILE.py:NAME:SETTINGS"`` for your own code (see `mas_gym.plugins`), or
            ``"NAME:ARGUMENT"`` for a loader registered under the entry-point group ``mas_gym.policies``.
            The string may contain options, as in ``"transformers:PATH#dtype=bfloat16&max_batch=128"``. A mapping
            from agents' names, or ``"*"`` for all others, to such strings or to loaded policies gives each agent
            its policy; equal strings are loaded once. The mapping may also be a string:
            ``"{Solver: 'openai:M@URL', '*': tiny}"``. The option ``cache=FILE`` adds a response cache to any
            policy. ``"arms:small=tiny,large=openai:M@URL"`` gives every agent several models, among which planners
            choose (`mas_gym.policies.arms_policy`); to give several models to only one agent,
            map that agent to a mapping from arm names to strings or policies:
            ``{"Solver": {"small": "tiny", "large": "openai:M@URL"}, "*": "tiny"}``.
        options: Options of the loader, such as ``max_batch``, ``threads``, ``device`` and ``window`` for local
            models (`TransformersPolicy`), or those of `OpenAIOptions` for servers.

    Raises:
        UnknownNameError: No loader has this name.
        MissingDependencyError: The loader needs a package that is not installed.
        ConfigError: An option or argument is invalid.
        PolicyError: The model or file cannot be loaded.
    """
    if isinstance(spec, str) and spec.startswith("{"):
        read = yaml_value(spec, "policy: expected a mapping such as {Solver: 'openai:M@URL', '*': tiny}")
        if not _is_mapping(read):
            raise ConfigError(
                f"expected a mapping from agents' names to policy strings or to mappings of arms, got {shown(spec)}"
            )
        spec = read
    if isinstance(spec, Mapping):
        from mas_gym.policies.per_agent import PerAgentPolicy

        load = _loader(options)
        return PerAgentPolicy({agent: _combined(policy, load) for agent, policy in spec.items()})
    if spec.strip().startswith(ARMS):
        return _arms(spec, **options)
    if spec.partition("#")[0].lower().endswith(".gguf") and not spec.startswith("gguf:"):
        spec = f"gguf:{spec}"
    parsed = POLICIES.parse(spec)
    if not parsed.argument and parsed.name in _ARGUMENTS and not parsed.file:
        raise ConfigError(f"expected {parsed.name}:{_ARGUMENTS[parsed.name]}, got {spec!r}")
    args, written = POLICIES.arguments(parsed)
    options = {**written, **options}
    cache = options.pop("cache", None)
    made = POLICIES.call(parsed, POLICIES.find(parsed), *args, **options)
    try:
        policy = as_policy(made)
    except ConfigError as error:
        raise ConfigError(f"policy {spec!r}: {error}") from None
    return policy if cache is None else _cached(policy, str(cache))


def known_policies() -> list[str]:
    """Return the names that `load_policy` accepts, including those of other packages."""
    return POLICIES.names()


def policy_makers() -> dict[str, Callable[..., object]]:
    """Return, by policy name, the callable whose signature lists the policy's options: its class, else its loader."""
    found: dict[str, Callable[..., object]] = {}
    for name in known_policies():
        try:
            found[name] = (_CLASSES if name in _CLASSES.shipped else POLICIES).find(Spec(name))
        except MissingDependencyError:
            found[name] = POLICIES.find(Spec(name))
    return found


def _is_mapping(read: object, of_arms: bool = False) -> TypeGuard[Mapping[str, str | Mapping[str, str]]]:
    return isinstance(read, dict) and all(
        isinstance(name, str) and (isinstance(policy, str) or (not of_arms and _is_mapping(policy, of_arms=True)))
        for name, policy in read.items()
    )


def _arms(spec: str, **options: object) -> AsyncPolicy:
    """Several models, such as arms:small=tiny,large=transformers:DIR, among which planners choose."""
    return _combined(spec, _loader(options))


Load = Callable[[str | Policy | AsyncPolicy], AsyncPolicy]


def _combined(spec: str | Policy | AsyncPolicy | Arms, load: Load) -> AsyncPolicy:
    """Return the policy of one agent; a mapping names its arms."""
    from mas_gym.policies.arms_policy import ArmsPolicy, read_arms

    if isinstance(spec, str) and spec.strip().startswith(ARMS):
        spec = read_arms(spec)
    if isinstance(spec, Mapping):
        return ArmsPolicy({arm: load(policy) for arm, policy in spec.items()})
    return load(spec)


def _loader(options: Mapping[str, object]) -> Load:
    """Return a function that loads the policies of a mapping, each string once, and adds the response cache if set."""
    others = ", ".join(name for name in options if name != "cache")
    if others:
        raise ConfigError(
            f"expected only the option cache= for several policies, got {others}; set the rest in each policy string"
        )
    loaded: dict[str | int, AsyncPolicy] = {}

    def load(spec: str | Policy | AsyncPolicy) -> AsyncPolicy:
        key = spec if isinstance(spec, str) else id(spec)
        if key not in loaded:
            policy = load_policy(spec) if isinstance(spec, str) else as_policy(spec)
            loaded[key] = _cached(policy, str(options["cache"])) if "cache" in options else policy
        return loaded[key]

    return load


def _cached(policy: AsyncPolicy, file: str) -> AsyncPolicy:
    from mas_gym.policies.cache import CachedPolicy

    return policy if isinstance(policy, CachedPolicy) else CachedPolicy(policy, file)


def _tiny(argument: str, **options: object) -> Policy:
    import mas_gym.tiny
    from mas_gym.policies.local.transformers import TransformersPolicy

    if argument:
        raise ConfigError(
            f"policy 'tiny' takes no argument, got {argument!r}; for another model use 'transformers:PATH'"
        )
    options = {"name": "tiny", **options}
    policy = build("policy 'tiny'", TransformersPolicy, mas_gym.tiny.path(), **options)
    policy.made_for = purpose_of("tiny")
    return policy


def purpose_of(policy: PolicySpec | Policy | AsyncPolicy | None) -> Purpose | None:
    """Return the purpose of a policy or policy spec; None if it declares no purpose."""
    if isinstance(policy, str) and POLICIES.parse(policy).name == "tiny":
        import mas_gym.tiny

        return Purpose(mas_gym.tiny.GRAPHS, mas_gym.tiny.knows)
    return None if policy is None or isinstance(policy, str | Mapping) else policy.made_for


def _transformers(argument: str, **options: object) -> Policy:
    from mas_gym.policies.local.transformers import TransformersPolicy

    return build("policy 'transformers'", TransformersPolicy, argument, **options)
