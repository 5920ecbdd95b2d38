"""A multi-agent system, from its config to the states of an episode: graph, conditions, dynamics and prompts."""
