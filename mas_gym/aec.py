"""The environment as a PettingZoo AEC game, in which each agent observes its local view alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mas_gym.errors import MissingDependencyError

if TYPE_CHECKING:
    from mas_gym.aec_view import MASAECEnv
    from mas_gym.env import MASEnv


def aec_env(env: str | MASEnv = "MAS-Arithmetic-v0", **kwargs: Any) -> MASAECEnv:
    """Return the AEC view of an environment; it needs the extra ``mas-gym[aec]``.

    Args:
        env: A registered id, or an environment that is not used otherwise from then on.
        kwargs: For ``gym.make``, with an id only.

    Returns:
        A `pettingzoo.AECEnv` whose agents are named as in the MAS.

    Raises:
        MissingDependencyError: PettingZoo is not installed.

    >>> game = aec_env("MAS-Arithmetic-v0")
    >>> game.reset(seed=0)
    >>> for agent in game.agent_iter():
    ...     view, reward, terminated, truncated, info = game.last()
    ...     game.step(None if terminated else ("Final Answer: none", game.ALL))
    >>> agent, reward
    ('Verifier', -1.0)
    """
    try:
        from mas_gym.aec_view import MASAECEnv
    except ImportError as error:
        raise MissingDependencyError("the AEC view needs PettingZoo: pip install 'mas-gym[aec]'") from error
    return MASAECEnv(env, **kwargs)
