"""Compliance checks for custom configs, policies, critics and planners.

Call them in your tests. Each raises a `ComplianceError` that lists every violation::

    from mas_gym.testing import check_critic, check_mas, check_planner, check_policy

    def test_my_parts():
        check_mas("my_mas.yaml")
        check_policy(MyPolicy())
        check_critic(MyCritic())
        check_planner(MyPlanner())

This package does not import `search`: planners, critics and requests are recognized by their attributes.
"""

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from mas_gym.errors import ComplianceError as ComplianceError
    from mas_gym.testing.critic_checks import check_critic as check_critic
    from mas_gym.testing.mas_checks import check_mas as check_mas
    from mas_gym.testing.planner_checks import check_planner as check_planner
    from mas_gym.testing.policy_checks import check_policy as check_policy

__getattr__, __dir__, __all__ = lazy_names(__name__)
