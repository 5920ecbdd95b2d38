"""Training a critic: configuration, batches, the trainer and the metrics."""
