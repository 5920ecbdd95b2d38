"""Multi-agent systems: configs, graphs, conditions, states, dynamics and prompts."""
