"""Publish a critic on a model hub, and load it by name on another machine.

Run ``hf auth login`` once, then ``python examples/publish_critic.py FOLDER ORG/NAME``.
"""

import sys

from rewardmodels import load_critic, push_to_hub


def main(folder: str, repository: str) -> None:
    """Upload a folder written by training, and load the critic from the hub."""
    print("published at", push_to_hub(folder, repository, private=True))
    critic = load_critic(repository)
    print(f"{critic.name}: trained on {', '.join(critic.info.tasks)}, for {', '.join(critic.info.graphs)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
