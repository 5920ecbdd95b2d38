"""Running searches: `search.engine.run` in this process, `search.engine.ray_actors` on Ray actors."""
