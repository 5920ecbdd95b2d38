"""Prices of models in USD, and the cost of a search at these prices.

A price file uses the model names shown in tables, with quotes where YAML needs them::

    "openai:gpt-4o-mini": {prompt: 0.15, cached: 0.075, generated: 0.60}
    tiny: {second: 0.0001}
    tiny-masprm: {forward: 0.000002}

``prompt``, ``cached`` and ``generated`` are USD per million tokens, ``forward`` is USD per reward call (RC), and
``second`` is USD per wall-clock second of a search. Prices do not change the result of a search, except through a
budget in USD. In that case, budget and prices are part of a run's identity.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from mas_gym.errors import ConfigError, UnknownNameError, did_you_mean, refuse_unknown, shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.policies.base import ARMS
from mas_gym.policies.meters import Price, check_price
from mas_gym.systems.loading import read_yaml
from search.usage import Usage

_EXAMPLE = "{prompt: 0.15, cached: 0.075, generated: 0.60}"


@dataclass(frozen=True)
class ModelPrice:
    """The prices of one model in USD; None for what is not charged by that unit.

    Attributes:
        tokens: Per million prompt, cached and generated tokens.
        forward: Per critic forward.
        second: Per wall-clock second of a search.
    """

    tokens: Price | None = None
    forward: float | None = None
    second: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers. Raises `ConfigError`."""
        for name, price in (("forward", self.forward), ("second", self.second)):
            if price is not None:
                check_price(name, price)

    @classmethod
    def read(cls, entry: JSONMapping) -> ModelPrice:
        """Read ``{"prompt": 0.15, "generated": 0.6}``; cached tokens cost as much as prompt tokens by default.

        Raises:
            ConfigError: A key is unknown or missing, or a price is no number of at least 0.
        """
        known = [*(field.name for field in fields(Price)), "forward", "second"]
        refuse_unknown("price", entry, known)
        if not entry:
            raise ConfigError(f"expected at least one of {', '.join(known)}, got none")
        given = dict(entry)
        for name, number in given.items():
            check_price(name, number)
        rest = {name: given.pop(name) for name in ("forward", "second") if name in given}
        if given and not {"prompt", "generated"} <= given.keys():
            raise ConfigError(
                f"expected prompt and generated together, got {', '.join(given)}; write 0 for what is free"
            )
        tokens = Price(given["prompt"], given.get("cached", given["prompt"]), given["generated"]) if given else None
        return cls(tokens, **rest)


@dataclass(frozen=True)
class Rate:
    """The prices of one search: those of the models that write its messages, and of its critic.

    Attributes:
        agents: The prices of the agents' model; of the agents without arms, if others have arms.
        critic: Those of the critic; None for one that costs nothing.
        arms: Those of each arm's model, if the arms' prices differ.
    """

    agents: ModelPrice
    critic: ModelPrice | None = None
    arms: tuple[tuple[str, Price], ...] = ()

    def generated(self, arm: str) -> float | None:
        """Return the price of a million generated tokens of an arm; None if it has none."""
        price = dict(self.arms).get(arm, self.agents.tokens)
        return None if price is None else price.generated

    def usd(self, usage: Usage) -> float:
        """Return the cost of a search or a run in USD; grading is not included."""
        total = 0.0
        tokens = [usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens]
        prices = dict(self.arms)
        for arm in usage.arms:
            if arm.arm in prices:
                spent = arm.prompt_tokens, arm.cached_tokens, arm.generated_tokens
                total += prices[arm.arm].cost(*spent)
                tokens = [all_of_it - part for all_of_it, part in zip(tokens, spent, strict=True)]
        if self.agents.tokens is not None:
            total += self.agents.tokens.cost(*tokens)
        if self.critic is not None:
            total += (self.critic.forward or 0.0) * usage.reward_calls
            if self.critic.tokens is not None:
                total += self.critic.tokens.cost(usage.critic_prompt_tokens, 0, usage.critic_tokens)
        seconds = sum(part.second or 0.0 for part in (self.agents, self.critic) if part is not None)
        return total + seconds * usage.seconds


