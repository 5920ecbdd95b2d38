"""Compliance checks for custom configs, policies, critics and planners.

Call them in your tests. Each raises a `ComplianceError` that lists every violation::

    from mas_gym.testing import check_critic, check_mas, check_planner, check_policy

    def test_my_parts():
        check_mas("my_mas.yaml")
        check_policy(MyPolicy())
        check_critic(MyCritic())
        check_planner(MyPlanner())

`OracleCritic` scores terminal states by the reference answers, for tests of search.

This package does not import `search`: planners, critics and requests are recognized by their attributes.
"""

from mas_gym.errors import ComplianceError
from mas_gym.testing.critic_checks import check_critic
from mas_gym.testing.mas_checks import check_mas
from mas_gym.testing.oracle_critic import OracleCritic
from mas_gym.testing.planner_checks import check_planner
from mas_gym.testing.policy_checks import check_policy

__all__ = ["ComplianceError", "OracleCritic", "check_critic", "check_mas", "check_planner", "check_policy"]
