"""Many machines or GPUs: the same run on Ray actors, each with its own engine.

Run ``python examples/many_machines.py``; it starts two actors on this machine. On a cluster, pass its address
to `Fleet`, and ``gpus=1.0`` for one GPU per actor. The rows are the same as without Ray.
"""

from functools import partial

import mas_gym
from mas_gym.policies import load_policy
from search.engine.ray_actors import Fleet, run_ray


def main(problems: int = 20, actors: int = 2) -> None:
    """Search on a fleet of local actors."""
    task = mas_gym.load_task("arithmetic", limit=problems)
    # Models are loaded inside the actors, so pass a function that loads one.
    make_policy = partial(load_policy, "tiny")
    plans = list(run_ray("sc:3", task, mas="rpsv", make_policy=make_policy, fleet=Fleet(actors=actors)))
    print(f"{sum(bool(plan.correct) for plan in plans)} of {len(plans)} right")


if __name__ == "__main__":
    main()
