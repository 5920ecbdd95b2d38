"""Training of critics: training config, batches, trainer and metrics."""
