"""Models of what is searched: systems played by a policy (`base`), programs (`programs`), recorded runs (`recorded`).

The scheduler, planners, store and tables use only the base class, `search.models.base.SearchModel`.
"""
