"""Running searches: `search.engine.run` in this process, `search.engine.fleet` on Ray actors."""
