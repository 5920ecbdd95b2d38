"""What all packages share and no user imports: identities, worker processes, databases and the event loop."""
