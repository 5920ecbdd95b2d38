"""The engine: from problems to plans. `search.engine.run` drives searches here, `search.engine.fleet` on Ray actors."""