@dataclass(frozen=True)
class Prices:
    """Prices of models by name; `as_prices` reads them from a file or a mapping.

    Attributes:
        models: The prices of each model.
        source: Where they come from, for error messages.
    """

    models: Mapping[str, ModelPrice]
    source: str = "prices"

    def __post_init__(self) -> None:
        """Keep a copy."""
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle; a read-only view cannot be pickled."""
        return type(self), (dict(self.models), self.source)

    def rate(self, policy: str, critic: str | None = None) -> Rate:
        """Return the prices of a search.

        Args:
            policy: The policy's name. For one policy per agent, such as ``"Reader=tiny, *=openai:m"``, all models must
                have the same price, unless the whole name has one: tokens are not counted by agent. Arms, such as
                ``"arms:small=tiny|large=openai:m"``, have a price under their own names, or under their models' names.
            critic: The critic's name; None for no critic, or one that costs nothing.

        Raises:
            UnknownNameError: A model has no price.
            ConfigError: The agents' models have different prices, or a price lacks the unit of its model.
        """
        models = {"": [policy]} if policy in self.models else _models_of(policy)
        models |= {arm: [arm] for arm in models if arm in self.models}
        found = {arm: self._price_of(policy, names) for arm, names in models.items()}
        agents = found.get("", next(iter(found.values())))
        arms: dict[str, Price] = {}
        if len(set(found.values())) > 1:
            for arm, price in found.items():
                if price.tokens is None or price.second is not None:
                    raise ConfigError(
                        f"{self.source}: {models[arm][0]}: expected prompt and generated alone for one of several "
                        "models, because seconds are not counted by model"
                    )
                arms[arm] = price.tokens
            arms.pop("", None)
        if critic is None:
            return Rate(agents, arms=tuple(arms.items()))
        guide = self._find("critic", critic, "{forward: 0.00001}")
        if guide.forward is None:
            raise ConfigError(
                f"{self.source}: {critic}: expected forward, USD per critic forward; write forward: 0 if only its "
                "tokens or seconds cost"
            )
        return Rate(agents, guide, tuple(arms.items()))

    def _price_of(self, policy: str, names: Sequence[str]) -> ModelPrice:
        """Return the price of models whose tokens are not counted separately."""
        found = {name: self._find("policy", name, _EXAMPLE) for name in names}
        if len(set(found.values())) > 1:
            raise ConfigError(
                f"{self.source}: the agents' models {', '.join(found)} have different prices, and tokens are not "
                f"counted by agent; add a price for {policy!r}, such as that of the most expensive one"
            )
        price = found[names[0]]
        if price.tokens is None and price.second is None:
            raise ConfigError(f"{self.source}: {names[0]}: expected prompt and generated, or second, for a policy")
        return price

    def _find(self, role: str, name: str, example: str) -> ModelPrice:
        if name not in self.models:
            priced = ", ".join(map(repr, self.models)) or "nothing"
            raise UnknownNameError(
                f"{self.source}: no price for the {role} {name!r}; priced: {priced}{did_you_mean(name, self.models)}; "
                f'add a line such as "{name}": {example}'
            )
        return self.models[name]


def _models_of(policy: str) -> dict[str, list[str]]:
    """Return the models of each arm in a policy's name, and those of agents without arms under ``""``.

    >>> _models_of("Solver=arms:small=tiny|large=openai:m, *=tiny")
    {'small': ['tiny'], 'large': ['openai:m'], '': ['tiny']}
    """
    found: dict[str, list[str]] = {}
    for part in policy.split(", "):
        model = part if part.startswith(ARMS) else part.partition("=")[2] or part
        named = model.removeprefix(ARMS).split("|") if model.startswith(ARMS) else [f"={model}"]
        for pair in named:
            arm, _, name = pair.partition("=")
            found.setdefault(arm, []).append(name)
    return found


PricesSource: TypeAlias = Prices | str | os.PathLike[str] | Mapping[str, JSONMapping]
"""What `as_prices` takes."""


def as_prices(source: PricesSource) -> Prices:
    """Return prices from a YAML file or a mapping of the same form.

    Raises:
        ConfigError: The file or the mapping has another form, each fault with its place.

    >>> as_prices({"tiny": {"prompt": 0.1, "generated": 0.4}}).rate("tiny").usd(Usage(generated_tokens=1_000_000))
    0.4
    """
    if isinstance(source, Prices):
        return source
    label = Path(source).name if isinstance(source, str | os.PathLike) else "prices"
    data = read_yaml(Path(source)) if isinstance(source, str | os.PathLike) else source
    if not isinstance(data, Mapping) or not data:
        raise ConfigError(f"{label}: expected lines such as tiny: {_EXAMPLE}, got {shown(data)}")
    models: dict[str, ModelPrice] = {}
    for name, entry in data.items():
        if not isinstance(name, str):
            raise ConfigError(f"{label}: expected the name of a model, got {shown(name)}; put it in quotes")
        try:
            models[name] = ModelPrice.read(entry)
        except ConfigError as error:
            raise ConfigError(f"{label}: {name}: {error}") from None
    return Prices(models, label)
