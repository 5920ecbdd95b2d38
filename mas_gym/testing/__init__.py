"""Checks for your own configs, policies, critics and planners.

Put them into your tests; each raises `ComplianceError` with everything that it found::

    from mas_gym.testing import check_critic, check_mas, check_planner, check_policy

    def test_my_parts():
        check_mas("my_mas.yaml")
        check_policy(MyPolicy())
        check_critic(MyCritic())
        check_planner(MyPlanner())

`OracleCritic` scores terminal states by the reference answers, for tests of search.

Nothing here imports the search package: planners, critics and their requests are recognised by their attributes.
"""

from mas_gym.errors import ComplianceError
from mas_gym.testing.critics import OracleCritic, check_critic
from mas_gym.testing.planners import check_planner
from mas_gym.testing.policies import check_policy
from mas_gym.testing.systems import check_mas

__all__ = ["ComplianceError", "OracleCritic", "check_critic", "check_mas", "check_planner", "check_policy"]
