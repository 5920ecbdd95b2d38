"""Verifiers of others as critics: judges, published reward models, servers, and what costs nothing.

* `search.critics`: the agents' own uncertainty, agreement among leaves, chance;
* `rewardmodels.verifiers.judge`: an LLM's verdicts;
* `rewardmodels.verifiers.published`: step reward models and scalar reward models of the hub;
* `rewardmodels.verifiers.server`: the same behind vLLM's server.

All are loaded by `rewardmodels.load_critic`. Unless a module says otherwise, probabilities ``p``
become values ``2 p - 1``, so that values are on the scale of the true reward, -1 to 1.
"""
