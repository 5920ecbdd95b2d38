"""Verifiers as critics: LLM judges, published reward models and reward models on servers.

* `rewardmodels.verifiers.judge_critic`: verdicts of an LLM;
* `rewardmodels.verifiers.published_models`: process and scalar reward models from the hub;
* `rewardmodels.verifiers.server`: the same models on vLLM's server;
* `search.critics`: critics without a model, such as the agents' uncertainty and agreement among leaves.

`rewardmodels.load_critic` loads all of them. Unless documented otherwise, probabilities ``p``
become values ``2 p - 1``, so that values are on the scale of the true reward, -1 to 1.
"""
