"""Shared internals: identities, worker processes, databases and the event loop."""
